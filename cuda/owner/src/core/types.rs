//! Events and actions of the owner's state machine.

use cuda_protocol::{FromOwner, FromTenant};
use owner_driver::Memory;
use sched::VgpuParams;
use sched::groups::Sharing;
use vram::{Limits, TenantId};

/// A connection of a process, as the server numbers them. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// One physical allocation of a chunk's size. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceId(pub u64);

/// A batch of copies, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// Action on a tenant's process that holds the card or its memory and does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnStuck {
    /// The process is killed.
    #[default]
    Kill,
    /// The driver suspends the process if possible; otherwise the process is killed.
    Suspend,
}

/// An operator's settings of a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantSpec {
    /// Name by which programs identify the tenant.
    pub name: String,
    /// User whose processes may belong to this tenant; root's always may.
    pub uid: Option<u32>,
    /// Size in bytes of the memory that the tenant sees.
    pub memory_bytes: u64,
    /// Limits of the tenant's memory on the card and in host memory, in chunks.
    pub limits: Limits,
    /// The tenant's share of the card's time.
    pub time: VgpuParams,
    /// Action on a program that does not answer.
    pub on_stuck: OnStuck,
    /// Group of tenants whose programs may use the card at the same time.
    pub share_group: Option<ShareGroup>,
}

/// A tenant's group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareGroup {
    /// Name of the group.
    pub name: String,
    /// Way of sharing that the tenant accepts; the strictest of all members is that of the group.
    pub sharing: Sharing,
    /// User of the tenant's programs, if it is known. An MPS server serves one user.
    pub user: Option<u32>,
}

/// An event.
#[derive(Debug)]
pub enum Event {
    /// A process has connected.
    Connected {
        /// Number of the connection.
        session: SessionId,
        /// Process, according to the socket's credentials.
        pid: u32,
        /// User, from the same credentials.
        uid: u32,
        /// The tenant that the socket belongs to, if it is a tenant's own socket.
        tenant: Option<TenantId>,
    },
    /// A process has sent a message.
    Said {
        /// The process's connection.
        session: SessionId,
        /// The message. Descriptors that came with it have become the pieces in `pieces`, in order.
        message: FromTenant,
        /// Numbers that the server assigned to the message's descriptors.
        pieces: Vec<PieceId>,
    },
    /// A process's connection has ended.
    Gone {
        /// The process's connection.
        session: SessionId,
    },
    /// A piece exists, zeroed if requested; `None` if it could not be made or imported.
    Made {
        /// The piece.
        piece: PieceId,
        /// The memory of the piece.
        memory: Option<Memory>,
    },
    /// Copies have ended.
    Copied {
        /// The batch.
        batch: BatchId,
        /// Set if the copies succeeded.
        done: bool,
        /// Duration of the copies, in ns.
        ns: u64,
    },
    /// The driver has suspended a process, or could not.
    Suspended {
        /// The process's connection.
        session: SessionId,
        /// Set on success.
        done: bool,
    },
    /// A process that was given up or has left was sent SIGKILL, or could not be.
    Signalled {
        /// Tenant of the process.
        tenant: TenantId,
        /// Set if the signal was sent.
        done: bool,
    },
    /// Answer to [`Action::LookAt`].
    Looked {
        /// The process's connection.
        session: SessionId,
        /// Set if the process is stopped by a signal, a debugger or a freezer: none of its threads runs.
        stopped: bool,
        /// Same as `is_overdue` in [`Action::LookAt`].
        is_overdue: bool,
    },
    /// A process that was given up has ended.
    Ended {
        /// Number of the process.
        pid: u32,
    },
    /// Processes that use the card according to NVML, except the owner, which has `own` bytes of the card, if known.
    Users {
        /// The other processes.
        users: Vec<User>,
        /// Number of bytes of the card that the owner has.
        own: Option<u64>,
    },
    /// NVML or the driver do not list the processes that use the card any longer.
    Blind,
    /// Number of bytes of the card that are in use and that NVML does not count for a process.
    InUseForNobody(u64),
    /// A piece of the card was released, and the card's free memory grew by less than its size.
    Missing {
        /// The tenant that had the piece.
        tenant: TenantId,
        /// The tenant had reported the release; if not, its program may just be ending.
        sure: bool,
        /// Number of missing bytes.
        bytes: u64,
    },
    /// The MPS server of a group has changed.
    Mps {
        /// Name of the group.
        group: String,
        /// The change.
        report: cuda_mps::Report,
    },
    /// Time has passed.
    Tick,
}

/// A process that uses the card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Number of the process.
    pub pid: u32,
    /// Name of the process's program; empty if the process has ended.
    pub program: String,
    /// Number of bytes of the card that the process itself has, if known.
    pub bytes: Option<u64>,
    /// Set if the process had work on the card since the previous poll.
    pub occupies: bool,
}

/// A process that bypasses the owner to use the card.
pub type UnmanagedProcess = User;

/// A process of a tenant with memory of the card beyond its account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unaccounted {
    /// Number of the process.
    pub pid: u32,
    /// Name of its program.
    pub program: String,
    /// Bytes in excess of the account.
    pub bytes: u64,
}

/// Action on processes that bypass the owner, and on a tenant's processes whose memory beyond their accounts exceeds
/// the tenant's limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStranger {
    /// Report them.
    #[default]
    Report,
    /// Kill them, if the owner has the right to.
    Kill,
}

/// An action to execute, in order.
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
        /// Number of the piece.
        piece: PieceId,
        /// Memory of the piece.
        memory: Memory,
        /// Set if the piece must be zeroed. Otherwise all of it is overwritten before a process sees it.
        zeroed: bool,
    },
    /// Map a piece that came from a tenant. Answered by [`Event::Made`].
    Import {
        /// Number of the piece.
        piece: PieceId,
    },
    /// Release a piece. Later orders do not use it.
    Drop {
        /// Number of the piece.
        piece: PieceId,
    },
    /// Copy pieces. Answered by [`Event::Copied`].
    Copy {
        /// Identifies the answer.
        batch: BatchId,
        /// Pairs of source and destination.
        pieces: Vec<(PieceId, PieceId)>,
        /// Memory of the destinations.
        to: Memory,
    },
    /// Check whether a process is stopped. Answered by [`Event::Looked`].
    LookAt {
        /// The process's connection.
        session: SessionId,
        /// Set if its turn has exceeded its tenant's limit: the process is then given up unless it is stopped.
        is_overdue: bool,
    },
    /// Suspend a process. Answered by [`Event::Suspended`].
    Suspend {
        /// The process's connection.
        session: SessionId,
    },
    /// Kill a process that has no connection.
    KillStranger {
        /// Number of the process.
        pid: u32,
    },
    /// Kill a process that is given up: it has no turn and no memory. Answered by [`Event::Signalled`], and by
    /// [`Event::Ended`] once it has ended.
    Kill {
        /// The process's connection, which ends.
        session: SessionId,
        /// Tenant of the process.
        tenant: TenantId,
    },
    /// A process has reported all memory that it had before this connection; its earlier, unconnected record ends.
    Adopted {
        /// The process's connection.
        session: SessionId,
    },
    /// Poll without sleeping for a while: a turn is about to change hands, and the card is idle until then.
    Attend {
        /// Duration of the polling, in ns.
        ns: u64,
    },
    /// Start the MPS server of a group, or keep one that was to be retired. Answered by [`Event::Mps`].
    StartServer {
        /// Name of the group.
        group: String,
        /// User of the server and its clients, if it is known.
        user: Option<u32>,
    },
    /// End the MPS server of a group as soon as it has no clients.
    RetireServer {
        /// Name of the group.
        group: String,
    },
    /// Poll the clients of a group's MPS server soon. Answered by [`Event::Mps`].
    PollServer {
        /// Name of the group.
        group: String,
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
    /// The tenant's programs have not ended.
    #[error("tenant `{name}` has {sessions} programs: end them first")]
    Busy {
        /// Name of the tenant.
        name: String,
        /// Number of its processes.
        sessions: usize,
    },
    /// The memory cannot be divided in this way.
    #[error(transparent)]
    Memory(#[from] vram::Error),
    /// The time cannot be divided in this way.
    #[error(transparent)]
    Time(#[from] sched::ConfigError),
}
