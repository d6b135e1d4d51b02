//! Regions of addresses, one for each card, and the chunks that back them.
//!
//! UNSAFETY: maps and unmaps memory of the card.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_protocol::{Adopted, Chunk, ChunkId, FromTenant, MAX_CHUNKS};

use super::arena::Arena;
use super::handles::{Backing, Handles, Pages as _};
use super::kept::Kept;
use super::opened::Opened;
use super::pages::Driver;
use crate::driver::{self, Access, Address, Handle, OUT_OF_MEMORY, Object, SUCCESS};
use crate::gate;
use crate::log::report;
use crate::requests::{self, Answer};
use crate::tenant;

/// Bytes of addresses of one card's region, per byte of the card.
const SPREAD: u64 = 4;
/// Bytes of chunks without users that a card's region keeps for the next allocation.
const SPARE: u64 = 256 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX: c_int = 1;

/// A chunk that is mapped.
#[derive(Debug)]
struct Slot {
    handle: Handle,
    chunk: Backing,
}

/// The addresses of one card.
#[derive(Debug)]
struct Region {
    device: c_int,
    card: u8,
    base: Address,
    bytes: u64,
    chunk_bytes: u64,
    arena: Arena,
    slots: BTreeMap<u32, Slot>,
    /// Mapped chunks that nothing lies in.
    spare: BTreeSet<u32>,
}

/// An allocation that is freed when the stream's work has ended.
#[derive(Debug)]
struct Deferred {
    event: Option<u64>,
    address: Address,
}

/// Memory of the program in chunks.
#[derive(Debug, Default)]
pub struct Memory {
    /// Handles of the program's own virtual memory.
    pub handles: Handles,
    /// Memory of other processes.
    pub opened: Opened,
    regions: Vec<Region>,
    places: HashMap<ChunkId, (usize, u32)>,
    deferred: Vec<Deferred>,
    spare: Vec<u64>,
}

/// Chunks of an allocation.
#[derive(Debug)]
pub struct Backed {
    /// Card.
    pub card: u8,
    /// The chunks, in the order of their addresses.
    pub chunks: Vec<ChunkId>,
    /// Bytes of the first chunk before the allocation.
    pub offset: u64,
    /// Bytes of the allocation.
    pub bytes: u64,
}

static MEMORY: Mutex<Option<Memory>> = Mutex::new(None);
/// Held by the one thread that asks for chunks.
static GROWS: Mutex<()> = Mutex::new(());
/// Answers with chunks that are delivered and not yet mapped.
static ARRIVING: AtomicU32 = AtomicU32::new(0);

fn lock() -> MutexGuard<'static, Option<Memory>> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells [`redirect`] that chunks arrive, before the thread that asked for them learns of it.
pub fn arriving() {
    ARRIVING.fetch_add(1, Ordering::SeqCst);
}

/// Allocates `bytes` on card `card` of the owner's list, device `device` of the driver's.
pub fn allocate(device: c_int, card: u8, bytes: u64) -> Result<Address, c_int> {
    tenant::note_context();
    persist(|| attempt(device, card, bytes))
}

fn attempt(device: c_int, card: u8, bytes: u64) -> Result<Address, c_int> {
    let _grows = GROWS.lock().unwrap_or_else(PoisonError::into_inner);
    settle(false);
    let mut guard = lock();
    let memory = guard.get_or_insert_default();
    let at = memory.region(device, card)?;
    let region = &mut memory.regions[at];
    let placed = region.arena.place(bytes).ok_or(OUT_OF_MEMORY)?;
    let address = region.base + placed.offset;
    let mut numbers = placed.chunks;
    numbers.retain(|number| !region.spare.remove(number));
    if numbers.is_empty() {
        return Ok(address);
    }
    drop(guard);

    let wanted = u32::try_from(numbers.len()).map_err(|_| OUT_OF_MEMORY)?;
    let mut result = Err(OUT_OF_MEMORY);
    obtain(card, wanted, |memory, chunks| {
        let unused = match chunks {
            Some(chunks) => memory.map(at, &numbers, chunks).err(),
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

/// Asks for chunks of a card and has `take` use them, or learn that there are none; the chunks that it returns go back.
pub fn obtain(card: u8, wanted: u32, take: impl FnOnce(&mut Memory, Option<Vec<(Chunk, OwnedFd)>>) -> Vec<ChunkId>) {
    obtain_by(|request| FromTenant::Allocate { request, card, chunks: wanted }, wanted, take);
}

/// As [`obtain`], by a request that `ask` makes.
pub fn obtain_by(
    ask: impl Fn(u32) -> FromTenant,
    wanted: u32,
    take: impl FnOnce(&mut Memory, Option<Vec<(Chunk, OwnedFd)>>) -> Vec<ChunkId>,
) {
    let mut answer = requests::request(&ask);
    while matches!(answer, Answer::Away) && requests::wait_for_owner() {
        answer = requests::request(&ask);
    }
    let ids = |parts: &[(Chunk, OwnedFd)]| parts.iter().map(|part| part.0.id).collect::<Vec<_>>();
    let mut guard = lock();
    let memory = guard.get_or_insert_default();
    let back = match answer {
        Answer::Granted(chunks) => {
            let back = driver::relaxed(|| {
                if chunks.len() == wanted as usize {
                    take(memory, Some(chunks))
                } else {
                    [ids(&chunks), take(memory, None)].concat()
                }
            });
            ARRIVING.fetch_sub(1, Ordering::SeqCst);
            back
        }
        Answer::Refused(reason, parts) => {
            report!("{wanted} chunks were refused: {reason:?}");
            [ids(&parts), driver::relaxed(|| take(memory, None))].concat()
        }
        _ => driver::relaxed(|| take(memory, None)),
    };
    give_back(back);
}

/// Runs `work` with the memory, while nothing of it moves.
pub fn with<T>(work: impl FnOnce(&mut Memory) -> T) -> T {
    work(lock().get_or_insert_default())
}

/// Runs `attempt` again if it finds no memory and some can be had without the owner.
pub fn persist<T>(attempt: impl Fn() -> Result<T, c_int>) -> Result<T, c_int> {
    match attempt() {
        Err(OUT_OF_MEMORY) if settle(true) | trim() => attempt(),
        done => done,
    }
}

/// Base and length of the allocation that `address` lies in, if it is one of ours.
pub fn find(address: Address) -> Option<(Address, u64)> {
    lock().as_ref()?.find(address).map(|(start, bytes, _)| (start, bytes))
}

/// Frees the allocation at `address`, after all work of the context; false if it is not ours.
pub fn free(address: Address) -> bool {
    if find(address).is_none_or(|(base, _)| base != address) {
        return false;
    }
    if gate::captures() {
        // Work that is being captured must not be waited for: it goes when an allocation looks next.
        lock().get_or_insert_default().deferred.push(Deferred { event: None, address });
        return true;
    }
    // SAFETY: no pointers. As with the driver's own function, memory is freed when no work uses it any more.
    unsafe { driver::ctx_synchronize() };
    release(address);
    true
}

/// Frees the allocation at `address` after the work in `stream`; false if it is not ours.
pub fn free_after(address: Address, stream: Object, per_thread: bool) -> bool {
    if find(address).is_none_or(|(base, _)| base != address) {
        return false;
    }
    let mut guard = lock();
    let memory = guard.get_or_insert_default();
    let event = memory.spare.pop().or_else(|| {
        let mut event = std::ptr::null_mut();
        // SAFETY: the pointer is valid. The event has no time.
        (unsafe { driver::event_create(&raw mut event, 2) } == SUCCESS).then_some(event as u64)
    });
    if let Some(event) = event {
        let record = if per_thread { driver::event_record_per_thread } else { driver::event_record };
        // SAFETY: an event of ours, and the stream that the program names.
        unsafe { record(event as Object, stream) };
    }
    memory.deferred.push(Deferred { event, address });
    true
}

/// Frees what may be freed by now, or with `wait` all; whether anything was freed.
fn settle(wait: bool) -> bool {
    let waiting = lock().as_ref().is_some_and(|m| !m.deferred.is_empty());
    if !waiting || gate::captures() {
        return false;
    }
    let all = lock().as_ref().is_some_and(|m| m.deferred.iter().any(|d| d.event.is_none()));
    if wait || all {
        // SAFETY: no pointers; no stream captures.
        unsafe { driver::ctx_synchronize() };
    }
    let mut guard = lock();
    let Some(memory) = guard.as_mut() else { return false };
    let (mut done, mut kept) = (Vec::new(), Vec::new());
    for deferred in memory.deferred.drain(..) {
        // SAFETY: an event of ours.
        let ended = deferred.event.is_none_or(|e| unsafe { driver::event_query(e as Object) != driver::NOT_READY });
        if ended { done.push(deferred) } else { kept.push(deferred) }
    }
    memory.deferred = kept;
    memory.spare.extend(done.iter().filter_map(|d| d.event));
    drop(guard);
    for deferred in &done {
        release(deferred.address);
    }
    !done.is_empty()
}

fn release(address: Address) {
    let mut guard = lock();
    let Some(memory) = guard.as_mut() else { return };
    if let Some(at) = memory.regions.iter().position(|r| r.contains(address)) {
        let freed = driver::relaxed(|| memory.release(at, address));
        give_back(freed);
    }
}

/// Returns the chunks that nothing lies in; whether there were any.
pub fn trim() -> bool {
    let mut guard = lock();
    let Some(memory) = guard.as_mut() else { return false };
    let mut freed = Vec::new();
    for at in 0..memory.regions.len() {
        let spare = std::mem::take(&mut memory.regions[at].spare).into_iter().collect();
        freed.extend(driver::relaxed(|| memory.unmap(at, spare)));
    }
    let any = !freed.is_empty();
    give_back(freed);
    any
}

/// Bytes of a card's chunks that nothing lies in.
pub fn spare(card: u8) -> u64 {
    let guard = lock();
    let regions = guard.iter().flat_map(|m| &m.regions).filter(|r| r.card == card);
    regions.map(|r| r.spare.len() as u64 * r.chunk_bytes).sum()
}

/// Tells the owner of chunks that are released.
pub fn give_back(chunks: Vec<ChunkId>) {
    for part in chunks.chunks(MAX_CHUNKS) {
        tenant::send(&FromTenant::Free { chunks: part.to_vec() });
    }
}

/// Maps chunks at the same addresses to their new places; how many, from the first. Nothing is in flight.
pub fn redirect(moves: Vec<(Chunk, OwnedFd)>) -> u32 {
    let mut guard = settled();
    let Some(memory) = guard.as_mut() else { return u32::try_from(moves.len()).unwrap_or(u32::MAX) };
    let mut moved = 0;
    let mut runs: Vec<(usize, u32, u32)> = Vec::new();
    let mut replaced = Vec::new();
    for (chunk, descriptor) in moves {
        if let Some(place) = memory.handles.place(chunk.id) {
            let Some(handle) = import(&descriptor) else { break };
            if !memory.handles.replace(&mut Driver, place, (handle, chunk), Kept::new(&descriptor)) {
                Driver.release(handle);
                break;
            }
            replaced.push(place);
        } else if let Some(&(region, number)) = memory.places.get(&chunk.id) {
            if !memory.regions[region].replace(number, chunk, &descriptor) {
                break;
            }
            match runs.last_mut() {
                Some((r, first, count)) if *r == region && *first + *count == number => *count += 1,
                _ => runs.push((region, number, 1)),
            }
        }
        moved += 1;
    }
    for (region, first, count) in runs {
        if !memory.regions[region].allow(first, count) {
            report!("redirected chunks cannot be accessed");
        }
    }
    if !memory.handles.restore(&mut Driver, replaced) {
        report!("redirected chunks of the program's own mappings cannot be accessed");
    }
    moved
}

/// Tells all chunks by `tell`, in parts, with whether more follow, and then calls `connected`; false as soon as telling
/// fails. Nothing is allocated or freed in between, so what the program says of chunks after `connected` is said of
/// chunks that the owner knows.
pub fn adopted(mut tell: impl FnMut(Vec<Adopted>, Vec<OwnedFd>, bool) -> bool, connected: impl FnOnce()) -> bool {
    // What an owner before has granted is mapped first: the next one must know of it.
    let guard = settled();
    let mut all: Vec<(u8, Handle, &Backing)> = Vec::new();
    for memory in guard.iter() {
        for region in &memory.regions {
            all.extend(region.slots.values().map(|slot| (region.card, slot.handle, &slot.chunk)));
        }
        all.extend(memory.handles.chunks());
        all.extend(memory.opened.chunks());
    }
    let parts = all.len().div_ceil(MAX_CHUNKS).max(1);
    let told = (0..parts).all(|part| {
        let (mut chunks, mut descriptors) = (Vec::new(), Vec::new());
        for &(card, handle, chunk) in all.iter().skip(part * MAX_CHUNKS).take(MAX_CHUNKS) {
            let descriptor = if chunk.shared {
                // Another process has it as well: it must not be copied away from under that one.
                None
            } else {
                let kept = chunk.kept.as_ref().and_then(|kept| kept.as_fd().try_clone_to_owned().ok());
                kept.or_else(|| export(handle))
            };
            chunks.push(chunk.adopted(card, descriptor.is_some()));
            descriptors.extend(descriptor);
        }
        tell(chunks, descriptors, part + 1 < parts)
    });
    if told {
        connected();
    }
    told
}

/// The memory, when no chunks are delivered that are not yet mapped. A thread that was answered maps what it got without
/// waiting for anybody.
fn settled() -> MutexGuard<'static, Option<Memory>> {
    loop {
        let guard = lock();
        if ARRIVING.load(Ordering::SeqCst) == 0 {
            return guard;
        }
        drop(guard);
        std::thread::yield_now();
    }
}

fn export(handle: Handle) -> Option<OwnedFd> {
    let mut descriptor: c_int = -1;
    // SAFETY: the driver writes one descriptor.
    let result = unsafe { driver::mem_export((&raw mut descriptor).cast::<c_void>(), handle, POSIX, 0) };
    // SAFETY: the descriptor is new and nobody else's.
    (result == SUCCESS && descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
}

impl Memory {
    /// Returns base and length of the allocation that an address lies in, with its device.
    pub fn find(&self, address: Address) -> Option<(Address, u64, c_int)> {
        let region = self.regions.iter().find(|r| r.contains(address))?;
        region.arena.find(address - region.base).map(|(offset, bytes)| (region.base + offset, bytes, region.device))
    }

    /// Returns the chunks that an allocation lies in, in the order of their addresses, with its card, base, length and
    /// offset in the first of them.
    pub fn backing(&self, address: Address) -> Option<Backed> {
        let region = self.regions.iter().find(|r| r.contains(address))?;
        let (offset, bytes) = region.arena.find(address - region.base)?;
        let (first, last) = (offset / region.chunk_bytes, (offset + bytes - 1) / region.chunk_bytes);
        let number = |number| u32::try_from(number).ok().and_then(|number| region.slots.get(&number));
        let chunks = (first..=last).map(|at| number(at).map(|slot| slot.chunk.id)).collect::<Option<_>>()?;
        Some(Backed { card: region.card, chunks, offset: offset % region.chunk_bytes, bytes })
    }

    /// Notes that other processes may have these chunks as well.
    pub fn mark_shared(&mut self, chunks: &[ChunkId]) {
        for id in chunks {
            if let Some(slot) = self.places.get(id).and_then(|(at, number)| self.regions[*at].slots.get_mut(number)) {
                slot.chunk.shared = true;
            }
        }
    }

    /// Says if allocations may lie in a range: the program does not manage it itself.
    pub fn reserved(&self, at: Address, bytes: u64) -> bool {
        let end = at.saturating_add(bytes);
        self.regions.iter().any(|r| at < r.base + r.bytes && end > r.base) || self.opened.reserved(at, bytes)
    }

    /// The region of a card, reserved on first use.
    fn region(&mut self, device: c_int, card: u8) -> Result<usize, c_int> {
        if let Some(at) = self.regions.iter().position(|r| r.device == device) {
            return Ok(at);
        }
        let chunk_bytes = tenant::get().map_or(2 << 20, |t| t.chunk_bytes);
        let mut total = 0;
        // SAFETY: the pointer is valid.
        unsafe { driver::device_total_mem(&raw mut total, device) };
        let bytes = (total as u64).saturating_mul(SPREAD).next_multiple_of(chunk_bytes);
        let mut base = 0;
        let align = usize::try_from(chunk_bytes).map_err(|_| OUT_OF_MEMORY)?;
        let length = usize::try_from(bytes).map_err(|_| OUT_OF_MEMORY)?;
        // SAFETY: the pointer is valid.
        match unsafe { driver::mem_address_reserve(&raw mut base, length, align, 0, 0) } {
            SUCCESS => {}
            error => return Err(error),
        }
        let arena = Arena::new(bytes, chunk_bytes);
        self.regions.push(Region {
            device,
            card,
            base,
            bytes,
            chunk_bytes,
            arena,
            slots: BTreeMap::new(),
            spare: BTreeSet::new(),
        });
        Ok(self.regions.len() - 1)
    }

    /// Maps `chunks` at the chunk numbers `numbers` of a region, or none of them; then the ids are returned.
    fn map(&mut self, at: usize, numbers: &[u32], chunks: Vec<(Chunk, OwnedFd)>) -> Result<(), Vec<ChunkId>> {
        let ids: Vec<_> = chunks.iter().map(|c| c.0.id).collect();
        let region = &mut self.regions[at];
        let mut mapped = Vec::new();
        for (number, (chunk, descriptor)) in numbers.iter().zip(chunks) {
            let Some(handle) = region.attach(*number, &descriptor) else { break };
            let kept = Kept::new(&descriptor);
            region.slots.insert(*number, Slot { handle, chunk: Backing::new(chunk, kept) });
            self.places.insert(chunk.id, (at, *number));
            mapped.push(*number);
        }
        let mut runs = Vec::new();
        for number in &mapped {
            match runs.last_mut() {
                Some((first, count)) if *first + *count == *number => *count += 1,
                _ => runs.push((*number, 1)),
            }
        }
        if mapped.len() == numbers.len() && runs.into_iter().all(|(first, count)| region.allow(first, count)) {
            return Ok(());
        }
        for number in mapped {
            region.detach(number);
        }
        for id in &ids {
            self.places.remove(id);
        }
        Err(ids)
    }

    /// Frees an allocation; the chunks that are unmapped for it.
    fn release(&mut self, at: usize, address: Address) -> Vec<ChunkId> {
        let region = &mut self.regions[at];
        let chunks = region.arena.release(address - region.base).unwrap_or_default();
        let mut over = Vec::new();
        for number in chunks.into_iter().filter(|number| region.slots.contains_key(number)) {
            if (region.spare.len() as u64 + 1) * region.chunk_bytes <= SPARE {
                region.spare.insert(number);
            } else {
                over.push(number);
            }
        }
        self.unmap(at, over)
    }

    /// Unmaps chunks that nothing lies in; their ids.
    fn unmap(&mut self, at: usize, numbers: Vec<u32>) -> Vec<ChunkId> {
        let region = &mut self.regions[at];
        let ids: Vec<_> = numbers.into_iter().filter_map(|number| region.detach(number)).collect();
        for id in &ids {
            self.places.remove(id);
        }
        ids
    }
}

impl Region {
    fn contains(&self, address: Address) -> bool {
        address >= self.base && address - self.base < self.bytes
    }

    fn address(&self, chunk: u32) -> Address {
        self.base + u64::from(chunk) * self.chunk_bytes
    }

    /// Imports a descriptor and maps it at an unmapped chunk.
    fn attach(&self, number: u32, descriptor: &OwnedFd) -> Option<Handle> {
        let handle = import(descriptor)?;
        // SAFETY: the address lies in our reservation and nothing is mapped there.
        let result = unsafe { driver::mem_map(self.address(number), self.chunk_bytes as usize, 0, handle, 0) };
        if result == SUCCESS {
            return Some(handle);
        }
        report!("a chunk cannot be mapped: error {result}");
        // SAFETY: the handle was imported above and is mapped nowhere.
        unsafe { driver::mem_release(handle) };
        None
    }

    /// Unmaps a chunk and releases its memory.
    fn detach(&mut self, number: u32) -> Option<ChunkId> {
        let slot = self.slots.remove(&number)?;
        // SAFETY: the chunk is mapped here, whole, and no work uses it.
        unsafe {
            driver::mem_unmap(self.address(number), self.chunk_bytes as usize);
            driver::mem_release(slot.handle);
        }
        Some(slot.chunk.id)
    }

    /// Puts other memory under a mapped chunk; it cannot be accessed before [`Region::allow`].
    fn replace(&mut self, number: u32, chunk: Chunk, descriptor: &OwnedFd) -> bool {
        let (address, bytes) = (self.address(number), self.chunk_bytes as usize);
        let Some(slot) = self.slots.get_mut(&number) else { return true };
        let Some(handle) = import(descriptor) else { return false };
        // SAFETY: the chunk is mapped here, whole, and nothing is in flight.
        unsafe {
            driver::mem_unmap(address, bytes);
            if driver::mem_map(address, bytes, 0, handle, 0) != SUCCESS {
                driver::mem_release(handle);
                driver::mem_map(address, bytes, 0, slot.handle, 0);
                let access = Access::all(self.device);
                driver::mem_set_access(address, bytes, &raw const access, 1);
                return false;
            }
            driver::mem_release(slot.handle);
        }
        slot.handle = handle;
        slot.chunk = Backing::new(chunk, Kept::new(descriptor));
        true
    }

    /// Lets the card access `count` chunks from `first`.
    fn allow(&self, first: u32, count: u32) -> bool {
        let access = Access::all(self.device);
        let bytes = u64::from(count) * self.chunk_bytes;
        // SAFETY: all of the range is mapped.
        unsafe { driver::mem_set_access(self.address(first), bytes as usize, &raw const access, 1) == SUCCESS }
    }
}

/// Imports the memory of a descriptor.
pub fn import(descriptor: &OwnedFd) -> Option<Handle> {
    let mut handle = 0;
    // SAFETY: the descriptor is open; the driver takes its value in the place of a pointer.
    let result = unsafe { driver::mem_import(&raw mut handle, descriptor.as_raw_fd() as usize as *mut c_void, POSIX) };
    if result != SUCCESS {
        report!("a chunk cannot be imported: error {result}");
    }
    (result == SUCCESS).then_some(handle)
}
