//! Cards behind NVIDIA's driver, and the tenants that share them.

use std::path::{Path, PathBuf};

use sched::PolicyKind;
use sched::groups::Sharing;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vram::victim::VictimPolicy;

use super::refusal::{Refusal, RefusalKind};
use super::{CardKind, CardSpec, Labels, SocketMode, TimeShare, VmMemory};

/// Maximum length of the name of a share group, in bytes.
const MAX_GROUP_NAME: usize = 64;

/// Maximum number of users for the workers of a card.
const MAX_WORKER_USERS: u32 = 1 << 16;

/// A `[card.cuda]` table: a card behind NVIDIA's driver, with `kind = "cuda"`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CudaSpec {
    /// The card: its number, `GPU-` and its UUID as `nvidia-smi -L` prints it, or its PCI address.
    pub device: String,
    /// NVIDIA's library: a path, or a name for the loader.
    pub driver: PathBuf,
    /// Program that calls CUDA for a program of a virtual machine; the package's if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<PathBuf>,
    /// First and last number of the users of workers: each virtual machine's workers have a user of their own. Without
    /// it they have the daemon's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_users: Option<[u32; 2]>,
    /// Workers are restricted to the parts of the host that they need.
    pub sandbox: bool,
    /// MiB of a chunk, the unit of allocation and relocation.
    #[serde(deserialize_with = "crate::size::key")]
    pub chunk_mib: u64,
    /// MiB of host memory that are pinned in advance.
    #[serde(deserialize_with = "crate::size::key")]
    pub host_ready_mib: u64,
    /// Milliseconds of a slice of the card's time.
    pub slice_ms: u64,
    /// Microseconds of work in flight of a tenant that competes with others.
    pub run_ahead_us: u32,
    /// Policy for processes that use the card without its owner, and for programs with memory outside their accounts.
    pub strangers: OnStranger,
    /// Tolerance in MiB between the accounts and the real use, of one process and of the whole card.
    #[serde(deserialize_with = "crate::size::key")]
    pub margin_mib: u64,
    /// Seconds for which workers of guest programs continue after a daemon that was killed. A worker that the next
    /// daemon has not taken by then ends itself, and its program with it.
    pub orphan_timeout_s: u64,
}

/// Policy for processes that use a CUDA card without its owner, as NVML reports, and for tenants' programs whose memory
/// outside their accounts exceeds the tenant's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnStranger {
    /// Such processes are shown and logged.
    #[default]
    Report,
    /// They are killed as well, if the daemon's user has the right to.
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
            orphan_timeout_s: 30,
        }
    }
}

/// A `[[tenant]]` table: programs that share a CUDA card with others.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantSpec {
    /// Its name, not that of a virtual machine.
    pub name: String,
    /// Name of the card, one of `kind = "cuda"`; where there is most room if not given.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub card: String,
    /// Name of the profile whose keys it has where it says nothing itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// MiB of memory that its programs see; to be said here or by the profile.
    #[serde(default)]
    #[serde(deserialize_with = "crate::size::key")]
    pub vram_mib: u64,
    /// Part of the card's memory.
    #[serde(default)]
    pub memory: VmMemory,
    /// Part of the card's time.
    #[serde(default)]
    pub time: TimeShare,
    /// Name of its share group: tenants of the card that trust each other. Programs of a group that are clients of the
    /// card's MPS server can use the card at the same time. Empty for a tenant on its own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub share_group: String,
    /// Mode in which the members of its group share the card: `turns`, `together`, or `auto` for the mode with more
    /// progress. The strictest member decides: `turns` before `auto` before `together`.
    #[serde(default)]
    pub sharing: Sharing,
    /// Policy for a program that does not answer.
    #[serde(default)]
    pub on_stuck: OnStuck,
    /// Policy for its programs when it is removed.
    #[serde(default)]
    pub on_remove: OnRemove,
    /// Path of its socket; `tenants/NAME/cuda.sock` in the daemon's folder if not given. The daemon makes a folder that
    /// has the tenant's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Access rights of the socket: who may connect is the tenant.
    #[serde(default)]
    pub mode: SocketMode,
    /// User that owns the socket, by name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Group of the socket, by name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Words of whoever places work, shown wherever it is.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// Folder of the tenants' folders, in the daemon's `socket_dir`.
pub const TENANTS: &str = "tenants";

/// Policy for a program that holds the card or its memory and does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnStuck {
    /// It is killed.
    #[default]
    Kill,
    /// NVIDIA's driver suspends it, if it can; if not it is killed.
    Suspend,
}

/// Policy for the programs of a tenant that is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnRemove {
    /// They are killed.
    #[default]
    Kill,
    /// Their connections end: those that have memory of the card are killed if they go on for 5 seconds.
    Disconnect,
}

impl TenantSpec {
    /// Returns the tenant that a `[[tenant]]` table describes.
    ///
    /// # Errors
    /// If the table is invalid; the error names the key.
    pub fn from_table(table: &serde_json::Map<String, serde_json::Value>) -> Result<Self, String> {
        Self::deserialize(table).map_err(|error| error.to_string())
    }

    /// Returns the table with all keys that have a value, including omitted keys.
    #[must_use]
    pub fn whole(&self, socket_dir: &Path) -> Self {
        let time = self.time.params(None).into();
        Self { time, socket: Some(self.socket_path(socket_dir)), ..self.clone() }
    }

    /// Assigns a tenant that names no card to the card with the most room, among the cards that accept it, given
    /// `others`.
    #[must_use]
    pub fn placed(mut self, cards: &[CardSpec], vms: &[&str], others: &[&TenantSpec]) -> Self {
        if !self.card.is_empty() {
            return self;
        }
        // Memory that the tenants of a card see, in thousandths of the card's memory. Overcommit is possible.
        let load = |card: &CardSpec| {
            let there = others.iter().filter(|other| other.card == card.name).map(|other| other.vram_mib);
            there.fold(self.vram_mib, u64::saturating_add).saturating_mul(1000) / card.vram_mib.max(1)
        };
        let fits = |card: &&CardSpec| {
            let here = Self { card: card.name.clone(), ..self.clone() };
            !card.drained && tenant(&here, cards, vms, others).is_empty()
        };
        let kind = |card: &&CardSpec| card.kind == CardKind::Cuda;
        // If no card accepts the tenant, the refusal of the first card is reported.
        let found = cards.iter().filter(kind).filter(fits).min_by_key(|card| load(card));
        if let Some(card) = found.or(cards.iter().find(kind)) {
            self.card.clone_from(&card.name);
        }
        self
    }

    /// Returns the socket's path: the configured path, or the path in the tenant's folder in `socket_dir`.
    ///
    /// The folder is exclusive to the tenant: containers mount it, and find the socket of the next owner in it.
    #[must_use]
    pub fn socket_path(&self, socket_dir: &Path) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| socket_dir.join(TENANTS).join(&self.name).join("cuda.sock"))
    }
}

impl CardSpec {
    /// Returns the keys of a CUDA card. Returns the defaults if the card has no such table.
    #[must_use]
    pub fn cuda(&self) -> CudaSpec {
        self.cuda.clone().unwrap_or_default()
    }
}

/// Returns the errors of a card of `kind = "cuda"`, each with its key.
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

/// Returns an error if the range of users for a card's workers overlaps another card's range.
pub(super) fn shared_users(card: &CardSpec, before: &[CardSpec]) -> Option<String> {
    let [first, last] = card.cuda.as_ref()?.worker_users?;
    let meets = |other: &&CardSpec| {
        other.cuda.as_ref().and_then(|cuda| cuda.worker_users).is_some_and(|[from, to]| from <= last && first <= to)
    };
    let other = before.iter().find(meets)?;
    Some(format!("users of card `{}` are among them, expected others", other.name))
}

/// Returns the errors of a CUDA card's `memory` table.
#[must_use]
pub fn memory(card: &CardSpec) -> Vec<(&'static str, String)> {
    let memory = &card.memory;
    let mut wrong = memory.check(card.cuda().chunk_mib << 10, card.vram_mib);
    if memory.reserve_mib != 0 {
        let what = format!("{}, expected 0 on a CUDA card; `memory.low_water_mib` keeps room free", memory.reserve_mib);
        wrong.push(("memory.reserve_mib", what));
    }
    if memory.chaos_every != 0 {
        wrong.push(("memory.chaos_every", format!("{}, expected 0 on a CUDA card", memory.chaos_every)));
    }
    if !memory.ram.is_silent() {
        wrong.push(("memory.ram", "expected no such table on a CUDA card: its tenants lend no RAM".to_owned()));
    }
    if memory.victims == VictimPolicy::Profiled {
        let what = "`profiled`, expected another policy on a CUDA card: programs have no profiles there".to_owned();
        wrong.push(("memory.victims", what));
    }
    wrong
}

/// Returns the errors of a CUDA card's `scheduler` table. A slice always includes the whole card.
#[must_use]
pub fn scheduler(config: &sched::Config) -> Vec<(&'static str, String)> {
    let mut wrong = Vec::new();
    if let Err(error) = config.check() {
        wrong.push(("scheduler", error.to_string()));
    }
    if matches!(config.policy, PolicyKind::Direct | PolicyKind::Disengaged) {
        let what = format!(
            "`{}`, expected `band`, `credit` or `fifo` on a CUDA card, whose time is given in turns; to share it \
             without turns, run the programs without the library",
            config.policy.name()
        );
        wrong.push(("scheduler.policy", what));
    }
    let default = sched::Config::default();
    let said = [
        ("scheduler.queues", config.queues != default.queues, "a turn is of the whole card"),
        ("scheduler.disengaged", config.disengaged != default.disengaged, "there is no such policy for turns"),
        (
            "scheduler.pipeline",
            config.pipeline != default.pipeline,
            "set `cuda.run_ahead_us` in the configuration file",
        ),
        ("scheduler.stamp_slack_ns", config.stamp_slack_ns != default.stamp_slack_ns, "the owner's own clock is taken"),
    ];
    let said = said.into_iter().filter(|(_, said, _)| *said);
    wrong.extend(said.map(|(key, _, why)| (key, format!("expected no such key on a CUDA card: {why}"))));
    wrong
}

/// Returns all reasons to refuse a tenant, given the names of virtual machines and the tenants `others`.
#[must_use]
pub fn tenant(tenant: &TenantSpec, cards: &[CardSpec], vms: &[&str], others: &[&TenantSpec]) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut say = |kind, field, what| refusals.push(Refusal { kind, field, what });
    if others.iter().any(|other| other.name == tenant.name) || vms.contains(&tenant.name.as_str()) {
        let what = format!("`{}` is the name of another tenant or VM, expected a new one", tenant.name);
        say(RefusalKind::Conflict, "name", what);
    }
    let Some(card) = cards.iter().find(|card| card.name == tenant.card && card.kind == CardKind::Cuda) else {
        let known = cards.iter().filter(|card| card.kind == CardKind::Cuda);
        let known: Vec<_> = known.map(|card| format!("`{}`", card.name)).collect();
        let known =
            if known.is_empty() { "a [[card]] table of that kind first".to_owned() } else { known.join(" or ") };
        let what = match tenant.card.as_str() {
            "" => format!("this host has no card of kind = \"cuda\", expected {known}"),
            card => format!("`{card}` is not a card of kind = \"cuda\", expected {known}"),
        };
        say(RefusalKind::UnknownCard, "card", what);
        return refusals;
    };
    let chunk = card.cuda().chunk_mib.max(1);
    if tenant.vram_mib < chunk || tenant.vram_mib > 16 << 20 || !tenant.vram_mib.is_multiple_of(chunk) {
        let what = match tenant.vram_mib {
            0 => "missing, expected MiB of memory or a `profile` that contains it".to_owned(),
            mib => format!("{mib} MiB, expected a multiple of the chunk of {chunk} MiB"),
        };
        say(RefusalKind::Invalid, "vram_mib", what);
    }
    let whole = card.vram_mib.saturating_add(card.memory.host_mib);
    if tenant.vram_mib > whole {
        let what = format!(
            "{} MiB, expected at most {whole}: card `{}` has {} MiB, and `memory.host_mib` of it is {}",
            tenant.vram_mib, card.name, card.vram_mib, card.memory.host_mib
        );
        say(RefusalKind::Quota, "vram_mib", what);
    }
    let as_cut = CardSpec { chunk_kib: chunk << 10, ..card.clone() };
    for (field, what) in tenant.memory.check(&as_cut) {
        say(RefusalKind::Invalid, field, what);
    }
    if !tenant.memory.ram.is_silent() {
        let what = "expected no such table: a tenant of a CUDA card lends no RAM".to_owned();
        say(RefusalKind::Invalid, "memory.ram", what);
    }
    let beside = others.iter().filter(|other| other.card == tenant.card);
    let promised: u64 = beside.map(|other| other.memory.guarantee_mib.unwrap_or(0)).fold(0, u64::saturating_add);
    let left = card.vram_mib.saturating_sub(promised);
    if let Some(guarantee) = tenant.memory.guarantee_mib.filter(|&guarantee| guarantee > left) {
        let what = format!(
            "{guarantee} MiB, expected at most the {left} MiB of card `{}` that are not guaranteed to others",
            card.name
        );
        say(RefusalKind::Quota, "memory.guarantee_mib", what);
    }
    let group = &tenant.share_group;
    if group.len() > MAX_GROUP_NAME || group.chars().any(|c| c.is_control() || c.is_whitespace()) {
        let what = format!("{group:?}, expected a name of at most {MAX_GROUP_NAME} bytes without spaces");
        say(RefusalKind::Invalid, "share_group", what);
    }
    if let Err(error) = tenant.time.params(None).check() {
        say(RefusalKind::Invalid, "time", error.to_string());
    }
    if !tenant.time.copies.is_silent() {
        let what = "expected no such table: a tenant has one share of all engines of its card".to_owned();
        say(RefusalKind::Invalid, "time.copies", what);
    }
    refusals
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
        let config = Config::parse(&text, "m.toml").expect("it is good");
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
            ("cuda.worker_users = [0, 9]\n", "card[0].cuda.worker_users: [0, 9], expected the first and the last"),
            ("cuda.worker_users = [9, 8]\n", "card[0].cuda.worker_users: [9, 8]"),
            ("cuda.worker_users = [1, 65537]\n", "card[0].cuda.worker_users: [1, 65537]"),
            (
                "cuda.worker_users = [900, 910]\n\
                 [[card]]\nname = \"b\"\nkind = \"cuda\"\nvram_mib = 1024\ncuda.worker_users = [910, 920]\n",
                "card[1].cuda.worker_users: users of card `h100` are among them",
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
        let config = Config::parse(&text, "m.toml").expect("it is good");
        let mut placed: Vec<crate::TenantSpec> = Vec::new();
        for tenant in config.tenants {
            let others: Vec<_> = placed.iter().collect();
            let tenant = tenant.placed(&config.cards, &[], &others);
            placed.push(tenant);
        }
        // The first tenant uses 40 % and 80 % of the two cards. Then both cards have 80 %, and the first one is chosen;
        // then the other one.
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
