//! What goes in and out of [`Channels`](crate::Channels).

use crate::{GuestInstance, Place, VmId};
use nvspec::addr::VramAddr;
use nvspec::fifo::{ChannelId, VirtualChannelId};

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
    /// The physical channel.
    pub channel: ChannelId,
}

/// What became of a guest's runlist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submitted {
    /// Channels of this VM that are in the runlist now.
    pub listed: u32,
    /// Entries that name no bound channel, or one twice.
    pub ignored: u32,
    /// The card has taken the list. Else it is stuck.
    pub taken: bool,
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
    /// The binding that it was checked for.
    pub(crate) serial: u64,
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
    /// The guest wants it scheduled.
    pub enabled: bool,
    /// Waits for a semaphore.
    pub acquire_pending: bool,
    /// A PBDMA or engine holds its context.
    pub loaded: bool,
    /// Has work that is not fetched yet.
    pub pending: bool,
}
