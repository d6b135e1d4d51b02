//! The reserve is a set of card chunks that makes immediate evictions possible. The evicted contents are copied to host
//! memory later.

use super::{ChunkTable, Error, Tier, VmMap};
use crate::TenantId;

impl ChunkTable {
    /// Sets aside `chunks` card chunks for evictions, including those that evictions already use. VMs and the mediator
    /// cannot get them. Lowering the number releases the difference, but removes no chunk in use.
    ///
    /// # Errors
    /// Returns [`Error::CardFull`] if too few chunks are spare, and changes nothing.
    pub fn set_reserve(&mut self, chunks: u32) -> Result<(), Error> {
        let missing = chunks.saturating_sub(self.parked);
        if missing > self.uncommitted() + self.left_reserve() {
            return Err(self.full(missing.into()));
        }
        self.reserve = chunks;
        Ok(())
    }

    /// Returns true if a guest chunk is in the reserve, so that it is on the card but is counted as host memory.
    #[must_use]
    pub fn is_parked(&self, vm: TenantId, index: u32) -> bool {
        self.vms.get(&vm).is_some_and(|map| map.is_parked(index))
    }

    /// Returns all guest chunks in the reserve.
    pub fn parked(&self) -> impl Iterator<Item = (TenantId, u32)> + '_ {
        self.vms.iter().flat_map(|(&vm, map)| map.parked().map(move |index| (vm, index)))
    }

    /// Returns a VM's guest chunks in the reserve, in order.
    pub fn parked_of(&self, vm: TenantId) -> impl Iterator<Item = u32> + '_ {
        self.vms.get(&vm).into_iter().flat_map(VmMap::parked)
    }

    /// Returns the number of chunks in the reserve that can start their move to host memory now.
    #[must_use]
    pub fn drainable(&self) -> u32 {
        (self.parked - self.draining).min(self.host.room())
    }

    /// Moves a guest chunk from its VM's card chunks into the reserve. In exchange, a free chunk of the reserve becomes
    /// spare, or is promised to the VM if the VM is then below its guarantee.
    pub(super) fn park(&mut self, vm: TenantId, index: u32) -> Result<(), Error> {
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

    /// Moves a guest chunk from the reserve back to its VM's card chunks. Returns [`Error::Full`] if no card chunk is
    /// available for the VM.
    pub(super) fn unpark(&mut self, vm: TenantId, index: u32) -> Result<(), Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        if let Some(limit) = self.limit_of(map, Tier::Card) {
            return Err(Error::Full { vm, limit, host: None });
        }
        self.change(vm, |map: &mut VmMap| map.unpark(index));
        self.parked -= 1;
        Ok(())
    }

    /// Returns the number of reserve chunks that are neither used nor borrowed.
    #[must_use]
    pub fn left_reserve(&self) -> u32 {
        self.reserve.saturating_sub(self.parked + self.borrowed)
    }

    /// Returns the number of host slots that may be allocated, excluding those needed for chunks in the reserve.
    #[must_use]
    pub fn host_room(&self) -> u32 {
        self.host.room().saturating_sub(self.parked - self.draining)
    }
}
