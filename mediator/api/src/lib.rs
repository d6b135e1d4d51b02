//! Message types of the admin API, shared by the daemon and `mediatorctl`.
//!
//! Readers must ignore unknown keys; within `/v1`, keys are added but not renamed.
//!
//! The crate neither serves nor sends requests; `mediatord` and `mediatorctl` do.

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
mod restarts;
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
pub use moving::{DrainReport, Left, MoveTo, Moved, PauseParts, Restored, TenantMoved};
pub use profile::{Capacity, Profile, ProfileList};
pub use restarts::{RestartWorkers, WorkerRestart, WorkerRestarts};
pub use scheduler::{
    CardScheduler, EngineUse, Overdue, Quarantine, SchedulerHistory, SchedulerList, UseSample, VmEngine, VmHistory,
    VmShare, VmTime,
};

pub use config::Labels;
/// Body of a request to add a tenant: a `[[tenant]]` table of the configuration file, as JSON.
pub use config::TenantSpec as AddTenant;
/// Body of a request to add a virtual machine: a `[[vm]]` table of the configuration file, as JSON.
pub use config::VmSpec as AddVm;
pub use tenant::{
    GivenUp, GroupState, MpsState, Program, ServedProgram, Tenant, TenantCard, TenantList, TenantPatch, Unaccounted,
};
pub use work::{WaitKind, WaitReason, WorkState};

/// Response to `GET /v1/vms`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmList {
    /// All virtual machines, sorted by name.
    pub vms: Vec<Vm>,
}

/// Response to `GET /v1/cards`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CardList {
    /// All cards, sorted by name.
    pub cards: Vec<Card>,
}

/// State of a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    /// The virtual machine is being created: its memory is being scrubbed, and its socket does not exist yet.
    Starting,
    /// The socket waits for a VMM.
    Waiting,
    /// A VMM is connected.
    Connected,
    /// The virtual machine is being removed.
    Stopping,
    /// The virtual machine has failed.
    Failed,
}

impl VmState {
    /// Returns the name in the API.
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

/// Mode in which a virtual machine uses its card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmMode {
    /// The virtual machine has its own vGPU.
    Mediated,
    /// The virtual machine drives the card directly (passthrough).
    Passthrough,
    /// The guest's programs use the card through CUDA calls.
    Cuda,
}

impl VmMode {
    /// Returns the name in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mediated => "mediated",
            Self::Passthrough => "passthrough",
            Self::Cuda => "cuda",
        }
    }
}

/// State of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Vm {
    /// Name of the virtual machine.
    pub name: String,
    /// Name of the virtual machine's card.
    pub card: String,
    /// Name of the profile from which the virtual machine was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Mode in which the virtual machine uses the card.
    pub mode: VmMode,
    /// State of the virtual machine.
    pub state: VmState,
    /// Reason why the virtual machine failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Path of the socket; absent if the service manager provided the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Name or ID of the virtual machine's Xen domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xen_domain: Option<String>,
    /// Connected VMM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<Client>,
    /// Size of the VRAM visible to the guest, in MiB.
    pub vram_mib: u64,
    /// Maximum number of channels of the guest.
    pub channels_limit: u32,
    /// Number of channels that the guest uses on the card.
    pub channels_used: u32,
    /// True if the VMM does not share guest memory (`share=off`). The guest cannot use the card, because the card would
    /// read zeros.
    pub memory_not_shared: bool,
    /// True if the VMM withdrew guest memory while the card could access it.
    pub memory_withdrawn: bool,
    /// RAM that the virtual machine lends to the card.
    #[serde(default)]
    pub ram: Ram,
    /// State of the device as configured by the guest's driver.
    pub driver: Driver,
    /// Total number of denied guest accesses.
    pub denied_total: u64,
    /// Denied guest accesses by location and reason.
    pub denied: Vec<Denied>,
    /// Counters of the virtual device.
    pub counters: BTreeMap<String, u64>,
    /// CUDA programs in the guest, for a VM on a card of `kind = "cuda"`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<GuestProgram>,
    /// Counters of the connection to the VMM.
    pub transport: BTreeMap<String, u64>,
    /// Labels for orchestrators.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// CUDA program in a guest. The guest's kernel reports the name, and the program itself reports its process ID.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct GuestProgram {
    /// Name of the program; empty if the guest's kernel does not report it.
    pub name: String,
    /// Process ID in the guest, if the program's library reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Process ID of the program's worker on the host, which is listed among the tenant's programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u32>,
    /// Size of the used part of the window, in bytes.
    pub window_bytes: u64,
    /// Number of threads of the program waiting for the card.
    pub waits: u64,
    /// True if the program's worker has exited, so that all calls of the program fail.
    pub lost: bool,
}

/// RAM that a virtual machine lends to a card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct Ram {
    /// Lent RAM, in bytes.
    pub lent_bytes: u64,
    /// Maximum lent RAM, in bytes.
    pub quota_bytes: u64,
    /// Lent RAM for which bus addresses are reserved, regardless of how much RAM other virtual machines lend, in bytes.
    pub guarantee_bytes: u64,
    /// Lent RAM that the daemon or the card touched first, and that is therefore charged to the daemon's cgroup, in
    /// bytes.
    pub touched_bytes: u64,
    /// Limit on `touched_bytes`; absent if only the size of the lent RAM limits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub touch_limit_bytes: Option<u64>,
    /// Number of accesses denied because they would have exceeded `touch_limit_bytes`.
    pub touches_refused: u64,
}

/// Connected VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Client {
    /// Process ID of the VMM; 0 if the process is not visible to the daemon.
    pub pid: i32,
    /// User ID of the VMM.
    pub uid: u32,
    /// ID of the Xen domain, if the client is a domain instead of a process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<u16>,
}

/// Mechanism that delivers interrupts to the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InterruptKind {
    /// The driver receives no interrupts.
    #[default]
    Off,
    /// The driver receives interrupts through the interrupt pin (INTx).
    Intx,
    /// The driver receives interrupts through MSI.
    Msi,
}

/// State of a device as configured by its guest's driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Driver {
    /// PCI vendor and device ID, such as `10de:06d8`.
    pub pci_id: String,
    /// True if the driver has enabled bus mastering.
    pub bus_master: bool,
    /// Mechanism that delivers interrupts to the driver.
    pub interrupts: InterruptKind,
    /// Human-readable state of the driver, as far as the device knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
}

/// Denied accesses at one location for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Denied {
    /// Name of the register or other location.
    pub place: String,
    /// Byte offset in BAR0, if the location is a register.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u32>,
    /// Reason for the denial.
    pub reason: String,
    /// Number of denied reads.
    pub reads: u64,
    /// Number of denied writes.
    pub writes: u64,
}

/// State of a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Card {
    /// Name of the card.
    pub name: String,
    /// Kind of the card.
    pub kind: String,
    /// Reason why the card and its virtual machines are out of service until the daemon is restarted or, for a CUDA
    /// card, until its owner responds.
    pub error: Option<String>,
    /// PCI vendor and device ID, such as `10de:06d8`.
    pub pci_id: String,
    /// Chip of the card or, for a CUDA card, the model name if known.
    #[serde(default)]
    pub model: String,
    /// UUID of a CUDA card in NVML's format, such as `GPU-12345678-9abc-def0-0123-456789abcdef`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Number of restarts of a CUDA card's owner since the start of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner_restarts: Option<u64>,
    /// Device of a CUDA card, as configured: a number, a UUID with the prefix `GPU-`, or a PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Size of the VRAM in MiB.
    pub vram_mib: u64,
    /// VRAM reserved for the mediator, in MiB.
    pub vram_reserved_mib: u64,
    /// VRAM assigned to virtual machines, in MiB.
    pub vram_assigned_mib: u64,
    /// VRAM available for another virtual machine, in MiB.
    pub vram_free_mib: u64,
    /// Used part of the assigned VRAM, in MiB, excluding memory that a guest has never touched.
    #[serde(default)]
    pub vram_placed_mib: u64,
    /// VRAM used by the mediator, in MiB, taken from the reserved memory or, if that does not suffice, from the free
    /// memory.
    #[serde(default)]
    pub vram_mediator_mib: u64,
    /// Size of BAR1, in MiB.
    pub bar1_mib: u64,
    /// Size of BAR3, in MiB.
    pub bar3_mib: u64,
    /// Number of channels available to virtual machines.
    pub channels: u32,
    /// Number of channels used by virtual machines.
    pub channels_used: u32,
    /// Names of the virtual machines on the card.
    pub vms: Vec<String>,
    /// Names of the tenants of a CUDA card.
    #[serde(default)]
    pub tenants: Vec<String>,
    /// Unmanaged processes on a CUDA card, as reported by NVML. They do not belong to a tenant.
    #[serde(default)]
    pub strangers: Vec<Stranger>,
    /// Memory of a CUDA card that the driver reports as used but that cannot be attributed to a process or tenant, in
    /// bytes.
    #[serde(default)]
    pub unexplained_bytes: u64,
    /// True if the card is passed through to a virtual machine.
    pub passthrough: bool,
    /// True if the card accepts no new virtual machines or tenants until an operator ends the drain.
    #[serde(default)]
    pub drained: bool,
}

/// Process that uses a CUDA card without the card's owner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
pub struct Stranger {
    /// Process ID on the daemon's host.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Card memory that the process uses, in bytes, if known.
    pub bytes: Option<u64>,
}

/// Response to `GET /v1/vms/NAME/launch-args`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct LaunchArgs {
    /// VMM to which the arguments apply.
    pub vmm: String,
    /// Arguments, one per element, without quoting.
    pub args: Vec<String>,
    /// Arguments as one shell command line.
    pub command: String,
    /// Notes for the operator.
    pub notes: Vec<String>,
}

/// Machine-readable kind of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is invalid.
    Invalid,
    /// The object does not exist.
    NotFound,
    /// The state of an object prevents the action.
    Conflict,
    /// The card does not have enough resources left.
    Quota,
    /// The socket on which the request arrived is read-only.
    Forbidden,
    /// The daemon could not complete the request.
    Failed,
}

/// Body of every error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Error {
    /// Kind of the error.
    pub code: ErrorCode,
    /// Description of the error and its location.
    pub error: String,
    /// Advice for the operator.
    pub what_to_do: String,
}
