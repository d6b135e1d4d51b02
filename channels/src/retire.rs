//! First half of ending a channel: the channel executes no more work, but its number is not reused yet.
//!
//! Between the two halves, the channel's work area is removed from its address space. If the number were reused
//! earlier, other channels in the old address space could write the new channel's semaphores.

use crate::card;
use crate::state::Permit;
use crate::{Channels, Host, Stuck, TenantId};
use nvspec::fifo::VirtualChannelId;

impl Channels {
    /// Removes the channel from its engines and the runlist permanently. The channel stays bound, but ignores
    /// doorbells, and cannot be enabled or listed. [`Self::unbind`] frees it. Does nothing if the channel is not bound.
    ///
    /// # Errors
    /// Returns [`Stuck`] if the channel is still on its engines. It starts no new work on them.
    pub fn retire(&mut self, host: &mut impl Host, vm: TenantId, channel: VirtualChannelId) -> Result<(), Stuck> {
        let Some(physical) = self.physical(vm, channel) else { return Ok(()) };
        let listed = self.vms.get_mut(&vm).is_some_and(|record| {
            let listed = record.list.contains(&channel.0);
            record.list.retain(|entry| *entry != channel.0);
            listed
        });
        self.halt(host, physical);
        if let Some(bound) = self.bound_mut(physical) {
            bound.permit = Permit::Ended;
        }
        let kicked = card::kick(host, physical);
        if listed {
            self.submit(host);
        }
        kicked
    }

    /// Returns true if a channel was retired and has not been unbound since. The channel's state then belongs to this
    /// binding, not to a later one with the same number.
    #[must_use]
    pub fn is_retired(&self, vm: TenantId, channel: VirtualChannelId) -> bool {
        self.physical(vm, channel)
            .and_then(|physical| self.bound(physical))
            .is_some_and(|bound| bound.permit == Permit::Ended)
    }

    /// Returns true if a channel of this VM is stuck on the card, in which case the VM's memory must not be reused.
    #[must_use]
    pub fn has_stuck(&self, vm: TenantId) -> bool {
        self.slots.iter().any(|slot| matches!(slot, crate::pool::Slot::Stuck { vm: owner, .. } if *owner == vm))
    }
}

#[cfg(test)]
mod tests;
