//! Channels whose bind the host has rejected. The guest is notified at the channel's first doorbell.

use crate::{Channels, Place, TenantId};
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::{CHANNELS, VirtualChannelId};

/// A guest channel whose bind was rejected.
#[derive(Debug)]
pub(crate) struct Refused {
    /// Location of the guest's instance block.
    pub(crate) instance: Place,
    /// USERD address in guest VRAM, if the instance block was readable.
    pub(crate) userd: Option<GuestVramAddr>,
    /// True if the guest was notified at a doorbell.
    pub(crate) told: bool,
}

impl Channels {
    /// Records that a guest's bind was rejected, until the guest binds or unbinds the channel again. Does nothing if
    /// the VM or channel number does not exist, or if the channel is bound.
    pub fn refuse(&mut self, vm: TenantId, channel: VirtualChannelId, instance: Place, userd: Option<GuestVramAddr>) {
        let Some(record) = self.vms.get_mut(&vm) else { return };
        if u32::from(channel.0) < CHANNELS && !record.channels.contains_key(&channel.0) {
            let userd = userd.map(GuestVramAddr::page);
            record.refused.insert(channel.0, Refused { instance, userd, told: false });
        }
    }

    /// Returns the location of a rejected channel's instance block, to report the fault to its guest.
    #[must_use]
    pub fn refused(&self, vm: TenantId, channel: VirtualChannelId) -> Option<Place> {
        self.vms.get(&vm)?.refused.get(&channel.0).map(|refused| refused.instance)
    }

    pub(crate) fn refused_of(&self, vm: TenantId) -> impl Iterator<Item = (VirtualChannelId, &Refused)> {
        let refused = self.vms.get(&vm).into_iter().flat_map(|vm| &vm.refused);
        refused.map(|(channel, refused)| (VirtualChannelId(*channel), refused))
    }

    /// Returns true if this is the channel's first doorbell since its bind was rejected.
    pub(crate) fn tell_refused(&mut self, vm: TenantId, channel: VirtualChannelId) -> bool {
        let refused = self.vms.get_mut(&vm).and_then(|record| record.refused.get_mut(&channel.0));
        refused.is_some_and(|refused| !std::mem::replace(&mut refused.told, true))
    }
}
