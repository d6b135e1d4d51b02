//! The order of the mediator's locks: the one table of it.

/// The rank of a lock. A thread takes locks of rising rank only, and two of the same rank never at once.
pub trait Rank: 'static {
    /// Position in the table below.
    const POSITION: u8;
    /// Name in messages.
    const NAME: &'static str;
    /// Says whether its holder may wait for the card, a VMM or another thread. No rank behind [`Moving`] has this.
    const MAY_WAIT: bool;
    /// The measurement that such locks are part of, if any.
    const MEASURED: Option<Measured>;
}

/// Locks whose holds are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measured {
    /// A VM's.
    Vm,
    /// A card's.
    Card,
}

impl Measured {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Vm, Self::Card];

    /// Name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Card => "card",
        }
    }
}

/// Declares the ranks in their order: doc comment, type, whether the holder may wait, whether holds are measured.
macro_rules! ranks {
    ($($(#[$doc:meta])* $name:ident, $may_wait:expr, $measured:expr;)*) => {
        #[derive(Clone, Copy)]
        #[repr(u8)]
        enum Position { $($name),* }

        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            pub enum $name {}

            impl Rank for $name {
                const POSITION: u8 = Position::$name as u8;
                const NAME: &'static str = stringify!($name);
                const MAY_WAIT: bool = $may_wait;
                const MEASURED: Option<Measured> = $measured;
            }
        )*

        /// Names of all ranks, the first to be taken first.
        pub const ORDER: &[&str] = &[$(stringify!($name)),*];
    };
}

ranks! {
    /// Daemon: a VM is added or removed, or a desired state applied.
    Changing, true, None;
    /// Daemon: settings of a card or a VM are read, changed and put back.
    Tuning, true, None;
    /// Daemon: the owner of one CUDA card is told of a change, and may be slow to answer. Whoever waits for it holds nothing else.
    CudaChanging, true, None;
    /// Daemon: what outlives it is written.
    Keeper, true, None;
    /// Daemon: the table of VMs and settings.
    Daemon, true, None;
    /// Daemon: sockets that are handed from one process to the next.
    Sockets, true, None;
    /// Daemon: who has a card, the mediator or a passthrough VM. Held while a card is opened or closed.
    Ownership, true, None;
    /// Daemon: a card's memory settings.
    MemorySettings, false, None;
    /// Daemon: a card's scheduler settings.
    SchedulerSettings, false, None;
    /// Passthrough: the thread that relays interrupts.
    Relay, true, None;
    /// Owner: one VM's memory moves at a time.
    Moving, true, None;
    /// One VM: its vGPU and its side of the card.
    Vm, false, Some(Measured::Vm);
    /// Owner: the card's state.
    Card, false, Some(Measured::Card);
    /// One VM: events that wait for the holder of its lock.
    Inbox, false, None;
    /// One VM: its last status, which nobody waits long for.
    Board, false, None;
    /// Owner: whether the thread that moves memory was woken.
    Wakeup, false, None;
    /// Handles of threads, taken out to join them.
    Threads, false, None;
    /// Daemon: path of a VM's socket, removed with it.
    SocketPath, false, None;
    /// Daemon: what the owner of a CUDA card has said last, which nobody waits for.
    CudaBoard, false, None;
    /// Daemon: how many VMs have moved between cards.
    Moves, false, None;
    /// Daemon: why a VM failed.
    Failure, false, None;
    /// Passthrough: level of the interrupt line.
    Level, false, None;
    /// Log: who has said how much. Any lock may be held by who logs.
    Log, false, None;
}
