//! A physical channel's states.

/// What a physical channel is doing, as far as the host knows and allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RunState {
    /// Nobody's.
    Free,
    /// Bound to a VM's channel; the card does not schedule it.
    Stopped,
    /// Bound, and the card may schedule it when it is in the runlist.
    Running,
    /// The card did not let go of it. It stays out of use until the card is reset.
    Stuck,
}

impl RunState {
    /// All states.
    pub const ALL: [Self; 4] = [Self::Free, Self::Stopped, Self::Running, Self::Stuck];

    /// Whether a channel may go from `self` to `to`.
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
