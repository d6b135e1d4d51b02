//! The chunk table: one owner and one state for each chunk of VRAM.

use crate::{CardAddr, GuestAddr, VmId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Smallest chunk: a large GPU page never spans two chunks.
pub const CHUNK_BYTES_MIN: u64 = 128 << 10;
/// Largest chunk.
pub const CHUNK_BYTES_MAX: u64 = 64 << 20;
/// What an operator gets who does not choose.
pub const CHUNK_BYTES_DEFAULT: u64 = 2 << 20;

/// A chunk of the card's VRAM, counted from address 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(u32);

/// What a chunk is used for; owner and state in one, so that they cannot disagree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkState {
    /// Zeroed, without an owner.
    Free,
    /// Without an owner, holding what the last one left.
    NeedsScrub,
    /// Without an owner, being zeroed by who took it from [`ChunkTable::take_scrub_work`].
    Scrubbing,
    /// The mediator's own: tables, instance blocks, rings. No VM reaches it.
    Mediator,
    /// A VM's, as its guest chunk `index`.
    Vm {
        /// The owner.
        vm: VmId,
        /// Which chunk of the guest's VRAM it holds.
        index: u32,
    },
}

impl ChunkState {
    /// Whether a chunk may go from `self` to `to`. A chunk that had an owner reaches the next only by way of `Scrubbing`.
    #[must_use]
    pub const fn can_go(self, to: Self) -> bool {
        matches!(
            (self, to),
            (Self::Free, Self::Mediator | Self::Vm { .. })
                | (Self::Mediator | Self::Vm { .. }, Self::NeedsScrub)
                | (Self::NeedsScrub, Self::Scrubbing)
                | (Self::Scrubbing, Self::Free)
        )
    }
}

/// What VRAM holds when the table is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeros, certainly.
    Zeroed,
    /// Anything: every chunk is scrubbed before its first use.
    Unknown,
}

/// Why the table does not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A chunk's size is a power of two from 128 KiB to 64 MiB.
    #[error("chunk size {0:#x} is not a power of two from 0x20000 to 0x4000000 bytes")]
    ChunkSize(u64),
    /// The card has no whole chunk, or more than can be counted.
    #[error("{0:#x} bytes of VRAM are no number of chunks that can be managed")]
    CardSize(u64),
    /// There is no such amount of VRAM left.
    #[error("{wanted} chunks of VRAM are wanted, {free} are free and {to_scrub} more will be after scrubbing")]
    Full {
        /// Chunks wanted.
        wanted: u64,
        /// Chunks free.
        free: u32,
        /// Chunks without an owner that are not zeroed yet.
        to_scrub: u32,
    },
    /// There is enough, once chunks are zeroed: take scrub work and ask again.
    #[error("{short} chunks of VRAM must be scrubbed first")]
    NeedsScrub {
        /// Chunks that are missing.
        short: u32,
    },
    /// A VM without VRAM is none.
    #[error("a VM needs at least one byte of VRAM")]
    Empty,
    /// That VM has its VRAM already.
    #[error("VM {0} has VRAM already")]
    Exists(VmId),
    /// No VM of that number has VRAM.
    #[error("VM {0} has no VRAM")]
    NoSuchVm(VmId),
}

/// A range of the card's VRAM behind a guest VRAM address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where it begins on the card.
    pub address: CardAddr,
    /// Bytes from there on that belong to the VM and follow one another on the card as they do for the guest.
    pub bytes: u64,
}

/// A chunk to fill with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubWork {
    /// For [`ChunkTable::scrubbed`].
    pub chunk: ChunkId,
    /// Where it begins on the card.
    pub address: CardAddr,
    /// Bytes.
    pub bytes: u64,
}

/// Accounts of the whole card, in chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Chunks of the card.
    pub total: u32,
    /// Zeroed, without an owner.
    pub free: u32,
    /// Without an owner, not zeroed yet (being scrubbed included).
    pub to_scrub: u32,
    /// The mediator's.
    pub mediator: u32,
    /// Each VM's.
    pub vms: BTreeMap<VmId, u32>,
    /// Chunks scrubbed since the table was made.
    pub scrubbed: u64,
}

#[derive(Debug)]
struct VmMap {
    /// Bytes that the guest has, which the last chunk may exceed.
    bytes: u64,
    /// The card's chunk for each guest chunk.
    chunks: Vec<u32>,
}

/// All chunks of a card. Invariant: `free`, `to_scrub` and the VMs' maps say the same as `states`.
#[derive(Debug)]
pub struct ChunkTable {
    shift: u32,
    states: Vec<ChunkState>,
    free: BTreeSet<u32>,
    to_scrub: VecDeque<u32>,
    scrubbing: u32,
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

    /// Takes `count` chunks that follow one another for the mediator; the first lies at a multiple of `align` chunks.
    ///
    /// # Errors
    /// [`Error::Full`] when there is no such run of zeroed chunks, [`Error::NeedsScrub`] when scrubbing could make one.
    pub fn reserve_mediator(&mut self, count: u32, align: u32) -> Result<ChunkId, Error> {
        let fits = |first: u32, usable: &dyn Fn(ChunkState) -> bool| {
            first.checked_add(count).is_some_and(|end| end as usize <= self.states.len())
                && (first..first + count).all(|chunk| usable(self.states[chunk as usize]))
        };
        let candidates = || (0..self.states.len() as u32).step_by(align.max(1) as usize);
        if count == 0 {
            return Err(Error::Empty);
        }
        let is_free = |state| state == ChunkState::Free;
        let Some(first) = candidates().find(|&first| fits(first, &is_free)) else {
            let unowned = |state| matches!(state, ChunkState::Free | ChunkState::NeedsScrub | ChunkState::Scrubbing);
            return Err(match candidates().find(|&first| fits(first, &unowned)) {
                Some(_) => Error::NeedsScrub { short: count },
                None => self.full(u64::from(count)),
            });
        };
        for chunk in first..first + count {
            self.free.remove(&chunk);
            self.go(chunk, ChunkState::Mediator);
        }
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
            self.go(chunk, ChunkState::NeedsScrub);
            self.to_scrub.push_back(chunk);
        }
    }

    /// Gives a new VM `bytes` of VRAM, zeroed, all of it at once.
    ///
    /// # Errors
    /// [`Error::Full`]; [`Error::NeedsScrub`] when there is enough after scrubbing; [`Error::Exists`]; [`Error::Empty`].
    pub fn create_vm(&mut self, vm: VmId, bytes: u64) -> Result<(), Error> {
        if self.vms.contains_key(&vm) {
            return Err(Error::Exists(vm));
        }
        let wanted = bytes.div_ceil(self.chunk_bytes());
        if wanted == 0 {
            return Err(Error::Empty);
        }
        let free = self.free.len() as u64;
        if wanted > free {
            let unowned = free + u64::from(self.unscrubbed());
            return Err(if wanted > unowned {
                self.full(wanted)
            } else {
                Error::NeedsScrub { short: (wanted - free) as u32 }
            });
        }
        let chunks: Vec<u32> = self.free.iter().copied().take(wanted as usize).collect();
        for (index, &chunk) in chunks.iter().enumerate() {
            self.free.remove(&chunk);
            self.go(chunk, ChunkState::Vm { vm, index: index as u32 });
        }
        self.vms.insert(vm, VmMap { bytes, chunks });
        Ok(())
    }

    /// Takes a VM's VRAM away; its chunks wait to be scrubbed. Returns how many.
    ///
    /// # Errors
    /// [`Error::NoSuchVm`].
    pub fn destroy_vm(&mut self, vm: VmId) -> Result<u32, Error> {
        let map = self.vms.remove(&vm).ok_or(Error::NoSuchVm(vm))?;
        for &chunk in &map.chunks {
            self.go(chunk, ChunkState::NeedsScrub);
            self.to_scrub.push_back(chunk);
        }
        Ok(map.chunks.len() as u32)
    }

    /// Bytes of VRAM that the VM's guest has; `None` without such a VM.
    #[must_use]
    pub fn vm_bytes(&self, vm: VmId) -> Option<u64> {
        self.vms.get(&vm).map(|map| map.bytes)
    }

    /// Where the guest VRAM `address` of `vm` lies on the card, and how far it goes on there in one piece.
    #[must_use]
    pub fn translate(&self, vm: VmId, address: GuestAddr) -> Option<Run> {
        let map = self.vms.get(&vm)?;
        let left = map.bytes.checked_sub(address.0).filter(|&left| left > 0)?;
        let first = usize::try_from(address.0 >> self.shift).ok()?;
        let chunk = *map.chunks.get(first)?;
        let offset = address.0 & (self.chunk_bytes() - 1);
        let more = map.chunks[first..].windows(2).take_while(|pair| pair[1] == pair[0].wrapping_add(1)).count();
        let bytes = ((more as u64 + 1) << self.shift) - offset;
        Some(Run { address: CardAddr((u64::from(chunk) << self.shift) + offset), bytes: bytes.min(left) })
    }

    /// Where the `len` bytes from the guest VRAM `address` of `vm` on lie, if all are the VM's and in one piece.
    #[must_use]
    pub fn translate_range(&self, vm: VmId, address: GuestAddr, len: u64) -> Option<CardAddr> {
        // Within one chunk, which is nearly always, no neighbour matters.
        let map = self.vms.get(&vm)?;
        let end = address.0.checked_add(len).filter(|&end| end <= map.bytes)?;
        let first = address.0 >> self.shift;
        let last = end.saturating_sub(1).max(address.0) >> self.shift;
        let chunk = *map.chunks.get(usize::try_from(first).ok()?)?;
        for step in 1..=(last - first) {
            let next = *map.chunks.get(usize::try_from(first + step).ok()?)?;
            if u64::from(next) != u64::from(chunk) + step {
                return None;
            }
        }
        Some(CardAddr((u64::from(chunk) << self.shift) + (address.0 & (self.chunk_bytes() - 1))))
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
        let mediator = self.states.iter().filter(|&&state| state == ChunkState::Mediator).count();
        Summary {
            chunk_bytes: self.chunk_bytes(),
            total: self.states.len() as u32,
            free: self.free.len() as u32,
            to_scrub: self.unscrubbed(),
            mediator: mediator as u32,
            vms: self.vms.iter().map(|(&vm, map)| (vm, map.chunks.len() as u32)).collect(),
            scrubbed: self.scrubbed,
        }
    }

    fn unscrubbed(&self) -> u32 {
        self.to_scrub.len() as u32 + self.scrubbing
    }

    fn full(&self, wanted: u64) -> Error {
        Error::Full { wanted, free: self.free.len() as u32, to_scrub: self.unscrubbed() }
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
