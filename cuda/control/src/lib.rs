//! Messages between the daemon and the owner of a CUDA card, which is a separate process.
//!
//! The messages are JSON objects, one per line, on the owner's standard input and output. The first message is
//! [`Settings`]. The owner replies with [`Answer::Ready`] or [`Answer::Failed`], and then replies to each [`Request`]
//! in order. The owner exits when its input is closed.
//!
//! Sizes are in bytes. Times are in nanoseconds unless the name specifies another unit. The crate only defines the
//! messages. It does not manage memory or set policy.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use gang::{CardId, GangId};
use sched::TenantId;
use sched::groups::Sharing;
use serde::{Deserialize, Serialize};
use tenancy::{MemoryView, TimeView};

/// Exit status of the owner process if its card was reset or has failed. In this case, the data of all programs on the
/// card is lost.
pub const CARD_LOST: i32 = 75;

/// A card's settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Path of NVIDIA's `libcuda.so.1`, or a name for the dynamic loader.
    pub driver: PathBuf,
    /// The card, identified by its index, its UUID with the prefix `GPU-`, or its PCI address.
    pub device: String,
    /// Card memory shared by tenants.
    pub card_bytes: u64,
    /// Host memory for chunks that are not on the card.
    pub host_bytes: u64,
    /// Host memory that is pinned in advance.
    pub host_ready_bytes: u64,
    /// Chunk size, the unit in which memory is allocated and moved.
    pub chunk_bytes: u64,
    /// Length of a slice of the card's time.
    pub slice_ns: u64,
    /// Limit on a tenant's work in flight while other tenants have work, in microseconds.
    pub run_ahead_us: u32,
    /// If set, the owner kills unmanaged processes instead of only reporting them. It also kills a tenant's processes
    /// if their unaccounted memory exceeds the tenant's limit.
    #[serde(default)]
    pub kills_strangers: bool,
    /// Number of bytes by which the memory usage of a process, or of the whole card, may exceed the accounted usage.
    #[serde(default)]
    pub margin_bytes: u64,
    /// Rules that can be changed while the owner runs.
    pub rules: Rules,
    /// File that records the served processes for the next owner.
    pub journal: PathBuf,
    /// MPS servers of share groups. This field is missing in settings from earlier versions.
    #[serde(default)]
    pub mps: Option<MpsSettings>,
    /// Links to the owners of other cards. This field is missing in settings from earlier versions.
    #[serde(default)]
    pub gangs: Option<GangSettings>,
    /// Other cards to which programs could move, in the form of [`Settings::device`]. This field is missing in settings
    /// from earlier versions.
    #[serde(default)]
    pub others: Vec<String>,
}

/// Settings for tenants with several cards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangSettings {
    /// Number of the card, unique on the host.
    pub card: CardId,
    /// Socket where the owner listens for the owners of other cards.
    pub socket: PathBuf,
}

/// The cards of a tenant with several cards. All owners of these cards get the same value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gang {
    /// Number of the tenant, unique on the host.
    pub number: GangId,
    /// The owners' sockets for all cards of the tenant, including this owner's card.
    pub cards: BTreeMap<CardId, PathBuf>,
}

/// Settings of MPS servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsSettings {
    /// Path of `nvidia-cuda-mps-control`.
    pub program: PathBuf,
    /// Folder that contains the servers' folders.
    pub folder: PathBuf,
}

/// Rules for sharing a card. They can be changed while the owner runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Scheduling policy of the card, with its parameters.
    pub scheduler: sched::Config,
    /// Host memory for chunks that are not on the card, at most the amount in [`Settings`].
    pub host_bytes: u64,
    /// Card memory to keep free when chunks are moved back to the card.
    pub low_water_bytes: u64,
    /// Name of the policy that selects chunks for eviction.
    pub victims: String,
    /// Interval at which chunks are moved back to the card.
    pub return_ns: u64,
    /// Minimum time before a moved chunk can be moved back.
    pub settle_ns: u64,
    /// Time without work after which a tenant yields to tenants with work.
    pub idle_ns: u64,
    /// Rules for quanta.
    pub quanta: Quanta,
}

/// Rules for quanta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quanta {
    /// `auto`, `off` or `forced`.
    pub mode: String,
    /// Length of the window over which traffic is measured.
    pub window_ns: u64,
    /// Traffic above which tenants are considered to be thrashing, in thousandths of the bytes that can be copied
    /// within the window.
    pub on_permille: u32,
    /// Free fraction of the card's memory at which quanta end, in thousandths.
    pub margin_permille: u32,
    /// Length of a quantum, as a multiple of the duration of the copies at its start.
    pub factor: u32,
    /// Minimum length of a quantum.
    pub min_ns: u64,
    /// Maximum length of a quantum.
    pub max_ns: u64,
}

/// A tenant's share of the card's memory. Sizes are multiples of the chunk size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryShare {
    /// Maximum memory on the card, or `None` for the tenant's full memory size.
    pub quota: Option<u64>,
    /// Memory on the card that is guaranteed to the tenant.
    pub guarantee: u64,
    /// Maximum amount of data in host memory.
    pub swap_cap: Option<u64>,
    /// Weight that applies while memory is scarce.
    pub weight: u32,
    /// Policy when the card is full: `swap`, `queue` or `refuse`.
    pub on_full: String,
}

/// A tenant's share of the card's time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeShare {
    /// Scheduling weight.
    pub weight: u32,
    /// Minimum share in thousandths.
    pub guarantee_permille: u32,
    /// Maximum share in thousandths.
    pub cap_permille: u32,
    /// Latency class: `interactive`, `normal` or `background`.
    pub class: String,
    /// Time limit for one unit of work, or `None` for no limit.
    pub max_run_ns: Option<u64>,
}

/// A tenant's settings on a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// Name of the tenant.
    pub name: String,
    /// Memory size that the tenant sees.
    pub memory_bytes: u64,
    /// Size of the memory window of the tenant's virtual machine, or 0 if it has none. The window counts as host memory
    /// of the card.
    #[serde(default)]
    pub window_bytes: u64,
    /// The tenant's share of the card's memory.
    pub memory: MemoryShare,
    /// The tenant's share of the card's time.
    pub time: TimeShare,
    /// If set, unresponsive programs are suspended instead of killed.
    pub suspends: bool,
    /// Path of the tenant's socket.
    pub socket: PathBuf,
    /// Access mode of the socket.
    pub mode: u32,
    /// User ID of the socket's owner.
    pub uid: Option<u32>,
    /// Group ID of the socket.
    pub gid: Option<u32>,
    /// Name of a group of tenants whose programs can use the card concurrently.
    #[serde(default)]
    pub share_group: Option<String>,
    /// Sharing mode that the tenant accepts.
    #[serde(default)]
    pub sharing: Sharing,
    /// The tenant's cards, if it has more than one.
    #[serde(default)]
    pub gang: Option<Gang>,
    /// Set if the tenant moves to this card. The owner then listens on its socket only after [`Request::Arrive`].
    #[serde(default)]
    pub arrives: bool,
}

/// A request from the daemon to an owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Creates a tenant and listens on its socket. The reply is [`Answer::Moving`] while other tenants use its
    /// guaranteed memory.
    Add(Tenant),
    /// Changes the limits and the memory size of the tenant with this name, but not its socket. As for
    /// [`Request::Add`], the reply can be [`Answer::Moving`].
    Change(Tenant),
    /// Removes a tenant. The reply is [`Answer::Leaving`] while the tenant has programs.
    Remove {
        /// Name of the tenant.
        name: String,
        /// If set, the tenant's programs are killed. Otherwise, only their connections are closed.
        kills: bool,
    },
    /// Checks that the programs of a tenant could move to another card. Changes nothing. The reply is
    /// [`Answer::Moving`] while programs of the card's previous owner have not reported their memory.
    MayLeave {
        /// Name of the tenant.
        name: String,
        /// UUID of the other card in NVML's form.
        to: String,
    },
    /// Prepares the move of the tenant with this name to another card: evicts its memory, and makes its programs unmap
    /// it. The reply is [`Answer::Moving`] until this is complete, and then [`Answer::Left`]. After a failure,
    /// [`Request::Stay`] must follow.
    Leave(String),
    /// Cancels the preparation of a move. The tenant with this name stays.
    Stay(String),
    /// Listens on the socket of a tenant that moves to this card.
    Arrive {
        /// Name of the tenant.
        name: String,
        /// Processes that have left their card. They are killed unless they connect soon.
        pids: Vec<u32>,
    },
    /// Queries which processes of the tenant with this name have arrived. The reply is [`Answer::Arrived`].
    Arrivals(String),
    /// Changes the rules of the card, with immediate effect.
    Tune(Box<Rules>),
    /// Releases the tenant with this name from quarantine and clears its strikes.
    Release(String),
    /// Starts recording the card's turns in the format of `sched::trace`, with this size limit in bytes.
    Record(usize),
    /// Ends the recording. The reply is [`Answer::Record`].
    EndRecord,
    /// Queries the card's state, including its time usage in intervals that begin at `since_ns` or later. Times refer
    /// to the owner's clock.
    View {
        /// Earliest start of an interval.
        since_ns: u64,
    },
}

/// An owner's reply to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The card is open.
    Ready {
        /// Name of the card's model.
        name: String,
        /// UUID of the card in NVML's form, for example `GPU-12345678-9abc-def0-0123-456789abcdef`.
        uuid: String,
        /// Total memory of the card.
        total_bytes: u64,
        /// Number of NVLink connections to each other card of the host, keyed by the other card's UUID. This field is
        /// missing in replies from earlier versions.
        #[serde(default)]
        links: BTreeMap<String, u32>,
    },
    /// The request has completed.
    Done,
    /// The request failed. Contains the reason. Except after [`Request::Leave`], the state is unchanged.
    Failed(String),
    /// The request cannot complete yet. Contains the reason. Repeat the request later.
    Moving(String),
    /// The request completes when these processes have exited.
    Leaving(Vec<u32>),
    /// These processes, which are all programs of the tenant, have unmapped their memory.
    Left(Vec<u32>),
    /// Progress of a move to this card.
    Arrived {
        /// Processes that use this card and have reported their memory.
        here: Vec<u32>,
        /// Reason why the move of a process has failed since the last query, or `None` if no move has failed.
        failed: Option<String>,
        /// Times of the moves of processes that have come from another card and now use this card.
        #[serde(default)]
        times: Vec<ArrivalTimes>,
    },
    /// The lines of the recording.
    Record(String),
    /// The card's current state.
    View(Box<Card>),
}

/// Times of a process's move to a card, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrivalTimes {
    /// Process ID.
    pub pid: u32,
    /// Time that the driver took to stop the process's calls, and to copy its remaining memory from the first card.
    pub checkpoint_us: u64,
    /// Time that the driver took to restore the process on this card.
    pub restore_us: u64,
    /// Time from the process's request to be moved until the owner had mapped the process's chunks and the driver had
    /// restored the process.
    pub arrive_us: u64,
    /// Number of the process's chunks.
    pub chunks: u64,
}

/// The current state of a card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// UUID of the card in NVML's form. It is empty in replies from earlier versions.
    #[serde(default)]
    pub uuid: String,
    /// Distribution of the card's memory.
    pub memory: MemoryView,
    /// Distribution of the card's time. Times refer to the owner's clock, which restarts with each owner.
    pub time: TimeView,
    /// Number of granted turns.
    pub turns: u64,
    /// Number of moved chunks.
    pub relocations: u64,
    /// Number of relocation orders that programs declined.
    pub declined: u64,
    /// Tenant state specific to this kind of card.
    pub tenants: BTreeMap<TenantId, TenantView>,
    /// Unmanaged processes that use the card: process ID, program name, and bytes on the card if known.
    pub strangers: Vec<(u32, String, Option<u64>)>,
    /// Actions on programs and tenants since the last [`Answer::View`], oldest first.
    pub incidents: Vec<Incident>,
    /// Used card memory that cannot be attributed to any process or tenant, in bytes.
    pub unexplained_bytes: u64,
}

/// The current state of a tenant, except its memory and time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantView {
    /// Name of the tenant.
    pub name: String,
    /// The tenant's programs: process ID and name.
    pub programs: Vec<(u32, String)>,
    /// Time within the tenant's turns during which it had work in flight, according to the card's events.
    pub busy_ns: u64,
    /// Part of `busy_ns` during which only copies were in flight.
    pub copy_ns: u64,
    /// Number of submissions, excluding those made while the tenant was alone.
    pub launches: u64,
    /// Number of the tenant's programs that were killed because they were unresponsive.
    pub killed: u64,
    /// Number of the tenant's abandoned programs that could not be killed.
    pub kill_failures: u64,
    /// Number of the tenant's programs that were suspended because they were unresponsive.
    pub suspended: u64,
    /// The tenant's last abandoned programs (at most 4), oldest first.
    pub given_up: Vec<GivenUp>,
    /// Time by which the tenant's turn exceeds its limit, or 0 if the turn is within the limit.
    pub overrun_ns: u64,
    /// The tenant's processes with unaccounted card memory: process ID, program name and bytes.
    pub unaccounted: Vec<(u32, String, u64)>,
    /// Card memory that the tenant has returned, but that is still referenced.
    pub kept_bytes: u64,
    /// Part of the unaccounted and kept memory that exceeds the tenant's limits.
    pub over_quota_bytes: u64,
    /// State within the tenant's share group.
    #[serde(default)]
    pub sharing: Option<SharingView>,
    /// State of the turns, if the tenant has several cards.
    #[serde(default)]
    pub gang: Option<GangView>,
}

/// State of a tenant with several cards from the perspective of one card's owner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangView {
    /// Cards with unreachable owners.
    pub missing: Vec<CardId>,
    /// Set if the tenant has work on this card.
    pub has_work: bool,
    /// Set if the tenant's gate on this card is open.
    pub runs: bool,
    /// Set if this card waits for the tenant's other cards.
    pub is_offered: bool,
    /// Number of the tenant's turns.
    pub turns: u64,
    /// Number of turns that did not begin because other cards were not free in time.
    pub cancelled: u64,
    /// Time during which this card was free for the tenant and waited for the other cards.
    pub gather_ns: u64,
    /// Longest time for which this card was free for the tenant and waited for the other cards.
    pub longest_gather_ns: u64,
    /// Time within the tenant's turns during which the tenant had no work on this card.
    pub rest_ns: u64,
    /// 99th percentile of the waiting times for turns.
    pub wait_p99_ns: u64,
}

impl From<gang::GangView> for GangView {
    fn from(view: gang::GangView) -> Self {
        Self {
            missing: view.missing.into_iter().collect(),
            has_work: view.wants,
            runs: view.runs,
            is_offered: view.is_offered,
            turns: view.counts.turns,
            cancelled: view.counts.cancelled,
            gather_ns: view.counts.gather_ns,
            longest_gather_ns: view.counts.longest_gather_ns,
            rest_ns: view.counts.rest_ns,
            wait_p99_ns: view.counts.waits.quantile(990),
        }
    }
}

impl Gang {
    /// Returns the numbers of the cards.
    #[must_use]
    pub fn card_numbers(&self) -> BTreeSet<CardId> {
        self.cards.keys().copied().collect()
    }
}

/// A tenant's state within its share group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharingView {
    /// The strictest mode of the group's members.
    pub mode: Sharing,
    /// Set if those members of the group that can use the card concurrently do so.
    pub is_together: bool,
    /// Set if this tenant uses the card concurrently with other members.
    pub takes_part: bool,
    /// Card time in ns to which the tenant's share entitles it, minus the card time of its work. Negative if its work
    /// exceeds its share.
    pub lack_ns: i64,
    /// The tenant's programs that are not clients of the group's MPS server: process ID and name. While such programs
    /// exist, the tenant gets exclusive turns.
    pub not_clients: Vec<(u32, String)>,
    /// State of the group's MPS server.
    #[serde(default)]
    pub server: ServerState,
    /// If the group needs a server, the value of `CUDA_MPS_PIPE_DIRECTORY` for programs that the tenant starts.
    #[serde(default)]
    pub pipes: Option<PathBuf>,
}

/// State of a group's MPS server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerState {
    /// The group does not need a server, because its members only take turns.
    #[default]
    Unused,
    /// The server is starting.
    Starting,
    /// The server is running.
    Serves,
    /// The server is not running. Contains the reason.
    Unavailable(String),
}

/// An action of the owner on a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incident {
    /// Name of the tenant, or of the group.
    pub tenant: String,
    /// The owner's action.
    pub action: Action,
}

/// An action on a tenant or one of its programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// A program was killed.
    Killed(GivenUp),
    /// A program was abandoned, but could not be killed.
    KillFailed(GivenUp),
    /// A program was suspended.
    Suspended(GivenUp),
    /// A program's work exceeded a limit. Contains the tenant's number of strikes.
    Struck(u32),
    /// The tenant gets no turns until it is released.
    Quarantined,
    /// This number of earlier incidents has been dropped.
    Forgotten(u64),
    /// A group's MPS server has exited or terminated its clients. The incident names the group.
    ServerEnded {
        /// Human-readable reason.
        why: String,
        /// The programs that lost their work.
        programs: Vec<GivenUp>,
    },
    /// A group's MPS server was restarted. The incident names the group.
    ServerStarted,
}

/// A program that the owner has abandoned.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenUp {
    /// Process ID of the program.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Human-readable reason.
    pub why: String,
}
