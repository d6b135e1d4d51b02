//! The reserve: chunks of the card that absorb evictions immediately. Their contents are copied to host memory later.

use super::{ChunkTable, Error, Tier, VmMap};
use crate::TenantId;

impl ChunkTable {
    /// Sets `chunks` of the card aside for evictions, including those already in use. Neither VMs nor the mediator can
    /// get them. A lower number than before releases the difference, but takes no chunk away.
    ///
    /// # Errors
    /// Returns [`Error::CardFull`] if more chunks are missing than are spare. If the call fails, it has changed
    /// nothing.
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

    /// Returns the number of chunks in the reserve whose move to host memory can begin now.
    #[must_use]
    pub fn drainable(&self) -> u32 {
        (self.parked - self.draining).min(self.host.room())
    }

    /// Puts a guest chunk that is on the card into the reserve. The card chunk that the VM gives up becomes spare, or
    /// owed to the VM.
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

    /// Returns a guest chunk in the reserve to its VM. The accounts must have a chunk of the card for it.
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

    /// Returns the number of host slots that may be allocated, without the slots guaranteed to chunks in the reserve.
    #[must_use]
    pub fn host_room(&self) -> u32 {
        self.host.room().saturating_sub(self.parked - self.draining)
    }
}
