//! The configuration file: cards, virtual machines, sockets.
//!
//! Modules: the types of the TOML file (this file), [`check`] (rules beyond the types), [`place`] (placement of virtual
//! machines without a configured card), `function` (virtual machines on CUDA cards), `rebalance` (automatic moves of
//! running virtual machines), [`position`] (line and key of an error), `parse` (all errors in a file), [`profile`]
//! (named sets of keys), [`patch`] (changes to tables at run time), [`live`] (keys that can be changed at run time),
//! [`size`] (syntax of sizes). Virtual machines added at run time must pass the same checks.
//!
//! `reference` generates the tables of keys in the documentation.
//!
//! The crate does not open a card or a socket, and does not write the file.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use shadow_pt::Mode;
use vfio_host::Address;

pub mod arguments;
pub mod check;
pub mod cuda;
pub mod filter;
mod function;
mod labels;
pub mod live;
pub mod memory;
pub mod paravirtual;
mod parse;
pub mod patch;
pub mod position;
pub mod profile;
mod rebalance;
#[cfg(test)]
mod reference;
mod refusal;
pub mod size;
mod software;
pub mod vfio;
mod xen;

#[cfg(test)]
mod tests;

pub use check::place::{self, Placement};
pub use check::{Key, Mistake, own_folder};
pub use cuda::{CudaSpec, OnRemove, OnStranger, OnStuck, TENANTS, TenantCards, TenantSpec};
pub use function::{FunctionSpec, windows_mib, workers_socket};
pub use labels::{LabelMatch, Labels};
pub use memory::{CardMemory, RamSpec, VmMemory};
pub use paravirtual::Paravirtual;
pub use placement::Links;
pub use profile::ProfileSpec;
pub use rebalance::RebalanceSpec;
pub use software::{FaultEngine, FaultKind, FaultSpec, TimeSpec};
pub use vfio::ResetWay;

/// Default path of the configuration file.
pub const DEFAULT_PATH: &str = "/etc/gpu-mediator.toml";

/// Default admin socket of both the daemon and `mediatorctl`.
pub const DEFAULT_ADMIN_SOCKET: &str = "/run/gpu-mediator/admin.sock";

/// A whole configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The daemon itself.
    #[serde(default)]
    pub daemon: DaemonSpec,
    /// The cards owned by the daemon.
    #[serde(default, rename = "card")]
    pub cards: Vec<CardSpec>,
    /// The virtual machines that exist from startup.
    #[serde(default, rename = "vm")]
    pub vms: Vec<VmSpec>,
    /// Tenants of CUDA cards.
    #[serde(default, rename = "tenant")]
    pub tenants: Vec<TenantSpec>,
    /// Named sets of keys for virtual machines and tenants.
    #[serde(default, rename = "profile")]
    pub profiles: Vec<ProfileSpec>,
}

/// The `[daemon]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DaemonSpec {
    /// Path of the admin socket.
    pub admin_socket: PathBuf,
    /// File mode of the admin socket. By default, only the daemon's user has access, because each client may do
    /// everything.
    pub admin_mode: SocketMode,
    /// Owner of the admin socket, as a user name or ID.
    pub admin_owner: Option<String>,
    /// Group of the admin socket, as a group name or ID.
    pub admin_group: Option<String>,
    /// Path of the read-only socket, which accepts `/metrics` and all other GETs. By default, there is no such socket.
    pub read_socket: Option<PathBuf>,
    /// File mode of the read-only socket.
    pub read_mode: SocketMode,
    /// Owner of the read-only socket, as a user name or ID.
    pub read_owner: Option<String>,
    /// Group of the read-only socket, as a group name or ID.
    pub read_group: Option<String>,
    /// Loopback address and port of a page that shows cards, tenants and virtual machines in a browser. By default, no
    /// page is served.
    #[schemars(with = "Option<String>")]
    pub page: Option<SocketAddr>,
    /// Folder for the sockets of virtual machines without a configured path.
    pub socket_dir: PathBuf,
    /// Log filter, in the syntax of `tracing`.
    pub log: String,
    /// Format of the log.
    pub log_format: LogFormat,
    /// Folder that stores changes made at run time. By default, they are lost at a restart.
    pub state_dir: Option<PathBuf>,
    /// Policy that chooses cards for virtual machines and tenants without configured cards.
    pub placement: Placement,
    /// Automatic moves of virtual machines from busy cards to idle ones. Disabled by default.
    pub rebalance: Option<RebalanceSpec>,
}

impl Default for DaemonSpec {
    fn default() -> Self {
        Self {
            admin_socket: DEFAULT_ADMIN_SOCKET.into(),
            admin_mode: SocketMode(0o600),
            admin_owner: None,
            admin_group: None,
            read_socket: None,
            read_mode: SocketMode::default(),
            read_owner: None,
            read_group: None,
            page: None,
            socket_dir: "/run/gpu-mediator".into(),
            log: "info".to_owned(),
            log_format: LogFormat::Text,
            state_dir: None,
            placement: Placement::default(),
            rebalance: None,
        }
    }
}

/// Format of the log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Policy for residual data of one virtual machine's kernels in PGRAPH before kernels of another one run there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Residue {
    /// Clears the residue.
    #[default]
    Clear,
    /// Keeps the residue, which the next virtual machine may read.
    Keep,
}

/// A `[[card]]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CardSpec {
    /// Name by which virtual machines refer to the card.
    pub name: String,
    /// Kind of the card.
    pub kind: CardKind,
    /// Makes the card reject new virtual machines and tenants; existing ones stay.
    #[serde(default)]
    pub drained: bool,
    /// PCI address of a card behind VFIO.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub address: Option<Address>,
    /// Reset method of a card behind VFIO.
    #[serde(default)]
    pub reset: ResetWay,
    /// Size of the VRAM, in MiB.
    #[serde(default = "default_card_vram")]
    #[serde(deserialize_with = "crate::size::key")]
    pub vram_mib: u64,
    /// Size of BAR1, in MiB.
    #[serde(default = "default_bar1")]
    #[serde(deserialize_with = "crate::size::key")]
    pub bar1_mib: u64,
    /// Size of BAR3, in MiB.
    #[serde(default = "default_bar3")]
    #[serde(deserialize_with = "crate::size::key")]
    pub bar3_mib: u64,
    /// VRAM that the mediator reserves for its own structures, in MiB. Virtual machines share the rest.
    #[serde(default)]
    #[serde(deserialize_with = "crate::size::optional")]
    pub reserve_mib: Option<u64>,
    /// Size of a chunk, the unit of VRAM allocation, in KiB.
    #[serde(default = "default_chunk")]
    pub chunk_kib: u64,
    /// Permits guarantees and sizes of virtual machines to exceed the VRAM. A guest is denied memory when none is left.
    #[serde(default)]
    pub overcommit: bool,
    /// Division of the card's memory.
    #[serde(default)]
    pub memory: CardMemory,
    /// Policy for residual data of one virtual machine's kernels in PGRAPH's registers and shared memory.
    #[serde(default)]
    pub residue: Residue,
    /// Division of the card's time.
    #[serde(default)]
    pub scheduler: sched::Config,
    /// A card behind NVIDIA's driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<CudaSpec>,
    /// Simulated duration of work on a software card. By default, work takes as long as the host needs.
    #[serde(default)]
    pub time: Option<TimeSpec>,
    /// Makes a software card count its engines' accesses to each part of memory.
    #[serde(default)]
    pub profile: bool,
    /// Provides a function-level reset for a software card that is passed through.
    #[serde(default)]
    pub flr: bool,
    /// Faults of a software card, for testing recovery.
    #[serde(default, rename = "fault", skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<FaultSpec>,
}

impl CardSpec {
    /// Returns the VRAM that the mediator reserves for itself, in MiB.
    #[must_use]
    pub fn reserve_mib(&self) -> u64 {
        self.reserve_mib.unwrap_or_else(|| (self.vram_mib / 8).clamp(8, 64))
    }

    /// Returns the table with all keys, including defaults of omitted keys.
    #[must_use]
    pub fn whole(&self) -> Self {
        Self { reserve_mib: Some(self.reserve_mib()), ..self.clone() }
    }

    /// Returns the VRAM shared by all virtual machines, in MiB.
    #[must_use]
    pub fn shared_mib(&self) -> u64 {
        self.vram_mib.saturating_sub(self.reserve_mib())
    }
}

fn default_card_vram() -> u64 {
    1024
}

fn default_bar1() -> u64 {
    128
}

fn default_bar3() -> u64 {
    64
}

fn default_chunk() -> u64 {
    2048
}

/// Kind of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CardKind {
    /// The software card.
    Simgpu,
    /// A card behind NVIDIA's driver, for CUDA programs.
    Cuda,
    /// A real card, behind VFIO.
    Vfio,
}

impl fmt::Display for CardKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simgpu => f.write_str("simgpu"),
            Self::Cuda => f.write_str("cuda"),
            Self::Vfio => f.write_str("vfio"),
        }
    }
}

/// A `[[vm]]` table, and the body of a request to add a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Name of the virtual machine.
    pub name: String,
    /// Name of the card; by default, `daemon.placement` chooses one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub card: String,
    /// Name of the profile that provides keys missing here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// VRAM that the guest sees, in MiB. Not allowed with passthrough, where the guest sees all of the card's VRAM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(deserialize_with = "crate::size::optional")]
    pub vram_mib: Option<u64>,
    /// Maximum number of channels that the guest has on the card simultaneously.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<u32>,
    /// Passes the card through to the virtual machine, without mediation.
    #[serde(default)]
    pub passthrough: bool,
    /// Method of serving BAR1 and BAR3.
    #[serde(default)]
    pub apertures: Apertures,
    /// Amount of shadow page table work per TLB flush by the guest.
    #[serde(default, with = "shadow")]
    #[schemars(with = "String")]
    pub shadow: Mode,
    /// Time that a channel may occupy an engine without progress before it is killed, in milliseconds; 0 means no
    /// limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hang_limit_ms: Option<u64>,
    /// Share of the card's memory.
    #[serde(default)]
    pub memory: VmMemory,
    /// Share of the card's time.
    #[serde(default)]
    pub time: TimeShare,
    /// Paravirtual interface, for drivers that support it.
    #[serde(default)]
    pub paravirtual: Paravirtual,
    /// Lets the guest's programs use CUDA, on a card of `kind = "cuda"`; the virtual machine then has no virtual GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<FunctionSpec>,
    /// Name or ID of the virtual machine's Xen HVM domain; the virtual machine then has no socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xen_domain: Option<String>,
    /// Path of the vfio-user socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// File mode of the socket.
    #[serde(default)]
    pub mode: SocketMode,
    /// Owner of the socket, as a user name or ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Group of the socket, as a group name or ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Labels for orchestrators, shown with the virtual machine.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Labels, as `KEY` or `KEY=VALUE`. Without `card`, prefers the card of a virtual machine that has one of these
    /// labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub near: Vec<LabelMatch>,
    /// Labels, as `KEY` or `KEY=VALUE`. The virtual machine never shares a card with one that has any of these labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apart_from: Vec<LabelMatch>,
}

/// Default maximum number of channels of a virtual machine.
pub(crate) const DEFAULT_CHANNELS: u32 = 32;

/// Default time limit for a channel that occupies an engine without progress, in milliseconds. It is shorter than
/// nouveau's own limit of 15 seconds, so that the guest receives the reason.
pub(crate) const DEFAULT_HANG_LIMIT_MS: u64 = channels::HANG_LIMIT_NS / 1_000_000;

impl VmSpec {
    /// Creates a mediated virtual machine with defaults for all other keys.
    #[must_use]
    pub fn new(name: &str, card: &str, vram_mib: u64) -> Self {
        Self {
            name: name.to_owned(),
            card: card.to_owned(),
            profile: None,
            vram_mib: Some(vram_mib),
            channels: None,
            passthrough: false,
            apertures: Apertures::default(),
            shadow: Mode::default(),
            hang_limit_ms: None,
            memory: VmMemory::default(),
            time: TimeShare::default(),
            paravirtual: Paravirtual::default(),
            cuda: None,
            xen_domain: None,
            socket: None,
            mode: SocketMode::default(),
            owner: None,
            group: None,
            labels: Labels::default(),
            near: Vec::new(),
            apart_from: Vec::new(),
        }
    }

    /// Returns the virtual machine described by a `[[vm]]` table.
    ///
    /// # Errors
    /// Returns an error that names the key if the table is invalid.
    pub fn from_table(table: &serde_json::Map<String, serde_json::Value>) -> Result<Self, String> {
        Self::deserialize(table).map_err(|error| error.to_string())
    }

    /// Returns the table with all keys that have a value, including defaults of omitted keys.
    #[must_use]
    pub fn whole(&self, socket_dir: &Path) -> Self {
        Self {
            channels: Some(self.channels()),
            hang_limit_ms: Some(self.hang_limit_ms.unwrap_or(DEFAULT_HANG_LIMIT_MS)),
            time: self.time_share().into(),
            socket: Some(self.socket_path(socket_dir)),
            ..self.clone()
        }
    }

    /// Returns the socket's path: the configured path, or the virtual machine's name in `socket_dir`.
    #[must_use]
    pub fn socket_path(&self, socket_dir: &Path) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| socket_dir.join(format!("{}.sock", self.name)))
    }

    /// Returns the time that a channel may occupy an engine without progress; `None` for no limit.
    #[must_use]
    pub fn hang_limit(&self) -> Option<Duration> {
        let limit = self.hang_limit_ms.unwrap_or(DEFAULT_HANG_LIMIT_MS);
        (limit != 0).then(|| Duration::from_millis(limit))
    }

    /// Returns the virtual machine's share of the card's time.
    #[must_use]
    pub fn time_share(&self) -> sched::VgpuParams {
        self.time.params(self.hang_limit_ms)
    }

    /// Returns the number of channels that the guest may use.
    #[must_use]
    pub fn channels(&self) -> u32 {
        self.channels.unwrap_or(DEFAULT_CHANNELS)
    }
}

/// A `[vm.time]` table: a virtual machine's share of each engine's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TimeShare {
    /// Weight for the time, relative to the weights of all competitors.
    pub weight: u32,
    /// Guaranteed share of the time while there is work, in permille.
    pub guarantee_permille: u32,
    /// Maximum share of the time in permille, even if the rest stays unused.
    pub cap_permille: u32,
    /// Latency class. Among the virtual machines that are due, the better class runs first.
    pub class: sched::LatencyClass,
    /// Time limit of one submission in milliseconds; 0 means no limit. The default is the time that a channel may
    /// occupy an engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_run_ms: Option<u64>,
    /// Share of the copy engines, if it differs from the share of compute.
    #[serde(skip_serializing_if = "sched::CopyShare::is_silent")]
    pub copies: sched::CopyShare,
}

impl Default for TimeShare {
    fn default() -> Self {
        let sched::VgpuParams { weight, guarantee_permille, cap_permille, class, copies, .. } =
            sched::VgpuParams::default();
        Self { weight, guarantee_permille, cap_permille, class, max_run_ms: None, copies }
    }
}

impl From<sched::VgpuParams> for TimeShare {
    /// Sets all keys. The limit is rounded down to whole milliseconds, but to at least 1 ms.
    fn from(params: sched::VgpuParams) -> Self {
        let sched::VgpuParams { weight, guarantee_permille, cap_permille, class, max_run_ns, copies } = params;
        let max_run_ms = Some(max_run_ns.map_or(0, |ns| (ns / 1_000_000).max(1)));
        Self { weight, guarantee_permille, cap_permille, class, max_run_ms, copies }
    }
}

impl TimeShare {
    /// Returns the share in the scheduler's form.
    #[must_use]
    pub fn params(&self, hang_limit_ms: Option<u64>) -> sched::VgpuParams {
        let Self { weight, guarantee_permille, cap_permille, class, max_run_ms, copies } = *self;
        let limit = max_run_ms.or(hang_limit_ms).unwrap_or(DEFAULT_HANG_LIMIT_MS);
        let max_run_ns = (limit != 0).then(|| limit.saturating_mul(1_000_000));
        sched::VgpuParams { weight, guarantee_permille, cap_permille, class, max_run_ns, copies }
    }
}

/// Method of serving the apertures BAR1 and BAR3, and PRAMIN, to the VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Apertures {
    /// Each access is a message to the daemon.
    Trapped,
    /// The VMM maps most of the apertures, and accesses to the mapped parts cause no messages.
    #[default]
    Remapped,
}

/// Serializes a shadowing mode as its name.
mod shadow {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use shadow_pt::Mode;

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Mode, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }

    pub(super) fn serialize<S: Serializer>(mode: &Mode, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(mode.name())
    }
}

/// File mode of a socket, written as a string of octal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, schemars::JsonSchema)]
#[schemars(with = "String")]
pub struct SocketMode(pub u32);

impl Default for SocketMode {
    fn default() -> Self {
        Self(0o660)
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl std::str::FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = !text.is_empty() && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
        match u32::from_str_radix(text, 8) {
            Ok(bits) if digits && bits <= 0o777 => Ok(Self(bits)),
            _ => Err(format!(
                "`{text}` is not an access mode, expected octal digits from 0000 to 0777, such as \"0660\""
            )),
        }
    }
}

impl<'de> Deserialize<'de> for SocketMode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = SocketMode;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string of octal digits such as \"0660\"")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<SocketMode, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

impl Serialize for SocketMode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Reason why a configuration is unusable.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("the configuration file {path} cannot be read; pass its path with --config PATH")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Reason why the file cannot be read.
        #[source]
        source: std::io::Error,
    },
    /// The file has errors. The text contains one line per error: `FILE:LINE:COLUMN: KEY: what is wrong, what was
    /// expected`.
    #[error("{}", .0.join("\n"))]
    Mistakes(Vec<String>),
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or has errors. Reports all errors together.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, &path.display().to_string())
    }
}
