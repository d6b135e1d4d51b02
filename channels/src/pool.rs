//! The card's channels and who has them.

use crate::{GuestInstance, GuestMemory, Host, Place, RunState, VmId};
use nvspec::addr::{GuestVramAddr, VramAddr};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use std::collections::BTreeSet;

/// Where the host's structures lie in VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Instance blocks of the 128 physical channels, one behind the other; a multiple of 4 KiB.
    pub instances: VramAddr,
    /// USERD pages of the 128 physical channels; a multiple of 4 KiB.
    pub userd: VramAddr,
    /// Two pages for runlists, used in turn; multiples of 4 KiB.
    pub runlists: [VramAddr; 2],
}

/// What a channel is bound to.
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// Where the guest's instance block lies.
    pub instance: Place,
    /// What it says.
    pub guest: &'a GuestInstance,
    /// The shadow of the guest's page directory.
    pub directory: VramAddr,
}

/// Why a channel is not bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// No VM of that number.
    #[error("the VM is not known")]
    NoSuchVm,
    /// No channel of that number.
    #[error("a card has 128 channels")]
    NoSuchChannel,
    /// The VM has as many channels as it may.
    #[error("the VM has all of its {cap} channels in use")]
    Cap {
        /// Its cap.
        cap: u32,
    },
    /// All of the card's channels are in use.
    #[error("all channels of the card are in use")]
    Full,
    /// What was bound there before does not end.
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

/// The card did not take a channel off its engines in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the card does not let go of channel {}; the engine that runs it must be reset", .channel.0)]
pub struct Stuck {
    /// The physical channel, out of use from now on.
    pub channel: ChannelId,
}

/// What became of a guest's runlist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submitted {
    /// Channels of this VM that are in the card's runlist now.
    pub listed: u32,
    /// Entries that name no bound channel, or one twice.
    pub ignored: u32,
}

/// A doorbell that was checked and may be rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// Whose.
    pub vm: VmId,
    /// Its number for the guest.
    pub virtual_channel: VirtualChannelId,
    /// Its number for the card.
    pub channel: ChannelId,
    /// Index behind the last entry of the ring that the guest has written.
    pub gp_put: u32,
    bound: u64,
}

/// Why a doorbell is not rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorbellError {
    /// Nothing is bound there.
    #[error("the channel is not bound")]
    Unbound,
    /// The index is beyond the ring: PBDMA error GP_PTR on hardware.
    #[error("GP_PUT {gp_put} is beyond a ring of {entries} entries")]
    BeyondRing {
        /// What the guest wrote.
        gp_put: u32,
        /// Entries of its ring.
        entries: u32,
    },
}

/// What the card says about a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HardwareState {
    /// May be scheduled, as the guest set it.
    pub enabled: bool,
    /// Waits for a semaphore.
    pub acquire_pending: bool,
    /// A PBDMA or engine holds its context.
    pub loaded: bool,
    /// Has work that is not fetched yet.
    pub pending: bool,
}

/// The physical channels of one card.
#[derive(Debug)]
pub struct Channels {}

#[expect(unused_variables, reason = "signatures first")]
impl Channels {
    /// All channels free.
    #[must_use]
    pub fn new(layout: Layout) -> Self {
        todo!()
    }

    /// A VM that may have up to `cap` channels at once.
    pub fn add_vm(&mut self, vm: VmId, cap: u32) {
        todo!()
    }

    /// Ends all of a VM's channels and forgets the VM. Returns the channels that the card did not let go of.
    pub fn destroy_vm(&mut self, host: &mut impl Host, vm: VmId) -> Vec<Stuck> {
        todo!()
    }

    /// Binds a guest's channel to a free physical one, with an instance block of the host's. A channel that is bound
    /// already is unbound first. It is stopped and in no runlist.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(
        &mut self,
        host: &mut impl Host,
        vm: VmId,
        channel: VirtualChannelId,
        bind: Bind<'_>,
    ) -> Result<ChannelId, BindError> {
        todo!()
    }

    /// Stops the channel, takes it off the runlist and its engines, and frees it. Nothing when it is not bound.
    ///
    /// # Errors
    /// [`Stuck`]; the channel is not the VM's any more even then.
    pub fn unbind(&mut self, host: &mut impl Host, vm: VmId, channel: VirtualChannelId) -> Result<(), Stuck> {
        todo!()
    }

    /// Lets the card schedule the channel, or not. `false` when it is not bound.
    pub fn enable(
        &mut self,
        host: &mut impl Host,
        guest: &mut impl GuestMemory,
        vm: VmId,
        channel: VirtualChannelId,
        enabled: bool,
    ) -> bool {
        todo!()
    }

    /// Makes `list` the VM's part of the runlist, and submits the union of all VMs' parts to the card.
    pub fn submit_runlist(
        &mut self,
        host: &mut impl Host,
        guest: &mut impl GuestMemory,
        vm: VmId,
        list: &[VirtualChannelId],
    ) -> Submitted {
        todo!()
    }

    /// Takes the channel off its engines; it may be scheduled again at once if it is enabled and listed.
    ///
    /// # Errors
    /// [`Stuck`] when the card does not do it in time; the channel stays bound, stopped.
    pub fn preempt(
        &mut self,
        host: &mut impl Host,
        guest: &mut impl GuestMemory,
        vm: VmId,
        channel: VirtualChannelId,
    ) -> Result<(), Stuck> {
        todo!()
    }

    /// Keeps all of a VM's channels from being scheduled, whatever the guest enables, or lets them again. Those on an
    /// engine stay there until [`Self::preempt`] or the end of their work.
    pub fn pause(&mut self, host: &mut impl Host, vm: VmId, paused: bool) {
        todo!()
    }

    /// What the card says about a channel; all false when it is not bound.
    pub fn hardware_state(&self, host: &mut impl Host, vm: VmId, channel: VirtualChannelId) -> HardwareState {
        todo!()
    }

    /// Checks a guest's write of GP_PUT, and takes over engine context pointers that it has set. Ring it by
    /// [`Self::ring`].
    ///
    /// # Errors
    /// See [`DoorbellError`].
    pub fn doorbell(
        &mut self,
        host: &mut impl Host,
        guest: &mut impl GuestMemory,
        vm: VmId,
        channel: VirtualChannelId,
        gp_put: u32,
    ) -> Result<Doorbell, DoorbellError> {
        todo!()
    }

    /// Gives the work to the card. `false` when the channel was unbound since the doorbell was checked.
    pub fn ring(&mut self, host: &mut impl Host, doorbell: Doorbell) -> bool {
        todo!()
    }

    /// Which channel's USERD lies at a guest VRAM address, and the byte offset in it: for every trapped access to guest
    /// VRAM, however the guest got there.
    #[must_use]
    pub fn userd_at(&self, vm: VmId, address: GuestVramAddr) -> Option<(VirtualChannelId, u64)> {
        todo!()
    }

    /// Whether any of the VM's channels has its USERD in the 4 KiB page: the quick test before [`Self::userd_at`].
    #[must_use]
    pub fn has_userd(&self, vm: VmId, page: GuestVramAddr) -> bool {
        todo!()
    }

    /// A guest's read of its USERD: the word at byte `offset` of the host's.
    pub fn userd_read(&self, host: &mut impl Host, vm: VmId, channel: VirtualChannelId, offset: u64) -> u32 {
        todo!()
    }

    /// The physical channel of a guest's.
    #[must_use]
    pub fn physical(&self, vm: VmId, channel: VirtualChannelId) -> Option<ChannelId> {
        todo!()
    }

    /// The guest's channel of a physical one: for engine status, PBDMA errors.
    #[must_use]
    pub fn by_physical(&self, channel: ChannelId) -> Option<(VmId, VirtualChannelId)> {
        todo!()
    }

    /// Whose instance block lies at a card address, and where the guest believes it to be: for MMU faults.
    #[must_use]
    pub fn by_instance(&self, address: VramAddr) -> Option<(VmId, VirtualChannelId, Place)> {
        todo!()
    }

    /// The guest's channel whose instance block the guest believes to be at `instance`.
    #[must_use]
    pub fn by_guest_instance(&self, vm: VmId, instance: Place) -> Option<VirtualChannelId> {
        todo!()
    }

    /// Guest page directories are shared by channels: whether any channel uses the shadow `directory`.
    #[must_use]
    pub fn uses_directory(&self, directory: VramAddr) -> bool {
        todo!()
    }

    /// VMs with a channel that is busy or has advanced since the last call: who gets a non-stall interrupt.
    pub fn progressed(&mut self, host: &mut impl Host) -> BTreeSet<VmId> {
        todo!()
    }

    /// The state of a physical channel.
    #[must_use]
    pub fn run_state(&self, channel: ChannelId) -> RunState {
        todo!()
    }

    /// Channels that a VM has in use.
    #[must_use]
    pub fn in_use(&self, vm: VmId) -> u32 {
        todo!()
    }

    /// The card was reset: channels that were stuck are free, all others must be bound anew.
    pub fn card_reset(&mut self) {
        todo!()
    }
}
