//! Requests of the daemon to the owner of a CUDA card, which is a process of its own, and the owner's answers.
//!
//! Over the owner's standard input and output, one JSON object a line: first [`Settings`], answered by
//! [`Answer::Ready`] or [`Answer::Failed`]; then each [`Request`], answered in order. The owner ends when its input
//! does.
//!
//! Sizes are bytes, times nanoseconds unless a name says otherwise. No memory, no policy: only the messages.

#![forbid(unsafe_code)]

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Status with which the owner's process ends when its card was reset or has failed: all that programs had there is
/// lost.
pub const CARD_LOST: i32 = 75;

/// A card's settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Path of NVIDIA's library, or its name for the loader.
    pub driver: PathBuf,
    /// The card: its number, `GPU-` and its UUID, or its PCI address.
    pub device: String,
    /// Memory of the card that tenants share.
    pub card_bytes: u64,
    /// Host memory for chunks that are not on the card.
    pub host_bytes: u64,
    /// Host memory that is ready before it is needed.
    pub host_ready_bytes: u64,
    /// Unit in which memory is given and moved.
    pub chunk_bytes: u64,
    /// Length of a slice of the card's time.
    pub slice_ns: u64,
    /// Microseconds of work in flight of a tenant that is not alone.
    pub run_ahead_us: u32,
    /// Kill unmanaged processes instead of only reporting them; also a tenant's processes that have more memory past
    /// their accounts than the tenant's limit.
    #[serde(default)]
    pub kills_strangers: bool,
    /// Memory by which a process, and all of the card, may be beyond the accounts.
    #[serde(default)]
    pub margin_bytes: u64,
    /// Rules that can be changed while it works.
    pub rules: Rules,
    /// File with the processes served, for the next owner.
    pub journal: PathBuf,
}

/// Rules by which a card is shared; they can be changed while it works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Policy for the card's time, with its parameters.
    pub scheduler: sched::Config,
    /// Host memory for chunks that are not on the card, at most that of [`Settings`].
    pub host_bytes: u64,
    /// Memory of the card that stays free when chunks come back.
    pub low_water_bytes: u64,
    /// Policy for the order of evictions, by its name.
    pub victims: String,
    /// Time between two checks whether chunks can return to the card.
    pub return_ns: u64,
    /// Time in which a chunk that has moved does not move back.
    pub settle_ns: u64,
    /// Time without work after which a tenant yields to those that work.
    pub idle_ns: u64,
    /// Rules for quanta.
    pub quanta: Quanta,
}

/// Rules for quanta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quanta {
    /// `auto`, `off` or `forced`.
    pub mode: String,
    /// Time over which traffic is looked at.
    pub window_ns: u64,
    /// Thousandths of the bytes that can be copied in it, above which tenants thrash.
    pub on_permille: u32,
    /// Thousandths of the card's memory that must be free for quanta to end.
    pub margin_permille: u32,
    /// Length of a quantum, as a multiple of the copies at its start.
    pub factor: u32,
    /// Shortest quantum.
    pub min_ns: u64,
    /// Longest quantum.
    pub max_ns: u64,
}

/// Part of a tenant in the card's memory; sizes in bytes of whole chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryShare {
    /// Most that it may have on the card; none for its whole memory size.
    pub quota: Option<u64>,
    /// Memory that it always gets on the card.
    pub guarantee: u64,
    /// Most that it may have in host memory.
    pub swap_cap: Option<u64>,
    /// Weight while memory is short.
    pub weight: u32,
    /// Policy when the card is full: `swap`, `queue` or `refuse`.
    pub on_full: String,
}

/// Part of a tenant in the card's time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeShare {
    /// Weight.
    pub weight: u32,
    /// Least part, in thousandths.
    pub guarantee_permille: u32,
    /// Greatest part, in thousandths.
    pub cap_permille: u32,
    /// Latency class: `interactive`, `normal` or `background`.
    pub class: String,
    /// Limit of a turn that does not end; `None` for no limit.
    pub max_run_ns: Option<u64>,
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// Memory that it believes to have.
    pub memory_bytes: u64,
    /// Part of the card's memory.
    pub memory: MemoryShare,
    /// Part of the card's time.
    pub time: TimeShare,
    /// A program that does not answer is suspended by the driver, not killed.
    pub suspends: bool,
    /// Path of its socket.
    pub socket: PathBuf,
    /// Access mode of the socket.
    pub mode: u32,
    /// Owner of the socket.
    pub uid: Option<u32>,
    /// Group of the socket.
    pub gid: Option<u32>,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Makes a tenant and listens at its socket. Answered by [`Answer::Moving`] while its guaranteed memory is in use.
    Add(Tenant),
    /// Changes what a tenant of this name may have, from now on; its memory's size and its socket stay. Answered by
    /// [`Answer::Moving`] as [`Request::Add`] is.
    Change(Tenant),
    /// Takes a tenant away by its name. Answered by [`Answer::Leaving`] as long as programs of it are there.
    Remove {
        /// Its name.
        name: String,
        /// Its programs are killed; if not, their connections end.
        kills: bool,
    },
    /// Changes the rules of the card, from now on.
    Tune(Box<Rules>),
    /// Releases a tenant from quarantine by its name, and clears its strikes.
    Release(String),
    /// Shows the card, with the uses of its time in intervals that begin at `since_ns` or later, by its own clock.
    View {
        /// Begin of the first interval.
        since_ns: u64,
    },
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The card is open.
    Ready {
        /// Name of its model.
        name: String,
        /// Its memory, all of it.
        total_bytes: u64,
    },
    /// Done.
    Done,
    /// Not done; nothing has changed.
    Failed(String),
    /// Not done yet, for this reason: memory of other tenants moves out of the way. The same request is to be made
    /// again.
    Moving(String),
    /// It will be done when these processes have ended.
    Leaving(Vec<u32>),
    /// The card as it is.
    View(Box<Card>),
}

/// A card, as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Time by the clock of its owner, which starts again with each owner.
    pub now_ns: u64,
    /// Neither used nor promised.
    pub spare_bytes: u64,
    /// Host memory in use.
    pub host_used_bytes: u64,
    /// Moved from the card to host memory.
    pub moved_out_bytes: u64,
    /// Moved back.
    pub moved_in_bytes: u64,
    /// Time for which a turn lasted.
    pub busy_ns: u64,
    /// Turns granted.
    pub turns: u64,
    /// Chunks that were moved.
    pub relocations: u64,
    /// Orders that programs declined.
    pub declined: u64,
    /// Quantum: the holder, all members, and its length.
    pub memory_turn: Option<(String, Vec<String>, u64)>,
    /// Tenants by name.
    pub tenants: Vec<TenantView>,
    /// Processes that use the card past the owner: number, program, and bytes of the card where that is known.
    #[serde(default)]
    pub strangers: Vec<(u32, String, Option<u64>)>,
    /// Memory of the card in use for which neither a process nor a tenant can be charged.
    #[serde(default)]
    pub unexplained_bytes: u64,
}

/// A tenant, as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantView {
    /// Its name.
    pub name: String,
    /// Its programs: process and name.
    pub programs: Vec<(u32, String)>,
    /// On the card.
    pub on_card_bytes: u64,
    /// Bytes in host memory.
    pub in_host_bytes: u64,
    /// Bytes that it believes to have and has not used.
    pub unbacked_bytes: u64,
    /// Moving now.
    pub moving_bytes: u64,
    /// Most that it ever had on the card.
    pub on_card_peak_bytes: u64,
    /// Most that it ever had in host memory.
    pub in_host_peak_bytes: u64,
    /// With a first place in host memory.
    pub born_in_host_bytes: u64,
    /// Moved from the card to host memory.
    pub moved_out_bytes: u64,
    /// Moved back.
    pub moved_in_bytes: u64,
    /// Time of the card that it was charged.
    pub used_ns: u64,
    /// The same by interval: its begin, and the time charged in it.
    pub recent: Vec<(u64, u64)>,
    /// Part that it is entitled to while all want the card, in thousandths.
    pub entitled_permille: u32,
    /// Part of its turns in which its work was in flight, by the card's events.
    pub busy_ns: u64,
    /// Part of that in which only copies were in flight.
    pub copy_ns: u64,
    /// Submissions that were counted; while it is alone they are not counted.
    pub launches: u64,
    /// Turns.
    pub turns: u64,
    /// Turns that it waited for, half of them no longer than this.
    pub wait_p50_ns: u64,
    /// The same for 99 of 100.
    pub wait_p99_ns: u64,
    /// The longest such wait.
    pub wait_max_ns: u64,
    /// It has the turn.
    pub runs: bool,
    /// Programs of it that were killed since they did not answer.
    pub killed: u64,
    /// Programs of it that were given up and could not be killed.
    #[serde(default)]
    pub kill_failures: u64,
    /// Programs of it that were suspended since they did not answer.
    pub suspended: u64,
    /// Its processes with memory of the card past its account: number, program and bytes.
    #[serde(default)]
    pub unaccounted: Vec<(u32, String, u64)>,
    /// Memory of the card that it gave back and that something keeps.
    #[serde(default)]
    pub kept_bytes: u64,
    /// Memory of both beyond its limits.
    #[serde(default)]
    pub over_quota_bytes: u64,
    /// Turns beyond their limit.
    pub strikes: u32,
    /// It gets no turn until it is released.
    pub quarantined: bool,
}
