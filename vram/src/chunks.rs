//! The chunk table: one owner, one state and one place for each chunk of VRAM.

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
pub use saved::{SavedChunks, Unclaimed};
pub use state::{ChunkId, ChunkState, Contents, MoveId, Place, ScrubWork, Tier};

use crate::{CardAddr, GuestAddr, HostAddr, VmId};
use map::VmMap;
use moves::Flight;
use state::Spot;
use std::collections::{BTreeMap, BTreeSet};
use stock::Stock;

/// Smallest chunk: a large GPU page never spans two chunks.
pub const CHUNK_BYTES_MIN: u64 = 128 << 10;
/// Largest chunk.
pub const CHUNK_BYTES_MAX: u64 = 64 << 20;
/// Size for an operator who does not choose.
pub const CHUNK_BYTES_DEFAULT: u64 = 2 << 20;
/// Most VRAM that a VM may be told to have; its map takes memory by that.
pub const ADVERTISED_BYTES_MAX: u64 = 1 << 40;

/// The place of a guest chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Place of the guest address that was asked for.
    pub place: Place,
    /// The chunk got its place just now: it holds zeros, and nothing names it yet.
    pub new: bool,
}

/// All chunks of a card, and the slots of host memory that guests' chunks lie in when the card is full. Invariant: the VMs'
/// maps and the moves under way say the same as the states of chunks and slots.
///
/// # Who may take what
/// A guest chunk gets a place at its first use ([`Self::place`]): a chunk of the card if it can have one, or a slot of host
/// memory if its VM may swap. Chunks of the card without an owner, zeroed or not, are counted together, since scrubbing
/// needs no one's leave; they back, in this order:
/// - what VMs with a guarantee have not used of it yet: [`Self::place`] never fails with [`Error::Full`] for them;
/// - what was set aside for the mediator ([`Self::set_aside`]) and is not used. A VM's chunks are of no use without page
///   tables, instance blocks and rings, which lie in chunks of the mediator: a guarantee is worth as much as the sum
///   set aside covers what the mediator may need for all VMs that are admitted;
/// - what was set aside for evictions ([`Self::set_reserve`]) and is not used. The mediator may borrow it, since work stands
///   still without page tables; what is borrowed comes back before anything is spare ([`Self::repay`]);
/// - what the mediator claims ([`Self::claim`]): no VM gets it beyond its guarantee, but a new guarantee may;
/// - whatever is left, the spare chunks: new guarantees, the mediator beyond what is set aside for it, and VMs beyond their
///   guarantees. These compete, first come, first served; who has to give when nothing is spare is for
///   [`Balancer`](crate::Balancer) to say.
///
/// Numbers are promised, not chunks: a run of several chunks ([`Self::reserve_mediator`]) can fail although their number
/// is set aside, if there is no such run. The mediator's tables fit into a single chunk unless chunks are small.
///
/// # Moves
/// [`Self::begin_move`] takes the destination, the caller copies, [`Self::commit_move`] makes it the chunk's place. Until
/// then the source is its place. A chunk on its way counts for the limits of both memories, so no limit is exceeded however
/// moves end.
///
/// # The reserve
/// A chunk in the reserve stays where it is on the card but counts as in host memory, so that its VM gives up a chunk
/// without a copy and another one has it at once. It is copied to host memory later, which fills the reserve up again
/// ([`Self::start`]).
#[derive(Debug)]
pub struct ChunkTable {
    shift: u32,
    card: Stock,
    host: Stock,
    /// Chunks of the mediator.
    mediator: u32,
    /// Chunks that are for the mediator, those that it has included.
    set_aside: u32,
    /// Chunks that are for evictions, those in use included.
    reserve: u32,
    /// VMs' chunks in the reserve.
    parked: u32,
    /// Of these, those that are moving to host memory.
    draining: u32,
    /// Chunks of the reserve that the mediator has borrowed.
    borrowed: u32,
    /// Chunks beyond those set aside that the mediator is to have as soon as they are spare.
    claimed: u32,
    /// Sum of what VMs with a guarantee have not got yet.
    promised: u32,
    vms: BTreeMap<VmId, VmMap>,
    /// VMs whose chunks stay where they are.
    frozen: BTreeSet<VmId>,
    /// All moves that have begun and not ended.
    flights: BTreeMap<MoveId, Flight>,
    /// The move of each guest chunk that moves.
    moving: BTreeMap<(VmId, u32), MoveId>,
    next_move: u64,
    /// Moves that were committed, to the card and to host memory.
    moved: [u64; 2],
}

impl ChunkTable {
    /// A table of `total_bytes` of VRAM in chunks of `chunk_bytes`, without host memory. A rest smaller than a chunk is
    /// left alone.
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

    /// Bytes of a chunk.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        1 << self.shift
    }

    /// Returns where a chunk begins on the card.
    #[must_use]
    pub fn address(&self, chunk: ChunkId) -> CardAddr {
        CardAddr(u64::from(chunk.0) << self.shift)
    }

    /// The chunk that `address` lies in, if it is in the table.
    #[must_use]
    pub fn chunk_at(&self, address: CardAddr) -> Option<ChunkId> {
        let index = u32::try_from(address.0 >> self.shift).ok()?;
        (index < self.card.limit()).then_some(ChunkId(index))
    }

    /// Returns what a chunk is used for.
    #[must_use]
    pub fn state(&self, chunk: ChunkId) -> ChunkState {
        self.card.state(chunk.0)
    }

    /// Sets how many slots of host memory may be used; none in a new table. Slots that were never used hold zeros. With fewer
    /// than are used nothing is taken away, but no new one is given until enough are free.
    pub fn set_host_budget(&mut self, slots: u32) {
        self.host.set_limit(slots);
    }

    /// Admits a VM whose guest believes to have `bytes` of VRAM. None of it has a place until [`Self::place`] gives it
    /// one. It may be more than the card has, but for what `limits` guarantee.
    ///
    /// # Errors
    /// [`Error::Promise`] when the guarantee cannot be kept; chunks that are not zeroed yet do as well as others here.
    /// [`Error::Guarantee`], [`Error::Weight`]; [`Error::Exists`]; [`Error::Empty`]; [`Error::Advertised`].
    pub fn create_vm(&mut self, vm: VmId, bytes: u64, limits: Limits) -> Result<(), Error> {
        if self.vms.contains_key(&vm) {
            return Err(Error::Exists(vm));
        }
        if bytes == 0 {
            return Err(Error::Empty);
        }
        let count = u32::try_from(bytes.div_ceil(self.chunk_bytes())).ok().filter(|_| bytes <= ADVERTISED_BYTES_MAX);
        let count = count.ok_or(Error::Advertised(bytes))?;
        self.check_limits(vm, limits, count, 0, 0)?;
        let map = VmMap::new(bytes, count, self.shift, limits);
        self.promised += map.owed();
        self.vms.insert(vm, map);
        Ok(())
    }

    /// Returns what a VM may have; `None` without such a VM.
    #[must_use]
    pub fn limits(&self, vm: VmId) -> Option<Limits> {
        self.vms.get(&vm).map(VmMap::limits)
    }

    /// Changes what a VM may have. Nothing that it has is taken away: a VM above a quota or a cap just gets no more.
    ///
    /// # Errors
    /// [`Error::Promise`] when a raised guarantee cannot be kept as things lie; [`Error::Guarantee`], [`Error::Weight`];
    /// [`Error::NoSuchVm`]. Nothing has changed then.
    pub fn set_limits(&mut self, vm: VmId, limits: Limits) -> Result<(), Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        self.check_limits(vm, limits, map.advertised(), map.used(Tier::Card), map.owed())?;
        self.change(vm, |map| map.set_limits(limits));
        Ok(())
    }

    /// Gives the guest chunk that `address` lies in a place, zeroed, if it has none yet: a chunk of the card, or a slot of
    /// host memory if the card has none for it and its policy is to swap.
    ///
    /// # Errors
    /// [`Error::NeedsScrub`]: scrub a chunk there and ask again. [`Error::Full`], not for a VM that has less than its
    /// guarantee. [`Error::OutOfRange`]; [`Error::NoSuchVm`].
    pub fn place(&mut self, vm: VmId, address: GuestAddr) -> Result<Placed, Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        let index = map.index(address).ok_or(Error::OutOfRange { vm, address })?;
        if let Some(spot) = map.get(index) {
            return Ok(Placed { place: self.within(spot, address), new: false });
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

    /// Takes the place of the guest chunk that `address` lies in away; what was its place waits to be scrubbed. False when
    /// it had none. Nothing may name the chunk any more: what is in it is gone for the guest. A move of it ends with
    /// [`Ended::Gone`].
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::NoSuchVm`].
    pub fn unplace(&mut self, vm: VmId, address: GuestAddr) -> Result<bool, Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        let index = map.index(address).ok_or(Error::OutOfRange { vm, address })?;
        self.lose_moves(vm, index..=index);
        let Some((spot, parked)) = self.change(vm, |map| map.take(index)).flatten() else { return Ok(false) };
        self.parked -= u32::from(parked);
        self.abandon(spot);
        Ok(true)
    }

    /// As [`Self::unplace`], for all chunks of a VM; returns how many had a place. The guarantee stays.
    pub fn unplace_all(&mut self, vm: VmId) -> u32 {
        self.lose_moves(vm, 0..=u32::MAX);
        self.parked -= self.vms.get(&vm).map_or(0, |map| map.parked().count() as u32);
        let Some(spots) = self.change(vm, VmMap::take_all) else { return 0 };
        for &spot in &spots {
            self.abandon(spot);
        }
        spots.len() as u32
    }

    /// Takes a VM's VRAM and its guarantee away; its chunks wait to be scrubbed, those that moves under way go to when these
    /// have ended. Returns how many had a place.
    ///
    /// # Errors
    /// [`Error::NoSuchVm`].
    pub fn destroy_vm(&mut self, vm: VmId) -> Result<u32, Error> {
        let count = self.unplace_all(vm);
        let map = self.vms.remove(&vm).ok_or(Error::NoSuchVm(vm))?;
        self.promised -= map.owed();
        self.frozen.remove(&vm);
        self.disown_moves(vm);
        Ok(count)
    }

    /// A piece of memory to fill with zeros, the one of the card that waits longest, or else one of the host. It stays
    /// without an owner until [`Self::scrubbed`].
    pub fn take_scrub_work(&mut self) -> Option<ScrubWork> {
        self.take_scrub_work_in(Tier::Card).or_else(|| self.take_scrub_work_in(Tier::Host))
    }

    /// As [`Self::take_scrub_work`], in one memory only: what [`Error::NeedsScrub`] asks for.
    pub fn take_scrub_work_in(&mut self, tier: Tier) -> Option<ScrubWork> {
        let number = self.stock_mut(tier).take_scrub()?;
        Some(ScrubWork { place: self.place_of(Spot::of(tier, number)), bytes: self.chunk_bytes() })
    }

    /// Notes that what lies at `place` is full of zeros now, and so are the card's caches of it.
    ///
    /// # Panics
    /// When that was not taken from [`Self::take_scrub_work`].
    pub fn scrubbed(&mut self, place: Place) {
        let spot = self.spot_at(place);
        self.stock_mut(spot.tier()).scrubbed(spot.number());
    }

    /// Keeps what lies at `place` from everybody, for the card may still reach it: at once if it has no owner, else when
    /// it loses it. It counts as used until the table is made anew.
    pub fn quarantine(&mut self, place: Place) {
        let spot = self.spot_at(place);
        self.stock_mut(spot.tier()).quarantine(spot.number());
    }

    /// Chunks of the card without an owner: those that are zeroed, and those that wait to be.
    #[must_use]
    pub fn zeroed(&self) -> (u32, u32) {
        (self.card.free(), self.card.unscrubbed())
    }

    /// The accounts.
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

    /// The VMs with their accounts.
    pub fn vms(&self) -> impl Iterator<Item = (VmId, VmSummary)> + '_ {
        self.vms.iter().map(|(&vm, map)| (vm, map.account()))
    }

    /// Chunks of the card without an owner that are promised to no one.
    #[must_use]
    pub fn spare(&self) -> u32 {
        self.uncommitted().saturating_sub(self.wanted())
    }

    /// As [`Self::spare`], those included that the mediator claims.
    #[must_use]
    pub fn uncommitted(&self) -> u32 {
        // What is quarantined may leave less than is promised.
        self.card.room().saturating_sub(self.promised + self.left_aside() + self.left_reserve())
    }

    /// Returns what keeps a VM from one more chunk in a memory.
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

    /// Checks that a VM may have `limits` whose guest has `advertised` chunks, and that has `used` and is `owed` so
    /// many chunks of the card.
    fn check_limits(&self, vm: VmId, limits: Limits, advertised: u32, used: u32, owed: u32) -> Result<(), Error> {
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

    /// Changes a VM's map, and the sum of what is promised with it. `None` without such a VM.
    fn change<T>(&mut self, vm: VmId, change: impl FnOnce(&mut VmMap) -> T) -> Option<T> {
        let map = self.vms.get_mut(&vm)?;
        let owed = map.owed();
        let result = change(map);
        self.promised = self.promised + map.owed() - owed;
        Some(result)
    }

    /// A zeroed piece of a memory that has room.
    fn take(&mut self, tier: Tier, to: ChunkState) -> Result<Spot, Error> {
        let number = self.stock_mut(tier).take(to).ok_or(Error::NeedsScrub { tier, short: 1 })?;
        Ok(Spot::of(tier, number))
    }

    /// Takes the owner of a piece of memory away.
    fn abandon(&mut self, spot: Spot) {
        self.stock_mut(spot.tier()).abandon(spot.number());
    }

    fn stock_mut(&mut self, tier: Tier) -> &mut Stock {
        match tier {
            Tier::Card => &mut self.card,
            Tier::Host => &mut self.host,
        }
    }

    /// Returns where a piece of memory begins.
    fn place_of(&self, spot: Spot) -> Place {
        match spot {
            Spot::Card(chunk) => Place::Card(CardAddr(u64::from(chunk) << self.shift)),
            Spot::Host(slot) => Place::Host(HostAddr(u64::from(slot) << self.shift)),
        }
    }

    /// The piece of memory that `place` lies in.
    fn spot_at(&self, place: Place) -> Spot {
        match place {
            Place::Card(address) => Spot::Card((address.0 >> self.shift) as u32),
            Place::Host(address) => Spot::Host((address.0 >> self.shift) as u32),
        }
    }

    /// Returns where guest `address` lies if its guest chunk lies at `spot`.
    fn within(&self, spot: Spot, address: GuestAddr) -> Place {
        let offset = address.0 & (self.chunk_bytes() - 1);
        match self.place_of(spot) {
            Place::Card(start) => Place::Card(CardAddr(start.0 + offset)),
            Place::Host(start) => Place::Host(HostAddr(start.0 + offset)),
        }
    }
}

#[cfg(test)]
#[path = "tests/chunks.rs"]
mod tests;
