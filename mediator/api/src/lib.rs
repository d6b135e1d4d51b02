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
/// The body of a request to add a tenant: a `[[tenant]]` table of the configuration file, as JSON.
pub use config::TenantSpec as AddTenant;
/// The body of a request to add a virtual machine: a `[[vm]]` table of the configuration file, as JSON.
pub use config::VmSpec as AddVm;
pub use tenant::{
    GivenUp, GroupState, MpsState, Program, ServedProgram, Tenant, TenantCard, TenantList, TenantPatch, Unaccounted,
};
pub use work::{WaitKind, WaitReason, WorkState};

/// The response to `GET /v1/vms`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VmList {
    /// The virtual machines by name.
    pub vms: Vec<Vm>,
}

/// The response to `GET /v1/cards`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CardList {
    /// All cards, sorted by name.
    pub cards: Vec<Card>,
}

/// State of a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    /// The virtual machine is being created: its memory is scrubbed, and its socket does not exist yet.
    Starting,
    /// The socket waits for a VMM.
    Waiting,
    /// A VMM is connected.
    Connected,
    /// The virtual machine is being removed.
    Stopping,
    /// The thread of the virtual machine has ended with an error.
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
    /// Through a vGPU of its own.
    Mediated,
    /// Directly, by passthrough.
    Passthrough,
    /// Through CUDA, which the guest's programs use.
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
    /// Card that the virtual machine uses.
    pub card: String,
    /// Profile from which the virtual machine was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Way in which the virtual machine uses the card.
    pub mode: VmMode,
    /// Its state.
    pub state: VmState,
    /// Reason why the virtual machine failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Path of the socket; absent if the service manager provided the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Name or number of the Xen domain of this virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xen_domain: Option<String>,
    /// The connected VMM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<Client>,
    /// MiB of VRAM that the guest sees.
    pub vram_mib: u64,
    /// Maximum number of channels of the guest.
    pub channels_limit: u32,
    /// Number of channels that the guest has on the card.
    pub channels_used: u32,
    /// True if the VMM does not share guest memory (`share=off`): the card would read zeros, and the guest cannot work.
    pub memory_not_shared: bool,
    /// True if the VMM withdrew guest memory while the card could reach it.
    pub memory_withdrawn: bool,
    /// RAM that the virtual machine lends to its card.
    #[serde(default)]
    pub ram: Ram,
    /// State of the device as configured by the guest's driver.
    pub driver: Driver,
    /// Total number of denied accesses of the guest.
    pub denied_total: u64,
    /// Denied accesses by location and reason.
    pub denied: Vec<Denied>,
    /// Counters of the virtual device.
    pub counters: BTreeMap<String, u64>,
    /// Programs of the guest that use CUDA, for a VM on a card of `kind = "cuda"`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<GuestProgram>,
    /// Counters of the connection to the VMM.
    pub transport: BTreeMap<String, u64>,
    /// Labels for placement software.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// A program of a guest that uses CUDA. The name comes from the guest's kernel, and the process from the program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct GuestProgram {
    /// Name of the program; empty if the guest's kernel does not send it.
    pub name: String,
    /// Process ID in the guest, if the program's library sent it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Process ID of the program's worker on the host, which is in the list of the tenant's programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u32>,
    /// Bytes of the window that the program uses.
    pub window_bytes: u64,
    /// Number of threads of the program that wait for the card.
    pub waits: u64,
    /// True if the program's worker has ended: all calls of the program fail.
    pub lost: bool,
}

/// RAM that a virtual machine lends to its card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct Ram {
    /// Lent bytes.
    pub lent_bytes: u64,
    /// Maximum number of bytes that the virtual machine may lend.
    pub quota_bytes: u64,
    /// Bytes for which bus addresses are reserved, however much other virtual machines lend.
    pub guarantee_bytes: u64,
    /// Bytes that the daemon or the card touched first; they are charged to the daemon's control group.
    pub touched_bytes: u64,
    /// Maximum number of bytes that the daemon or the card may touch first; absent if only limited by the lent RAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub touch_limit_bytes: Option<u64>,
    /// Number of accesses that were refused because they would have exceeded this limit.
    pub touches_refused: u64,
}

/// A connected VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Client {
    /// Process ID of the VMM; 0 if the daemon cannot see it.
    pub pid: i32,
    /// User ID of the VMM.
    pub uid: u32,
    /// Number of the served Xen domain, for which no process is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<u16>,
}

/// Way in which the driver receives interrupts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InterruptKind {
    /// The driver receives no interrupts.
    #[default]
    Off,
    /// Through the interrupt pin.
    Intx,
    /// Through messages (MSI).
    Msi,
}

/// State of a device as configured by its guest's driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Driver {
    /// PCI vendor and device IDs, such as `10de:06d8`.
    pub pci_id: String,
    /// True if the device may access guest memory.
    pub bus_master: bool,
    /// Way in which the driver receives interrupts.
    pub interrupts: InterruptKind,
    /// Free text about the state of the driver, as far as the device knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
}

/// Denied accesses of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Denied {
    /// Name of the register, or of another location.
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

/// A card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Kind of the card.
    pub kind: String,
    /// Reason why the card and its virtual machines are out of service, until the daemon is restarted or, for a CUDA
    /// card, until its owner responds.
    pub error: Option<String>,
    /// PCI vendor and device IDs, such as `10de:06d8`.
    pub pci_id: String,
    /// Chip of the card or, for a CUDA card, name of the model, if known.
    #[serde(default)]
    pub model: String,
    /// UUID of a CUDA card in NVML's format, such as `GPU-12345678-9abc-def0-0123-456789abcdef`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Number of restarts of a CUDA card's owner since the daemon started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner_restarts: Option<u64>,
    /// Device of a CUDA card, as configured: a number, `GPU-` with the UUID, or a PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// MiB of VRAM.
    pub vram_mib: u64,
    /// MiB that are reserved for the mediator.
    pub vram_reserved_mib: u64,
    /// MiB that are assigned to virtual machines.
    pub vram_assigned_mib: u64,
    /// MiB that are available for a further virtual machine.
    pub vram_free_mib: u64,
    /// MiB of the assigned memory that are in use; memory that a guest has never touched is not.
    #[serde(default)]
    pub vram_placed_mib: u64,
    /// MiB that the mediator uses, of the reserved memory or, if that does not suffice, of the free memory.
    #[serde(default)]
    pub vram_mediator_mib: u64,
    /// MiB of BAR1.
    pub bar1_mib: u64,
    /// MiB of BAR3.
    pub bar3_mib: u64,
    /// Number of channels of the card for virtual machines.
    pub channels: u32,
    /// Number of channels that virtual machines have on the card.
    pub channels_used: u32,
    /// The virtual machines that use the card.
    pub vms: Vec<String>,
    /// The tenants that use a CUDA card.
    #[serde(default)]
    pub tenants: Vec<String>,
    /// Unmanaged processes on a CUDA card, as reported by NVML: processes that are not programs of a tenant.
    #[serde(default)]
    pub strangers: Vec<Stranger>,
    /// Memory of a CUDA card that the driver reports as used and that can be charged to neither a process nor a tenant,
    /// in bytes.
    #[serde(default)]
    pub unexplained_bytes: u64,
    /// True if one virtual machine has the card by passthrough.
    pub passthrough: bool,
    /// True if the card accepts no virtual machines and tenants until an operator ends the drain.
    #[serde(default)]
    pub drained: bool,
}

/// A process that uses a CUDA card without the card's owner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
pub struct Stranger {
    /// Process ID on the daemon's host.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Bytes of the card that the process uses, if known.
    pub bytes: Option<u64>,
}

/// The response to `GET /v1/vms/NAME/launch-args`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct LaunchArgs {
    /// VMM for which the arguments are.
    pub vmm: String,
    /// The arguments, one per element, without quoting.
    pub args: Vec<String>,
    /// The arguments as one line for a shell.
    pub command: String,
    /// Notes for the operator.
    pub notes: Vec<String>,
}

/// Kinds of errors, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is invalid.
    Invalid,
    /// The object does not exist.
    NotFound,
    /// Something prevents the action.
    Conflict,
    /// The card has too few resources left.
    Quota,
    /// The socket of the request is read-only.
    Forbidden,
    /// The daemon could not complete the request.
    Failed,
}

/// The body of every error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Error {
    /// Its kind.
    pub code: ErrorCode,
    /// Description of the error and its location.
    pub error: String,
    /// Advice to the operator.
    pub what_to_do: String,
}
