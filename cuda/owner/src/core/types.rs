//! Events and actions of the owner's state machine.

use crate::driver::Memory;
use cuda_protocol::{FromOwner, FromTenant};
use sched::VgpuParams;
use vram::{Limits, TenantId};

/// A connection of a process, as the server numbers them. A number is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// One physical allocation of a chunk's size. A number is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceId(pub u64);

/// A batch of copies, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// Fate of a tenant's process that holds the card or its memory and does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnStuck {
    /// It is killed.
    #[default]
    Kill,
    /// The driver suspends it, if it can; if not it is killed.
    Suspend,
}

/// An operator's word on a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantSpec {
    /// Its name, by which programs ask for it.
    pub name: String,
    /// User whose processes may be this tenant's; root's always may.
    pub uid: Option<u32>,
    /// Bytes of memory that it believes to have.
    pub memory_bytes: u64,
    /// Parts of the card's memory and of the host's that it may have, in chunks.
    pub limits: Limits,
    /// Part of the card's time that it may have.
    pub time: VgpuParams,
    /// Fate of a program that does not answer.
    pub on_stuck: OnStuck,
}

/// An event.
#[derive(Debug)]
pub enum Event {
    /// A process has connected.
    Connected {
        /// Its number.
        session: SessionId,
        /// Process, by the socket's credentials.
        pid: u32,
        /// User, likewise.
        uid: u32,
        /// The tenant whose own socket it is.
        tenant: Option<TenantId>,
    },
    /// A process has said something.
    Said {
        /// The process's connection.
        session: SessionId,
        /// The message. Descriptors that came with it have become the pieces in `pieces`, in order.
        message: FromTenant,
        /// Numbers that the server gave the message's descriptors.
        pieces: Vec<PieceId>,
    },
    /// A process's connection has ended.
    Gone {
        /// The process's connection.
        session: SessionId,
    },
    /// A piece exists, zeroed if requested; `None`: it could not be made or imported.
    Made {
        /// The piece.
        piece: PieceId,
        /// The memory that it is of.
        memory: Option<Memory>,
    },
    /// Copies have ended.
    Copied {
        /// The batch.
        batch: BatchId,
        /// They were done.
        done: bool,
        /// Time that they took, in ns.
        ns: u64,
    },
    /// The driver has suspended a process, or could not.
    Suspended {
        /// The process's connection.
        session: SessionId,
        /// It could.
        done: bool,
    },
    /// A process that was given up or that has left was sent SIGKILL, or could not be.
    Signalled {
        /// Its tenant.
        tenant: TenantId,
        /// It was.
        done: bool,
    },
    /// A process was looked at, as [`Action::LookAt`] says.
    Looked {
        /// The process's connection.
        session: SessionId,
        /// It is stopped, by a signal, a debugger or a freezer: none of its threads runs.
        stopped: bool,
        /// As in [`Action::LookAt`].
        is_overdue: bool,
    },
    /// A process that was given up has ended.
    Ended {
        /// Its number.
        pid: u32,
    },
    /// Processes that use the card according to NVML, without the owner, which has `own` bytes of the card, if that is
    /// known.
    Users {
        /// The others.
        users: Vec<User>,
        /// Bytes of the owner.
        own: Option<u64>,
    },
    /// NVML or the driver do not list the processes that use the card any longer.
    Blind,
    /// Bytes of the card that are in use and that NVML counts for no process.
    InUseForNobody(u64),
    /// A piece of the card was given up, and the card has less more free than that.
    Missing {
        /// The tenant that had it.
        tenant: TenantId,
        /// It had said that it has released it; if not, its program may just end.
        sure: bool,
        /// Bytes that are missing.
        bytes: u64,
    },
    /// Time has passed.
    Tick,
}

/// A process that uses the card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Its number.
    pub pid: u32,
    /// Name of its program; empty if it has ended.
    pub program: String,
    /// Bytes of the card that it has itself, where that is known.
    pub bytes: Option<u64>,
    /// It had work on the card since the look before.
    pub occupies: bool,
}

/// A process that uses the card past the owner.
pub type UnmanagedProcess = User;

/// A process of a tenant with memory of the card past its account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unaccounted {
    /// Its number.
    pub pid: u32,
    /// Name of its program.
    pub program: String,
    /// Bytes past the account.
    pub bytes: u64,
}

/// Treatment of processes that use the card past the owner, and of a tenant's that have more of it past their accounts
/// than the tenant may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStranger {
    /// They are told of.
    #[default]
    Report,
    /// They are killed, where the owner may.
    Kill,
}

/// A thing to be done, in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message with the descriptors of these pieces.
    Send {
        /// The process's connection.
        session: SessionId,
        /// The message.
        message: FromOwner,
        /// The pieces.
        pieces: Vec<PieceId>,
    },
    /// Make a piece: allocate, map, zero. Answered by [`Event::Made`].
    Make {
        /// Its number.
        piece: PieceId,
        /// Memory of the piece.
        memory: Memory,
        /// It must hold zeros. If not, all of it is overwritten before a process sees it.
        zeroed: bool,
    },
    /// Map a piece that came from a tenant. Answered by [`Event::Made`].
    Import {
        /// Its number.
        piece: PieceId,
    },
    /// Give a piece up. It is not used by anything that was ordered later.
    Drop {
        /// Its number.
        piece: PieceId,
    },
    /// Copy pieces. Answered by [`Event::Copied`].
    Copy {
        /// For the answer.
        batch: BatchId,
        /// From the first to the second.
        pieces: Vec<(PieceId, PieceId)>,
        /// The destinations are of this memory.
        to: Memory,
    },
    /// Find out whether a process is stopped. Answered by [`Event::Looked`].
    LookAt {
        /// The process's connection.
        session: SessionId,
        /// Its turn has exceeded its tenant's limit: it is given up unless it is stopped.
        is_overdue: bool,
    },
    /// Suspend a process. Answered by [`Event::Suspended`].
    Suspend {
        /// The process's connection.
        session: SessionId,
    },
    /// Kill a process that has no connection.
    KillStranger {
        /// Its number.
        pid: u32,
    },
    /// Kill a process that is given up: it has no turn and no memory. Answered by [`Event::Signalled`], and by
    /// [`Event::Ended`] once it has ended.
    Kill {
        /// The process's connection, which ends.
        session: SessionId,
        /// Its tenant.
        tenant: TenantId,
    },
    /// A process has reported all memory that it had before this connection: it ends without a connection.
    Adopted {
        /// The process's connection.
        session: SessionId,
    },
    /// Poll without sleeping for a while: a turn is about to change hands, and the card idles until then.
    Attend {
        /// Length of that, in ns.
        ns: u64,
    },
    /// Close a connection, after the queued messages.
    Close {
        /// The process's connection.
        session: SessionId,
    },
}

/// Reason that a tenant cannot be added or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TenantError {
    /// The name is taken.
    #[error("there is a tenant `{0}` already")]
    Exists(String),
    /// The tenant does not exist.
    #[error("there is no tenant {0}")]
    Unknown(TenantId),
    /// Its programs have not ended.
    #[error("tenant `{name}` has {sessions} programs: end them first")]
    Busy {
        /// Its name.
        name: String,
        /// Number of its processes.
        sessions: usize,
    },
    /// The memory cannot be divided like that.
    #[error(transparent)]
    Memory(#[from] vram::Error),
    /// The time cannot be divided like that.
    #[error(transparent)]
    Time(#[from] sched::ConfigError),
}
