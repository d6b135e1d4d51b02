//! Events and actions of the owner's state machine.

use cuda_protocol::{FromOwner, FromTenant};
use gang::{CardId, Message};
use owner_driver::{FetchTimes, Memory, New};
pub use owner_driver::{PieceId, User};
use owner_host::{LinkEvent, StateMessage};
pub use owner_host::{OnStranger, OnStuck, ShareGroup, TenantSpec, Unaccounted};
use vram::TenantId;

/// Number of a process's connection. The server never reuses a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// Number of a batch of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// Input of the state machine.
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
        /// Tenant whose socket the process connected to, or `None` for the common socket.
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
    /// A process's connection was closed.
    Gone {
        /// The process's connection.
        session: SessionId,
    },
    /// The allocation or import of a piece has succeeded or failed.
    Made {
        /// Number of the piece.
        piece: PieceId,
        /// Kind of memory of the piece, or `None` if the piece could not be allocated or imported.
        memory: Option<Memory>,
    },
    /// A batch of copies has completed or failed.
    Copied {
        /// Number of the batch.
        batch: BatchId,
        /// Set if the copies succeeded.
        done: bool,
        /// Duration of the copies, in ns.
        ns: u64,
    },
    /// The driver has suspended a process or failed to do so.
    Suspended {
        /// The process's connection.
        session: SessionId,
        /// Set on success.
        done: bool,
    },
    /// The driver has moved a process to this card or failed to do so.
    Fetched {
        /// The process's connection.
        session: SessionId,
        /// Times of the driver's calls, or its error.
        done: Result<FetchTimes, String>,
    },
    /// SIGKILL was sent to a process that was abandoned or has left, or sending it failed.
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
        /// Set if a signal, a debugger or a freezer has stopped all threads of the process.
        stopped: bool,
        /// Same as `is_overdue` in [`Action::LookAt`].
        is_overdue: bool,
    },
    /// An abandoned process has exited.
    Ended {
        /// Process ID.
        pid: u32,
    },
    /// NVML's list of the processes that use the card, excluding the owner.
    Users {
        /// The processes that use the card, excluding the owner.
        users: Vec<User>,
        /// Card memory that the owner uses in bytes, if known.
        own: Option<u64>,
    },
    /// NVML or the driver can no longer list the processes that use the card.
    Blind,
    /// Used card memory that NVML does not attribute to any process, in bytes.
    InUseForNobody(u64),
    /// A card piece was released, but the card's free memory grew by less than its size.
    Missing {
        /// Tenant to which the piece belonged.
        tenant: TenantId,
        /// Set if the tenant had reported the release. Otherwise, its program may still be exiting.
        sure: bool,
        /// Size of the missing memory in bytes.
        bytes: u64,
    },
    /// The MPS server of a group has changed.
    Mps {
        /// Name of the group.
        group: String,
        /// Report about the group's server.
        report: cuda_mps::Report,
    },
    /// The owner of another card has connected, disconnected or sent a message.
    Link(LinkEvent),
    /// Time has passed.
    Tick,
}

/// A process that uses the card but is not managed by the owner.
pub type UnmanagedProcess = User;

/// Output of the state machine. The server executes actions in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message with the descriptors of the given pieces.
    Send {
        /// The process's connection.
        session: SessionId,
        /// The message to send.
        message: FromOwner,
        /// Numbers of the pieces whose descriptors the message carries.
        pieces: Vec<PieceId>,
    },
    /// Allocate and map a piece, and zero it if requested. [`Event::Made`] reports the result.
    Make {
        /// Number of the piece.
        piece: PieceId,
        /// Kind of memory of the piece.
        memory: Memory,
        /// Set if the piece must be zeroed. Otherwise, the whole piece is overwritten before a process gets it.
        zeroed: bool,
    },
    /// Map a piece that a tenant has sent. [`Event::Made`] reports the result.
    Import {
        /// Number of the piece.
        piece: PieceId,
    },
    /// Release a piece. Later actions do not refer to it.
    Drop {
        /// Number of the piece.
        piece: PieceId,
    },
    /// Copy pieces. [`Event::Copied`] reports the result.
    Copy {
        /// Number of the batch.
        batch: BatchId,
        /// Pairs of source and destination.
        pieces: Vec<(PieceId, PieceId)>,
        /// Kind of memory of the destinations.
        to: Memory,
    },
    /// Check whether a process is stopped. [`Event::Looked`] reports the result.
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
        /// UUIDs of the cards that the process's driver sees.
        sees: Vec<[u8; 16]>,
    },
    /// Kill an unmanaged process.
    KillStranger {
        /// Process ID.
        pid: u32,
    },
    /// Kill an abandoned process, which has no turn and no memory. [`Event::Signalled`] reports the result, and
    /// [`Event::Ended`] the exit of the process.
    Kill {
        /// The process's connection, which the state machine has already removed.
        session: SessionId,
        /// Tenant of the process.
        tenant: TenantId,
        /// True if the process is a client of an MPS server.
        is_client: bool,
    },
    /// Drop the entry for the process's earlier connection, because the process has reported all memory from that
    /// connection.
    Adopted {
        /// The process's connection.
        session: SessionId,
    },
    /// Poll without sleeping for a while, because the current turn is about to end and the card then idles until the
    /// next one.
    Attend {
        /// Duration of the polling, in ns.
        ns: u64,
    },
    /// Start a group's MPS server, or keep one that was to be retired. [`Event::Mps`] reports the result.
    StartServer {
        /// Name of the group.
        group: String,
        /// User ID of the server and its clients, if known.
        user: Option<u32>,
    },
    /// Stop a group's MPS server as soon as it has no clients.
    RetireServer {
        /// Name of the group.
        group: String,
    },
    /// Poll the clients of a group's MPS server soon. [`Event::Mps`] reports the result.
    PollServer {
        /// Name of the group.
        group: String,
    },
    /// Send the state of a tenant's memory quantum to the owner of another card.
    TellQuantum(StateMessage),
    /// Probe the owner of another card.
    Probe {
        /// Number of the other card.
        card: CardId,
    },
    /// Send a message to the owner of another card.
    Tell {
        /// Number of the other card.
        card: CardId,
        /// The message to send.
        message: Message,
    },
    /// Close a connection. Messages of earlier actions are sent first, unless they must wait.
    Close {
        /// The process's connection.
        session: SessionId,
    },
}

/// Reason why a tenant cannot be added, changed or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TenantError {
    /// The name is already in use.
    #[error("tenant `{0}` already exists")]
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
    /// The cards of a tenant with several cards are invalid for this owner.
    #[error("tenant `{0}` cannot have these cards: {1}")]
    Cards(String, &'static str),
    /// The card's host memory is too small for the tenant's window.
    #[error(
        "a window of {bytes} bytes does not fit into the card's host memory of {host_bytes} bytes, of which {others} bytes \
         are for windows of other VMs"
    )]
    Window {
        /// Size of the window, in bytes.
        bytes: u64,
        /// Total size of the other windows, in bytes.
        others: u64,
        /// Size of the card's host memory, in bytes.
        host_bytes: u64,
    },
    /// The memory settings are invalid or cannot be met.
    #[error(transparent)]
    Memory(#[from] vram::Error),
    /// The scheduling settings are invalid.
    #[error(transparent)]
    Time(#[from] sched::ConfigError),
}

impl From<cuda_pieces::Order> for Action {
    fn from(order: cuda_pieces::Order) -> Self {
        match order {
            cuda_pieces::Order::Make(New { piece, memory, zeroed }) => Self::Make { piece, memory, zeroed },
            cuda_pieces::Order::Drop(piece) => Self::Drop { piece },
        }
    }
}
