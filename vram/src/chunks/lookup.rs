//! Looks up the locations of guest memory.

use super::{ChunkState, ChunkTable, Place, Spot, Tier, VmMap};
use crate::{GuestVramAddr, TenantId, VramAddr};

/// A contiguous range of memory that backs guest VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Start location of the range.
    pub place: Place,
    /// Number of bytes, starting at `place`, that are contiguous in both this memory and the VM's guest VRAM.
    pub bytes: u64,
}

/// Result of looking up a range of guest VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The whole range is placed and contiguous, starting at this location.
    Placed(Place),
    /// The range is unplaced. Reads return zeros.
    Unplaced,
    /// The range is not contiguous: its chunks are not adjacent or not in the same memory, or only some of them are
    /// placed. For each part from [`ChunkTable::pieces`], a lookup returns one of the other results.
    Split,
    /// Part of the range is outside the guest's VRAM, or the VM does not exist.
    Outside,
}

impl ChunkTable {
    /// Returns the size of a guest's VRAM in bytes, or its largest past size if it has shrunk. Returns `None` if the VM
    /// does not exist.
    #[must_use]
    pub fn vm_bytes(&self, vm: TenantId) -> Option<u64> {
        self.vms.get(&vm).map(VmMap::bytes)
    }

    /// Returns the index of the guest chunk at `address`, or `None` if the guest has no such address.
    #[must_use]
    pub fn index(&self, vm: TenantId, address: GuestVramAddr) -> Option<u32> {
        self.vms.get(&vm)?.index(address)
    }

    /// Returns the start address of guest chunk `index`.
    #[must_use]
    pub fn guest_address(&self, index: u32) -> GuestVramAddr {
        GuestVramAddr(u64::from(index) << self.shift)
    }

    /// Returns true if the guest chunk at `address` is placed. Returns `None` if the guest has no such address.
    #[must_use]
    pub fn is_placed(&self, vm: TenantId, address: GuestVramAddr) -> Option<bool> {
        let map = self.vms.get(&vm)?;
        Some(map.get(map.index(address)?).is_some())
    }

    /// Returns the location of `address` in the VRAM of `vm`, and the number of contiguous bytes starting there.
    /// Returns `None` if the guest has no such address or the address is unplaced.
    #[must_use]
    pub fn translate(&self, vm: TenantId, address: GuestVramAddr) -> Option<Run> {
        let map = self.vms.get(&vm)?;
        let index = map.index(address)?;
        let spot = map.get(index)?;
        let offset = address.0 & (self.chunk_bytes() - 1);
        let bytes = (map.neighbours(index, spot, u64::MAX) << self.shift) - offset;
        Some(Run { place: self.within(spot, address), bytes: bytes.min(map.bytes() - address.0) })
    }

    /// Returns the location of the `len` bytes at `address` in the VRAM of `vm`, if all of them are placed and
    /// contiguous.
    #[must_use]
    pub fn translate_range(&self, vm: TenantId, address: GuestVramAddr, len: u64) -> Option<Place> {
        match self.lookup(vm, address, len) {
            Lookup::Placed(at) => Some(at),
            Lookup::Unplaced | Lookup::Split | Lookup::Outside => None,
        }
    }

    /// Looks up the `len` bytes at `address` in the VRAM of `vm`. A length of 0 is treated as 1.
    #[must_use]
    pub fn lookup(&self, vm: TenantId, address: GuestVramAddr, len: u64) -> Lookup {
        let Some(map) = self.vms.get(&vm) else { return Lookup::Outside };
        let (Some(index), Some(end)) = (map.index(address), address.0.checked_add(len.max(1))) else {
            return Lookup::Outside;
        };
        if end > map.bytes() {
            return Lookup::Outside;
        }
        // The number of chunks is almost always one, and is at most the number of chunks of the guest's VRAM.
        let count = ((end - 1) >> self.shift) - u64::from(index) + 1;
        match map.get(index) {
            Some(spot) if map.neighbours(index, spot, count) == count => Lookup::Placed(self.within(spot, address)),
            None if map.placed_among(index, count) == 0 => Lookup::Unplaced,
            _ => Lookup::Split,
        }
    }

    /// Returns the indices of a VM's guest chunks that are counted in `tier` and are not moving, in order.
    pub fn resting(&self, vm: TenantId, tier: Tier) -> impl Iterator<Item = u32> + '_ {
        let chunks = self.vms.get(&vm).into_iter().flat_map(move |map| {
            let counts = move |index, spot: Spot| match tier {
                Tier::Card => spot.tier() == tier && !map.is_parked(index),
                Tier::Host => spot.tier() == tier || map.is_parked(index),
            };
            map.iter().filter(move |&(index, spot)| counts(index, spot)).map(|(index, _)| index)
        });
        chunks.filter(move |&index| self.moving.is_empty() || !self.is_moving(vm, index))
    }

    /// Splits the `len` bytes at `address` at chunk boundaries. Returns the address and length of each part. Omits
    /// bytes beyond the end of the address space.
    pub fn pieces(&self, address: GuestVramAddr, len: u64) -> impl Iterator<Item = (GuestVramAddr, u64)> + use<> {
        let chunk = self.chunk_bytes();
        let (mut at, mut left) = (address.0, len.min(u64::MAX - address.0));
        std::iter::from_fn(move || {
            let piece = left.min(chunk - at % chunk);
            let from = at;
            (at, left) = (at + piece, left - piece);
            (piece > 0).then_some((GuestVramAddr(from), piece))
        })
    }

    /// Returns the VM that owns a card address, and the corresponding guest address, for fault reports.
    #[must_use]
    pub fn owner(&self, address: VramAddr) -> Option<(TenantId, GuestVramAddr)> {
        match self.state(self.chunk_at(address)?) {
            ChunkState::Vm { vm, index } => {
                let offset = address.0 & (self.chunk_bytes() - 1);
                Some((vm, GuestVramAddr(self.guest_address(index).0 + offset)))
            }
            _ => None,
        }
    }
}
