//! A physical channel's states.

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
    /// The channel must not run before its slice.
    Withheld,
    /// The channel must not run until it is bound again.
    Ended,
}

/// Permitted use of a channel's PGRAPH context.
///
/// A channel whose block lacks a pointer to a PGRAPH context cannot use PGRAPH: a PGRAPH method causes a fault, which
/// ends the channel.
// GUESS: real hardware also faults, because FECS has no image to load. The software card faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Graphics {
    /// The card's block contains the pointer: the channel runs while its VM is admitted.
    #[default]
    Attached,
    /// The block lacks the pointer, because the channel's work is for copy engines only: the channel runs regardless of
    /// the admitted VM.
    Unused,
    /// The block lacks the pointer while another VM is admitted, because a copy engine is still running the channel.
    /// The channel is stopped, and gets the pointer back when its VM is admitted.
    Withdrawn,
}

/// VMs whose channels with a PGRAPH context the card may schedule. The host's own channels are always included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Gate {
    /// All VMs.
    #[default]
    Open,
    /// One VM, or none.
    Only(Option<TenantId>),
}

/// Dwords of a guest's instance block for its ring progress, as byte offset and value.
pub type SavedWords = [(u64, u32); 3];

/// Presence of a channel on the card, as reported by the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// An engine is running the channel, or the fetch unit holds the channel and its methods are being consumed.
    Works,
    /// The channel waits for a semaphore, and no engine is running it.
    Acquires,
    /// The channel uses no unit of the card.
    Off,
}

/// The host's view of a physical channel's state and permissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RunState {
    /// No VM owns the channel.
    Free,
    /// Bound to a VM's channel, but not scheduled by the card.
    Stopped,
    /// Bound, and scheduled by the card while in the runlist.
    Running,
    /// The channel has no owner but is still on the card. It stays out of use until it leaves the card or the card is
    /// reset.
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
