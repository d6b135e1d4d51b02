//! The types of messages over the admin socket, which the daemon and `mediatorctl` share.
//!
//! A reader must ignore keys that it does not know; keys are added, not renamed, within `/v1`.
//!
//! The crate does not serve or send requests; `mediatord` and `mediatorctl` do.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

mod daemon;
mod desired;
mod durations;
mod events;
pub mod launch;
mod memory;
mod moving;
mod profile;
mod scheduler;
pub mod schema;
mod tenant;
mod work;

pub use daemon::{DaemonInfo, Upgraded};
pub use desired::{Action, Applied, CardSettings, Comparison, Desired, Exported, KeyChange, Kind, Step};
pub use durations::{Bucket, Durations};
pub use events::{Author, AuthorKind, Event, EventKind, EventPage, Subject, SubjectKind};
pub use memory::{
    AccessProfile, Accessed, CardMemory, CardMemorySettings, Counted, Hint, Hints, MemoryList, MoveReport, MoveRequest,
    Range, Turn, VmMemory, VmMemorySettings,
};
pub use moving::{DrainReport, Left, MoveTo, Moved, PauseParts, Restored};
pub use profile::{Capacity, Profile, ProfileList};
pub use scheduler::{
    CardScheduler, EngineUse, Overdue, Quarantine, SchedulerHistory, SchedulerList, UseSample, VmEngine, VmHistory,
    VmShare, VmTime,
};

pub use config::Labels;
/// The body of a request to add a tenant: a `[[tenant]]` table of the configuration file, as JSON.
pub use config::TenantSpec as AddTenant;
/// The body of a request to add a virtual machine: a `[[vm]]` table of the configuration file, as JSON.
pub use config::VmSpec as AddVm;
pub use tenant::{GivenUp, GroupState, MpsState, Program, Tenant, TenantList, TenantPatch, Unaccounted};
pub use work::{WaitKind, WaitReason, WorkState};

/// The answer to `GET /v1/vms`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmList {
    /// The virtual machines by name.
    pub vms: Vec<Vm>,
}

/// The answer to `GET /v1/cards`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CardList {
    /// All cards, sorted by name.
    pub cards: Vec<Card>,
}

/// State of a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    /// It is being made: memory is scrubbed, the socket is not there yet.
    Starting,
    /// Its socket waits for a VMM.
    Waiting,
    /// A VMM is connected.
    Connected,
    /// It is being removed.
    Stopping,
    /// Its thread has ended with an error.
    Failed,
}

impl VmState {
    /// Its name in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Waiting => "waiting",
            Self::Connected => "connected",
            Self::Stopping => "stopping",
            Self::Failed => "failed",
        }
    }
}

/// Way in which a virtual machine reaches its card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmMode {
    /// By a vGPU of its own.
    Mediated,
    /// Straight.
    Passthrough,
    /// By its programs, which use CUDA.
    Cuda,
}

impl VmMode {
    /// Its name in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mediated => "mediated",
            Self::Passthrough => "passthrough",
            Self::Cuda => "cuda",
        }
    }
}

/// A virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// The card that it uses.
    pub card: String,
    /// The profile that it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Way in which it uses the card.
    pub mode: VmMode,
    /// Its state.
    pub state: VmState,
    /// Reason why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Path of its socket; absent when the socket was handed over by the service manager.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// The domain of Xen that it is, by its name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xen_domain: Option<String>,
    /// The VMM that is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<Client>,
    /// MiB of VRAM that the guest sees.
    pub vram_mib: u64,
    /// Channels that the guest may have.
    pub channels_limit: u32,
    /// Channels that the guest has on the card.
    pub channels_used: u32,
    /// The VMM keeps guest memory to itself (`share=off`): the card would read zeros. The guest cannot work.
    pub memory_not_shared: bool,
    /// The VMM withdrew guest memory that the card could reach.
    pub memory_withdrawn: bool,
    /// RAM that it lends.
    #[serde(default)]
    pub ram: Ram,
    /// State of the device as the guest's driver has set it up.
    pub driver: Driver,
    /// Accesses of the guest that were denied, all together.
    pub denied_total: u64,
    /// The same, by place and reason.
    pub denied: Vec<Denied>,
    /// Counts of the virtual device.
    pub counters: BTreeMap<String, u64>,
    /// Programs of the guest that use CUDA, for a VM on a card of `kind = "cuda"`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<GuestProgram>,
    /// Counts of the connection to the VMM.
    pub transport: BTreeMap<String, u64>,
    /// Words of whoever places work.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// A program of a guest that uses CUDA. The guest's kernel and the program itself say its name and its process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct GuestProgram {
    /// Its name; empty if the guest's kernel does not send it.
    pub name: String,
    /// Its process in the guest, if its library sent it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Bytes of the window that it uses.
    pub window_bytes: u64,
    /// Threads of it that wait for the card.
    pub waits: u64,
    /// Its worker has ended: all its calls fail.
    pub lost: bool,
}

/// RAM that a virtual machine lends its card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct Ram {
    /// Bytes that it lends.
    pub lent_bytes: u64,
    /// Bytes that it may lend at most.
    pub quota_bytes: u64,
    /// Bytes for which the card has bus addresses whatever other virtual machines lend.
    pub guarantee_bytes: u64,
    /// Bytes that the daemon or the card was the first to touch: they are charged to the daemon's control group.
    pub touched_bytes: u64,
    /// Bytes that it may touch first at most; as much as is lent if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub touch_limit_bytes: Option<u64>,
    /// Accesses that were refused since they would have touched more.
    pub touches_refused: u64,
}

/// A VMM that is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Client {
    /// Its process; 0 when it cannot be seen from the daemon.
    pub pid: i32,
    /// The user that it runs as.
    pub uid: u32,
    /// Number of the domain of Xen that is served, which no process has connected for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<u16>,
}

/// Way in which the driver takes interrupts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InterruptKind {
    /// Not at all.
    #[default]
    Off,
    /// By the pin.
    Intx,
    /// By message.
    Msi,
}

/// State of a device as its guest's driver has set it up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Driver {
    /// PCI vendor and device, as `10de:06d8`.
    pub pci_id: String,
    /// The device may access guest memory.
    pub bus_master: bool,
    /// Way in which the driver takes interrupts.
    pub interrupts: InterruptKind,
    /// Free words on the state of the driver, as far as the device can tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
}

/// Accesses of one kind that were denied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Denied {
    /// Name of the register, or of another place.
    pub place: String,
    /// Byte offset in BAR0, for a register.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u32>,
    /// Reason.
    pub reason: String,
    /// Reads that were denied.
    pub reads: u64,
    /// Writes that were denied.
    pub writes: u64,
}

/// A card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Kind of its carrier.
    pub kind: String,
    /// Reason why it is out of service with its virtual machines until the daemon is restarted; of a CUDA card, until
    /// it has an owner that answers.
    pub error: Option<String>,
    /// PCI vendor and device, as `10de:06d8`.
    pub pci_id: String,
    /// Its chip, or of a CUDA card the name of its model, where that is known.
    #[serde(default)]
    pub model: String,
    /// UUID of a CUDA card in NVML's form, as `GPU-12345678-9abc-def0-0123-456789abcdef`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Number of times that the owner of a CUDA card was restarted since the daemon started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner_restarts: Option<u64>,
    /// Its device for the driver, of a CUDA card: a number, `GPU-` with the UUID, or a PCI address, as configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// MiB of VRAM.
    pub vram_mib: u64,
    /// MiB that the mediator keeps for itself.
    pub vram_reserved_mib: u64,
    /// MiB that virtual machines have.
    pub vram_assigned_mib: u64,
    /// MiB that a further virtual machine could have.
    pub vram_free_mib: u64,
    /// MiB of the assigned that are in use: what a guest has never touched takes no place.
    #[serde(default)]
    pub vram_placed_mib: u64,
    /// MiB that the mediator uses, of those that it keeps or, when they do not suffice, of the free.
    #[serde(default)]
    pub vram_mediator_mib: u64,
    /// MiB of BAR1.
    pub bar1_mib: u64,
    /// MiB of BAR3.
    pub bar3_mib: u64,
    /// Channels of the card that virtual machines can have.
    pub channels: u32,
    /// Channels that virtual machines have on the card.
    pub channels_used: u32,
    /// The virtual machines that use it.
    pub vms: Vec<String>,
    /// The tenants that use it, of a CUDA card.
    #[serde(default)]
    pub tenants: Vec<String>,
    /// Processes that use it and are no program of a tenant, of a CUDA card, as NVML tells.
    #[serde(default)]
    pub strangers: Vec<Stranger>,
    /// Memory of a CUDA card in use, as the driver tells, for which neither a process nor a tenant can be charged, in
    /// bytes.
    #[serde(default)]
    pub unexplained_bytes: u64,
    /// One virtual machine has it by passthrough.
    pub passthrough: bool,
    /// It takes no further virtual machine or tenant, until an operator says so.
    #[serde(default)]
    pub drained: bool,
}

/// A process that uses a CUDA card past its owner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
pub struct Stranger {
    /// Its number, as the daemon's host has it.
    pub pid: u32,
    /// Name of its program.
    pub program: String,
    /// Bytes of the card that it has, where that is known.
    pub bytes: Option<u64>,
}

/// The answer to `GET /v1/vms/NAME/launch-args`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct LaunchArgs {
    /// The VMM that takes them.
    pub vmm: String,
    /// The arguments, one per element, without quoting.
    pub args: Vec<String>,
    /// The arguments as one line for a shell.
    pub command: String,
    /// Notes to keep in mind.
    pub notes: Vec<String>,
}

/// Kinds of errors that a program can act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is wrong.
    Invalid,
    /// There is no such thing.
    NotFound,
    /// Something is in the way.
    Conflict,
    /// The card has not that much left.
    Quota,
    /// The socket of the request is read-only.
    Forbidden,
    /// The daemon could not do it.
    Failed,
}

/// The body of every answer that is no success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Error {
    /// Its kind.
    pub code: ErrorCode,
    /// The mistake, and its place.
    pub error: String,
    /// Advice for the operator.
    pub what_to_do: String,
}
