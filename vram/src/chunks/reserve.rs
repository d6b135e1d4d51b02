//! The reserve: chunks of the card that absorb evictions immediately and drain to host memory later.

use super::{ChunkTable, Error, Tier, VmMap};
use crate::TenantId;

impl ChunkTable {
    /// Sets `chunks` of the card aside for evictions, including those in use there: neither VMs nor the mediator get
    /// them. A smaller number than before releases the difference, but takes no chunk away.
    ///
    /// # Errors
    /// [`Error::CardFull`] if more is missing than is spare; then nothing changes.
    pub fn set_reserve(&mut self, chunks: u32) -> Result<(), Error> {
        let missing = chunks.saturating_sub(self.parked);
        if missing > self.uncommitted() + self.left_reserve() {
            return Err(self.full(missing.into()));
        }
        self.reserve = chunks;
        Ok(())
    }

    /// Returns true if a guest chunk is in the reserve: on the card, but counted as in host memory.
    #[must_use]
    pub fn is_parked(&self, vm: TenantId, index: u32) -> bool {
        self.vms.get(&vm).is_some_and(|map| map.is_parked(index))
    }

    /// Returns all guest chunks in the reserve.
    pub fn parked(&self) -> impl Iterator<Item = (TenantId, u32)> + '_ {
        self.vms.iter().flat_map(|(&vm, map)| map.parked().map(move |index| (vm, index)))
    }

    /// Returns the guest chunks of a VM in the reserve, in order.
    pub fn parked_of(&self, vm: TenantId) -> impl Iterator<Item = u32> + '_ {
        self.vms.get(&vm).into_iter().flat_map(VmMap::parked)
    }

    /// Returns the number of chunks of the reserve that can begin to move to host memory now.
    #[must_use]
    pub fn drainable(&self) -> u32 {
        (self.parked - self.draining).min(self.host.room())
    }

    /// Puts a guest chunk that is on the card into the reserve. The chunk that its VM loses is spare, or owed to it.
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

    /// Returns a guest chunk in the reserve to its VM. This needs a chunk of the card in the accounts.
    pub(super) fn unpark(&mut self, vm: TenantId, index: u32) -> Result<(), Error> {
        let map = self.vms.get(&vm).ok_or(Error::NoSuchVm(vm))?;
        if let Some(limit) = self.limit_of(map, Tier::Card) {
            return Err(Error::Full { vm, limit, host: None });
        }
        self.change(vm, |map: &mut VmMap| map.unpark(index));
        self.parked -= 1;
        Ok(())
    }

    /// Returns the part of the reserve that is neither used nor borrowed.
    #[must_use]
    pub fn left_reserve(&self) -> u32 {
        self.reserve.saturating_sub(self.parked + self.borrowed)
    }

    /// Returns the host slots that may be allocated: chunks in the reserve have a guaranteed slot.
    #[must_use]
    pub fn host_room(&self) -> u32 {
        self.host.room().saturating_sub(self.parked - self.draining)
    }
}
