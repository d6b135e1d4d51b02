//! Lock order of the mediator, as a table.

/// Rank of a lock. A thread takes locks only in ascending rank order, and never holds two locks of the same rank.
pub trait Rank: 'static {
    /// Position in the table below.
    const POSITION: u8;
    /// Name for messages.
    const NAME: &'static str;
    /// True if the holder may wait for the card, a VMM or another thread. False for all ranks after [`Moving`].
    const MAY_WAIT: bool;
    /// Measurement to which such locks contribute, if any.
    const MEASURED: Option<Measured>;
}

/// Locks whose hold times are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measured {
    /// Locks of VMs.
    Vm,
    /// Locks of cards.
    Card,
}

impl Measured {
    /// All measured kinds, in order.
    pub const ALL: [Self; 2] = [Self::Vm, Self::Card];

    /// Returns the name used in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Card => "card",
        }
    }
}

/// Declares the ranks in order. Each has a doc comment, a type, whether the holder may wait, and the measurement, if
/// any.
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

        /// Names of all ranks, in the order in which their locks are taken.
        pub const ORDER: &[&str] = &[$(stringify!($name)),*];
    };
}

ranks! {
    /// Daemon: held while a VM is added or removed, or a desired state is applied.
    Changing, true, None;
    /// Daemon: held while settings of a card or a VM are read, changed and stored.
    Tuning, true, None;
    /// Daemon: held while a change is sent to a CUDA card's owner, which may respond slowly. A thread that waits for
    /// this lock holds no other lock.
    CudaChanging, true, None;
    /// Daemon: held while the daemon's state is compared with its previous state to derive events.
    Observing, true, None;
    /// Daemon: held while changes are written to the persistent file.
    OverrideStore, true, None;
    /// Daemon: the table of VMs and settings.
    Daemon, true, None;
    /// Daemon: sockets handed over from one process to the next.
    Sockets, true, None;
    /// Daemon: the user of a card (the mediator or a passthrough VM). Held while a card is opened or closed.
    Ownership, true, None;
    /// Daemon: a card's memory settings.
    MemorySettings, false, None;
    /// Daemon: a card's scheduler settings.
    SchedulerSettings, false, None;
    /// Passthrough: the thread that relays interrupts.
    Relay, true, None;
    /// Owner: held while one VM's memory moves, so that only one VM's memory moves at a time.
    Moving, true, None;
    /// One VM: its vGPU, and its part of the card's state.
    Vm, false, Some(Measured::Vm);
    /// Owner: the card's state.
    Card, false, Some(Measured::Card);
    /// One VM: events waiting for the holder of the VM's lock.
    Inbox, false, None;
    /// One VM: its last status. Held only briefly.
    StatusCell, false, None;
    /// Owner: flag set to wake the thread that moves memory.
    Wakeup, false, None;
    /// One VM: registers and control queue of its CUDA function. Held for one access or one command.
    CudaFunction, false, None;
    /// One VM: the card of its CUDA function.
    CudaHome, false, None;
    /// One VM: programs that use its CUDA function.
    CudaPrograms, false, None;
    /// Handles of threads, taken out of the lock before the threads are joined.
    Threads, false, None;
    /// Daemon: path of a VM's socket, which is removed with the VM.
    SocketPath, false, None;
    /// Daemon: the last status of the owner of a CUDA card. Held only briefly.
    CudaStatusCell, false, None;
    /// Daemon: number of VMs moved between cards.
    Moves, false, None;
    /// Daemon: the reason why a VM failed.
    Failure, false, None;
    /// Passthrough: level of the interrupt line.
    Level, false, None;
    /// Event log. A thread that adds an event may hold any of the preceding locks.
    Events, false, None;
    /// Log: number of messages by origin. A thread that logs may hold any lock.
    Log, false, None;
}
