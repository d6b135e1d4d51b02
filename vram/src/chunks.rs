//! The chunk table: one owner and one state for each chunk of VRAM.

mod account;
mod error;
mod map;
mod state;

pub use account::{Summary, VmSummary};
pub use error::Error;
pub use state::{ChunkId, ChunkState, Contents, ScrubWork};

use crate::{CardAddr, GuestAddr, VmId};
use map::VmMap;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Smallest chunk: a large GPU page never spans two chunks.
pub const CHUNK_BYTES_MIN: u64 = 128 << 10;
/// Largest chunk.
pub const CHUNK_BYTES_MAX: u64 = 64 << 20;
/// What an operator gets who does not choose.
pub const CHUNK_BYTES_DEFAULT: u64 = 2 << 20;
/// Most VRAM that a VM may be told to have; its map takes memory by that.
pub const ADVERTISED_BYTES_MAX: u64 = 1 << 40;

/// A range of the card's VRAM behind a guest VRAM address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where it begins on the card.
    pub address: CardAddr,
    /// Bytes from there on that belong to the VM and follow one another on the card as they do for the guest.
    pub bytes: u64,
}

/// The place of a guest chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Where the guest address that was asked for lies on the card.
    pub address: CardAddr,
    /// The chunk got its place just now: it holds zeros, and nothing names it yet.
    pub new: bool,
}

/// What is behind a range of guest VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// All of it has a place, in one piece that begins there.
    Placed(CardAddr),
    /// None of it has a place: it reads as zeros.
    Unplaced,
    /// It spans chunks that are no neighbours, or of which only some have a place: each piece of [`ChunkTable::pieces`]
    /// is one of the other answers.
    Split,
    /// Some of it is not the guest's, or there is no such VM.
    Outside,
}

/// All chunks of a card. Invariant: `free`, `to_scrub` and the VMs' maps say the same as `states`.
///
/// # Who may take what
/// A guest chunk gets a chunk of the card at its first use. Chunks without an owner, zeroed or not, are counted together,
/// since scrubbing needs no one's leave; they back, in this order:
/// - what VMs with a reservation have not used yet: [`Self::place`] never fails with [`Error::Full`] for them;
/// - what was set aside for the mediator ([`Self::set_aside`]) and is not used. A VM's chunks are of no use without page
///   tables, instance blocks and rings, which lie in chunks of the mediator: a reservation is worth as much as the sum
///   set aside covers what the mediator may need for all VMs that are admitted;
/// - whatever is left, the spare chunks: new reservations, the mediator beyond what is set aside for it, and VMs without a
///   reservation. These compete, first come, first served.
///
/// Numbers are promised, not chunks: a run of several chunks ([`Self::reserve_mediator`]) can fail although their number
/// is set aside, if there is no such run. The mediator's tables fit into a single chunk unless chunks are small.
#[derive(Debug)]
pub struct ChunkTable {
    shift: u32,
    states: Vec<ChunkState>,
    free: BTreeSet<u32>,
    to_scrub: VecDeque<u32>,
    scrubbing: u32,
    /// Chunks of the mediator.
    mediator: u32,
    /// Chunks that are for the mediator, those that it has included.
    set_aside: u32,
    /// Sum of what VMs with a reservation have not got yet.
    promised: u32,
    vms: BTreeMap<VmId, VmMap>,
    scrubbed: u64,
}

impl ChunkTable {
    /// A table of `total_bytes` of VRAM in chunks of `chunk_bytes`. A rest smaller than a chunk is left alone.
    ///
    /// # Errors
    /// When the sizes make no sense: [`Error::ChunkSize`], [`Error::CardSize`].
    pub fn new(total_bytes: u64, chunk_bytes: u64, contents: Contents) -> Result<Self, Error> {
        if !chunk_bytes.is_power_of_two() || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes) {
            return Err(Error::ChunkSize(chunk_bytes));
        }
        let count = match u32::try_from(total_bytes / chunk_bytes) {
            Ok(count) if count > 0 => count,
            _ => return Err(Error::CardSize(total_bytes)),
        };
        let (state, free, to_scrub) = match contents {
            Contents::Zeroed => (ChunkState::Free, (0..count).collect(), VecDeque::new()),
            Contents::Unknown => (ChunkState::NeedsScrub, BTreeSet::new(), (0..count).collect()),
        };
        Ok(Self {
            shift: chunk_bytes.trailing_zeros(),
            states: vec![state; count as usize],
            free,
            to_scrub,
            scrubbing: 0,
            mediator: 0,
            set_aside: 0,
            promised: 0,
            vms: BTreeMap::new(),
            scrubbed: 0,
        })
    }

    /// Bytes of a chunk.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        1 << self.shift
    }

    /// Where a chunk begins on the card.
    #[must_use]
    pub fn address(&self, chunk: ChunkId) -> CardAddr {
        CardAddr(u64::from(chunk.0) << self.shift)
    }

    /// The chunk that `address` lies in, if it is in the table.
    #[must_use]
    pub fn chunk_at(&self, address: CardAddr) -> Option<ChunkId> {
        let index = u32::try_from(address.0 >> self.shift).ok()?;
        ((index as usize) < self.states.len()).then_some(ChunkId(index))
    }

    /// What a chunk is used for.
    #[must_use]
    pub fn state(&self, chunk: ChunkId) -> ChunkState {
        self.states[chunk.0 as usize]
    }

    /// Sets `chunks` aside for the mediator, those that it has included: no VM gets them. A smaller number than before
    /// gives the difference up, but takes nothing away.
    ///
    /// # Errors
    /// [`Error::Full`] when more is missing than is spare; nothing has changed then.
    pub fn set_aside(&mut self, chunks: u32) -> Result<(), Error> {
        let missing = chunks.saturating_sub(self.mediator);
        if missing > self.unowned() - self.promised {
            return Err(self.full(u64::from(missing), self.promised));
        }
        self.set_aside = chunks;
        Ok(())
    }

    /// Takes `count` chunks that follow one another for the mediator; the first lies at a multiple of `align` chunks.
    ///
    /// # Errors
    /// [`Error::Full`] when there is no such run without an owner, or VMs are sure to get what it would need;
    /// [`Error::NeedsScrub`] when scrubbing could make one.
    pub fn reserve_mediator(&mut self, count: u32, align: u32) -> Result<ChunkId, Error> {
        let fits = |first: u32, usable: &dyn Fn(ChunkState) -> bool| {
            first.checked_add(count).is_some_and(|end| end as usize <= self.states.len())
                && (first..first + count).all(|chunk| usable(self.states[chunk as usize]))
        };
        let candidates = || (0..self.states.len() as u32).step_by(align.max(1) as usize);
        if count == 0 {
            return Err(Error::Empty);
        }
        if count > self.unowned() - self.promised {
            return Err(self.full(u64::from(count), self.promised));
        }
        let is_free = |state| state == ChunkState::Free;
        let Some(first) = candidates().find(|&first| fits(first, &is_free)) else {
            let unowned = |state| matches!(state, ChunkState::Free | ChunkState::NeedsScrub | ChunkState::Scrubbing);
            return Err(match candidates().find(|&first| fits(first, &unowned)) {
                Some(_) => Error::NeedsScrub { short: count },
                None => self.full(u64::from(count), self.promised),
            });
        };
        for chunk in first..first + count {
            self.free.remove(&chunk);
            self.go(chunk, ChunkState::Mediator);
        }
        self.mediator += count;
        Ok(ChunkId(first))
    }

    /// Gives `count` chunks from `first` on back that the mediator had reserved. They are scrubbed before reuse: they
    /// held addresses of other VMs' memory.
    ///
    /// # Panics
    /// When one of them is not the mediator's, which is the caller's mistake.
    pub fn release_mediator(&mut self, first: ChunkId, count: u32) {
        for chunk in first.0..first.0 + count {
            assert_eq!(self.states[chunk as usize], ChunkState::Mediator, "chunk {chunk} is not the mediator's");
            self.abandon(chunk);
        }
        self.mediator -= count;
    }

    /// Admits a VM whose guest believes to have `bytes` of VRAM. None of it has a place until [`Self::place`] gives it
    /// one. With `reserve` all of it is sure to get one; without, it may be more than the card has.
    ///
    /// # Errors
    /// [`Error::Full`] when that cannot be promised; chunks that are not zeroed yet do as well as others here.
    /// [`Error::Exists`]; [`Error::Empty`]; [`Error::Advertised`].
    pub fn create_vm(&mut self, vm: VmId, bytes: u64, reserve: bool) -> Result<(), Error> {
        if self.vms.contains_key(&vm) {
            return Err(Error::Exists(vm));
        }
        if bytes == 0 {
            return Err(Error::Empty);
        }
        let wanted = bytes.div_ceil(self.chunk_bytes());
        if reserve && wanted > u64::from(self.spare()) {
            return Err(self.full(wanted, self.promised + self.left_aside()));
        }
        let count = u32::try_from(wanted).ok().filter(|_| bytes <= ADVERTISED_BYTES_MAX);
        let map = VmMap::new(bytes, count.ok_or(Error::Advertised(bytes))?, self.shift, reserve);
        self.promised += map.owed();
        self.vms.insert(vm, map);
        Ok(())
    }

    /// Gives the guest chunk that `address` lies in a place: a zeroed chunk, if it has none yet.
    ///
    /// # Errors
    /// [`Error::NeedsScrub`]: scrub a chunk and ask again. [`Error::Full`], for a VM without a reservation only.
    /// [`Error::OutOfRange`]; [`Error::NoSuchVm`].
    pub fn place(&mut self, vm: VmId, address: GuestAddr) -> Result<Placed, Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        let index = map.index(address).ok_or(Error::OutOfRange { vm, address })?;
        if let Some(chunk) = map.get(index) {
            return Ok(Placed { address: self.within(chunk, address), new: false });
        }
        let promised = map.owed() > 0;
        if !promised && self.spare() == 0 {
            return Err(self.full(1, self.promised + self.left_aside()));
        }
        let chunk = self.free.pop_first().ok_or(Error::NeedsScrub { short: 1 })?;
        self.go(chunk, ChunkState::Vm { vm, index });
        if promised {
            self.promised -= 1;
        }
        if let Some(map) = self.vms.get_mut(&vm) {
            map.set(index, chunk);
        }
        Ok(Placed { address: self.within(chunk, address), new: true })
    }

    /// Takes the place of the guest chunk that `address` lies in away; the card's chunk waits to be scrubbed. False when
    /// it had none. Nothing may name the chunk any more: what is in it is gone for the guest.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::NoSuchVm`].
    pub fn unplace(&mut self, vm: VmId, address: GuestAddr) -> Result<bool, Error> {
        let map = self.vms.get_mut(&vm).ok_or(Error::NoSuchVm(vm))?;
        let index = map.index(address).ok_or(Error::OutOfRange { vm, address })?;
        let owed = map.owed();
        let Some(chunk) = map.take(index) else { return Ok(false) };
        self.promised += map.owed() - owed;
        self.abandon(chunk);
        Ok(true)
    }

    /// As [`Self::unplace`], for all chunks of a VM; returns how many had a place. The reservation stays.
    pub fn unplace_all(&mut self, vm: VmId) -> u32 {
        let Some(map) = self.vms.get_mut(&vm) else { return 0 };
        let owed = map.owed();
        let chunks = map.take_all();
        self.promised += map.owed() - owed;
        for &chunk in &chunks {
            self.abandon(chunk);
        }
        chunks.len() as u32
    }

    /// Takes a VM's VRAM and its reservation away; its chunks wait to be scrubbed. Returns how many had a place.
    ///
    /// # Errors
    /// [`Error::NoSuchVm`].
    pub fn destroy_vm(&mut self, vm: VmId) -> Result<u32, Error> {
        let count = self.unplace_all(vm);
        let map = self.vms.remove(&vm).ok_or(Error::NoSuchVm(vm))?;
        self.promised -= map.owed();
        Ok(count)
    }

    /// Bytes of VRAM that the VM's guest believes to have; `None` without such a VM.
    #[must_use]
    pub fn vm_bytes(&self, vm: VmId) -> Option<u64> {
        self.vms.get(&vm).map(VmMap::bytes)
    }

    /// Whether the guest chunk that `address` lies in has a place; `None` when the VM's guest has no such address.
    #[must_use]
    pub fn is_placed(&self, vm: VmId, address: GuestAddr) -> Option<bool> {
        let map = self.vms.get(&vm)?;
        Some(map.get(map.index(address)?).is_some())
    }

    /// Where the guest VRAM `address` of `vm` lies on the card, and how far it goes on there in one piece. `None` when
    /// the guest has no such address, or it has no place.
    #[must_use]
    pub fn translate(&self, vm: VmId, address: GuestAddr) -> Option<Run> {
        let map = self.vms.get(&vm)?;
        let index = map.index(address)?;
        let chunk = map.get(index)?;
        let bytes = (map.neighbours(index, chunk, u64::MAX) << self.shift) - self.offset(address);
        Some(Run { address: self.within(chunk, address), bytes: bytes.min(map.bytes() - address.0) })
    }

    /// Where the `len` bytes from the guest VRAM `address` of `vm` on lie, if all have a place and lie in one piece.
    #[must_use]
    pub fn translate_range(&self, vm: VmId, address: GuestAddr, len: u64) -> Option<CardAddr> {
        match self.lookup(vm, address, len) {
            Lookup::Placed(at) => Some(at),
            Lookup::Unplaced | Lookup::Split | Lookup::Outside => None,
        }
    }

    /// What is behind the `len` bytes from the guest VRAM `address` of `vm` on. No bytes are looked up as one would be.
    #[must_use]
    pub fn lookup(&self, vm: VmId, address: GuestAddr, len: u64) -> Lookup {
        let Some(map) = self.vms.get(&vm) else { return Lookup::Outside };
        let (Some(index), Some(end)) = (map.index(address), address.0.checked_add(len.max(1))) else {
            return Lookup::Outside;
        };
        if end > map.bytes() {
            return Lookup::Outside;
        }
        // One, nearly always; at most as many as the guest has.
        let count = ((end - 1) >> self.shift) - u64::from(index) + 1;
        match map.get(index) {
            Some(chunk) if map.neighbours(index, chunk, count) == count => Lookup::Placed(self.within(chunk, address)),
            None if map.placed_among(index, count) == 0 => Lookup::Unplaced,
            _ => Lookup::Split,
        }
    }

    /// Cuts the `len` bytes from `address` on where chunks end: each piece with its length. Bytes beyond the end of the
    /// address space are left out.
    pub fn pieces(&self, address: GuestAddr, len: u64) -> impl Iterator<Item = (GuestAddr, u64)> + use<> {
        let chunk = self.chunk_bytes();
        let (mut at, mut left) = (address.0, len.min(u64::MAX - address.0));
        std::iter::from_fn(move || {
            let piece = left.min(chunk - at % chunk);
            let from = at;
            (at, left) = (at + piece, left - piece);
            (piece > 0).then_some((GuestAddr(from), piece))
        })
    }

    /// The owner of a card address and where it lies for that guest: for reports about faults.
    #[must_use]
    pub fn owner(&self, address: CardAddr) -> Option<(VmId, GuestAddr)> {
        match self.state(self.chunk_at(address)?) {
            ChunkState::Vm { vm, index } => {
                Some((vm, GuestAddr((u64::from(index) << self.shift) + (address.0 & (self.chunk_bytes() - 1)))))
            }
            _ => None,
        }
    }

    /// A chunk to fill with zeros, the one that waits longest. It stays without an owner until [`Self::scrubbed`].
    pub fn take_scrub_work(&mut self) -> Option<ScrubWork> {
        let chunk = self.to_scrub.pop_front()?;
        self.go(chunk, ChunkState::Scrubbing);
        self.scrubbing += 1;
        Some(ScrubWork { chunk: ChunkId(chunk), address: self.address(ChunkId(chunk)), bytes: self.chunk_bytes() })
    }

    /// The chunk is full of zeros now, and so are the card's caches of it.
    ///
    /// # Panics
    /// When the chunk was not taken from [`Self::take_scrub_work`].
    pub fn scrubbed(&mut self, chunk: ChunkId) {
        self.go(chunk.0, ChunkState::Free);
        self.scrubbing -= 1;
        self.scrubbed += 1;
        self.free.insert(chunk.0);
    }

    /// The accounts.
    #[must_use]
    pub fn summary(&self) -> Summary {
        Summary {
            chunk_bytes: self.chunk_bytes(),
            total: self.states.len() as u32,
            free: self.free.len() as u32,
            to_scrub: self.unscrubbed(),
            promised: self.promised,
            set_aside: self.left_aside(),
            mediator: self.mediator,
            vms: self.vms.iter().map(|(&vm, map)| (vm, map.account())).collect(),
            scrubbed: self.scrubbed,
        }
    }

    fn unscrubbed(&self) -> u32 {
        self.to_scrub.len() as u32 + self.scrubbing
    }

    /// Chunks without an owner, zeroed or not. Never fewer than are promised and left aside.
    fn unowned(&self) -> u32 {
        self.free.len() as u32 + self.unscrubbed()
    }

    /// What the mediator has not used of what is set aside for it.
    fn left_aside(&self) -> u32 {
        self.set_aside.saturating_sub(self.mediator)
    }

    /// Chunks without an owner that are promised to no one.
    fn spare(&self) -> u32 {
        self.unowned() - self.promised - self.left_aside()
    }

    fn full(&self, wanted: u64, promised: u32) -> Error {
        Error::Full { wanted, free: self.free.len() as u32, to_scrub: self.unscrubbed(), promised }
    }

    fn offset(&self, address: GuestAddr) -> u64 {
        address.0 & (self.chunk_bytes() - 1)
    }

    /// Where guest `address` lies if its guest chunk lies in `chunk`.
    fn within(&self, chunk: u32, address: GuestAddr) -> CardAddr {
        CardAddr((u64::from(chunk) << self.shift) + self.offset(address))
    }

    /// Takes the chunk's owner away.
    fn abandon(&mut self, chunk: u32) {
        self.go(chunk, ChunkState::NeedsScrub);
        self.to_scrub.push_back(chunk);
    }

    fn go(&mut self, chunk: u32, to: ChunkState) {
        let state = &mut self.states[chunk as usize];
        assert!(state.can_go(to), "chunk {chunk} cannot go from {state:?} to {to:?}");
        *state = to;
    }
}

#[cfg(test)]
#[path = "tests/chunks.rs"]
mod tests;
