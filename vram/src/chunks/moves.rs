//! Moves of guest chunks between the card and host memory.

use super::{ChunkState, ChunkTable, Error, Limit, MoveId, Place, Spot, Tier};
use crate::TenantId;
use std::ops::RangeInclusive;

/// Destination of a guest chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum To {
    /// A card chunk.
    Card,
    /// A host slot.
    Host,
    /// The reserve. The chunk stays on the card, but is counted as host memory.
    Reserve,
}

/// A step of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// VM that owns the chunk.
    pub vm: TenantId,
    /// Index of the guest chunk.
    pub index: u32,
    /// Destination of the chunk.
    pub to: To,
}

/// A guest chunk's move in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Move number, which identifies the move when it is committed or aborted.
    pub id: MoveId,
    /// VM that owns the chunk.
    pub vm: TenantId,
    /// Index of the guest chunk.
    pub index: u32,
    /// Location of the chunk until the move is committed.
    pub from: Place,
    /// Destination, which VMs cannot access, and which the copy must overwrite completely.
    pub to: Place,
    /// Number of bytes to copy.
    pub bytes: u64,
}

/// Result of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The chunk is at its destination. Its old place must be scrubbed.
    Committed,
    /// The chunk was unplaced, or its VM was destroyed, during the move. The destination must be scrubbed.
    Gone,
}

/// A move in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub(super) vm: TenantId,
    pub(super) index: u32,
    pub(super) from: Spot,
    pub(super) to: Spot,
    /// True if the chunk was in the reserve.
    pub(super) drains: bool,
    pub(super) fate: Fate,
}

/// State of a moving chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The chunk is still placed.
    Alive,
    /// The chunk was unplaced. The destination is still counted for the VM.
    Unplaced,
    /// The chunk's VM was destroyed.
    Ownerless,
}

impl ChunkTable {
    /// Starts a move of a guest chunk by reserving a destination. From now on, the destination counts towards the VM's
    /// limits. It may contain another owner's data until the copy has overwritten it completely. The chunk stays at its
    /// place until [`Self::commit_move`], and must not be modified during the copy.
    ///
    /// # Errors
    /// Returns [`Error::NeedsScrub`] if all chunks without an owner in that memory are being scrubbed. The caller must
    /// then complete a scrub and retry. Also returns [`Error::Full`], [`Error::Moving`], [`Error::Settled`],
    /// [`Error::NotPlaced`] or [`Error::NoSuchVm`].
    pub fn begin_move(&mut self, vm: TenantId, index: u32, to: To) -> Result<Move, Error> {
        let from = self.movable(vm, index)?;
        let tier = match to {
            To::Card => Tier::Card,
            To::Host => Tier::Host,
            To::Reserve => return Err(Error::Settled { vm, index }),
        };
        if from.tier() == tier {
            return Err(Error::Settled { vm, index });
        }
        // A chunk in the reserve is already counted as host memory, and a slot is reserved for it.
        let drains = self.is_parked(vm, index);
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        let limit = match drains {
            true => (self.host.room() == 0).then(|| Limit::HostBudget(self.host.limit())),
            false => self.limit_of(map, tier),
        };
        if let Some(limit) = limit {
            return Err(Error::Full { vm, limit, host: None });
        }
        let id = MoveId(self.next_move);
        let to = self.stock_mut(tier).take_for_copy(ChunkState::Arriving(id));
        let to = Spot::new(tier, to.ok_or(Error::NeedsScrub { tier, short: 1 })?);
        self.next_move += 1;
        self.draining += u32::from(drains);
        self.change(vm, |map| map.begin(index, tier));
        let flight = Flight { vm, index, from, to, drains, fate: Fate::Alive };
        self.flights.insert(id, flight);
        self.moving.insert((vm, index), id);
        Ok(self.describe(id, &flight))
    }

    /// Starts a step of a plan. Steps into the reserve, and from there back to the card, only change the accounts: they
    /// complete immediately, and `None` is returned.
    ///
    /// # Errors
    /// Returns the errors of [`Self::begin_move`], or [`Error::ReserveFull`].
    pub fn start(&mut self, step: Step) -> Result<Option<Move>, Error> {
        let Step { vm, index, to } = step;
        let from = self.movable(vm, index)?;
        match (to, self.is_parked(vm, index)) {
            (To::Reserve, false) if from.tier() == Tier::Card => self.park(vm, index).map(|()| None),
            (To::Card, true) => self.unpark(vm, index).map(|()| None),
            _ => self.begin_move(vm, index, to).map(Some),
        }
    }

    /// Places guest chunk `index`, which arrives from another card, in zeroed memory of `tier`. In host memory, the VM
    /// may exceed its limits, because they do not apply to a VM that is arriving.
    ///
    /// # Errors
    /// Returns [`Error::NeedsScrub`] if the caller must scrub a chunk in that memory before it retries,
    /// [`Error::Settled`] if the chunk is already placed, or [`Error::Full`], [`Error::OutOfRange`] or
    /// [`Error::NoSuchVm`].
    pub fn receive(&mut self, vm: TenantId, index: u32, tier: Tier) -> Result<Place, Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        let address = self.guest_address(index);
        if map.index(address) != Some(index) {
            return Err(Error::OutOfRange { vm, address });
        }
        if map.get(index).is_some() {
            return Err(Error::Settled { vm, index });
        }
        let limit = match tier {
            Tier::Card => self.limit_of(map, tier),
            Tier::Host => (self.host_room() == 0).then(|| Limit::HostBudget(self.host.limit())),
        };
        if let Some(limit) = limit {
            return Err(Error::Full { vm, limit, host: None });
        }
        let spot = self.take(tier, ChunkState::Vm { vm, index })?;
        self.change(vm, |map| map.set(index, spot));
        Ok(self.place_of(spot))
    }

    /// Prevents moves of a VM's chunks until the VM is destroyed, because users of its chunks cannot be notified of
    /// moves. Moves in flight end as usual.
    pub fn freeze(&mut self, vm: TenantId) {
        if self.vms.contains_key(&vm) {
            self.frozen.insert(vm);
        }
    }

    /// Returns true if the VM's chunks must not move.
    #[must_use]
    pub fn is_frozen(&self, vm: TenantId) -> bool {
        self.frozen.contains(&vm)
    }

    /// Returns the place of a guest chunk if it can move.
    fn movable(&self, vm: TenantId, index: u32) -> Result<Spot, Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        let from = map.get(index).ok_or(Error::NotPlaced { vm, index })?;
        if self.is_moving(vm, index) {
            return Err(Error::Moving { vm, index });
        }
        if self.is_frozen(vm) {
            return Err(Error::Settled { vm, index });
        }
        Ok(from)
    }

    /// Ends a move after its copy. The chunk is then at the destination, unless it was unplaced ([`Ended::Gone`]). The
    /// caller must update all references to the chunk's place before the chunk is accessed again.
    ///
    /// # Panics
    /// Panics if the move does not exist.
    pub fn commit_move(&mut self, id: MoveId) -> Ended {
        let flight = self.flights.remove(&id).expect("a move ends once");
        if flight.fate != Fate::Alive {
            self.give_up(&flight);
            return Ended::Gone;
        }
        let Flight { vm, index, from, to, drains, fate: _ } = flight;
        self.moving.remove(&(vm, index));
        self.draining -= u32::from(drains);
        self.parked -= u32::from(drains);
        self.stock_mut(to.tier()).go(to.number(), ChunkState::Vm { vm, index });
        // Free the old place before it is promised to the VM again.
        self.abandon(from);
        self.change(vm, |map| map.arrive(index, to));
        self.moved[to.tier() as usize] += 1;
        Ended::Committed
    }

    /// Cancels a move. The chunk stays in place, and the destination must be scrubbed.
    ///
    /// # Panics
    /// Panics if the move does not exist.
    pub fn abort_move(&mut self, id: MoveId) {
        let flight = self.flights.remove(&id).expect("a move ends once");
        if flight.fate == Fate::Alive {
            self.moving.remove(&(flight.vm, flight.index));
            self.draining -= u32::from(flight.drains);
        }
        self.give_up(&flight);
    }

    /// Returns all moves in flight, oldest first, including moves of unplaced chunks.
    pub fn moves(&self) -> impl Iterator<Item = Move> + '_ {
        self.flights.iter().map(|(&id, flight)| self.describe(id, flight))
    }

    /// Returns true if a copy is unnecessary, because the move's chunk was unplaced or the move has ended.
    #[must_use]
    pub fn is_gone(&self, id: MoveId) -> bool {
        self.flights.get(&id).is_none_or(|flight| flight.fate != Fate::Alive)
    }

    /// Returns true if a guest chunk is moving.
    #[must_use]
    pub fn is_moving(&self, vm: TenantId, index: u32) -> bool {
        self.moving.contains_key(&(vm, index))
    }

    /// Records that the chunks were unplaced. Their moves will have no effect.
    pub(super) fn lose_moves(&mut self, vm: TenantId, indices: RangeInclusive<u32>) {
        let of_them = (vm, *indices.start())..=(vm, *indices.end());
        while let Some((&key, &id)) = self.moving.range(of_them.clone()).next() {
            self.moving.remove(&key);
            if let Some(flight) = self.flights.get_mut(&id) {
                flight.fate = Fate::Unplaced;
                self.draining -= u32::from(flight.drains);
            }
            self.change(vm, |map| map.lose());
        }
    }

    /// Records that the VM was destroyed. The destinations of its moves no longer count for any VM.
    pub(super) fn disown_moves(&mut self, vm: TenantId) {
        for flight in self.flights.values_mut().filter(|flight| flight.vm == vm) {
            flight.fate = Fate::Ownerless;
        }
    }

    /// Ends a move that is not committed, and releases its destination.
    fn give_up(&mut self, flight: &Flight) {
        self.abandon(flight.to);
        if flight.fate != Fate::Ownerless {
            self.change(flight.vm, |map| map.end(flight.to.tier(), flight.drains, flight.fate == Fate::Alive));
        }
    }

    fn describe(&self, id: MoveId, flight: &Flight) -> Move {
        let Flight { vm, index, from, to, drains: _, fate: _ } = *flight;
        Move { id, vm, index, from: self.place_of(from), to: self.place_of(to), bytes: self.chunk_bytes() }
    }
}
