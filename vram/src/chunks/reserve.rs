//! The reserve: chunks of the card that take evictions at once, and drain to host memory later.

use super::{ChunkTable, Error, Tier, VmMap};
use crate::VmId;

impl ChunkTable {
    /// Sets `chunks` of the card aside for evictions, those that lie there included: no VM gets them, nor does the mediator.
    /// A smaller number than before gives the difference up, but takes nothing away.
    ///
    /// # Errors
    /// [`Error::CardFull`] when more is missing than is spare; nothing has changed then.
    pub fn set_reserve(&mut self, chunks: u32) -> Result<(), Error> {
        let missing = chunks.saturating_sub(self.parked);
        if missing > self.uncommitted() + self.left_reserve() {
            return Err(self.full(missing.into()));
        }
        self.reserve = chunks;
        Ok(())
    }

    /// Returns whether a guest chunk lies in the reserve: on the card, but counted as in host memory.
    #[must_use]
    pub fn is_parked(&self, vm: VmId, index: u32) -> bool {
        self.vms.get(&vm).is_some_and(|map| map.is_parked(index))
    }

    /// All guest chunks in the reserve.
    pub fn parked(&self) -> impl Iterator<Item = (VmId, u32)> + '_ {
        self.vms.iter().flat_map(|(&vm, map)| map.parked().map(move |index| (vm, index)))
    }

    /// The guest chunks of a VM in the reserve, in order.
    pub fn parked_of(&self, vm: VmId) -> impl Iterator<Item = u32> + '_ {
        self.vms.get(&vm).into_iter().flat_map(VmMap::parked)
    }

    /// Returns how many of all can begin to move to host memory now.
    #[must_use]
    pub fn drainable(&self) -> u32 {
        (self.parked - self.draining).min(self.host.room())
    }

    /// Puts a guest chunk that lies on the card into the reserve. What it loses is spare, or owed to its VM.
    pub(super) fn park(&mut self, vm: VmId, index: u32) -> Result<(), Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        if let Some(limit) = self.limit_of(map, Tier::Host) {
            return Err(Error::Full { vm, limit, host: None });
        }
        if self.left_reserve() == 0 {
            return Err(Error::ReserveFull(self.reserve));
        }
        self.parked += 1;
        self.change(vm, |map| map.park(index));
        Ok(())
    }

    /// Gives a guest chunk in the reserve back to its VM. It needs a chunk of the card in the accounts.
    pub(super) fn unpark(&mut self, vm: VmId, index: u32) -> Result<(), Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        if let Some(limit) = self.limit_of(map, Tier::Card) {
            return Err(Error::Full { vm, limit, host: None });
        }
        self.change(vm, |map: &mut VmMap| map.unpark(index));
        self.parked -= 1;
        Ok(())
    }

    /// Returns what is neither used nor borrowed of the reserve.
    #[must_use]
    pub fn left_reserve(&self) -> u32 {
        self.reserve.saturating_sub(self.parked + self.borrowed)
    }

    /// Host slots that may be given away: what is in the reserve is sure to get one.
    #[must_use]
    pub fn host_room(&self) -> u32 {
        self.host.room().saturating_sub(self.parked - self.draining)
    }
}
