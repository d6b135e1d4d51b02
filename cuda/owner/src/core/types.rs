//! Events and actions of the owner's state machine.

use cuda_control::Gang;
use cuda_protocol::{FromOwner, FromTenant};
use gang::{CardId, Message};
use owner_driver::{FetchTimes, Memory};
pub use owner_driver::{PieceId, User};
use owner_host::LinkEvent;
use sched::VgpuParams;
use sched::groups::Sharing;
use vram::{Limits, TenantId};

/// A process's connection, as numbered by the server. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// Number of a batch of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// Action on an unresponsive process of a tenant that has the card or memory.
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
    /// User whose processes may belong to this tenant. Processes of root always may.
    pub uid: Option<u32>,
    /// Size in bytes of the memory that the tenant sees.
    pub memory_bytes: u64,
    /// Size in bytes of the tenant's window, which counts as host memory of the card; 0 without a window.
    pub window_bytes: u64,
    /// Limits of the tenant's memory on the card and in host memory, in chunks.
    pub limits: Limits,
    /// The tenant's share of the card's time.
    pub time: VgpuParams,
    /// Action on an unresponsive program.
    pub on_stuck: OnStuck,
    /// Group of tenants whose programs may use the card at the same time.
    pub share_group: Option<ShareGroup>,
    /// The tenant's cards, if it has several.
    pub gang: Option<Gang>,
}

/// A tenant's group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareGroup {
    /// Name of the group.
    pub name: String,
    /// Kind of sharing that the tenant accepts. The strictest kind among all members applies to the group.
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
        /// Process ID from the socket's credentials.
        pid: u32,
        /// User ID from the same credentials.
        uid: u32,
        /// The tenant to whose own socket the process connected, if any.
        tenant: Option<TenantId>,
    },
    /// A process has sent a message.
    Said {
        /// The process's connection.
        session: SessionId,
        /// The message. Each descriptor of the message became a piece in `pieces`, in order.
        message: FromTenant,
        /// Numbers that the server assigned to the message's descriptors.
        pieces: Vec<PieceId>,
    },
    /// A process's connection has ended.
    Gone {
        /// The process's connection.
        session: SessionId,
    },
    /// A piece was made, zeroed if requested. `None` means that it could not be made or imported.
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
    /// The driver has suspended a process, or has failed to.
    Suspended {
        /// The process's connection.
        session: SessionId,
        /// Set on success.
        done: bool,
    },
    /// The driver has moved a process to this card, or has failed to.
    Fetched {
        /// The process's connection.
        session: SessionId,
        /// Times of the driver's calls, or its error.
        done: Result<FetchTimes, String>,
    },
    /// SIGKILL was sent to a process that was abandoned or has left, or could not be sent.
    Signalled {
        /// Tenant of the process.
        tenant: TenantId,
        /// Set if the signal was sent.
        done: bool,
    },
    /// Result of [`Action::LookAt`].
    Looked {
        /// The process's connection.
        session: SessionId,
        /// Set if no thread of the process runs, because a signal, a debugger or a freezer has stopped it.
        stopped: bool,
        /// Same as `is_overdue` in [`Action::LookAt`].
        is_overdue: bool,
    },
    /// An abandoned process has exited.
    Ended {
        /// Process ID.
        pid: u32,
    },
    /// NVML's list of the processes that use the card, without the owner, which uses `own` bytes of the card, if known.
    Users {
        /// The other processes.
        users: Vec<User>,
        /// Number of bytes of the card that the owner uses.
        own: Option<u64>,
    },
    /// NVML or the driver can no longer list the processes that use the card.
    Blind,
    /// Number of used bytes of the card that NVML does not attribute to any process.
    InUseForNobody(u64),
    /// A piece of the card was released, and the card's free memory grew by less than its size.
    Missing {
        /// The tenant that had the piece.
        tenant: TenantId,
        /// Set if the tenant had reported the release. Otherwise, its program may just be exiting.
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
    /// The connection to the owner of another card has begun or ended, or a message has come from it.
    Link(LinkEvent),
    /// Time has passed.
    Tick,
}

/// A process that bypasses the owner to use the card.
pub type UnmanagedProcess = User;

/// A process of a tenant that has card memory beyond its account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unaccounted {
    /// Process ID.
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
    /// Kill these processes, if the owner is permitted to.
    Kill,
}

/// An action to execute. Actions are executed in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message, with the descriptors of these pieces.
    Send {
        /// The process's connection.
        session: SessionId,
        /// The message.
        message: FromOwner,
        /// The pieces.
        pieces: Vec<PieceId>,
    },
    /// Make a piece: allocate, map and zero it. [`Event::Made`] reports the result.
    Make {
        /// Number of the piece.
        piece: PieceId,
        /// Memory of the piece.
        memory: Memory,
        /// Set if the piece must be zeroed. Otherwise the whole piece is overwritten before a process gets it.
        zeroed: bool,
    },
    /// Map a piece that a tenant has sent. [`Event::Made`] reports the result.
    Import {
        /// Number of the piece.
        piece: PieceId,
    },
    /// Release a piece. Later actions do not use it.
    Drop {
        /// Number of the piece.
        piece: PieceId,
    },
    /// Copy pieces. [`Event::Copied`] reports the result.
    Copy {
        /// Number that identifies the result.
        batch: BatchId,
        /// Pairs of source and destination.
        pieces: Vec<(PieceId, PieceId)>,
        /// Memory of the destinations.
        to: Memory,
    },
    /// Check if a process is stopped. [`Event::Looked`] reports the result.
    LookAt {
        /// The process's connection.
        session: SessionId,
        /// Set if the turn of the process has exceeded its tenant's limit. The process is then abandoned unless it is
        /// stopped.
        is_overdue: bool,
    },
    /// Suspend a process. [`Event::Suspended`] reports the result.
    Suspend {
        /// The process's connection.
        session: SessionId,
    },
    /// Make the driver move a process to this card from another one. [`Event::Fetched`] reports the result.
    Fetch {
        /// The process's connection.
        session: SessionId,
        /// UUID of the other card.
        from: [u8; 16],
        /// Cards that the process's driver sees.
        sees: Vec<[u8; 16]>,
    },
    /// Kill a process that has no connection.
    KillStranger {
        /// Process ID.
        pid: u32,
    },
    /// Kill an abandoned process, which has no turn and no memory. [`Event::Signalled`] reports the result, and
    /// [`Event::Ended`] that the process has exited.
    Kill {
        /// The process's connection, which is closed.
        session: SessionId,
        /// Tenant of the process.
        tenant: TenantId,
    },
    /// A process has reported all memory that it had before this connection. Its entry as a process without a
    /// connection is no longer needed.
    Adopted {
        /// The process's connection.
        session: SessionId,
    },
    /// Poll without sleeping for a while, because a turn is about to change and the card is idle until then.
    Attend {
        /// Duration of the polling, in ns.
        ns: u64,
    },
    /// Start the MPS server of a group, or keep one that was to be retired. [`Event::Mps`] reports the result.
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
    /// Poll the clients of a group's MPS server soon. [`Event::Mps`] reports the result.
    PollServer {
        /// Name of the group.
        group: String,
    },
    /// Ask the owner of another card whether it responds.
    Probe {
        /// The other card.
        card: CardId,
    },
    /// Send a message to the owner of another card.
    Tell {
        /// The other card.
        card: CardId,
        /// The message.
        message: Message,
    },
    /// Close a connection after the queued messages were sent.
    Close {
        /// The process's connection.
        session: SessionId,
    },
}

/// Reasons for which a tenant cannot be added or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TenantError {
    /// The name is taken.
    #[error("there is a tenant `{0}` already")]
    Exists(String),
    /// The tenant does not exist.
    #[error("there is no tenant {0}")]
    Unknown(TenantId),
    /// The tenant still has programs.
    #[error("tenant `{name}` still has {sessions} programs: end them first")]
    Busy {
        /// Name of the tenant.
        name: String,
        /// Number of its processes.
        sessions: usize,
    },
    /// The cards of a tenant with several cards do not fit this owner.
    #[error("tenant `{0}` cannot have these cards: {1}")]
    Cards(String, &'static str),
    /// The card's host memory is too small for the tenant's window.
    #[error(
        "a window of {bytes} bytes does not fit into the card's host memory of {host_bytes} bytes, of which {others} bytes \
         are for windows of other VMs"
    )]
    Window {
        /// Size of the window.
        bytes: u64,
        /// Total size of the other windows.
        others: u64,
        /// Host memory of the card.
        host_bytes: u64,
    },
    /// The memory cannot be divided in this way.
    #[error(transparent)]
    Memory(#[from] vram::Error),
    /// The time cannot be divided in this way.
    #[error(transparent)]
    Time(#[from] sched::ConfigError),
}
