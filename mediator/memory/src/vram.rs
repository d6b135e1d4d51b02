//! Guest memory, on the card or in host memory that the card can access.

use super::accesses::Records;
use super::pinned::PinnedPool;
use super::refusals::Refusals;
use super::wakeup::Wakeup;
use super::wants::{FIRST_BYTES, Looks, Wants};
use super::zeroed::Zeroing;
use crate::ManagerError;
use crate::shortage::Shortage;
use bringup::memory::CardMemory;
use nvspec::addr::{GuestVramAddr, SMALL_PAGE, VramAddr};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use vram::{Block, ChunkTable, Lookup, PagePool, Place, PoolError, TenantId};

/// Set of a chunk's pages, with one bit per page.
pub struct Dirty(Vec<u64>);

impl Dirty {
    /// Creates an empty set for a chunk of `bytes` bytes.
    pub fn new(bytes: u64) -> Self {
        Self(vec![0; (bytes / SMALL_PAGE).div_ceil(64) as usize])
    }

    /// Adds the pages that contain any of the `len` bytes at `offset` in the chunk.
    pub fn mark(&mut self, offset: u64, len: u64) {
        let last = offset + len.max(1) - 1;
        for page in offset / SMALL_PAGE..=last / SMALL_PAGE {
            if let Some(word) = self.0.get_mut((page / 64) as usize) {
                *word |= 1 << (page % 64);
            }
        }
    }

    /// Returns true if the set contains no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Removes up to `most` pages, and returns their byte offsets in the chunk.
    pub fn take(&mut self, most: usize) -> Vec<u64> {
        let pages: Vec<u64> = self.pages().take(most).collect();
        for page in pages.iter().map(|offset| offset / SMALL_PAGE) {
            if let Some(word) = self.0.get_mut((page / 64) as usize) {
                *word &= !(1 << (page % 64));
            }
        }
        pages
    }

    /// Returns the byte offsets of the pages in the set.
    pub fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        let marked = |page: &u64| self.0[(page / 64) as usize] >> (page % 64) & 1 != 0;
        (0..self.0.len() as u64 * 64).filter(marked).map(|page| page * SMALL_PAGE)
    }
}

/// Number of words of up to 8 bytes that the CPU has transferred through the card's BARs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// Number of words read. The CPU waits for each read.
    pub read: u64,
    /// Number of words written. The CPU does not wait for writes.
    pub written: u64,
}

/// A card's VRAM, the host memory for chunks that do not fit, and the owners of all chunks.
pub struct CardVram {
    /// Access to VRAM.
    pub memory: CardMemory,
    /// Host memory for chunks.
    pub pinned: PinnedPool,
    /// Owners of chunks.
    pub chunks: ChunkTable,
    /// Chunks being copied, and their pages that were written in the meantime.
    pub copied: BTreeMap<(TenantId, u64), Dirty>,
    /// New chunks that were denied card memory since the balancer was last notified. They are in host memory or wait
    /// for memory.
    pub(crate) unmet: BTreeSet<(TenantId, u64)>,
    /// Chunks whose first memory was allocated on the card since the balancer was last notified, numbered in order of
    /// arrival.
    pub(crate) born: BTreeMap<(TenantId, u64), u64>,
    /// Set if the victim policy depends on which chunks are used.
    pub watches: bool,
    /// Number of bytes in host memory to which work has referred since the last query, or `None` if no policy uses this
    /// number.
    pub(crate) over_bus: Option<u64>,
    /// Records of guest accesses.
    pub(crate) records: Records,
    /// Chunks used since the balancer was last notified.
    pub touched: BTreeSet<(TenantId, u64)>,
    /// Number of VRAM words that the CPU has transferred for each VM.
    pub(super) words: BTreeMap<TenantId, Words>,
    /// Chunks that are being zeroed.
    pub(super) zeroing: Zeroing,
    /// Denied memory requests of guests.
    pub refusals: Refusals,
    /// VMs that requested memory while none was available.
    pub short: BTreeSet<TenantId>,
    /// Requests that wait for the mover.
    pub wants: Wants,
    /// Signalled when the card has no memory for a guest, and when memory is freed.
    pub wakeup: Arc<Wakeup>,
}

impl CardVram {
    /// Creates the memory, without any copies in progress.
    pub fn new(memory: CardMemory, pinned: PinnedPool, chunks: ChunkTable) -> Self {
        Self {
            memory,
            pinned,
            chunks,
            copied: BTreeMap::new(),
            unmet: BTreeSet::new(),
            born: BTreeMap::new(),
            watches: false,
            over_bus: None,
            records: Records::default(),
            touched: BTreeSet::new(),
            words: BTreeMap::new(),
            zeroing: Zeroing::default(),
            refusals: Refusals::default(),
            short: BTreeSet::new(),
            wants: Wants::default(),
            wakeup: Arc::default(),
        }
    }

    /// Returns the location of `len` bytes of guest VRAM, and allocates memory for chunks that have none. Returns
    /// `None` if the bytes do not belong to the VM or are not contiguous, or if no memory is free.
    pub fn place(&mut self, vm: TenantId, address: GuestVramAddr, len: u64) -> Option<Place> {
        let address = GuestVramAddr(address.0);
        match self.chunks.lookup(vm, address, len) {
            Lookup::Placed(place) => return Some(place),
            Lookup::Outside => return None,
            Lookup::Unplaced | Lookup::Split => {}
        }
        for (piece, _) in self.chunks.pieces(address, len) {
            self.place_chunk(vm, piece)?;
        }
        self.chunks.translate_range(vm, address, len)
    }

    /// Returns the location of the chunk that contains `address`, and allocates zeroed memory if the chunk has none.
    fn place_chunk(&mut self, vm: TenantId, address: GuestVramAddr) -> Option<Place> {
        let chunk = (vm, address.0 / self.chunks.chunk_bytes());
        loop {
            match self.chunks.place(vm, address) {
                Ok(placed) => {
                    if placed.new {
                        // Mapping memory does not access it, but new memory is usually accessed soon after it is
                        // mapped.
                        self.touch(vm, address);
                        if placed.place.card().is_some() {
                            // A chunk that was freed and placed again is last in the order.
                            let number = self.born.len() as u64;
                            self.born.insert(chunk, number);
                        }
                    }
                    if let (Place::Host(at), true) = (placed.place, placed.new) {
                        self.unmet.insert(chunk);
                        self.wakeup.ring();
                        if let Err(error) = self.pinned.fill(at) {
                            tracing::warn!(%vm, %address, %error, "no host memory is available for guest memory");
                            self.unplace(vm, address);
                            self.short.insert(vm);
                            return None;
                        }
                    }
                    self.refusals.placed(chunk);
                    self.ring_for_zeroed();
                    return Some(placed.place);
                }
                // The loop terminates because each iteration scrubs a dirty chunk.
                Err(vram::Error::NeedsScrub { .. }) if self.scrub_one().ok()? => {}
                Err(error) => {
                    if let vram::Error::Full { limit, host, .. } = error {
                        self.unmet.insert(chunk);
                        self.refusals.refused(chunk, limit.decisive(host));
                    }
                    if self.short.insert(vm) {
                        let error = Shortage::from_error(&error, self.chunks.chunk_bytes());
                        tracing::warn!(%vm, %address, %error, "no memory is available for guest memory");
                    }
                    self.wakeup.ring();
                    return None;
                }
            }
        }
    }

    /// Removes the records of a VM that was removed.
    pub fn forget(&mut self, vm: TenantId) {
        self.words.remove(&vm);
        self.short.remove(&vm);
        self.wants.forget(vm);
        self.refusals.forget(vm);
    }

    /// Returns true if the VM has requested memory while none was available, since the last call of
    /// [`Self::was_short`].
    pub fn is_short(&self, vm: TenantId) -> bool {
        self.short.contains(&vm)
    }

    /// Same as [`Self::is_short`], but also clears the record.
    pub fn was_short(&mut self, vm: TenantId) -> bool {
        self.short.remove(&vm)
    }

    fn unplace(&mut self, vm: TenantId, address: GuestVramAddr) {
        if let Err(error) = self.chunks.unplace(vm, address) {
            tracing::error!(%vm, %address, %error, "cannot release the slot of a chunk without memory");
        }
    }

    /// Returns the number of VRAM words that the CPU has transferred for a VM since the VM was added.
    pub fn words_of(&self, vm: TenantId) -> Words {
        self.words.get(&vm).copied().unwrap_or_default()
    }

    fn count_words(&mut self, vm: TenantId, place: Place, read: usize, written: usize) {
        if place.card().is_some() {
            let words = self.words.entry(vm).or_default();
            words.read += read.div_ceil(8) as u64;
            words.written += written.div_ceil(8) as u64;
        }
    }

    /// Reads guest VRAM, across chunks if necessary. Unplaced memory reads as zeros and is not allocated.
    pub fn guest_read(&mut self, vm: TenantId, address: GuestVramAddr, data: &mut [u8]) -> Option<()> {
        let mut rest = data;
        for (piece, len) in self.chunks.pieces(GuestVramAddr(address.0), rest.len() as u64) {
            let (data, more) = std::mem::take(&mut rest).split_at_mut(len as usize);
            self.touch(vm, piece);
            match self.chunks.lookup(vm, piece, len) {
                Lookup::Placed(place) => {
                    self.count_words(vm, place, data.len(), 0);
                    failed(self.read_at(place, data))?;
                }
                Lookup::Unplaced => data.fill(0),
                Lookup::Split | Lookup::Outside => return None,
            }
            rest = more;
        }
        rest.is_empty().then_some(())
    }

    /// Writes guest VRAM, across chunks if necessary. Writing zeros to unplaced memory does not allocate it.
    pub fn guest_write(&mut self, vm: TenantId, address: GuestVramAddr, data: &[u8]) -> Option<()> {
        let mut rest = data;
        for (piece, len) in self.chunks.pieces(GuestVramAddr(address.0), rest.len() as u64) {
            let (data, more) = rest.split_at(len as usize);
            self.touch(vm, piece);
            let place = match self.chunks.lookup(vm, piece, len) {
                Lookup::Placed(place) => Some(place),
                Lookup::Unplaced if data.iter().all(|byte| *byte == 0) => None,
                Lookup::Unplaced => Some(self.place_chunk(vm, piece)?),
                Lookup::Split | Lookup::Outside => return None,
            };
            if let Some(place) = place {
                self.written(vm, piece, len);
                self.count_words(vm, place, 0, data.len());
                failed(self.write_at(place, data))?;
            }
            rest = more;
        }
        rest.is_empty().then_some(())
    }

    /// Zeroes `len` bytes at `address`, which must be within one chunk. Does nothing if the chunk has no memory.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn guest_zero(&mut self, vm: TenantId, address: GuestVramAddr, len: u64) -> Result<(), ManagerError> {
        let Lookup::Placed(place) = self.chunks.lookup(vm, address, len) else { return Ok(()) };
        self.written(vm, address, len);
        match place {
            Place::Card(VramAddr(at)) => Ok(self.memory.zero(VramAddr(at), len)?),
            Place::Host(at) => {
                self.pinned.write(at, &vec![0; len as usize]);
                Ok(())
            }
        }
    }

    /// Returns true if the memory to which work refers must be recorded.
    #[must_use]
    pub fn watches(&self) -> bool {
        self.watches || self.over_bus.is_some() || self.records.any()
    }

    /// Records that work refers to `bytes` bytes of the chunk at `address`.
    pub fn named(&mut self, vm: TenantId, address: GuestVramAddr, bytes: u64) {
        self.touch(vm, address);
        self.records.named(vm, address.0 / self.chunks.chunk_bytes());
        if let (Some(sum), Lookup::Placed(Place::Host(_))) = (&mut self.over_bus, self.chunks.lookup(vm, address, 1)) {
            *sum = sum.saturating_add(bytes);
        }
    }

    /// Records that the chunk at `address` is in use, if the victim policy depends on this. The record has at most one
    /// entry per guest chunk.
    fn touch(&mut self, vm: TenantId, address: GuestVramAddr) {
        if self.watches {
            self.touched.insert((vm, address.0 / self.chunks.chunk_bytes()));
        }
    }

    /// Marks written pages of a chunk that is being copied.
    fn written(&mut self, vm: TenantId, address: GuestVramAddr, len: u64) {
        if self.copied.is_empty() {
            return;
        }
        let chunk = self.chunks.chunk_bytes();
        if let Some(dirty) = self.copied.get_mut(&(vm, address.0 / chunk)) {
            dirty.mark(address.0 % chunk, len);
        }
    }

    /// Reads from a chunk's location into `data`.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn read_at(&mut self, place: Place, data: &mut [u8]) -> Result<(), ManagerError> {
        match place {
            Place::Card(VramAddr(at)) => Ok(self.memory.read(VramAddr(at), data)?),
            Place::Host(at) => {
                self.pinned.read(at, data);
                Ok(())
            }
        }
    }

    /// Writes `data` to a chunk's location.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn write_at(&mut self, place: Place, data: &[u8]) -> Result<(), ManagerError> {
        match place {
            Place::Card(VramAddr(at)) => Ok(self.memory.write(VramAddr(at), data)?),
            Place::Host(at) => {
                self.pinned.write(at, data);
                Ok(())
            }
        }
    }

    /// Same as [`Self::alloc`] for a VM's page tables. If no memory is free, the VM is marked as short of memory, and
    /// the mover is notified.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::alloc`].
    pub fn alloc_for(&mut self, vm: TenantId, pool: &mut PagePool, bytes: u64) -> Result<VramAddr, ManagerError> {
        let found = self.alloc(pool, bytes);
        match found {
            Ok(_) => {
                self.wants.found(vm);
                self.pool_changed(vm, pool);
            }
            Err(ManagerError::Lacking) => {
                // If enough chunks are free, they are not contiguous, so request more.
                let there = self.chunks.for_mediator();
                let wanted = self.count(bytes);
                self.wants.lack(vm, if there >= wanted { there.saturating_add(wanted) } else { wanted });
                self.short.insert(vm);
                self.wakeup.ring();
            }
            Err(_) => {}
        }
        found
    }

    /// Updates a VM's reservation after its pool for page tables has grown or shrunk.
    pub fn pool_changed(&mut self, vm: TenantId, pool: &PagePool) {
        let (held, first) = (self.count(pool.held_bytes()), self.count(FIRST_BYTES));
        self.wants.hold(vm, held, first);
    }

    /// Returns the number of chunks needed for `bytes` bytes.
    pub fn count(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.div_ceil(self.chunks.chunk_bytes())).unwrap_or(u32::MAX)
    }

    /// Allocates zeroed card memory for the mediator's own structures, aligned to 4 KiB.
    ///
    /// # Errors
    /// Returns [`ManagerError::Lacking`] if the card is currently out of memory, or another error if the pool may not
    /// grow or the card does not respond.
    pub fn alloc(&mut self, pool: &mut PagePool, bytes: u64) -> Result<VramAddr, ManagerError> {
        let Block { address: VramAddr(address), zeroed } = self.take_block(pool, bytes)?;
        if !zeroed {
            self.memory.zero(VramAddr(address), bytes)?;
        }
        Ok(VramAddr(address))
    }

    /// Same as [`Self::alloc`], but does not zero the memory.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::alloc`].
    pub fn take(&mut self, pool: &mut PagePool, bytes: u64) -> Result<VramAddr, ManagerError> {
        Ok(VramAddr(self.take_block(pool, bytes)?.address.0))
    }

    fn take_block(&mut self, pool: &mut PagePool, bytes: u64) -> Result<Block, ManagerError> {
        let block = loop {
            match pool.alloc_block(&mut self.chunks, bytes) {
                Ok(block) => break block,
                // Scrubbing dirty chunks may free enough memory.
                Err(_) if self.scrub_one()? => {}
                Err(PoolError::Chunks(vram::Error::CardFull { .. } | vram::Error::NeedsScrub { .. })) => {
                    return Err(ManagerError::Lacking);
                }
                Err(error) => return Err(error.into()),
            }
        };
        if self.is_tight() {
            self.wakeup.ring();
        }
        self.ring_for_zeroed();
        Ok(block)
    }

    /// Returns true if guest chunks can move to host memory.
    pub(crate) fn has_host_memory(&self) -> bool {
        self.pinned.range().1 != 0
    }

    /// Returns true if the mediator may soon lack memory for its own structures, although guest chunks can move.
    pub(crate) fn is_tight(&self) -> bool {
        self.has_host_memory() && self.chunks.kept_for_mediator() < self.own_chunks()
    }

    /// Returns the number of chunks that the mediator must keep free for itself, plus those that it has borrowed for
    /// this purpose.
    pub(crate) fn own_chunks(&self) -> u32 {
        self.wants.chunks().saturating_add(self.chunks.borrowed())
    }

    /// Records whether a VM's work waits for memory. If it does, the mover notifies the VM when memory is available.
    pub fn set_waits(&mut self, vm: TenantId, waits: bool) {
        self.wants.set_waits(vm, waits);
    }

    /// Returns the VMs whose accesses, work or page tables wait for memory.
    pub fn waiting(&self) -> BTreeSet<TenantId> {
        self.short.iter().copied().chain(self.wants.vms()).collect()
    }

    /// Returns the counters of the mover's scans for a VM.
    #[must_use]
    pub fn looks(&self, vm: TenantId) -> Looks {
        self.wants.looks(vm)
    }

    /// Returns true if the mover's scans for a VM since `since` have failed as often as `limit` permits. If memory on
    /// the card can move, at least one scan must have failed.
    #[must_use]
    pub fn is_vain(&self, vm: TenantId, since: Looks, limit: Duration) -> bool {
        self.wants.is_vain(vm, since, limit, self.has_host_memory())
    }
}

/// Logs a guest's access that failed on the card. The access is lost, but the state of the card stays consistent.
fn failed(result: Result<(), ManagerError>) -> Option<()> {
    result.inspect_err(|error| tracing::error!(%error, "the card failed during a guest's access")).ok()
}
