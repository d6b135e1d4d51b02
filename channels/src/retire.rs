//! The first half of an end: a channel that does nothing any more, but whose number no one else gets yet.
//!
//! Between the two halves its work area is taken out of its address space; a channel that got the same number earlier
//! would have semaphores that the old address space's other channels could write.

use crate::card;
use crate::state::Permit;
use crate::{Channels, Host, Stuck, VmId};
use nvspec::fifo::VirtualChannelId;

impl Channels {
    /// Takes the channel off its engines and the runlist for good. It stays bound, takes no doorbell, and neither enabling
    /// nor listing it brings it back; [`Self::unbind`] frees it. Nothing when it is not bound.
    ///
    /// # Errors
    /// [`Stuck`] when it has not left its engines yet; it does nothing new there.
    pub fn retire(&mut self, host: &mut impl Host, vm: VmId, channel: VirtualChannelId) -> Result<(), Stuck> {
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

    /// Returns whether a channel was retired and not unbound since. What is known of it then is of this binding, not of
    /// a later one with the same number.
    #[must_use]
    pub fn is_retired(&self, vm: VmId, channel: VirtualChannelId) -> bool {
        self.physical(vm, channel)
            .and_then(|physical| self.bound(physical))
            .is_some_and(|bound| bound.permit == Permit::Ended)
    }

    /// Returns whether the card holds on to a channel that was this VM's: what it reaches must not be given to anyone.
    #[must_use]
    pub fn has_stuck(&self, vm: VmId) -> bool {
        self.slots.iter().any(|slot| matches!(slot, crate::pool::Slot::Stuck { vm: owner, .. } if *owner == vm))
    }
}

#[cfg(test)]
#[path = "tests/retire.rs"]
mod tests;
