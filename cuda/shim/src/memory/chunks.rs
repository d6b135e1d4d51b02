//! Address regions, one per card, and the chunks that back them.
//!
//! UNSAFETY: maps and unmaps card memory.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::ThreadId;

use chunk_arena::{Behind, Lane, Ordered, rounded};
use cuda_protocol::{Adopted, Chunk, ChunkId, FromTenant, MAX_CHUNKS, Obstacle, Place};

use super::Operations;
use super::handles::{Backing, Handles, Pages as _};
use super::opened::Opened;
use super::pages::Driver;
use super::region::Region;
use crate::captures::Captures;
use crate::descriptors::ChunkDescriptor;
use crate::driver::{self, Address, OUT_OF_MEMORY, Object, SUCCESS};
use crate::link::Answer;
use crate::log::report;

/// Size of a card's address region, in bytes per byte of the card's memory.
const REGION_BYTES_PER_CARD_BYTE: u64 = 4;
/// Maximum total size of a region's cached empty chunks, in bytes.
const MAX_SPARE_BYTES: u64 = 256 << 20;
/// The program's chunk-backed memory.
#[derive(Debug, Default)]
pub struct ChunkMemory {
    /// Handles of the program's own virtual memory.
    pub handles: Handles,
    /// Other processes' memory that this program has opened.
    pub opened: Opened,
    pub(super) regions: Vec<Region>,
    /// Other devices with access to the regions' chunks.
    pub(super) peers: Vec<c_int>,
    places: HashMap<ChunkId, (usize, u32)>,
    /// Memory that streams have freed.
    ordered: Ordered,
    /// Number of evicted chunks that are not mapped.
    away: Arc<AtomicUsize>,
    /// Thread that has unmapped all chunks because the program is leaving its card. Other threads wait for it.
    pub(super) detached_by: Option<ThreadId>,
}

/// The chunks that back an allocation.
#[derive(Debug)]
pub struct Backed {
    pub card: u8,
    /// The chunks, in address order.
    pub chunks: Vec<ChunkId>,
    /// Offset of the allocation in its first chunk, in bytes.
    pub offset: u64,
    pub bytes: u64,
}

impl<'a> Operations<'a> {
    /// Announces chunks that are about to be mapped. [`Self::redirect`] waits for them. Call this before the requesting
    /// thread is notified.
    pub fn arriving(self) {
        self.memory.arriving.fetch_add(1, Ordering::SeqCst);
    }

    /// Allocates `bytes` on the driver's device `device`, which has index `card` in the owner's list. The allocation is
    /// at address `wish`, if given.
    pub fn allocate(self, device: c_int, card: u8, bytes: u64, wish: Option<Address>) -> Result<Address, c_int> {
        self.memory.touched.store(true, Ordering::Relaxed);
        self.contexts.note_current();
        self.persist(|| self.attempt(device, card, bytes, wish))
    }

    fn attempt(self, device: c_int, card: u8, bytes: u64, wish: Option<Address>) -> Result<Address, c_int> {
        let _grows = self.memory.grows.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.with(|memory| {
            let at = memory.region(device, card, self.link.chunk_bytes());
            at.inspect(|&at| self.memory.set_region(memory.regions[at].base, memory.regions[at].bytes))
        })?;
        self.save_chunks(at, bytes);
        let mut guard = self.lock();
        let memory = &mut *guard;
        let region = &mut memory.regions[at];
        let placed = match wish {
            Some(wish) => wish.checked_sub(region.base).and_then(|at| region.arena.place_at(at, bytes)),
            None => region.arena.place(bytes),
        };
        let placed = placed.ok_or(OUT_OF_MEMORY)?;
        let address = region.base + placed.offset;
        let mut numbers = placed.chunks;
        numbers.retain(|number| !region.spare.remove(number));
        if numbers.is_empty() {
            return Ok(address);
        }
        drop(guard);

        let wanted = u32::try_from(numbers.len()).map_err(|_| OUT_OF_MEMORY)?;
        let mut result = Err(OUT_OF_MEMORY);
        self.obtain(card, wanted, |memory, chunks| {
            let unused = match chunks {
                Some(chunks) => memory.map(at, &numbers, &chunks).err(),
                None => Some(Vec::new()),
            };
            let Some(mut unused) = unused else {
                result = Ok(address);
                return Vec::new();
            };
            unused.extend(memory.release(at, address));
            unused
        });
        result
    }

    /// Frees pending memory if an allocation would need chunks that the region lacks. Keeps up to [`MAX_SPARE_BYTES`]
    /// of freed memory for reuse by its streams.
    fn save_chunks(self, at: usize, bytes: u64) {
        let lacks = || self.with(|memory| !memory.ordered.is_empty() && memory.lacks(at, bytes));
        if lacks() {
            self.collect(false);
        }
        if lacks() && self.with(|memory| memory.ordered.loose_bytes() > MAX_SPARE_BYTES) {
            self.free_released(false);
        }
    }

    /// Requests chunks on a card, and passes the chunks or the rejection to `take`. Chunks that `take` returns are
    /// returned to the owner.
    pub fn obtain(
        self,
        card: u8,
        wanted: u32,
        take: impl FnOnce(&mut ChunkMemory, Option<Vec<(Chunk, ChunkDescriptor)>>) -> Vec<ChunkId>,
    ) {
        self.obtain_by(|request| FromTenant::Allocate { request, card, chunks: wanted }, wanted, take);
    }

    /// Like [`Self::obtain`], with the request that `ask` creates.
    pub fn obtain_by(
        self,
        ask: impl Fn(u32) -> FromTenant,
        wanted: u32,
        take: impl FnOnce(&mut ChunkMemory, Option<Vec<(Chunk, ChunkDescriptor)>>) -> Vec<ChunkId>,
    ) {
        let mut answer = self.link.request(&ask);
        while matches!(answer, Answer::Away) && self.link.wait_for_owner() {
            answer = self.link.request(&ask);
        }
        let ids = |parts: &[(Chunk, ChunkDescriptor)]| parts.iter().map(|part| part.0.id).collect::<Vec<_>>();
        let mut guard = self.lock();
        let memory = &mut *guard;
        let back = match answer {
            Answer::Granted(chunks) => {
                let back = driver::relaxed(|| {
                    if chunks.len() == wanted as usize {
                        take(memory, Some(chunks))
                    } else {
                        [ids(&chunks), take(memory, None)].concat()
                    }
                });
                self.memory.arriving.fetch_sub(1, Ordering::SeqCst);
                back
            }
            Answer::Refused(reason, parts) => {
                report!("{wanted} chunks were refused: {reason:?}");
                [ids(&parts), driver::relaxed(|| take(memory, None))].concat()
            }
            _ => driver::relaxed(|| take(memory, None)),
        };
        self.give_back(back);
    }

    /// Runs `work` with the memory locked, so that no part of it moves.
    pub fn with<T>(self, work: impl FnOnce(&mut ChunkMemory) -> T) -> T {
        work(&mut self.lock())
    }

    /// Runs `attempt`, and repeats it if it runs out of memory and memory can be freed without the owner.
    pub fn persist<T>(self, attempt: impl Fn() -> Result<T, c_int>) -> Result<T, c_int> {
        let mut done = attempt();
        // First free only memory that no work uses.
        for wait in [false, true] {
            if matches!(done, Err(OUT_OF_MEMORY)) && (self.free_released(wait) | (wait && self.trim())) {
                done = attempt();
            }
        }
        done
    }

    /// Waits for all work in the current context, and frees the allocation at `address`. During a capture, the
    /// allocation is freed later. Returns false if the memory does not belong to this library.
    pub fn free(self, address: Address) -> bool {
        let mut guard = self.lock();
        let memory = &mut *guard;
        if memory.freeable(address).is_none() {
            return false;
        }
        if self.captures.any() {
            // Waiting is not permitted during a capture, so a later allocation frees the memory.
            memory.ordered.put_behind(driver::current_context() as u64, Behind::All, address);
            return true;
        }
        drop(guard);
        // Wait until no work uses the memory, as the driver's own function does.
        // SAFETY: the call takes no pointers.
        unsafe { driver::ctx_synchronize() };
        self.release(address);
        true
    }

    /// Returns true if memory of this library at `address` has already been freed.
    pub fn is_freed(self, address: Address) -> bool {
        self.lock().ordered.is_freed(address)
    }

    /// Returns memory that a stream has freed, for reuse by later work of the same stream.
    pub fn take_back(self, bytes: u64, stream: Object, per_thread: bool) -> Option<Address> {
        self.memory.touched.store(true, Ordering::Relaxed);
        self.lock().ordered.take(lane(stream, per_thread)?, rounded(bytes)?)
    }

    /// Frees the allocation at `address` in stream order. Returns false if the memory does not belong to this library.
    pub fn free_after(self, address: Address, stream: Object, per_thread: bool) -> bool {
        let mut guard = self.lock();
        let memory = &mut *guard;
        let Some(bytes) = memory.freeable(address) else { return false };
        match lane(stream, per_thread) {
            Some(lane) => memory.ordered.put(lane, bytes, address),
            None => {
                let lane = Lane { context: driver::current_context() as u64, stream: stream as u64, per_thread };
                let behind = memory.record(lane).map_or(Behind::All, Behind::Event);
                memory.ordered.put_behind(lane.context, behind, address);
            }
        }
        true
    }

    /// Queues the memory that a stream has freed, for release after the stream's work. Must be called before the stream
    /// is destroyed.
    pub fn stream_ends(self, stream: u64) {
        let mut memory = self.lock();
        for lane in memory.ordered.lanes().into_iter().filter(|lane| lane.stream == stream) {
            memory.gather(self.captures, lane);
        }
    }

    /// Prepares for the destruction of a context.
    pub fn context_ends(self, context: u64) {
        self.lock().ordered.forget(context);
    }

    /// Prepares for the possible destruction of contexts.
    pub fn contexts_end(self) {
        self.lock().ordered.forget_all();
    }

    /// Releases pending memory that no work uses. If `wait` is set, first waits for the work in the current context.
    /// Returns true if any memory was released. A context must be current.
    fn free_released(self, wait: bool) -> bool {
        self.gather();
        self.collect(wait)
    }

    /// Queues the memory that streams have freed, for release after their work. A context must be current.
    fn gather(self) {
        let mut memory = self.lock();
        if !self.captures.any() {
            memory.ordered.lanes().into_iter().for_each(|lane| memory.gather(self.captures, lane));
        }
    }

    /// Like [`Self::free_released`], but only for memory that streams cannot reuse directly.
    fn collect(self, wait: bool) -> bool {
        let memory = self.lock();
        if memory.ordered.is_empty() || self.captures.any() {
            return false;
        }
        let wait = wait || memory.ordered.waits_for_all();
        drop(memory);
        if wait {
            // SAFETY: the call takes no pointers, and no capture is open.
            unsafe { driver::ctx_synchronize() };
        }
        // SAFETY: the event belongs to this library.
        let passed = |event| match unsafe { driver::event_query(event as Object) } {
            driver::NOT_READY => false,
            // The event was recorded during a capture, so only waiting ensures that the work has completed.
            driver::CAPTURED_EVENT => wait,
            // The work has completed or failed, so it no longer uses the memory.
            _ => true,
        };
        let done = self.lock().ordered.passed(passed, wait);
        done.iter().for_each(|&address| self.release(address));
        !done.is_empty()
    }

    fn release(self, address: Address) {
        let mut guard = self.lock();
        let memory = &mut *guard;
        if let Some(at) = memory.regions.iter().position(|r| r.contains(address)) {
            let freed = driver::relaxed(|| memory.release(at, address));
            self.give_back(freed);
        }
    }

    /// Returns true if any of the program's chunks are evicted.
    fn any_away(self) -> bool {
        self.memory.away.load(Ordering::SeqCst) > 0
    }

    /// Maps evicted chunks. Returns true if all are mapped.
    pub fn bring(self) -> bool {
        !self.any_away() || self.with(|memory| driver::relaxed(|| memory.bring()))
    }

    /// Maps evicted chunks for a call that may access memory but does not wait for the program's slice.
    pub fn present(self) {
        if self.any_away() && !self.bring() {
            report!("memory that is away cannot be mapped");
        }
    }

    /// Returns cached chunks to the owner if no memory has been allocated since the last call.
    pub fn tidy(self) {
        if !self.memory.touched.swap(false, Ordering::Relaxed) {
            self.begin_to_empty();
            self.give_up_empty();
        }
    }

    /// Starts releasing memory that streams have freed. Does not wait for their work, because the thread that executes
    /// the owner's commands must not block.
    pub fn begin_to_empty(self) {
        if self.with(|memory| !memory.ordered.waits_for_all()) {
            self.gather();
        }
    }

    /// Returns the empty chunks to the owner. Returns true if no pending work can produce more empty chunks.
    pub fn give_up_empty(self) -> bool {
        if self.with(|memory| !memory.ordered.waits_for_all()) {
            self.collect(false);
        }
        self.trim();
        self.with(|memory| !memory.ordered.waits_for_events())
    }

    /// Returns the empty chunks to the owner. Returns true if any existed.
    fn trim(self) -> bool {
        let mut guard = self.lock();
        let memory = &mut *guard;
        let mut freed = Vec::new();
        for at in 0..memory.regions.len() {
            let spare: Vec<u32> = std::mem::take(&mut memory.regions[at].spare).into_iter().collect();
            freed.extend(driver::relaxed(|| memory.unmap(at, &spare)));
        }
        let any = !freed.is_empty();
        self.give_back(freed);
        any
    }

    /// Returns the number of bytes on a card that later allocations can use without the owner: empty chunks, and memory
    /// freed by streams.
    pub fn spare(self, card: u8) -> u64 {
        let guard = self.lock();
        let memory = &*guard;
        let freed = |region: &Region| {
            let of_region = memory.ordered.freed().filter(|address| region.contains(*address));
            of_region
                .filter_map(|address| region.arena.find(address - region.base))
                .map(|(_, bytes)| bytes)
                .sum::<u64>()
        };
        let regions = memory.regions.iter().filter(|region| region.card == card);
        regions.map(|region| region.spare.len() as u64 * region.chunk_bytes + freed(region)).sum()
    }

    /// Returns chunks to the owner.
    pub fn give_back(self, chunks: Vec<ChunkId>) {
        for part in chunks.chunks(MAX_CHUNKS) {
            self.link.send(&FromTenant::Free { chunks: part.to_vec() });
        }
    }

    /// Maps new memory at the addresses of the given chunks. Returns the number of chunks redirected before the first
    /// failure. No work may be in flight.
    pub fn redirect(self, moves: Vec<(Chunk, ChunkDescriptor)>) -> u32 {
        let mut guard = self.mapped_memory();
        let memory = &mut *guard;
        let mut replaced = Vec::new();
        let mut rest = &moves[..];
        while let Some((chunk, descriptor)) = rest.first() {
            let mut run = 1;
            if let Some(place) = memory.handles.place(chunk.id) {
                let Some(handle) = Driver.import(descriptor.as_fd()) else { break };
                if !memory.handles.replace(&mut Driver, place, handle, *chunk, descriptor.lasting()) {
                    Driver.release(handle);
                    break;
                }
                replaced.push(place);
            } else if let Some(&(region, number)) = memory.places.get(&chunk.id) {
                let follows = |(number, (chunk, _)): &(u32, &(Chunk, ChunkDescriptor))| {
                    memory.places.get(&chunk.id) == Some(&(region, *number))
                };
                run = (number..).zip(rest).take_while(follows).count();
                let done = memory.regions[region].redirect(&mut Driver, number, &rest[..run]);
                if done < run {
                    rest = &rest[done..];
                    break;
                }
            }
            rest = &rest[run..];
        }
        memory.count_away();
        if !memory.handles.restore(&mut Driver, replaced) {
            report!("redirected chunks of the program's own mappings cannot be accessed");
        }
        u32::try_from(moves.len() - rest.len()).unwrap_or(u32::MAX)
    }

    /// Unmaps all chunks, and makes other threads wait for [`Self::attach`] before they use the memory. No work may be
    /// in flight. Changes nothing if the program cannot leave its card.
    pub fn detach(self) -> Result<(), Obstacle> {
        let mut guard = self.mapped_memory();
        let memory = &mut *guard;
        if memory.handles.chunks().next().is_some() {
            return Err(Obstacle::Mappings);
        }
        if memory.opened.chunks().next().is_some() {
            return Err(Obstacle::Shared);
        }
        for chunk in memory.regions.iter().flat_map(Region::chunks) {
            match chunk {
                Backing { shared: true, .. } => return Err(Obstacle::Shared),
                Backing { descriptor: None, .. } => return Err(Obstacle::Mappings),
                Backing { place: Place::Device, .. } => return Err(Obstacle::NotEvicted),
                _ => {}
            }
        }
        driver::relaxed(|| memory.regions.iter_mut().for_each(|region| region.detach(&mut Driver)));
        memory.count_away();
        memory.detached_by = Some(std::thread::current().id());
        Ok(())
    }

    /// Lets other threads use the memory again. The chunks are mapped later, like evicted chunks.
    pub fn attach(self) {
        self.lock().detached_by = None;
    }

    /// Reports all chunks through `tell`, in parts with a flag that is set if more parts follow, and then calls
    /// `connected` with the descriptor of one chunk, if any. Returns false as soon as a report or `connected` fails. No
    /// chunk is allocated or freed in between. From `connected` on, the program therefore refers only to chunks that
    /// the owner knows.
    pub fn adopted(
        self,
        mut tell: impl FnMut(Vec<Adopted>, Vec<ChunkDescriptor>, bool) -> bool,
        connected: impl FnOnce(Option<&ChunkDescriptor>) -> bool,
    ) -> bool {
        // First map the chunks that the previous owner granted, because the next owner must know about them.
        let memory = self.mapped_memory();
        let mut all: Vec<(u8, &Backing)> = Vec::new();
        for region in &memory.regions {
            all.extend(region.chunks().map(|chunk| (region.card, chunk)));
        }
        all.extend(memory.handles.chunks().chain(memory.opened.chunks()));
        let parts = all.len().div_ceil(MAX_CHUNKS).max(1);
        let told = (0..parts).all(|part| {
            let (mut chunks, mut descriptors) = (Vec::new(), Vec::new());
            for &(card, chunk) in all.iter().skip(part * MAX_CHUNKS).take(MAX_CHUNKS) {
                // Shared chunks must not move, because other processes also use them.
                let descriptor = chunk.descriptor.as_ref().filter(|_| !chunk.shared);
                chunks.push(chunk.adopted(card, descriptor.is_some()));
                descriptors.extend(descriptor.cloned());
            }
            tell(chunks, descriptors, part + 1 < parts)
        });
        told && connected(all.iter().find_map(|(_, chunk)| chunk.descriptor.as_ref()))
    }

    /// Locks the memory once every received chunk is mapped. The wait is short, because a thread that has received a
    /// reply maps its chunks without waiting for other threads.
    fn mapped_memory(self) -> MutexGuard<'a, ChunkMemory> {
        loop {
            let guard = self.lock();
            if self.memory.arriving.load(Ordering::SeqCst) == 0 {
                return guard;
            }
            drop(guard);
            std::thread::yield_now();
        }
    }
}

/// Returns the lane of a stream, or `None` for the per-thread default stream.
fn lane(stream: Object, per_thread: bool) -> Option<Lane> {
    /// `CU_STREAM_PER_THREAD`.
    const PER_THREAD: u64 = 2;
    let stream = stream as u64;
    let one_for_all = stream != PER_THREAD && (stream != 0 || !per_thread);
    one_for_all.then(|| Lane { context: driver::current_context() as u64, stream, per_thread })
}

impl ChunkMemory {
    /// Creates the state of a card's memory, without allocations. `away` is its counter of evicted chunks.
    pub fn new(card: usize, away: Arc<AtomicUsize>) -> Self {
        Self { away, handles: Handles::of_card(card), ..Self::default() }
    }

    /// Returns the base address, length and device of the allocation that contains an address.
    pub fn find(&self, address: Address) -> Option<(Address, u64, c_int)> {
        let region = self.regions.iter().find(|r| r.contains(address))?;
        region.arena.find(address - region.base).map(|(offset, bytes)| (region.base + offset, bytes, region.device()))
    }

    /// Returns the chunks that back the allocation at an address.
    pub fn backing(&self, address: Address) -> Option<Backed> {
        let region = self.regions.iter().find(|r| r.contains(address))?;
        let (offset, bytes) = region.arena.find(address - region.base)?;
        let (first, last) = (offset / region.chunk_bytes, (offset + bytes - 1) / region.chunk_bytes);
        let number = |number| u32::try_from(number).ok().and_then(|number| region.slot(number));
        let chunks = (first..=last).map(|at| number(at).map(|slot| slot.chunk.id)).collect::<Option<_>>()?;
        Some(Backed { card: region.card, chunks, offset: offset % region.chunk_bytes, bytes })
    }

    /// Records that other processes may use these chunks.
    pub fn mark_shared(&mut self, chunks: &[ChunkId]) {
        for id in chunks {
            if let Some(slot) = self.places.get(id).and_then(|(at, number)| self.regions[*at].slot_mut(*number)) {
                slot.chunk.shared = true;
            }
        }
    }

    /// Returns true if a range may contain allocations, which means that the program does not manage it itself.
    pub fn reserved(&self, at: Address, bytes: u64) -> bool {
        let end = at.saturating_add(bytes);
        self.regions.iter().any(|r| at < r.base + r.bytes && end > r.base) || self.opened.reserved(at, bytes)
    }

    /// Returns the index of a card's region. Reserves the region on first use.
    fn region(&mut self, device: c_int, card: u8, chunk_bytes: u64) -> Result<usize, c_int> {
        if let Some(at) = self.regions.iter().position(|r| r.device() == device) {
            return Ok(at);
        }
        let mut total = 0;
        // SAFETY: the pointer is valid.
        unsafe { driver::device_total_mem(&raw mut total, device) };
        let bytes = (total as u64).saturating_mul(REGION_BYTES_PER_CARD_BYTE).next_multiple_of(chunk_bytes);
        let mut base = 0;
        let align = usize::try_from(chunk_bytes).map_err(|_| OUT_OF_MEMORY)?;
        let length = usize::try_from(bytes).map_err(|_| OUT_OF_MEMORY)?;
        match driver::reserve_addresses(&mut base, length, align) {
            SUCCESS => {}
            error => return Err(error),
        }
        let access = std::iter::once(device).chain(self.peers.iter().copied()).collect();
        self.regions.push(Region::new(access, card, base, bytes, chunk_bytes));
        Ok(self.regions.len() - 1)
    }

    /// Returns true if an allocation would need chunks that a region lacks.
    fn lacks(&mut self, at: usize, bytes: u64) -> bool {
        let region = &mut self.regions[at];
        let Some(placed) = region.arena.place(bytes) else { return true };
        region.arena.release(placed.offset);
        placed.chunks.iter().any(|number| !region.spare.contains(number))
    }

    /// Maps `chunks` at the chunk indices `numbers` of a region. On failure, maps none of them and returns their IDs.
    fn map(&mut self, at: usize, numbers: &[u32], chunks: &[(Chunk, ChunkDescriptor)]) -> Result<(), Vec<ChunkId>> {
        let ids = chunks.iter().map(|(chunk, _)| chunk.id);
        if !self.regions[at].map(&mut Driver, numbers, chunks) {
            return Err(ids.collect());
        }
        self.places.extend(ids.zip(numbers.iter().map(|number| (at, *number))));
        Ok(())
    }

    /// Frees an allocation. Returns the chunks that were unmapped.
    fn release(&mut self, at: usize, address: Address) -> Vec<ChunkId> {
        let region = &mut self.regions[at];
        let chunks = region.arena.release(address - region.base).unwrap_or_default();
        let mut over = Vec::new();
        for number in chunks {
            if region.slot(number).is_none() {
                continue;
            }
            if (region.spare.len() as u64 + 1) * region.chunk_bytes <= MAX_SPARE_BYTES {
                region.spare.insert(number);
            } else {
                over.push(number);
            }
        }
        self.unmap(at, &over)
    }

    /// Unmaps empty chunks. Returns their IDs.
    fn unmap(&mut self, at: usize, numbers: &[u32]) -> Vec<ChunkId> {
        let ids = self.regions[at].unmap(&mut Driver, numbers);
        for id in &ids {
            self.places.remove(id);
        }
        self.count_away();
        ids
    }

    /// Maps the evicted chunks if one of them contains `address`, in preparation for a driver query.
    pub fn bring_for(&mut self, address: Address) {
        if self.regions.iter().any(|region| region.is_away(address)) {
            driver::relaxed(|| self.bring());
        }
    }

    /// Maps evicted chunks. Returns true if all are mapped.
    fn bring(&mut self) -> bool {
        // Try each region, even after a failure.
        let mut all = true;
        for region in &mut self.regions {
            all &= region.bring(&mut Driver);
        }
        self.count_away();
        all
    }

    fn count_away(&self) {
        self.away.store(self.regions.iter().map(Region::away).sum(), Ordering::SeqCst);
    }

    /// Returns the size of the live allocation that starts at an address, or `None` if no such allocation exists.
    fn freeable(&self, address: Address) -> Option<u64> {
        let (base, bytes, _) = self.find(address)?;
        (base == address && !self.ordered.is_freed(address)).then_some(bytes)
    }

    /// Records an event in a lane. Returns `None` if the driver rejects the event.
    fn record(&mut self, lane: Lane) -> Option<u64> {
        let event = self.ordered.spare(lane.context).or_else(|| {
            let mut event = std::ptr::null_mut();
            // SAFETY: the pointer is valid. The event has timing disabled.
            (unsafe { driver::event_create(&raw mut event, 2) } == SUCCESS).then_some(event as u64)
        });
        event.filter(|event| {
            let record = if lane.per_thread { driver::event_record_per_thread } else { driver::event_record };
            // SAFETY: the event belongs to this library, and the stream is live.
            unsafe { record(*event as Object, lane.stream as Object) == SUCCESS }
        })
    }

    /// Queues the memory that a lane has freed, for release after the lane's work, which may already have completed.
    fn gather(&mut self, captures: &Captures, lane: Lane) {
        let before = driver::current_context();
        if before as u64 != lane.context {
            // SAFETY: the program has freed memory in this context, and has not destroyed it.
            unsafe { driver::ctx_set_current(lane.context as Object) };
        }
        let query = if lane.per_thread { driver::stream_query_per_thread } else { driver::stream_query };
        let behind = if captures.any() {
            Behind::All
        // SAFETY: the stream is live.
        } else if unsafe { query(lane.stream as Object) } == SUCCESS {
            Behind::Nothing
        } else {
            self.record(lane).map_or(Behind::All, Behind::Event)
        };
        if before as u64 != lane.context {
            // SAFETY: the context was current before.
            unsafe { driver::ctx_set_current(before) };
        }
        self.ordered.gather(lane, behind);
    }
}
