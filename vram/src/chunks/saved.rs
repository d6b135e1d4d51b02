//! Saved form of the chunk table. It contains the owner of each chunk, but not the chunk's contents.
//!
//! Owners are stored only once, in the states of chunks and slots. The VMs' maps, totals, and promises are derived from
//! these states.

use super::moves::{Fate, Flight};
use super::state::{MoveId, Spot};
use super::stock::{SavedStock, Stock};
use super::{
    ADVERTISED_BYTES_MAX, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, ChunkState, ChunkTable, Limits, OnFull, Tier, VmMap,
};
use crate::TenantId;
use saved_state::{Invalid, ascend, first_version};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

pub use super::map::SavedVm;

/// Maximum number of chunks of a card in a saved table. It ensures that sums of a few such numbers fit in 32 bits.
const CHUNKS_MAX: u32 = 1 << 29;
/// Maximum number of guest chunks of all VMs in a saved table. A map has an entry for each of them, even if it is
/// unplaced.
const GUEST_CHUNKS_MAX: u64 = 1 << 25;
/// Maximum value of an event counter.
pub(crate) const COUNT_MAX: u64 = 1 << 62;

/// A saved chunk table, with or without moves in flight. Scrubs that were interrupted must be repeated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedChunks {
    /// Log2 of the chunk size in bytes.
    pub(crate) shift: u32,
    pub(crate) card: SavedStock,
    pub(crate) host: SavedStock,
    pub(crate) set_aside: u32,
    pub(crate) reserve: u32,
    pub(crate) borrowed: u32,
    pub(crate) claimed: u32,
    /// VMs, sorted by number.
    pub(crate) vms: Vec<SavedVm>,
    /// Moves in flight, sorted by number.
    pub(crate) flights: Vec<SavedFlight>,
    pub(crate) next_move: u64,
    pub(crate) moved: [u64; 2],
}

first_version!(SavedChunks, "vram");

/// A move in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFlight {
    pub(crate) id: u64,
    pub(crate) vm: u32,
    pub(crate) index: u32,
    pub(crate) from: SavedSpot,
    pub(crate) to: SavedSpot,
    pub(crate) drains: bool,
    pub(crate) fate: SavedFate,
}

/// State of a moving chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedFate {
    Alive,
    Unplaced,
    Ownerless,
}

/// A card chunk or host slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedSpot {
    Card(u32),
    Host(u32),
}

/// Behaviour if no card chunk is available for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedOnFull {
    Swap,
    Queue,
    Refuse,
}

/// Limits of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedLimits {
    pub(crate) quota: u32,
    pub(crate) guarantee: u32,
    pub(crate) swap_cap: u32,
    pub(crate) weight: u32,
    pub(crate) on_full: SavedOnFull,
}

impl ChunkTable {
    /// Saves the table.
    #[must_use]
    pub fn save(&self) -> SavedChunks {
        let Self {
            shift,
            card,
            host,
            // The totals and maps are derived from the states.
            mediator: _,
            set_aside,
            reserve,
            parked: _,
            draining: _,
            borrowed,
            claimed,
            promised: _,
            vms,
            frozen,
            flights,
            moving: _,
            next_move,
            moved,
        } = self;
        SavedChunks {
            shift: *shift,
            card: card.save(),
            host: host.save(),
            set_aside: *set_aside,
            reserve: *reserve,
            borrowed: *borrowed,
            claimed: *claimed,
            vms: vms.iter().map(|(vm, map)| map.save(vm.0, frozen.contains(vm))).collect(),
            flights: flights.iter().map(|(id, flight)| flight.save(*id)).collect(),
            next_move: *next_move,
            moved: *moved,
        }
    }
}

impl Flight {
    fn save(&self, id: MoveId) -> SavedFlight {
        let Self { vm, index, from, to, drains, fate } = *self;
        let fate = match fate {
            Fate::Alive => SavedFate::Alive,
            Fate::Unplaced => SavedFate::Unplaced,
            Fate::Ownerless => SavedFate::Ownerless,
        };
        SavedFlight { id: id.0, vm: vm.0, index, from: from.into(), to: to.into(), drains, fate }
    }

    fn restored(saved: &SavedFlight) -> (MoveId, Self) {
        let SavedFlight { id, vm, index, from, to, drains, fate } = *saved;
        let fate = match fate {
            SavedFate::Alive => Fate::Alive,
            SavedFate::Unplaced => Fate::Unplaced,
            SavedFate::Ownerless => Fate::Ownerless,
        };
        (MoveId(id), Self { vm: TenantId(vm), index, from: from.into(), to: to.into(), drains, fate })
    }
}

impl TryFrom<SavedChunks> for ChunkTable {
    type Error = Invalid;

    fn try_from(saved: SavedChunks) -> Result<Self, Invalid> {
        saved.check_numbers()?;
        let SavedChunks { shift, card, host, set_aside, reserve, borrowed, claimed, vms, flights, next_move, moved } =
            saved;
        let (card, host) = (Stock::restored(card)?, Stock::restored(host)?);
        Invalid::unless(card.end() <= card.limit(), || "the card has chunks beyond its end".into())?;
        let mediator = card.states().filter(|(_, state)| *state == ChunkState::Mediator).count() as u32;
        Invalid::unless(host.states().all(|(_, state)| state != ChunkState::Mediator), || {
            "a slot of host memory belongs to the mediator".into()
        })?;
        let flights: BTreeMap<MoveId, Flight> = flights.iter().map(Flight::restored).collect();
        check_destinations(&card, &host, &flights)?;
        let mut places = places(&card, &host)?;
        let frozen = vms.iter().filter(|vm| vm.frozen).map(|vm| TenantId(vm.vm)).collect();
        let mut maps = BTreeMap::new();
        for vm in vms {
            let id = TenantId(vm.vm);
            let map = VmMap::restored(vm, shift, places.remove(&id).unwrap_or_default(), &flights)?;
            maps.insert(id, map);
        }
        if let Some(vm) = places.keys().next() {
            return Err(Invalid::new(format_args!("VM {vm} owns chunks, but does not exist")));
        }
        let moving = moving(&maps, &flights)?;
        let is_draining = |flight: &&Flight| flight.fate == Fate::Alive && flight.drains;
        let table = Self {
            shift,
            mediator,
            set_aside,
            reserve,
            parked: maps.values().map(|map| map.parked().count() as u32).sum(),
            draining: flights.values().filter(is_draining).count() as u32,
            borrowed,
            claimed,
            promised: maps.values().map(VmMap::owed).sum(),
            card,
            host,
            vms: maps,
            frozen,
            flights,
            moving,
            next_move,
            moved,
        };
        Ok(table)
    }
}

impl SavedChunks {
    /// Checks the values that can be checked without the states of chunks and slots.
    fn check_numbers(&self) -> Result<(), Invalid> {
        let Self { shift, card, host: _, set_aside, reserve, borrowed, claimed: _, vms, flights, next_move, moved } =
            self;
        let bytes = 1u64.checked_shl(*shift).unwrap_or(0);
        Invalid::unless((CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&bytes), || {
            format!("2^{shift} bytes is not a valid chunk size")
        })?;
        let limit = card.limit;
        Invalid::unless((1..=CHUNKS_MAX).contains(&limit), || format!("{limit} is not a valid number of chunks"))?;
        for (what, chunks) in [("set aside", *set_aside), ("the reserve", *reserve), ("borrowed", *borrowed)] {
            Invalid::unless(chunks <= limit, || format!("{what} are {chunks} chunks of a card of {limit}"))?;
        }
        Invalid::unless(ascend(vms.iter().map(|vm| vm.vm)), || "the VMs are not in order".into())?;
        Invalid::unless(ascend(flights.iter().map(|flight| flight.id)), || "the moves are not in order".into())?;
        let guest_chunks = vms.iter().fold(0u64, |sum, vm| sum.saturating_add(vm.bytes.div_ceil(bytes)));
        Invalid::unless(guest_chunks <= GUEST_CHUNKS_MAX, || {
            format!("all VMs together have {guest_chunks} chunks, more than {GUEST_CHUNKS_MAX}")
        })?;
        for vm in vms {
            Invalid::unless((1..=ADVERTISED_BYTES_MAX).contains(&vm.bytes), || {
                format!("VM {} has {:#x} bytes of VRAM", vm.vm, vm.bytes)
            })?;
        }
        let guarantees = vms.iter().map(|vm| vm.bytes.div_ceil(bytes).min(vm.limits.guarantee.into()));
        let guarantees = guarantees.fold(0u64, u64::saturating_add);
        Invalid::unless(guarantees <= limit.into(), || {
            format!("{guarantees} chunks of a card of {limit} are guaranteed")
        })?;
        let counts = moved.iter().chain([next_move]).all(|count| *count <= COUNT_MAX);
        let numbered = flights.iter().all(|flight| flight.id < *next_move);
        Invalid::unless(counts && numbered, || "the numbers of moves are too large".into())
    }
}

/// Checks that the state of each move's destination refers to this move, and that no two moves have the same
/// destination.
fn check_destinations(card: &Stock, host: &Stock, flights: &BTreeMap<MoveId, Flight>) -> Result<(), Invalid> {
    for (id, flight) in flights {
        let stock = if flight.to.tier() == Tier::Card { card } else { host };
        Invalid::unless(stock.state(flight.to.number()) == ChunkState::Arriving(*id), || {
            format!("the destination of move {} has another use", id.0)
        })?;
    }
    let arriving = |state: &(u32, ChunkState)| matches!(state.1, ChunkState::Arriving(_));
    let count = card.states().filter(arriving).count() + host.states().filter(arriving).count();
    Invalid::unless(count == flights.len(), || "a destination refers to a move that does not exist".into())
}

/// Place of each guest chunk, keyed by VM.
type Places = BTreeMap<TenantId, BTreeMap<u32, Spot>>;

fn places(card: &Stock, host: &Stock) -> Result<Places, Invalid> {
    let mut places = Places::new();
    let tiers = [(Tier::Card, card), (Tier::Host, host)];
    for (tier, (number, state)) in tiers.into_iter().flat_map(|(tier, stock)| stock.states().map(move |at| (tier, at)))
    {
        let ChunkState::Vm { vm, index } = state else { continue };
        let earlier = places.entry(vm).or_default().insert(index, Spot::new(tier, number));
        Invalid::unless(earlier.is_none(), || format!("guest chunk {index} of VM {vm} has two places"))?;
    }
    Ok(places)
}

/// Checks the moves, and returns those of placed chunks, keyed by chunk.
fn moving(
    maps: &BTreeMap<TenantId, VmMap>,
    flights: &BTreeMap<MoveId, Flight>,
) -> Result<BTreeMap<(TenantId, u32), MoveId>, Invalid> {
    let mut moving = BTreeMap::new();
    for (&id, flight) in flights {
        let Flight { vm, index, from, to, drains, fate } = *flight;
        let map = maps.get(&vm);
        let sound = match fate {
            Fate::Alive => map.is_some_and(|map| {
                map.get(index) == Some(from) && map.is_parked(index) == drains && from.tier() != to.tier()
            }),
            Fate::Unplaced => map.is_some(),
            Fate::Ownerless => true,
        };
        let first = fate != Fate::Alive || moving.insert((vm, index), id).is_none();
        // A move from the reserve always leads to host memory.
        Invalid::unless(sound && first && (!drains || to.tier() == Tier::Host), || {
            format!("the chunk of move {} does not exist", id.0)
        })?;
    }
    Ok(moving)
}

impl From<Spot> for SavedSpot {
    fn from(spot: Spot) -> Self {
        match spot {
            Spot::Card(number) => Self::Card(number),
            Spot::Host(number) => Self::Host(number),
        }
    }
}

impl From<SavedSpot> for Spot {
    fn from(saved: SavedSpot) -> Self {
        match saved {
            SavedSpot::Card(number) => Self::Card(number),
            SavedSpot::Host(number) => Self::Host(number),
        }
    }
}

impl From<Limits> for SavedLimits {
    fn from(Limits { quota, guarantee, swap_cap, weight, on_full }: Limits) -> Self {
        let on_full = match on_full {
            OnFull::Swap => SavedOnFull::Swap,
            OnFull::Queue => SavedOnFull::Queue,
            OnFull::Refuse => SavedOnFull::Refuse,
        };
        Self { quota, guarantee, swap_cap, weight, on_full }
    }
}

impl From<SavedLimits> for Limits {
    fn from(SavedLimits { quota, guarantee, swap_cap, weight, on_full }: SavedLimits) -> Self {
        let on_full = match on_full {
            SavedOnFull::Swap => OnFull::Swap,
            SavedOnFull::Queue => OnFull::Queue,
            SavedOnFull::Refuse => OnFull::Refuse,
        };
        Self { quota, guarantee, swap_cap, weight, on_full }
    }
}

/// Chunks of the mediator in a restored table that no user has claimed yet. Each chunk must have exactly one user.
#[derive(Debug)]
pub struct UnclaimedChunks(BTreeSet<u32>);

impl ChunkTable {
    /// Returns the mediator's chunks. Each user claims its chunks when it is restored.
    #[must_use]
    pub fn unclaimed(&self) -> UnclaimedChunks {
        let own = self.card.states().filter(|(_, state)| *state == ChunkState::Mediator);
        UnclaimedChunks(own.map(|(number, _)| number).collect())
    }
}

impl UnclaimedChunks {
    /// Claims `count` chunks, starting with `first`, for a user.
    ///
    /// # Errors
    /// Returns an error if one of the chunks does not belong to the mediator or already has a user. Other chunks may
    /// already have been claimed.
    pub fn claim(&mut self, first: u32, count: u32) -> Result<(), Invalid> {
        let end = first.checked_add(count).ok_or_else(|| Invalid::new("a run of chunks has no end"))?;
        for chunk in first..end {
            Invalid::unless(self.0.remove(&chunk), || {
                format!("chunk {chunk} is used twice, or does not belong to the mediator")
            })?;
        }
        Ok(())
    }

    /// Checks that each chunk has a user.
    ///
    /// # Errors
    /// Returns an error if a chunk has no user.
    pub fn finish(self) -> Result<(), Invalid> {
        let left = self.0.first();
        Invalid::unless(left.is_none(), || format!("chunk {left:?} of the mediator has no user"))
    }
}

#[cfg(test)]
mod tests;
