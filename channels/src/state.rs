//! States of a physical channel.

use crate::TenantId;

/// Channel state requested by the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestedState {
    Stopped,
    Enabled,
}

/// The host's permission for a channel that its guest has enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permit {
    Granted,
    /// The channel must not run until its slice starts.
    Withheld,
    /// The channel must not run until it is bound again.
    Ended,
}

/// Permitted use of a channel's PGRAPH context.
///
/// A channel without a pointer to a PGRAPH context in its block cannot use PGRAPH: a PGRAPH method causes a fault,
/// which ends the channel.
// GUESS: real hardware also faults, because FECS has no image to load. The software card faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Graphics {
    /// The card's block contains the pointer. The channel runs while its VM is admitted.
    #[default]
    Attached,
    /// The block has no pointer, because the channel's work is for copy engines only. The channel runs regardless of
    /// the admitted VM.
    Unused,
    /// The block has no pointer while another VM is admitted and a copy engine is still running the channel. The
    /// channel is stopped, and gets the pointer back when its VM is admitted.
    Withdrawn,
}

/// VMs from which the card may schedule channels with a PGRAPH context. The host's own channels are always permitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Gate {
    /// All VMs.
    #[default]
    Open,
    /// One VM, or none.
    Only(Option<TenantId>),
}

/// Dwords of a guest's instance block that contain the channel's ring progress, as byte offsets and values.
pub type SavedWords = [(u64, u32); 3];

/// Presence of a channel on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// An engine is running the channel, or the fetch unit has the channel loaded and its methods are being executed.
    Works,
    /// The channel waits for a semaphore, and no engine is running it.
    Acquires,
    /// The channel does not use any unit of the card.
    Off,
}

/// State of a physical channel, as tracked by the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RunState {
    /// No VM owns the channel.
    Free,
    /// Bound to a VM's channel, but not schedulable.
    Stopped,
    /// Bound, and schedulable while it is in the runlist.
    Running,
    /// The channel has no owner but is still on the card. It is not reused until it has left the card or the card has
    /// been reset.
    Stuck,
}

impl RunState {
    /// All states.
    pub const ALL: [Self; 4] = [Self::Free, Self::Stopped, Self::Running, Self::Stuck];

    /// Returns true if a channel may change from `self` to `to`.
    #[must_use]
    pub const fn can_go(self, to: Self) -> bool {
        matches!(
            (self, to),
            (Self::Free, Self::Stopped)
                | (Self::Stopped, Self::Running | Self::Free | Self::Stuck)
                | (Self::Running, Self::Stopped)
                | (Self::Stuck, Self::Free)
        )
    }
}
