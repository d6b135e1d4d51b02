//! The mediator's lock order.

/// Rank of a lock. A thread acquires locks only in ascending order of ranks, and never holds two locks of the same
/// rank.
pub trait Rank: 'static {
    /// Position in the lock order.
    const POSITION: u8;
    /// Name in messages.
    const NAME: &'static str;
    /// True if the holder may wait for the card, a VMM or another thread. False for all ranks after [`Moving`].
    const MAY_WAIT: bool;
    /// Measurement that includes these locks, if any.
    const MEASURED: Option<Measured>;
}

/// Kinds of locks whose hold times are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measured {
    /// Locks of VMs.
    Vm,
    /// Locks of cards.
    Card,
}

impl Measured {
    /// All measured kinds.
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

/// Declares the ranks in order. Each rank has a doc comment, a type, a flag that permits the holder to wait, and the
/// measurement, if any.
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

        /// Names of all ranks, in lock order.
        pub const ORDER: &[&str] = &[$(stringify!($name)),*];
    };
}

ranks! {
    /// Daemon: held while a VM is added or removed, or while a desired state is applied.
    Changing, true, None;
    /// Daemon: held while settings of a card or a VM are read, modified and stored.
    Tuning, true, None;
    /// Daemon: held while a change is sent to a CUDA card's owner, which may respond slowly. A thread that waits
    /// for this lock must not hold any other lock.
    CudaChanging, true, None;
    /// Daemon: held while events are derived from a comparison of the daemon's current and previous state.
    Observing, true, None;
    /// Daemon: held while overrides are written to disk.
    OverrideStore, true, None;
    /// Daemon: the table of VMs and settings.
    Daemon, true, None;
    /// Daemon: sockets to be handed over to the next process.
    Sockets, true, None;
    /// Daemon: the owner of a card, which is the mediator or a passthrough VM. Held while a card is opened or closed.
    Ownership, true, None;
    /// Daemon: a card's memory settings.
    MemorySettings, false, None;
    /// Daemon: a card's scheduler settings.
    SchedulerSettings, false, None;
    /// Passthrough: the interrupt relay thread.
    Relay, true, None;
    /// Card manager: held while a VM's memory moves, so that the memory of only one VM moves at a time.
    Moving, true, None;
    /// One VM: its vGPU and its part of the card's state.
    Vm, false, Some(Measured::Vm);
    /// Card manager: the card's state.
    Card, false, Some(Measured::Card);
    /// One VM: queued events for the holder of the VM's lock.
    Inbox, false, None;
    /// One VM: its last status. Held briefly.
    StatusCell, false, None;
    /// Card manager: wakeup flag of the thread that moves memory.
    Wakeup, false, None;
    /// One VM: registers and control queue of its CUDA function. Held during one access or command.
    CudaFunction, false, None;
    /// One VM: the card of its CUDA function.
    CudaHome, false, None;
    /// One VM: programs that use its CUDA function.
    CudaPrograms, false, None;
    /// Handles of threads. A thread is joined after its handle has been removed and the lock released.
    Threads, false, None;
    /// Daemon: path of a VM's socket, which is deleted with the VM.
    SocketPath, false, None;
    /// Daemon: the last status of a CUDA card's owner. Held briefly.
    CudaStatusCell, false, None;
    /// Daemon: number of VM moves between cards.
    Moves, false, None;
    /// Daemon: the reason why a VM failed.
    Failure, false, None;
    /// Passthrough: level of the interrupt pin.
    Level, false, None;
    /// Event log. Threads that add events may hold any of the preceding locks.
    Events, false, None;
    /// Log: number of messages by origin. Threads that log may hold any other lock.
    Log, false, None;
}
