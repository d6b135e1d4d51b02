//! Cards behind NVIDIA's driver, and the tenants that share them.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CardKind, CardSpec, SocketMode, TimeShare, VmMemory, VmSpec};

/// A `[card.cuda]` table: a card behind NVIDIA's driver, with `kind = "cuda"`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CudaSpec {
    /// The card: its number, `GPU-` and its UUID as `nvidia-smi -L` prints it, or its PCI address.
    pub device: String,
    /// NVIDIA's library: a path, or a name for the loader.
    pub driver: PathBuf,
    /// MiB of a chunk, the unit in which memory is given and moved.
    pub chunk_mib: u64,
    /// MiB of host memory that are pinned before they are needed.
    pub host_ready_mib: u64,
    /// Milliseconds of a slice of the card's time.
    pub slice_ms: u64,
    /// Microseconds of work in flight of a tenant that is not alone.
    pub run_ahead_us: u32,
}

impl Default for CudaSpec {
    fn default() -> Self {
        Self {
            device: "0".to_owned(),
            driver: "libcuda.so.1".into(),
            chunk_mib: 16,
            host_ready_mib: 256,
            slice_ms: 10,
            run_ahead_us: 4000,
        }
    }
}

/// A `[[tenant]]` table: programs that share a CUDA card with others.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantSpec {
    /// Its name, not that of a virtual machine.
    pub name: String,
    /// Name of the card, one of `kind = "cuda"`.
    pub card: String,
    /// MiB of memory that its programs see.
    pub vram_mib: u64,
    /// Part of the card's memory.
    #[serde(default)]
    pub memory: VmMemory,
    /// Part of the card's time.
    #[serde(default)]
    pub time: TimeShare,
    /// Policy for a program that does not answer.
    #[serde(default)]
    pub on_stuck: OnStuck,
    /// Path of its socket; `NAME.cuda` in the daemon's folder if not given.
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
}

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

impl TenantSpec {
    /// The socket's path: its own, or its name in `socket_dir`.
    #[must_use]
    pub fn socket_path(&self, socket_dir: &Path) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| socket_dir.join(format!("{}.cuda", self.name)))
    }
}

impl CardSpec {
    /// The keys of a CUDA card; the defaults where there is no such table.
    #[must_use]
    pub fn cuda(&self) -> CudaSpec {
        self.cuda.clone().unwrap_or_default()
    }
}

/// Mistakes of a card of `kind = "cuda"`: keys, and what is wrong with them.
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
    wrong.extend(card.memory.check(cuda.chunk_mib << 10, card.vram_mib));
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
    if cuda.device.is_empty() || cuda.device.len() > 63 {
        let what = "expected a number, `GPU-` with a UUID, or a PCI address such as 0000:3b:00.0".to_owned();
        wrong.push(("cuda.device", what));
    }
    wrong
}

/// Mistakes of a tenant beside virtual machines and `others`: keys, and what is wrong with them.
#[must_use]
pub fn tenant(
    tenant: &TenantSpec,
    cards: &[CardSpec],
    vms: &[VmSpec],
    others: &[TenantSpec],
) -> Vec<(&'static str, String)> {
    let mut wrong = Vec::new();
    if others.iter().any(|other| other.name == tenant.name) || vms.iter().any(|vm| vm.name == tenant.name) {
        wrong.push(("name", format!("`{}` is the name of another tenant or VM, expected a new one", tenant.name)));
    }
    let Some(card) = cards.iter().find(|card| card.name == tenant.card && card.kind == CardKind::Cuda) else {
        let what = format!("`{}` is no card of kind = \"cuda\", expected the name of one", tenant.card);
        wrong.push(("card", what));
        return wrong;
    };
    let chunk = card.cuda().chunk_mib.max(1);
    if tenant.vram_mib < chunk || tenant.vram_mib > 16 << 20 || !tenant.vram_mib.is_multiple_of(chunk) {
        wrong.push(("vram_mib", format!("{} MiB, expected a multiple of the chunk of {chunk} MiB", tenant.vram_mib)));
    }
    let as_cut = CardSpec { chunk_kib: chunk << 10, ..card.clone() };
    wrong.extend(tenant.memory.check(&as_cut));
    let beside = others.iter().filter(|other| other.card == tenant.card);
    let promised: u64 = beside.map(|other| other.memory.guarantee_mib.unwrap_or(0)).fold(0, u64::saturating_add);
    let left = card.vram_mib.saturating_sub(promised);
    if let Some(guarantee) = tenant.memory.guarantee_mib.filter(|&guarantee| guarantee > left) {
        let what = format!("{guarantee} MiB, expected at most the {left} MiB that are promised to no one");
        wrong.push(("memory.guarantee_mib", what));
    }
    if let Err(error) = tenant.time.params(None).check() {
        wrong.push(("time", error.to_string()));
    }
    wrong
}

#[cfg(test)]
mod tests {
    use crate::Config;

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
             time.weight = 300\nmode = \"0600\"\non_stuck = \"suspend\"\n"
        );
        let config = Config::parse(&text, "m.toml").expect("it is good");
        assert_eq!(config.tenants[0].memory.guarantee_mib, Some(1024));
        assert_eq!(config.cards[0].cuda().chunk_mib, 2);
    }

    #[test]
    fn mistakes_are_told_with_line_and_key() {
        for (more, expected) in [
            ("cuda.chunk_mib = 3\n", "m.toml:6:18: card[0].cuda.chunk_mib: 3 MiB"),
            ("[[tenant]]\nname = \"a\"\ncard = \"x\"\nvram_mib = 16\n", "m.toml:8:8: tenant[0].card: `x` is no card"),
            ("[[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 15\n", "m.toml:9:12: tenant[0].vram_mib: 15 MiB"),
            (
                "[[tenant]]\nname = \"a\"\ncard = \"h100\"\nvram_mib = 16\nmemory.guarantee_mib = 65536\n",
                "tenant[0].memory.guarantee_mib: 65536 MiB",
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
}
