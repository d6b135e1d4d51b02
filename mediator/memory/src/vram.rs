//! Guests' memory wherever it lies: on the card, or in host memory that the card reaches.

use super::accesses::Records;
use super::pinned::PinnedPool;
use super::refusals::Refusals;
use super::wakeup::Wakeup;
use super::wants::{FIRST_BYTES, Looks, Wants};
use super::zeroed::Zeroing;
use crate::HostError;
use crate::shortage::Shortage;
use bringup::memory::CardMemory;
use nvspec::addr::{GuestVramAddr, SMALL_PAGE, VramAddr};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use vram::{Block, CardAddr, ChunkTable, GuestAddr, Lookup, PagePool, Place, PoolError, VmId};

/// Pages of a chunk, one bit each.
pub struct Dirty(Vec<u64>);

impl Dirty {
    /// None of the pages of a chunk of `bytes` bytes.
    pub fn new(bytes: u64) -> Self {
        Self(vec![0; (bytes / SMALL_PAGE).div_ceil(64) as usize])
    }

    /// Marks those that hold one of the `len` bytes from `offset` on, which is relative to the chunk.
    pub fn mark(&mut self, offset: u64, len: u64) {
        let last = offset + len.max(1) - 1;
        for page in offset / SMALL_PAGE..=last / SMALL_PAGE {
            if let Some(word) = self.0.get_mut((page / 64) as usize) {
                *word |= 1 << (page % 64);
            }
        }
    }

    /// Takes the marks of up to `most` pages off; returns their byte offsets, relative to the chunk.
    pub fn take(&mut self, most: usize) -> Vec<u64> {
        let pages: Vec<u64> = self.pages().take(most).collect();
        for page in pages.iter().map(|offset| offset / SMALL_PAGE) {
            if let Some(word) = self.0.get_mut((page / 64) as usize) {
                *word &= !(1 << (page % 64));
            }
        }
        pages
    }

    /// Byte offset of each that is marked, relative to the chunk.
    pub fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        let marked = |page: &u64| self.0[(page / 64) as usize] >> (page % 64) & 1 != 0;
        (0..self.0.len() as u64 * 64).filter(marked).map(|page| page * SMALL_PAGE)
    }
}

/// Words of up to 8 bytes that this processor has moved by the card's BARs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// Each of which it waits for.
    pub read: u64,
    /// None of which it waits for.
    pub written: u64,
}

/// The card's VRAM: the way into it, what takes chunks that it has no room for, and who owns which chunk.
pub struct CardVram {
    /// The way into VRAM.
    pub memory: CardMemory,
    /// Host memory for chunks.
    pub pinned: PinnedPool,
    /// Owners of chunks.
    pub chunks: ChunkTable,
    /// Chunks that are being copied: which of their pages were written since.
    pub copied: BTreeMap<(VmId, u64), Dirty>,
    /// New chunks that found no room on the card since the balancer was told: they were born in host memory, or have no place
    /// and are waited for.
    pub(crate) unmet: BTreeSet<(VmId, u64)>,
    /// Chunks that have got their first place since it was told, on the card, in their order by the number of each.
    pub(crate) born: BTreeMap<(VmId, u64), u64>,
    /// The policy that picks victims wants to know what is used.
    pub watches: bool,
    /// Bytes that work names in host memory since somebody began to ask; `None` when nobody does.
    pub(crate) over_bus: Option<u64>,
    /// Records of what guests use.
    pub(crate) records: Records,
    /// Chunks that were used since it was told.
    pub touched: BTreeSet<(VmId, u64)>,
    /// Words of VRAM that this processor has read and written for each VM.
    pub(super) words: BTreeMap<VmId, Words>,
    /// Chunks that are being zeroed.
    pub(super) zeroing: Zeroing,
    /// Requests of guests that were refused.
    pub refusals: Refusals,
    /// VMs that wanted memory that there was none of.
    pub short: BTreeSet<VmId>,
    /// Requests that wait for the mover.
    pub wants: Wants,
    /// Rung when a guest wanted memory that there was none of on the card, and when some has become free.
    pub wakeup: Arc<Wakeup>,
}

impl CardVram {
    /// Memory of which nothing is being copied.
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

    /// Returns where `len` bytes of guest VRAM lie, if they are the VM's and in one piece. What has no place yet gets
    /// one. `None` also when there is none left.
    pub fn place(&mut self, vm: VmId, address: GuestVramAddr, len: u64) -> Option<Place> {
        let address = GuestAddr(address.0);
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

    /// Gives the chunk of `address` a place, zeroed.
    fn place_chunk(&mut self, vm: VmId, address: GuestAddr) -> Option<Place> {
        let chunk = (vm, address.0 / self.chunks.chunk_bytes());
        loop {
            match self.chunks.place(vm, address) {
                Ok(placed) => {
                    if placed.new {
                        // To be mapped is no use, but nothing is mapped for the first time in vain.
                        self.touch(vm, address);
                        if placed.place.card().is_some() {
                            // One that was given up and is placed again is last.
                            let number = self.born.len() as u64;
                            self.born.insert(chunk, number);
                        }
                    }
                    if let (Place::Host(at), true) = (placed.place, placed.new) {
                        self.unmet.insert(chunk);
                        self.wakeup.ring();
                        if let Err(error) = self.pinned.fill(at) {
                            tracing::warn!(%vm, %address, %error, "guest memory gets no place in host memory");
                            self.unplace(vm, address);
                            self.short.insert(vm);
                            return None;
                        }
                    }
                    self.refusals.placed(chunk);
                    self.ring_for_zeroed();
                    return Some(placed.place);
                }
                // Ends: each turn makes one of the chunks that wait a free one.
                Err(vram::Error::NeedsScrub { .. }) if self.scrub_one().ok()? => {}
                Err(error) => {
                    if let vram::Error::Full { limit, host, .. } = error {
                        self.unmet.insert(chunk);
                        self.refusals.refused(chunk, limit.decisive(host));
                    }
                    if self.short.insert(vm) {
                        let error = Shortage::of(&error, self.chunks.chunk_bytes());
                        tracing::warn!(%vm, %address, %error, "guest memory gets no place");
                    }
                    self.wakeup.ring();
                    return None;
                }
            }
        }
    }

    /// Forgets what a VM wanted that is removed.
    pub fn forget(&mut self, vm: VmId) {
        self.words.remove(&vm);
        self.short.remove(&vm);
        self.wants.forget(vm);
        self.refusals.forget(vm);
    }

    /// Returns whether the VM wanted memory that there was none of, since [`Self::was_short`] was called.
    pub fn is_short(&self, vm: VmId) -> bool {
        self.short.contains(&vm)
    }

    /// As [`Self::is_short`], and forgets it.
    pub fn was_short(&mut self, vm: VmId) -> bool {
        self.short.remove(&vm)
    }

    fn unplace(&mut self, vm: VmId, address: GuestAddr) {
        if let Err(error) = self.chunks.unplace(vm, address) {
            tracing::error!(%vm, %address, %error, "a chunk without memory keeps its place");
        }
    }

    /// Words of VRAM that were moved for a VM by this processor, since it came.
    pub fn words_of(&self, vm: VmId) -> Words {
        self.words.get(&vm).copied().unwrap_or_default()
    }

    fn count_words(&mut self, vm: VmId, place: Place, read: usize, written: usize) {
        if place.card().is_some() {
            let words = self.words.entry(vm).or_default();
            words.read += read.div_ceil(8) as u64;
            words.written += written.div_ceil(8) as u64;
        }
    }

    /// Reads guest VRAM, whatever chunks it spans. What was never used reads as zeros, and stays without a place.
    pub fn guest_read(&mut self, vm: VmId, address: GuestVramAddr, data: &mut [u8]) -> Option<()> {
        let mut rest = data;
        for (piece, len) in self.chunks.pieces(GuestAddr(address.0), rest.len() as u64) {
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

    /// Writes guest VRAM, whatever chunks it spans. Zeros need no place where there is none.
    pub fn guest_write(&mut self, vm: VmId, address: GuestVramAddr, data: &[u8]) -> Option<()> {
        let mut rest = data;
        for (piece, len) in self.chunks.pieces(GuestAddr(address.0), rest.len() as u64) {
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

    /// Fills the `len` bytes from `address` on, which lie in one chunk, with zeros where they lie.
    ///
    /// # Errors
    /// When the card does not answer.
    pub fn guest_zero(&mut self, vm: VmId, address: GuestAddr, len: u64) -> Result<(), HostError> {
        let Lookup::Placed(place) = self.chunks.lookup(vm, address, len) else { return Ok(()) };
        self.written(vm, address, len);
        match place {
            Place::Card(CardAddr(at)) => Ok(self.memory.zero(VramAddr(at), len)?),
            Place::Host(at) => {
                self.pinned.write(at, &vec![0; len as usize]);
                Ok(())
            }
        }
    }

    /// Returns whether somebody wants to know what work names.
    #[must_use]
    pub fn watches(&self) -> bool {
        self.watches || self.over_bus.is_some() || self.records.any()
    }

    /// Work names `bytes` bytes in the chunk of `address`.
    pub fn named(&mut self, vm: VmId, address: GuestAddr, bytes: u64) {
        self.touch(vm, address);
        self.records.named(vm, address.0 / self.chunks.chunk_bytes());
        if let (Some(sum), Lookup::Placed(Place::Host(_))) = (&mut self.over_bus, self.chunks.lookup(vm, address, 1)) {
            *sum = sum.saturating_add(bytes);
        }
    }

    /// The chunk of `address` is used. There are no more than guests have chunks.
    fn touch(&mut self, vm: VmId, address: GuestAddr) {
        if self.watches {
            self.touched.insert((vm, address.0 / self.chunks.chunk_bytes()));
        }
    }

    /// Notes that something has changed while it is being copied.
    fn written(&mut self, vm: VmId, address: GuestAddr, len: u64) {
        if self.copied.is_empty() {
            return;
        }
        let chunk = self.chunks.chunk_bytes();
        if let Some(dirty) = self.copied.get_mut(&(vm, address.0 / chunk)) {
            dirty.mark(address.0 % chunk, len);
        }
    }

    /// Reads where a chunk lies.
    ///
    /// # Errors
    /// When the card does not answer.
    pub fn read_at(&mut self, place: Place, data: &mut [u8]) -> Result<(), HostError> {
        match place {
            Place::Card(CardAddr(at)) => Ok(self.memory.read(VramAddr(at), data)?),
            Place::Host(at) => {
                self.pinned.read(at, data);
                Ok(())
            }
        }
    }

    /// Writes where a chunk lies.
    ///
    /// # Errors
    /// When the card does not answer.
    pub fn write_at(&mut self, place: Place, data: &[u8]) -> Result<(), HostError> {
        match place {
            Place::Card(CardAddr(at)) => Ok(self.memory.write(VramAddr(at), data)?),
            Place::Host(at) => {
                self.pinned.write(at, data);
                Ok(())
            }
        }
    }

    /// Card memory for a VM's page tables, as [`Self::alloc`]. Where there is none the VM counts as short of memory, and the
    /// mover is asked for some.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    pub fn alloc_for(&mut self, vm: VmId, pool: &mut PagePool, bytes: u64) -> Result<VramAddr, HostError> {
        let found = self.alloc(pool, bytes);
        match found {
            Ok(_) => {
                self.wants.found(vm);
                self.pool_changed(vm, pool);
            }
            Err(HostError::Lacking) => {
                // Enough of them, but not in a row: more have to be free.
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

    /// The pool of a VM's page tables holds more or less than before.
    pub fn pool_changed(&mut self, vm: VmId, pool: &PagePool) {
        let (held, first) = (self.count(pool.held_bytes()), self.count(FIRST_BYTES));
        self.wants.hold(vm, held, first);
    }

    /// Chunks that so many bytes take.
    pub fn count(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.div_ceil(self.chunks.chunk_bytes())).unwrap_or(u32::MAX)
    }

    /// Card memory for the mediator's own structures, zeroed and aligned to 4 KiB.
    ///
    /// # Errors
    /// [`HostError::Lacking`] when the card has none now; when the pool may not grow further, or the card does not answer.
    pub fn alloc(&mut self, pool: &mut PagePool, bytes: u64) -> Result<VramAddr, HostError> {
        let Block { address: CardAddr(address), zeroed } = self.take_block(pool, bytes)?;
        if !zeroed {
            self.memory.zero(VramAddr(address), bytes)?;
        }
        Ok(VramAddr(address))
    }

    /// The same, with anything in it.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    pub fn take(&mut self, pool: &mut PagePool, bytes: u64) -> Result<VramAddr, HostError> {
        Ok(VramAddr(self.take_block(pool, bytes)?.address.0))
    }

    fn take_block(&mut self, pool: &mut PagePool, bytes: u64) -> Result<Block, HostError> {
        let block = loop {
            match pool.alloc_block(&mut self.chunks, bytes) {
                Ok(block) => break block,
                // Chunks that wait to be scrubbed may do.
                Err(_) if self.scrub_one()? => {}
                Err(PoolError::Chunks(vram::Error::CardFull { .. } | vram::Error::NeedsScrub { .. })) => {
                    return Err(HostError::Lacking);
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

    /// Returns whether there is host memory that guests' chunks could move to.
    pub(crate) fn has_host_memory(&self) -> bool {
        self.pinned.range().1 != 0
    }

    /// Returns whether the mediator may soon be without memory for its own structures, while guests' could move.
    pub(crate) fn is_tight(&self) -> bool {
        self.has_host_memory() && self.chunks.kept_for_mediator() < self.own_chunks()
    }

    /// Chunks that the mediator is to have at hand, and what it has borrowed to have them.
    pub(crate) fn own_chunks(&self) -> u32 {
        self.wants.chunks().saturating_add(self.chunks.borrowed())
    }

    /// Notes whether work of a VM waits for memory: the mover tells it whenever there may be some.
    pub fn set_waits(&mut self, vm: VmId, waits: bool) {
        self.wants.set_waits(vm, waits);
    }

    /// VMs that wait for memory, their own or that of their page tables.
    pub fn waiting(&self) -> BTreeSet<VmId> {
        self.short.iter().copied().chain(self.wants.vms()).collect()
    }

    /// Returns what the mover has done for a VM so far.
    #[must_use]
    pub fn looks(&self, vm: VmId) -> Looks {
        self.wants.looks(vm)
    }

    /// Returns whether the mover has looked in vain for a VM since `since` for as long as `limit` lets it wait. A card
    /// whose memory can move is asked once in any case.
    #[must_use]
    pub fn is_vain(&self, vm: VmId, since: Looks, limit: Duration) -> bool {
        self.wants.is_vain(vm, since, limit, self.has_host_memory())
    }
}

/// An access of a guest that the card has failed at is lost; the card's state is not.
fn failed(result: Result<(), HostError>) -> Option<()> {
    result.inspect_err(|error| tracing::error!(%error, "the card failed at an access of a guest")).ok()
}
