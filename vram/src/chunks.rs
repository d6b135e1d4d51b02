//! The chunk table: the state and owner of each chunk of the card, and the place of each guest chunk.

mod account;
mod error;
mod limits;
mod lookup;
mod map;
mod mediator;
mod moves;
mod reserve;
mod saved;
mod state;
mod stock;

pub use account::{HostSummary, Summary, VmSummary};
pub use error::{Error, Limit};
pub use limits::{Limits, OnFull};
pub use lookup::{Lookup, Run};
pub use moves::{Ended, Move, Step, To};
pub use saved::{SavedChunks, UnclaimedChunks};
pub use state::{ChunkId, ChunkState, Contents, MoveId, Place, ScrubWork, Tier};

use crate::{GuestVramAddr, HostAddr, TenantId, VramAddr};
use map::VmMap;
use moves::Flight;
use state::Spot;
use std::collections::{BTreeMap, BTreeSet};
use stock::Stock;

/// Minimum chunk size in bytes, which is the size of a large GPU page. No such page spans two chunks.
pub const CHUNK_BYTES_MIN: u64 = 128 << 10;
/// Maximum chunk size in bytes.
pub const CHUNK_BYTES_MAX: u64 = 64 << 20;
/// Default chunk size in bytes.
pub const CHUNK_BYTES_DEFAULT: u64 = 2 << 20;
/// Maximum VRAM size that a VM may advertise to its guest, in bytes. The size of the VM's map is proportional to it.
pub const ADVERTISED_BYTES_MAX: u64 = 1 << 40;

/// Result of [`ChunkTable::place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Location of the given guest address.
    pub place: Place,
    /// True if this call placed the chunk. The chunk then contains zeros, and is not referenced yet.
    pub new: bool,
}

/// All chunks of a card, and the host memory slots for guest chunks that are not on the card. Invariant: the VMs' maps
/// and the moves in flight are consistent with the states of chunks and slots.
///
/// # Allocation order
/// A guest chunk gets a place at its first use ([`Self::place`]): a card chunk if one is available, or a host slot if
/// its VM may swap. Zeroed and dirty card chunks without an owner are counted together, because scrubbing is always
/// possible. These chunks are assigned in this order:
/// - the unused part of VMs' guarantees: [`Self::place`] never fails with [`Error::Full`] for them;
/// - the unused part of the mediator's own share ([`Self::set_aside`]). A VM's chunks are useless without page tables,
///   instance blocks, and rings, which are in the mediator's chunks. Guarantees are therefore useful only if this share
///   is large enough for all admitted VMs;
/// - the unused part of the reserve for evictions ([`Self::set_reserve`]). The mediator may borrow it, because no work
///   can run without page tables. Borrowed chunks are returned before any chunk is spare ([`Self::repay`]);
/// - chunks that the mediator claims ([`Self::claim`]). They are available for new guarantees, but not to VMs beyond
///   their guarantees;
/// - spare chunks (the remainder): for new guarantees, for the mediator beyond its share, and for VMs beyond their
///   guarantees, on a first-come, first-served basis. If no chunk is spare, [`Balancer`](crate::Balancer) selects a
///   chunk to evict.
///
/// The table promises a number of chunks, not contiguous runs: [`Self::reserve_mediator`] can fail for a run of several
/// chunks even if enough chunks are set aside. Each of the mediator's tables fits in one chunk unless chunks are small.
///
/// # Moves
/// [`Self::begin_move`] reserves the destination, the caller copies the chunk, and [`Self::commit_move`] makes the
/// destination the chunk's place. Until then, the chunk's place is the source. A moving chunk counts towards the limits
/// of both memories, so neither committing nor aborting a move exceeds a limit.
///
/// # The reserve
/// A chunk in the reserve stays on the card, but is counted as host memory. Another VM can thus get a card chunk
/// immediately, without waiting for a copy. The chunk is copied to host memory later, which refills the reserve
/// ([`Self::start`]).
#[derive(Debug)]
pub struct ChunkTable {
    shift: u32,
    card: Stock,
    host: Stock,
    /// Number of chunks that the mediator owns.
    mediator: u32,
    /// Number of chunks set aside for the mediator, including those that it already owns.
    set_aside: u32,
    /// Number of chunks set aside for evictions, including those in use.
    reserve: u32,
    /// Number of VMs' chunks in the reserve.
    parked: u32,
    /// Number of these chunks that are being moved to host memory.
    draining: u32,
    /// Number of reserve chunks that the mediator has borrowed.
    borrowed: u32,
    /// Number of additional chunks that the mediator gets as soon as they are spare.
    claimed: u32,
    /// Sum of the unused parts of VMs' guarantees.
    promised: u32,
    vms: BTreeMap<TenantId, VmMap>,
    /// VMs with chunks that must not move.
    frozen: BTreeSet<TenantId>,
    /// All moves in flight.
    flights: BTreeMap<MoveId, Flight>,
    /// Moves in flight by guest chunk.
    moving: BTreeMap<(TenantId, u32), MoveId>,
    next_move: u64,
    /// Numbers of committed moves to the card, and to host memory.
    moved: [u64; 2],
}

impl ChunkTable {
    /// Creates a table for `total_bytes` of VRAM in chunks of `chunk_bytes`, without host memory. A partial chunk at
    /// the end is not used.
    ///
    /// # Errors
    /// Returns [`Error::ChunkSize`] or [`Error::CardSize`] if the sizes are invalid.
    pub fn new(total_bytes: u64, chunk_bytes: u64, contents: Contents) -> Result<Self, Error> {
        if !chunk_bytes.is_power_of_two() || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes) {
            return Err(Error::ChunkSize(chunk_bytes));
        }
        let count = match u32::try_from(total_bytes / chunk_bytes) {
            Ok(count) if count > 0 => count,
            _ => return Err(Error::CardSize(total_bytes)),
        };
        let card = match contents {
            Contents::Zeroed => Stock::zeroed(count),
            Contents::Unknown => Stock::dirty(count),
        };
        Ok(Self {
            shift: chunk_bytes.trailing_zeros(),
            card,
            host: Stock::zeroed(0),
            mediator: 0,
            set_aside: 0,
            reserve: 0,
            parked: 0,
            draining: 0,
            borrowed: 0,
            claimed: 0,
            promised: 0,
            vms: BTreeMap::new(),
            frozen: BTreeSet::new(),
            flights: BTreeMap::new(),
            moving: BTreeMap::new(),
            next_move: 0,
            moved: [0; 2],
        })
    }

    /// Returns the size of a chunk in bytes.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        1 << self.shift
    }

    /// Returns the VRAM address of a card chunk.
    #[must_use]
    pub fn address(&self, chunk: ChunkId) -> VramAddr {
        VramAddr(u64::from(chunk.0) << self.shift)
    }

    /// Returns the chunk that contains `address`, if it is in the table.
    #[must_use]
    pub fn chunk_at(&self, address: VramAddr) -> Option<ChunkId> {
        let index = u32::try_from(address.0 >> self.shift).ok()?;
        (index < self.card.limit()).then_some(ChunkId(index))
    }

    /// Returns the state of a chunk.
    #[must_use]
    pub fn state(&self, chunk: ChunkId) -> ChunkState {
        self.card.state(chunk.0)
    }

    /// Sets the number of usable host slots, which is 0 for a new table. New slots contain zeros. A number below the
    /// number of used slots removes no slots, but prevents allocations until enough slots are free.
    pub fn set_host_budget(&mut self, slots: u32) {
        self.host.set_limit(slots);
    }

    /// Admits a VM with a guest that sees `bytes` of VRAM, which is unplaced until [`Self::place`] is called. The size
    /// may exceed the card's size, but the guarantee in `limits` may not.
    ///
    /// # Errors
    /// Returns [`Error::Promise`] if the guarantee cannot be met. Chunks that are not zeroed yet count as available.
    /// Returns [`Error::Guarantee`], [`Error::Weight`], [`Error::Exists`], [`Error::Empty`] or [`Error::Advertised`] if
    /// an argument is invalid.
    pub fn create_vm(&mut self, vm: TenantId, bytes: u64, limits: Limits) -> Result<(), Error> {
        if self.vms.contains_key(&vm) {
            return Err(Error::Exists(vm));
        }
        let count = self.count_of(bytes)?;
        self.check_limits(vm, limits, count, 0, 0)?;
        let map = VmMap::new(bytes, count, self.shift, limits);
        self.promised += map.owed();
        self.vms.insert(vm, map);
        Ok(())
    }

    /// Returns a VM's limits, or `None` if the VM does not exist.
    #[must_use]
    pub fn limits(&self, vm: TenantId) -> Option<Limits> {
        self.vms.get(&vm).map(VmMap::limits)
    }

    /// Changes a VM's limits. The VM keeps its chunks. While it exceeds a quota or cap, it gets no further chunks.
    ///
    /// # Errors
    /// Returns [`Error::Promise`] if a raised guarantee cannot be met now, or [`Error::Guarantee`], [`Error::Weight`]
    /// or [`Error::NoSuchVm`]. On error, nothing is changed.
    pub fn set_limits(&mut self, vm: TenantId, limits: Limits) -> Result<(), Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        self.check_limits(vm, limits, map.advertised(), map.used(Tier::Card), map.owed())?;
        self.change(vm, |map| map.set_limits(limits));
        Ok(())
    }

    /// Changes the size of a VM's VRAM and its limits. The VM keeps its chunks and addresses. While it has more chunks
    /// than the new size permits, it gets no further chunks. [`Self::save`] does not save a reduced size, so VMs that
    /// will be saved must not shrink.
    ///
    /// # Errors
    /// Returns the errors of [`Self::set_limits`], [`Error::Empty`] or [`Error::Advertised`]. On error, nothing is
    /// changed.
    pub fn resize_vm(&mut self, vm: TenantId, bytes: u64, limits: Limits) -> Result<(), Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        let count = self.count_of(bytes)?;
        self.check_limits(vm, limits, count, map.used(Tier::Card), map.owed())?;
        self.change(vm, |map| {
            map.resize(bytes, count);
            map.set_limits(limits);
        });
        Ok(())
    }

    /// Places the guest chunk at `address` in zeroed memory if it is unplaced. The place is a card chunk, or a host
    /// slot if no card chunk is available and the VM may swap.
    ///
    /// # Errors
    /// Returns [`Error::NeedsScrub`] if the caller must scrub a chunk in that memory before it retries. Returns
    /// [`Error::Full`] if no chunk is available, which is impossible for a VM below its guarantee. Also returns
    /// [`Error::OutOfRange`] or [`Error::NoSuchVm`].
    pub fn place(&mut self, vm: TenantId, address: GuestVramAddr) -> Result<Placed, Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        let index = map.index(address).ok_or(Error::OutOfRange { vm, address })?;
        if let Some(spot) = map.get(index) {
            return Ok(Placed { place: self.within(spot, address), new: false });
        }
        if map.is_full() {
            return Err(Error::Full { vm, limit: Limit::Quota(map.advertised()), host: None });
        }
        let tier = match self.limit_of(map, Tier::Card) {
            None => Tier::Card,
            Some(limit) => match self.limit_of(map, Tier::Host) {
                _ if map.limits().on_full != OnFull::Swap => {
                    return Err(Error::Full { vm, limit, host: Some(Limit::Policy(map.limits().on_full)) });
                }
                Some(host) => return Err(Error::Full { vm, limit, host: Some(host) }),
                None => Tier::Host,
            },
        };
        let spot = self.take(tier, ChunkState::Vm { vm, index })?;
        self.change(vm, |map| map.set(index, spot));
        Ok(Placed { place: self.within(spot, address), new: true })
    }

    /// Unplaces the guest chunk at `address`, and marks its old place for scrubbing. Returns false if the chunk was
    /// already unplaced. The contents are lost, so the caller must first remove all references to the chunk. A pending
    /// move of the chunk ends with [`Ended::Gone`].
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] or [`Error::NoSuchVm`].
    pub fn unplace(&mut self, vm: TenantId, address: GuestVramAddr) -> Result<bool, Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        let index = map.index(address).ok_or(Error::OutOfRange { vm, address })?;
        self.lose_moves(vm, index..=index);
        let Some((spot, parked)) = self.change(vm, |map| map.take(index)).flatten() else { return Ok(false) };
        self.parked -= u32::from(parked);
        self.abandon(spot);
        Ok(true)
    }

    /// Unplaces all chunks of a VM as [`Self::unplace`] does, and returns their number. The guarantee stays valid.
    pub fn unplace_all(&mut self, vm: TenantId) -> u32 {
        self.lose_moves(vm, 0..=u32::MAX);
        self.parked -= self.vms.get(&vm).map_or(0, |map| map.parked().count() as u32);
        let Some(spots) = self.change(vm, VmMap::take_all) else { return 0 };
        for &spot in &spots {
            self.abandon(spot);
        }
        spots.len() as u32
    }

    /// Removes a VM's VRAM and its guarantee, and marks its chunks for scrubbing. The destinations of its moves in
    /// flight are marked when these moves end. Returns the number of chunks that were placed.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchVm`] if the VM does not exist.
    pub fn destroy_vm(&mut self, vm: TenantId) -> Result<u32, Error> {
        let count = self.unplace_all(vm);
        let map = self.vms.remove(&vm).ok_or(Error::NoSuchVm(vm))?;
        self.promised -= map.owed();
        self.frozen.remove(&vm);
        self.disown_moves(vm);
        Ok(count)
    }

    /// Returns a chunk or slot to fill with zeros: the card chunk that has waited longest, or a host slot if no card
    /// chunk is waiting. The chunk or slot cannot be allocated until [`Self::scrubbed`] is called.
    pub fn take_scrub_work(&mut self) -> Option<ScrubWork> {
        self.take_scrub_work_in(Tier::Card).or_else(|| self.take_scrub_work_in(Tier::Host))
    }

    /// Like [`Self::take_scrub_work`], but only for the memory `tier`, such as the one in [`Error::NeedsScrub`].
    pub fn take_scrub_work_in(&mut self, tier: Tier) -> Option<ScrubWork> {
        let number = self.stock_mut(tier).take_scrub()?;
        Some(ScrubWork { place: self.place_of(Spot::new(tier, number)), bytes: self.chunk_bytes() })
    }

    /// Records that the chunk or slot at `place` now contains zeros, and that the card's caches do not contain old
    /// data.
    ///
    /// # Panics
    /// Panics if the chunk or slot was not returned by [`Self::take_scrub_work`].
    pub fn scrubbed(&mut self, place: Place) {
        let spot = self.spot_at(place);
        self.stock_mut(spot.tier()).scrubbed(spot.number());
    }

    /// Permanently excludes the chunk or slot at `place` from use, because the card may still access it. If it has an
    /// owner, it is excluded once it has lost that owner. An excluded chunk or slot still counts as used.
    pub fn quarantine(&mut self, place: Place) {
        let spot = self.spot_at(place);
        self.stock_mut(spot.tier()).quarantine(spot.number());
    }

    /// Returns the numbers of zeroed and dirty card chunks without an owner.
    #[must_use]
    pub fn zeroed(&self) -> (u32, u32) {
        (self.card.free(), self.card.unscrubbed())
    }

    /// Returns the accounts of the card, of host memory, and of all VMs.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let host = &self.host;
        Summary {
            chunk_bytes: self.chunk_bytes(),
            total: self.card.limit(),
            free: self.card.free(),
            to_scrub: self.card.unscrubbed(),
            quarantined: self.card.quarantined(),
            promised: self.promised,
            set_aside: self.kept_for_mediator(),
            reserve: self.left_reserve(),
            parked: self.parked,
            mediator: self.mediator,
            arriving: self.flights.values().filter(|flight| flight.to.tier() == Tier::Card).count() as u32,
            host: HostSummary {
                budget: host.limit(),
                used: host.owned(),
                free: host.free(),
                to_scrub: host.unscrubbed(),
                quarantined: host.quarantined(),
                end: host.end(),
                scrubbed: host.scrub_count(),
            },
            vms: self.vms().collect(),
            scrubbed: self.card.scrub_count(),
            moved_out: self.moved[Tier::Host as usize],
            moved_in: self.moved[Tier::Card as usize],
        }
    }

    /// Returns the VMs with their accounts.
    pub fn vms(&self) -> impl Iterator<Item = (TenantId, VmSummary)> + '_ {
        self.vms.iter().map(|(&vm, map)| (vm, map.account()))
    }

    /// Returns the number of card chunks that have no owner and are not promised, set aside, or claimed.
    #[must_use]
    pub fn spare(&self) -> u32 {
        self.uncommitted().saturating_sub(self.wanted())
    }

    /// Returns the number of card chunks that have no owner and are not promised or set aside, including chunks that
    /// the mediator claims.
    #[must_use]
    pub fn uncommitted(&self) -> u32 {
        // Quarantine may leave fewer chunks than are promised.
        self.card.room().saturating_sub(self.promised + self.left_aside() + self.left_reserve())
    }

    /// Returns the number of chunks needed for `bytes` of VRAM.
    fn count_of(&self, bytes: u64) -> Result<u32, Error> {
        if bytes == 0 {
            return Err(Error::Empty);
        }
        let count = u32::try_from(bytes.div_ceil(self.chunk_bytes())).ok().filter(|_| bytes <= ADVERTISED_BYTES_MAX);
        count.ok_or(Error::Advertised(bytes))
    }

    /// Returns the limit that prevents a VM from getting another chunk in `tier`, or `None`.
    fn limit_of(&self, map: &VmMap, tier: Tier) -> Option<Limit> {
        let limits = map.limits();
        match tier {
            Tier::Card if map.used(tier) >= limits.quota => Some(Limit::Quota(limits.quota)),
            Tier::Card if map.owed() == 0 && self.spare() == 0 => Some(Limit::Card {
                free: self.card.free(),
                to_scrub: self.card.unscrubbed(),
                promised: self.promised + self.kept_for_mediator() + self.left_reserve(),
            }),
            Tier::Host if map.used(tier) >= limits.swap_cap => Some(Limit::SwapCap(limits.swap_cap)),
            Tier::Host if self.host_room() == 0 => Some(Limit::HostBudget(self.host.limit())),
            Tier::Card | Tier::Host => None,
        }
    }

    /// Checks that `limits` can be met for a VM with `advertised` guest chunks, `used` card chunks, and `owed` missing
    /// guaranteed chunks.
    fn check_limits(&self, vm: TenantId, limits: Limits, advertised: u32, used: u32, owed: u32) -> Result<(), Error> {
        let Limits { quota, guarantee, swap_cap: _, weight, on_full: _ } = limits;
        if guarantee > quota {
            return Err(Error::Guarantee { vm, guarantee, quota });
        }
        if weight == 0 {
            return Err(Error::Weight(vm));
        }
        let wanted = guarantee.min(advertised);
        let now = used + owed + self.uncommitted();
        if wanted <= now {
            return Ok(());
        }
        let others = self.vms.iter().filter(|&(&other, _)| other != vm);
        let promised: u64 = others.map(|(_, map)| u64::from(map.guarantee())).sum();
        let left = u64::from(self.for_vms()).saturating_sub(promised) as u32;
        Err(Error::Promise { vm, wanted, now, left })
    }

    /// Changes a VM's map, and updates the number of promised chunks. Returns `None` if the VM does not exist.
    fn change<T>(&mut self, vm: TenantId, change: impl FnOnce(&mut VmMap) -> T) -> Option<T> {
        let map = self.vms.get_mut(&vm)?;
        let owed = map.owed();
        let result = change(map);
        self.promised = self.promised + map.owed() - owed;
        Some(result)
    }

    /// Allocates a zeroed chunk or slot in `tier`, which must have a zeroed or dirty one.
    fn take(&mut self, tier: Tier, to: ChunkState) -> Result<Spot, Error> {
        let number = self.stock_mut(tier).take(to).ok_or(Error::NeedsScrub { tier, short: 1 })?;
        Ok(Spot::new(tier, number))
    }

    /// Removes the owner of a chunk or slot.
    fn abandon(&mut self, spot: Spot) {
        self.stock_mut(spot.tier()).abandon(spot.number());
    }

    fn stock_mut(&mut self, tier: Tier) -> &mut Stock {
        match tier {
            Tier::Card => &mut self.card,
            Tier::Host => &mut self.host,
        }
    }

    /// Returns the start location of a chunk or slot.
    fn place_of(&self, spot: Spot) -> Place {
        match spot {
            Spot::Card(chunk) => Place::Card(VramAddr(u64::from(chunk) << self.shift)),
            Spot::Host(slot) => Place::Host(HostAddr(u64::from(slot) << self.shift)),
        }
    }

    /// Returns the chunk or slot that contains `place`.
    fn spot_at(&self, place: Place) -> Spot {
        match place {
            Place::Card(address) => Spot::Card((address.0 >> self.shift) as u32),
            Place::Host(address) => Spot::Host((address.0 >> self.shift) as u32),
        }
    }

    /// Returns the location of guest `address` in the chunk at `spot`.
    fn within(&self, spot: Spot, address: GuestVramAddr) -> Place {
        let offset = address.0 & (self.chunk_bytes() - 1);
        match self.place_of(spot) {
            Place::Card(start) => Place::Card(VramAddr(start.0 + offset)),
            Place::Host(start) => Place::Host(HostAddr(start.0 + offset)),
        }
    }
}

#[cfg(test)]
mod tests;
