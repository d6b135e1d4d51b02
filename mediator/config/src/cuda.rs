//! Cards behind NVIDIA's driver, and the tenants that share them.

use std::path::{Path, PathBuf};

use sched::PolicyKind;
use sched::groups::Sharing;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vram::victim::VictimPolicy;

use super::{CardSpec, Labels, Placement, SocketMode, TimeShare, VmMemory};

mod cards;
mod place;
mod tenant;

pub use cards::TenantCards;
pub(crate) use place::TOO_FEW;
pub use place::placement_order;
pub use tenant::tenant;

/// Maximum number of user IDs for the workers of a card.
const MAX_WORKER_USERS: u32 = 1 << 16;

/// A `[card.cuda]` table: a card behind NVIDIA's driver, with `kind = "cuda"`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CudaSpec {
    /// The card, given by its number, its `GPU-` UUID as printed by `nvidia-smi -L`, or its PCI address.
    pub device: String,
    /// NVIDIA's library, as a path or as a name for the dynamic loader.
    pub driver: PathBuf,
    /// Program that calls CUDA on behalf of a virtual machine's program; by default, the package's program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<PathBuf>,
    /// First and last user ID for workers. Each virtual machine's workers run as a separate user. By default, workers
    /// run as the daemon's user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_users: Option<[u32; 2]>,
    /// Restricts workers to the parts of the host that they need.
    pub sandbox: bool,
    /// Size of a chunk, the unit of allocation and relocation, in MiB.
    #[serde(deserialize_with = "crate::size::key")]
    pub chunk_mib: u64,
    /// Host memory to pin in advance, in MiB.
    #[serde(deserialize_with = "crate::size::key")]
    pub host_ready_mib: u64,
    /// Length of a slice of the card's time, in milliseconds.
    pub slice_ms: u64,
    /// Maximum duration of the work in flight of a tenant that competes with others, in microseconds.
    pub run_ahead_us: u32,
    /// Policy for processes that use the card without its owner, and for programs with memory outside their accounts.
    pub strangers: OnStranger,
    /// Tolerance between accounted and actual memory usage, per process and for the whole card, in MiB.
    #[serde(deserialize_with = "crate::size::key")]
    pub margin_mib: u64,
    /// If set, running programs of the card's tenants can move to other cards with this setting, and programs of those
    /// cards to this one.
    pub moves: bool,
    /// NVIDIA's control program for MPS servers, used for share groups.
    pub mps_control: PathBuf,
    /// Time that workers of guest programs continue to run after the daemon was killed, in seconds. A worker that no
    /// new daemon has taken over by then exits and ends its program.
    pub orphan_timeout_s: u64,
}

/// Policy for processes that, according to NVML, use a CUDA card without its owner, and for tenants' programs whose
/// unaccounted memory exceeds the tenant's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnStranger {
    /// Shows and logs such processes.
    #[default]
    Report,
    /// Also kills such processes, if the daemon's user has permission.
    Kill,
}

impl Default for CudaSpec {
    fn default() -> Self {
        Self {
            device: "0".to_owned(),
            driver: "libcuda.so.1".into(),
            worker: None,
            worker_users: None,
            sandbox: true,
            chunk_mib: 16,
            host_ready_mib: 256,
            slice_ms: 15,
            run_ahead_us: 4000,
            strangers: OnStranger::Report,
            margin_mib: 128,
            moves: true,
            mps_control: "/usr/bin/nvidia-cuda-mps-control".into(),
            orphan_timeout_s: 30,
        }
    }
}

/// A `[[tenant]]` table: a group of programs that share a CUDA card with others.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantSpec {
    /// Name of the tenant. No virtual machine may have the same name.
    pub name: String,
    /// Name of the card, of `kind = "cuda"`; by default, the policy `placement` chooses one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub card: String,
    /// Names of the cards of a tenant with several CUDA cards, or the number of cards to choose, instead of `card`. The
    /// tenant's turns begin on all of them together.
    #[serde(default, skip_serializing_if = "TenantCards::is_absent")]
    pub cards: TenantCards,
    /// Policy that chooses cards that are not named; by default, `daemon.placement`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// Name of the profile that provides keys missing here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Memory that the tenant's programs see on each card, in MiB. Required here or in the profile.
    #[serde(default)]
    #[serde(deserialize_with = "crate::size::key")]
    pub vram_mib: u64,
    /// Share of the card's memory.
    #[serde(default)]
    pub memory: VmMemory,
    /// Share of the card's time.
    #[serde(default)]
    pub time: TimeShare,
    /// Name of the share group, which consists of tenants of the card that trust each other; empty for no group.
    /// Programs of a group that are clients of the card's MPS server can use the card simultaneously.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub share_group: String,
    /// Sharing mode of the group: `turns`, `together`, or `auto` for the mode with more progress. The
    /// strictest member's setting applies: `turns` before `auto` before `together`.
    #[serde(default)]
    pub sharing: Sharing,
    /// Policy for a program that does not respond.
    #[serde(default)]
    pub on_stuck: OnStuck,
    /// Policy for the tenant's programs when it is removed.
    #[serde(default)]
    pub on_remove: OnRemove,
    /// Path of the socket; by default, `tenants/NAME/cuda.sock` in the daemon's socket folder. The daemon creates the
    /// folder with the tenant's name. A tenant with several cards has a socket `CARD.sock` per card in that folder, or
    /// in the folder that this key names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// File mode of the socket. Users that can connect act as the tenant.
    #[serde(default)]
    pub mode: SocketMode,
    /// Owner of the socket, as a user name or ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Group of the socket, as a group name or ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Labels for orchestrators, shown with the tenant.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// Folder for the tenants' folders, in the daemon's `socket_dir`.
pub const TENANTS: &str = "tenants";

/// Policy for a program that occupies the card or its memory and does not respond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnStuck {
    /// Kills the program.
    #[default]
    Kill,
    /// Suspends the program with NVIDIA's driver if possible, and otherwise kills it.
    Suspend,
}

/// Policy for the programs of a removed tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnRemove {
    /// Kills the programs.
    #[default]
    Kill,
    /// Closes the connections. Programs that use card memory are killed if they still run after 5 seconds.
    Disconnect,
}

impl TenantSpec {
    /// Returns the tenant described by a `[[tenant]]` table.
    ///
    /// # Errors
    /// Returns an error that names the key if the table is invalid.
    pub fn from_table(table: &serde_json::Map<String, serde_json::Value>) -> Result<Self, String> {
        Self::deserialize(table).map_err(|error| error.to_string())
    }

    /// Returns the table with all keys that have a value, including defaults of omitted keys.
    #[must_use]
    pub fn whole(&self, socket_dir: &Path) -> Self {
        let time = self.time.params(None).into();
        let socket = self.cards.is_absent().then(|| self.socket_path(socket_dir)).or_else(|| self.socket.clone());
        Self { time, socket, ..self.clone() }
    }

    /// Returns the names of the tenant's cards, in the order of the configuration.
    #[must_use]
    pub fn card_names(&self) -> Vec<&str> {
        match &*self.cards {
            [] => vec![&self.card],
            cards => cards.iter().map(String::as_str).collect(),
        }
    }

    /// Returns the name of the tenant's first card.
    #[must_use]
    pub fn first_card(&self) -> &str {
        self.cards.first().unwrap_or(&self.card)
    }

    /// Returns true if a card is one of the tenant's cards.
    #[must_use]
    pub fn uses(&self, card: &str) -> bool {
        self.card_names().contains(&card)
    }

    /// Returns the socket's path: the configured path, or the default path in `socket_dir`. With several cards, this is
    /// the path of the first card's socket.
    ///
    /// The folder is exclusive to the tenant: containers mount it, so that they find the next owner's socket there.
    #[must_use]
    pub fn socket_path(&self, socket_dir: &Path) -> PathBuf {
        self.socket_on(self.cards.first().map_or("", String::as_str), socket_dir)
    }

    /// Returns the path of the tenant's socket for one of its cards.
    #[must_use]
    pub fn socket_on(&self, card: &str, socket_dir: &Path) -> PathBuf {
        let folder = || socket_dir.join(TENANTS).join(&self.name);
        match (self.cards.is_absent(), &self.socket) {
            (true, Some(path)) => path.clone(),
            (true, None) => folder().join("cuda.sock"),
            (false, path) => path.clone().unwrap_or_else(folder).join(format!("{card}.sock")),
        }
    }

    /// Returns the path of the tenant's socket for each of its cards, in their order.
    #[must_use]
    pub fn socket_paths(&self, socket_dir: &Path) -> Vec<PathBuf> {
        self.card_names().into_iter().map(|card| self.socket_on(card, socket_dir)).collect()
    }
}

/// Returns the ID of a card, or of a tenant with several cards, among the cards' owners. It depends only on the name,
/// so owners agree on it across restarts and configuration changes.
#[must_use]
pub fn gang_number(name: &str) -> u32 {
    // The ID is the 32-bit FNV-1a hash of the name. A configuration in which two names collide is rejected.
    name.bytes().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Returns the file name of the socket on which a card's owner listens for the owners of other cards. The socket is in
/// the daemon's socket folder.
#[must_use]
pub fn owner_socket(card: &str) -> String {
    format!("{card}.owner.gangs")
}

impl CardSpec {
    /// Returns the keys of a CUDA card, or the defaults if the card has no `cuda` table.
    #[must_use]
    pub fn cuda(&self) -> CudaSpec {
        self.cuda.clone().unwrap_or_default()
    }
}

/// Returns the errors in a card of `kind = "cuda"`, each with its key.
pub(super) fn card(card: &CardSpec) -> Vec<(&'static str, String)> {
    let cuda = card.cuda();
    let mut wrong = Vec::new();
    if !cuda.chunk_mib.is_power_of_two() || !(2..=64).contains(&cuda.chunk_mib) {
        wrong.push(("cuda.chunk_mib", format!("{} MiB, expected a power of two from 2 to 64", cuda.chunk_mib)));
        return wrong;
    }
    if card.vram_mib > 4 << 20 || card.vram_mib < cuda.chunk_mib || !card.vram_mib.is_multiple_of(cuda.chunk_mib) {
        let what = format!("{} MiB, expected a multiple of the chunk of {} MiB", card.vram_mib, cuda.chunk_mib);
        wrong.push(("vram_mib", what));
    }
    wrong.extend(memory(card));
    wrong.extend(scheduler(&card.scheduler));
    if cuda.host_ready_mib > card.memory.host_mib.max(CudaSpec::default().host_ready_mib) {
        let what = format!("{} MiB, expected at most `memory.host_mib`", cuda.host_ready_mib);
        wrong.push(("cuda.host_ready_mib", what));
    }
    if !(1..=1000).contains(&cuda.slice_ms) {
        wrong.push(("cuda.slice_ms", format!("{}, expected 1 to 1000", cuda.slice_ms)));
    }
    if !(100..=1_000_000).contains(&cuda.run_ahead_us) {
        wrong.push(("cuda.run_ahead_us", format!("{}, expected 100 to 1000000", cuda.run_ahead_us)));
    }
    if !(1..=3600).contains(&cuda.orphan_timeout_s) {
        wrong.push(("cuda.orphan_timeout_s", format!("{}, expected 1 to 3600", cuda.orphan_timeout_s)));
    }
    if !cuda.mps_control.is_absolute() {
        let what = format!("{}, expected an absolute path", cuda.mps_control.display());
        wrong.push(("cuda.mps_control", what));
    }
    if cuda.margin_mib > 1 << 20 {
        wrong.push(("cuda.margin_mib", format!("{} MiB, expected 0 to 1048576", cuda.margin_mib)));
    }
    if let Some([first, last]) = cuda.worker_users
        && !((1..u32::MAX).contains(&first) && (first..u32::MAX).contains(&last) && last - first < MAX_WORKER_USERS)
    {
        let what =
            format!("[{first}, {last}], expected the first and the last of 1 to {MAX_WORKER_USERS} users, not root");
        wrong.push(("cuda.worker_users", what));
    }
    if cuda.device.is_empty() || cuda.device.len() > 63 {
        let what = "expected a number, `GPU-` with a UUID, or a PCI address such as 0000:3b:00.0".to_owned();
        wrong.push(("cuda.device", what));
    }
    wrong
}

/// Returns an error if the range of user IDs for a card's workers overlaps another card's range.
pub(super) fn shared_users(card: &CardSpec, before: &[CardSpec]) -> Option<String> {
    let [first, last] = card.cuda.as_ref()?.worker_users?;
    let meets = |other: &&CardSpec| {
        other.cuda.as_ref().and_then(|cuda| cuda.worker_users).is_some_and(|[from, to]| from <= last && first <= to)
    };
    let other = before.iter().find(meets)?;
    Some(format!("they overlap the users of card `{}`, expected others", other.name))
}

/// Returns the errors in a CUDA card's `memory` table.
#[must_use]
pub fn memory(card: &CardSpec) -> Vec<(&'static str, String)> {
    let memory = &card.memory;
    let mut wrong = memory.check(card.cuda().chunk_mib << 10, card.vram_mib);
    if memory.reserve_mib != 0 {
        let what =
            format!("{}, expected 0 on a CUDA card; `memory.low_water_mib` keeps memory free", memory.reserve_mib);
        wrong.push(("memory.reserve_mib", what));
    }
    if memory.chaos_every != 0 {
        wrong.push(("memory.chaos_every", format!("{}, expected 0 on a CUDA card", memory.chaos_every)));
    }
    if !memory.ram.is_silent() {
        wrong.push(("memory.ram", "expected no such table on a CUDA card: its tenants do not lend RAM".to_owned()));
    }
    if memory.victims == VictimPolicy::Profiled {
        let what = "`profiled`, expected another policy on a CUDA card: programs have no profiles there".to_owned();
        wrong.push(("memory.victims", what));
    }
    wrong
}

/// Returns the errors in a CUDA card's `scheduler` table. A slice always includes the whole card.
#[must_use]
pub fn scheduler(config: &sched::Config) -> Vec<(&'static str, String)> {
    let mut wrong = Vec::new();
    if let Err(error) = config.check() {
        wrong.push(("scheduler", error.to_string()));
    }
    if matches!(config.policy, PolicyKind::Direct | PolicyKind::Disengaged) {
        let what = format!(
            "`{}`, expected `band`, `credit` or `fifo` on a CUDA card, whose time is assigned in turns; to share it \
             without turns, run the programs without the library",
            config.policy.name()
        );
        wrong.push(("scheduler.policy", what));
    }
    let default = sched::Config::default();
    let said = [
        ("scheduler.queues", config.queues != default.queues, "a turn covers the whole card"),
        ("scheduler.disengaged", config.disengaged != default.disengaged, "turns do not support this policy"),
        (
            "scheduler.pipeline",
            config.pipeline != default.pipeline,
            "set `cuda.run_ahead_us` in the configuration file",
        ),
        ("scheduler.stamp_slack_ns", config.stamp_slack_ns != default.stamp_slack_ns, "the owner uses its own clock"),
    ];
    let said = said.into_iter().filter(|(_, said, _)| *said);
    wrong.extend(said.map(|(key, _, why)| (key, format!("expected no such key on a CUDA card: {why}"))));
    wrong
}

#[cfg(test)]
mod tests {
    use crate::Config;
    use sched::groups::Sharing;

    const CARD: &str = "[[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = 40960\nmemory.host_mib = 40960\n";

    fn mistakes(more: &str) -> String {
        match Config::parse(&format!("{CARD}{more}"), "m.toml") {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_card_and_tenants_are_read() {
        let text = format!(
            "{CARD}cuda.device = \"GPU-1234\"\ncuda.chunk_mib = 2\n\
             [[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 40960\nmemory.guarantee_mib = 1024\n\
             time.weight = 300\nmode = \"0600\"\non_stuck = \"suspend\"\n\
             share_group = \"decoders\"\nsharing = \"together\"\n"
        );
        let config = Config::parse(&text, "m.toml").expect("the file is valid");
        assert_eq!(config.tenants[0].memory.guarantee_mib, Some(1024));
        assert_eq!(
            (config.tenants[0].share_group.as_str(), config.tenants[0].sharing),
            ("decoders", Sharing::Together)
        );
        assert_eq!(config.cards[0].cuda().chunk_mib, 2);
    }

    #[test]
    fn config_errors_name_line_and_key() {
        for (more, expected) in [
            ("cuda.chunk_mib = 3\n", "m.toml:6:18: card[0].cuda.chunk_mib: 3 MiB"),
            ("cuda.mps_control = \"mps\"\n", "card[0].cuda.mps_control: mps, expected an absolute path"),
            ("cuda.worker_users = [0, 9]\n", "card[0].cuda.worker_users: [0, 9], expected the first and the last"),
            ("cuda.worker_users = [9, 8]\n", "card[0].cuda.worker_users: [9, 8]"),
            ("cuda.worker_users = [1, 65537]\n", "card[0].cuda.worker_users: [1, 65537]"),
            (
                "cuda.worker_users = [900, 910]\n\
                 [[card]]\nname = \"b\"\nkind = \"cuda\"\nvram_mib = 1024\ncuda.worker_users = [910, 920]\n",
                "card[1].cuda.worker_users: they overlap the users of card `h100`",
            ),
            (
                "[[tenant]]\nname = \"a\"\ncard = \"x\"\nvram_mib = 16\n",
                "m.toml:8:8: tenant[0].card: `x` is not a card",
            ),
            ("[[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 15\n", "m.toml:9:12: tenant[0].vram_mib: 15 MiB"),
            (
                "[[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 16\nmemory.guarantee_mib = 65536\n",
                "tenant[0].memory.guarantee_mib: 65536 MiB",
            ),
            (
                "[[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 16\nshare_group = \"a b\"\n",
                "tenant[0].share_group: \"a b\", expected a name of at most 64 bytes without spaces",
            ),
            (
                "[[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 16\nsharing = \"space\"\n",
                "unknown variant `space`, expected one of `turns`, `auto`, `together`",
            ),
            (
                "[[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 16\ntime.copies.weight = 3\n",
                "tenant[0].time.copies: expected no such table",
            ),
            (
                "[[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 81936\n",
                "tenant[0].vram_mib: 81936 MiB, expected at most 81920: card `h100` has 40960 MiB",
            ),
            ("[[vm]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 16\n", "vm[0].card: `h100` is of kind = \"cuda\""),
            ("[[tenant]]\nname = \"a\"\ncards = [\"h100\"]\nvram_mib = 16\n", "tenant[0].cards: only `h100`"),
            (
                "[[tenant]]\nname = \"a\"\ncards = [\"h100\", \"h100\"]\nvram_mib = 16\n",
                "m.toml:8:9: tenant[0].cards: `h100` is listed twice",
            ),
            (
                "[[tenant]]\nname = \"a\"\ncards = [\"h100\", \"x\"]\nvram_mib = 16\n",
                "tenant[0].cards: `x` is not a card of kind = \"cuda\", expected `h100`",
            ),
            (
                "[[card]]\nname = \"vm\"\nkind = \"simgpu\"\n\
                 [[tenant]]\nname = \"a\"\ncards = [\"h100\", \"vm\"]\nvram_mib = 16\n",
                "tenant[0].cards: `vm` is not a card of kind = \"cuda\"",
            ),
            (
                "[[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 16\n\
                 [[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 16\n",
                "tenant[1].name: `a` is the name of another tenant",
            ),
        ] {
            let found = mistakes(more);
            assert!(found.contains(expected), "{more}: {found}");
        }
    }

    #[test]
    fn tenant_with_several_cards_is_checked_on_each() {
        let second = CARD.replace("h100", "b").replace("40960", "20480");
        let tenant = |more: &str| {
            let text = format!("{second}[[tenant]]\nname = \"a\"\ncards = [\"h100\", \"b\"]\nvram_mib = 16384\n{more}");
            mistakes(&text)
        };
        assert_eq!(tenant("memory.guarantee_mib = 16384\n"), "");
        for (more, expected) in [
            ("card = \"b\"\n", "tenant[0].card: `b`, expected no such key with `cards`"),
            ("on_stuck = \"suspend\"\n", "tenant[0].on_stuck: `suspend`, expected `kill` with `cards`"),
            ("share_group = \"g\"\n", "tenant[0].share_group: `g`, expected no such key with `cards`"),
            ("socket = \"sockets\"\n", "tenant[0].socket: `sockets/h100.sock` is not an absolute path"),
            ("socket = \"/run/a:b\"\n", "tenant[0].socket: `/run/a:b/h100.sock` contains `:`"),
            ("memory.guarantee_mib = 32768\n", "expected at most the 20480 MiB of card `b`"),
            (
                "memory.guarantee_mib = 16384\n\
                 [[tenant]]\nname = \"c\"\ncard = \"b\"\nvram_mib = 8192\nmemory.guarantee_mib = 8192\n",
                "tenant[1].memory.guarantee_mib: 8192 MiB, expected at most the 4096 MiB of card `b`",
            ),
        ] {
            let found = tenant(more);
            assert!(found.contains(expected), "{more}: {found}");
        }
    }

    #[test]
    fn tenant_with_several_cards_has_socket_for_each() {
        let table = serde_json::json!({ "name": "a", "cards": ["y", "x"], "vram_mib": 16 });
        let spec = crate::TenantSpec::from_table(table.as_object().expect("a table")).expect("the table is valid");
        let paths = ["/run/tenants/a/y.sock", "/run/tenants/a/x.sock"].map(std::path::PathBuf::from);
        assert_eq!(spec.socket_paths("/run".as_ref()), paths);
        assert_eq!((spec.uses("x"), spec.uses(""), spec.whole("/run".as_ref()).socket), (true, false, None));
        // With several cards, the key `socket` names the folder of the sockets.
        let spec = crate::TenantSpec { socket: Some("/jobs/a".into()), ..spec };
        assert_eq!(
            spec.socket_paths("/run".as_ref()),
            ["/jobs/a/y.sock", "/jobs/a/x.sock"].map(std::path::PathBuf::from)
        );
        assert_eq!(spec.whole("/run".as_ref()).socket, Some("/jobs/a".into()));
    }

    #[test]
    fn tenant_without_any_cuda_card_is_refused_without_empty_name() {
        let tenant = "[[card]]\nname = \"c\"\nkind = \"simgpu\"\n[[tenant]]\nname = \"a\"\nvram_mib = 16\n";
        let error = Config::parse(tenant, "m.toml").unwrap_err().to_string();
        assert!(
            error.contains("tenant[0].card: this host has no card of kind = \"cuda\", expected a [[card]]"),
            "{error}"
        );
    }

    #[test]
    fn tenant_without_card_goes_to_roomiest_card_that_fits() {
        let second = CARD.replace("h100", "small").replace("40960", "20480");
        let tenant = |name: &str, more: &str| format!("[[tenant]]\nname = \"{name}\"\nvram_mib = 16384\n{more}");
        let text = format!("{CARD}{second}{}{}{}", tenant("a", ""), tenant("b", ""), tenant("c", ""));
        let config = Config::parse(&text, "m.toml").expect("the file is valid");
        let mut placed: Vec<crate::TenantSpec> = Vec::new();
        for tenant in config.tenants {
            let others: Vec<_> = placed.iter().collect();
            let tenant = tenant.placed((crate::Placement::Room, &crate::Links::default()), &config.cards, &[], &others);
            placed.push(tenant);
        }
        // The first tenant would occupy 40 % of `h100` or 80 % of `small`. The second tenant would fill either card to
        // 80 %, so the first card is chosen. The third tenant is placed on the other card.
        assert_eq!(placed.iter().map(|tenant| tenant.card.as_str()).collect::<Vec<_>>(), ["h100", "h100", "small"]);
        let guarantee = |mib: u64| tenant("d", &format!("memory.guarantee_mib = {mib}\n"));
        assert_eq!(mistakes(&format!("{second}{}", guarantee(32768))), "");
        assert!(
            mistakes(&guarantee(65536))
                .contains("tenant[0].memory.guarantee_mib: 65536 MiB, expected at most the 40960")
        );
    }

    #[test]
    fn settings_invalid_on_cuda_card_are_rejected() {
        for (more, expected) in [
            (
                "scheduler.policy = \"direct\"\n",
                "card[0].scheduler.policy: `direct`, expected `band`, `credit` or `fifo`",
            ),
            ("scheduler.pipeline.contended = 1\n", "scheduler.pipeline: expected no such key on a CUDA card"),
            ("scheduler.queues = \"single\"\n", "scheduler.queues: expected no such key"),
            ("scheduler.band.period_ns = 1\n", "card[0].scheduler: band.period_ns = 1 is not between"),
            ("memory.reserve_mib = 16\n", "memory.reserve_mib: 16, expected 0 on a CUDA card"),
            ("memory.victims = \"profiled\"\n", "memory.victims: `profiled`, expected another policy"),
        ] {
            let found = mistakes(more);
            assert!(found.contains(expected), "{more}: {found}");
        }
        assert_eq!(mistakes("scheduler.policy = \"credit\"\nscheduler.strikes = 0\nmemory.victims = \"random\"\n"), "");
    }
}
