//! Virtual machines whose programs use a CUDA card: the `[vm.cuda]` table and its rules.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::cuda::{self, OnRemove, OnStuck, TENANTS};
use super::refusal::{Refusal, RefusalKind};
use super::{Apertures, CardSpec, Labels, Paravirtual, SocketMode, TenantCards, TenantSpec, VmSpec};

/// Minimum window size in MiB. Firmware places a smaller window where the guest maps it uncached.
const MIN_WINDOW_MIB: u64 = 1 << 10;
/// Maximum window size in MiB.
const MAX_WINDOW_MIB: u64 = 1 << 20;
/// Maximum number of programs of a virtual machine.
const MAX_PROGRAMS: u32 = 64;

/// A `[vm.cuda]` table. The virtual machine is on a card of `kind = "cuda"`, and the guest's programs use CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FunctionSpec {
    /// Size of the window in MiB, a power of two. The window is host memory shared by programs and card, including
    /// pinned memory. The guest can use all of it, in addition to its RAM.
    #[serde(deserialize_with = "crate::size::key")]
    pub window_mib: u64,
    /// Maximum number of guest programs that use the card simultaneously. Each has a process on the host.
    pub programs: u32,
}

impl Default for FunctionSpec {
    fn default() -> Self {
        Self { window_mib: 4 << 10, programs: 16 }
    }
}

impl VmSpec {
    /// Returns the settings of the virtual machine as a tenant of its CUDA card.
    #[must_use]
    pub fn as_tenant(&self) -> TenantSpec {
        TenantSpec {
            name: self.name.clone(),
            card: self.card.clone(),
            cards: TenantCards::default(),
            placement: None,
            profile: None,
            vram_mib: self.vram_mib.unwrap_or(0),
            memory: self.memory.clone(),
            time: self.time,
            share_group: String::new(),
            sharing: sched::groups::Sharing::default(),
            on_stuck: OnStuck::Kill,
            on_remove: OnRemove::Kill,
            // Only the daemon's own workers connect to this socket.
            socket: None,
            mode: SocketMode(0o600),
            owner: None,
            group: None,
            labels: Labels::default(),
        }
    }
}

/// Returns the socket on which the owner of a card listens for the workers of a VM's programs. The socket has the name
/// of the card, because workers of a VM that moves use both cards.
#[must_use]
pub fn workers_socket(vm: &str, card: &str, socket_dir: &Path) -> PathBuf {
    socket_dir.join(TENANTS).join(vm).join(format!("{card}.sock"))
}

/// Returns all reasons to reject a virtual machine on a CUDA card, given the other virtual machines `others`. Excludes
/// errors in the name and the socket.
pub(super) fn vm(vm: &VmSpec, card: &CardSpec, cards: &[CardSpec], others: &[&VmSpec]) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut say = |field, what: String| refusals.push(Refusal { kind: RefusalKind::Invalid, field, what });
    let Some(function) = vm.cuda else {
        let what = format!(
            "`{}` is of kind = \"cuda\", expected another card, or a table `cuda` for a VM whose programs use CUDA",
            card.name
        );
        say("card", what);
        return refusals;
    };
    let window = function.window_mib;
    if !window.is_power_of_two() || !(MIN_WINDOW_MIB..=MAX_WINDOW_MIB).contains(&window) {
        let what = format!("{window} MiB, expected a power of two from {MIN_WINDOW_MIB} to {MAX_WINDOW_MIB}");
        say("cuda.window_mib", what);
    }
    if !(1..=MAX_PROGRAMS).contains(&function.programs) {
        say("cuda.programs", format!("{}, expected 1 to {MAX_PROGRAMS}", function.programs));
    }
    let said = [
        ("passthrough", vm.passthrough),
        ("channels", vm.channels.is_some()),
        ("hang_limit_ms", vm.hang_limit_ms.is_some()),
        ("apertures", vm.apertures != Apertures::default()),
        ("shadow", vm.shadow != shadow_pt::Mode::default()),
        ("paravirtual", vm.paravirtual != Paravirtual::default()),
        ("xen_domain", vm.xen_domain.is_some()),
    ];
    for (field, _) in said.into_iter().filter(|(_, said)| *said) {
        say(field, format!("expected no such key for a VM on card `{}`, of kind = \"cuda\"", card.name));
    }
    let others = others.iter().copied().filter(|other| other.cuda.is_some() && other.name != vm.name);
    let others: Vec<&VmSpec> = others.collect();
    refusals.extend(refused_window(function, card, &others));
    let tenants: Vec<_> = others.iter().map(|other| other.as_tenant()).collect();
    let tenants: Vec<_> = tenants.iter().collect();
    refusals.extend(cuda::tenant(&vm.as_tenant(), cards, &[], &tenants));
    refusals
}

/// Returns the host memory that the windows of these virtual machines need on a card, in MiB.
#[must_use]
pub fn windows_mib<'a>(card: &str, vms: impl IntoIterator<Item = &'a VmSpec>) -> u64 {
    let of_card = vms.into_iter().filter(|vm| vm.card == card).filter_map(|vm| vm.cuda);
    of_card.map(|function| function.window_mib).fold(0, u64::saturating_add)
}

/// Returns the reason to reject a window that does not fit into the card's host memory together with the windows of
/// `others`. A guest can fill its window, so the whole window counts.
fn refused_window(function: FunctionSpec, card: &CardSpec, others: &[&VmSpec]) -> Option<Refusal> {
    let (window, taken) = (function.window_mib, windows_mib(&card.name, others.iter().copied()));
    let left = card.memory.host_mib.saturating_sub(taken);
    let what = format!(
        "{window} MiB, expected at most {left}: the window is host memory of card `{}`, whose `memory.host_mib` is {}, and \
         windows of other VMs need {taken}; raise `memory.host_mib`, or choose smaller windows",
        card.name, card.memory.host_mib
    );
    (window > left).then_some(Refusal { kind: RefusalKind::Quota, field: "cuda.window_mib", what })
}

#[cfg(test)]
mod tests {
    use crate::Config;

    const CARDS: &str = "[[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = 40960\nmemory.host_mib = 8192\n\
                         [[card]]\nname = \"old\"\nkind = \"simgpu\"\n";

    fn mistakes(vm: &str) -> String {
        match Config::parse(&format!("{CARDS}[[vm]]\nname = \"a\"\n{vm}"), "m.toml") {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn vm_with_cuda_is_placed_on_a_cuda_card_only() {
        assert_eq!(mistakes("vram_mib = 1024\ncuda = {}\n"), "");
        assert_eq!(mistakes("card = \"h100\"\nvram_mib = 1024\ncuda.window_mib = \"2G\"\ntime.weight = 200\n"), "");
        assert_eq!(mistakes("vram_mib = 512\n"), "");
        let found = mistakes("card = \"h100\"\nvram_mib = 1024\n");
        assert!(found.contains("vm[0].card: `h100` is of kind = \"cuda\""), "{found}");
        let found = mistakes("card = \"old\"\nvram_mib = 512\ncuda = {}\n");
        assert!(found.contains("vm[0].cuda: expected no such table"), "{found}");
    }

    #[test]
    fn keys_without_meaning_and_wrong_sizes_are_refused() {
        for (keys, expected) in [
            ("cuda.window_mib = 1000\n", "vm[0].cuda.window_mib: 1000 MiB, expected a power of two"),
            ("cuda.window_mib = 512\n", "vm[0].cuda.window_mib: 512 MiB"),
            ("cuda.programs = 0\n", "vm[0].cuda.programs: 0, expected 1 to 64"),
            ("cuda = {}\nchannels = 4\n", "vm[0].channels: expected no such key"),
            ("cuda = {}\nmemory.guarantee_mib = 65536\n", "vm[0].memory.guarantee_mib: 65536 MiB"),
        ] {
            let found = mistakes(&format!("card = \"h100\"\nvram_mib = 1024\n{keys}"));
            assert!(found.contains(expected), "{keys}: {found}");
        }
        let found = mistakes("card = \"h100\"\nvram_mib = 1000\ncuda = {}\n");
        assert!(found.contains("vm[0].vram_mib: 1000 MiB, expected a multiple of the chunk"), "{found}");
    }

    #[test]
    fn windows_of_all_vms_fit_into_the_host_memory_of_the_card() {
        let other = |name: &str, mib: u64| {
            format!("[[vm]]\nname = \"{name}\"\ncard = \"h100\"\nvram_mib = 1024\ncuda.window_mib = {mib}\n")
        };
        let first = "card = \"h100\"\nvram_mib = 1024\ncuda.window_mib = 4096\n";
        assert_eq!(mistakes(&(first.to_owned() + &other("b", 2048) + &other("c", 2048))), "");
        let found = mistakes(&(first.to_owned() + &other("b", 2048) + &other("c", 4096)));
        let expected = "vm[2].cuda.window_mib: 4096 MiB, expected at most 2048: the window is host memory of card `h100`, \
                        whose `memory.host_mib` is 8192, and windows of other VMs need 6144";
        assert!(found.contains(expected), "{found}");
        // Another card's window does not need this card's memory.
        let cards = "[[card]]\nname = \"second\"\nkind = \"cuda\"\nvram_mib = 40960\nmemory.host_mib = 4096\n";
        let there = other("b", 4096).replace("h100", "second");
        assert_eq!(mistakes(&(first.replace("4096", "8192") + &there + cards)), "");
        let found = mistakes(&(first.replace("4096", "8192") + &there.replace("= 4096", "= 8192") + cards));
        assert!(found.contains("vm[1].cuda.window_mib: 8192 MiB, expected at most 4096"), "{found}");
    }
}
