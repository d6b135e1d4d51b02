//! Metrics: the admin API's data and additional counts in Prometheus's text format.
//!
//! Modules: cards, virtual machines and the daemon itself (this file), `counts` (devices and connections), `scheduler`
//! and `memory` (sharing of cards), [`tenants`], `locks`, [`moves`] (moves of virtual machines between cards, which are
//! counted here).
//!
//! The crate does not serve requests or access cards.

use std::fmt::{Display, Write};

use api::{Card, CardMemory, CardScheduler, Labels, Vm, VmMode, VmState};

mod counts;
mod locks;
mod memory;
pub mod moves;
#[cfg(test)]
mod page;
mod scheduler;
pub mod tenants;

/// Media type of the format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A metric of one kind of object: name, type, meaning, and a function that returns its samples as (further labels,
/// value).
type Metric<T, V = u64> = (&'static str, &'static str, &'static str, fn(&T) -> Vec<(String, V)>);

fn one(value: impl Into<u64>) -> Vec<(String, u64)> {
    vec![(String::new(), value.into())]
}

const CARD: [Metric<Card>; 9] = [
    ("gpu_mediator_card_failed", "gauge", "1 for a card that is out of service with its VMs", |card| {
        one(card.error.is_some())
    }),
    (
        "gpu_mediator_card_drained",
        "gauge",
        "1 for a card that accepts no new VMs and tenants",
        |card| one(card.drained),
    ),
    ("gpu_mediator_card_vram_bytes", "gauge", "VRAM of a card, by `use`: `assigned`, `free`, `reserved`", |card| {
        let uses =
            [("assigned", card.vram_assigned_mib), ("free", card.vram_free_mib), ("reserved", card.vram_reserved_mib)];
        uses.map(|(name, mib)| (format!("use=\"{name}\""), mib.saturating_mul(1 << 20))).into()
    }),
    ("gpu_mediator_card_vram_used_bytes", "gauge", "Used VRAM of a card, by `user`: `vms`, `mediator`", |card| {
        let users = [("vms", card.vram_placed_mib), ("mediator", card.vram_mediator_mib)];
        users.map(|(name, mib)| (format!("user=\"{name}\""), mib.saturating_mul(1 << 20))).into()
    }),
    ("gpu_mediator_card_channels", "gauge", "Channels of VMs on a card", |card| one(card.channels_used)),
    ("gpu_mediator_card_vms", "gauge", "VMs of a card", |card| one(card.vms.len() as u64)),
    ("gpu_mediator_card_strangers", "gauge", "Unmanaged processes on a CUDA card", |card| {
        one(card.strangers.len() as u64)
    }),
    (
        "gpu_mediator_card_unexplained_bytes",
        "gauge",
        "Used memory of a CUDA card that cannot be attributed to any process or tenant",
        |card| one(card.unexplained_bytes),
    ),
    ("gpu_mediator_card_owner_restarts_total", "counter", "Restarts of a CUDA card's owner", |card| {
        card.owner_restarts.into_iter().flat_map(one).collect()
    }),
];

const VM: [Metric<Vm>; 13] = [
    ("gpu_mediator_vm_state", "gauge", "1 for the state of a VM, by `state`", |vm| {
        let states = [VmState::Starting, VmState::Waiting, VmState::Connected, VmState::Stopping, VmState::Failed];
        states.map(|state| (format!("state=\"{}\"", state.name()), u64::from(state == vm.state))).into()
    }),
    ("gpu_mediator_vm_passthrough", "gauge", "1 for a VM with a passed-through card", |vm| {
        one(vm.mode == VmMode::Passthrough)
    }),
    ("gpu_mediator_vm_vram_bytes", "gauge", "VRAM that a VM's guest sees", |vm| {
        one(vm.vram_mib.saturating_mul(1 << 20))
    }),
    ("gpu_mediator_vm_channels", "gauge", "Channels that a VM has on its card", |vm| one(vm.channels_used)),
    ("gpu_mediator_vm_channels_limit", "gauge", "Maximum number of channels of a VM", |vm| one(vm.channels_limit)),
    ("gpu_mediator_vm_memory_not_shared", "gauge", "1 if a VMM does not share guest memory", |vm| {
        one(vm.memory_not_shared)
    }),
    (
        "gpu_mediator_vm_memory_withdrawn",
        "gauge",
        "1 if a VMM has withdrawn guest memory while the card could access it",
        |vm| one(vm.memory_withdrawn),
    ),
    (
        "gpu_mediator_vm_ram_bytes",
        "gauge",
        "RAM that a VM lends to its card, by `of`: `lent`, `quota` (maximum), `guarantee`",
        |vm| {
            let sizes =
                [("lent", vm.ram.lent_bytes), ("quota", vm.ram.quota_bytes), ("guarantee", vm.ram.guarantee_bytes)];
            sizes.map(|(name, bytes)| (format!("of=\"{name}\""), bytes)).into()
        },
    ),
    (
        "gpu_mediator_vm_ram_touched_bytes",
        "gauge",
        "RAM of a VM that the daemon or the card touched first, charged to the daemon's control group",
        |vm| one(vm.ram.touched_bytes),
    ),
    ("gpu_mediator_vm_denied_total", "counter", "Denied accesses of a guest, by `reason`", |vm| {
        let mut reasons = std::collections::BTreeMap::<&str, u64>::new();
        for denied in &vm.denied {
            let sum = reasons.entry(&denied.reason).or_default();
            *sum = sum.saturating_add(denied.reads).saturating_add(denied.writes);
        }
        reasons.into_iter().map(|(reason, sum)| (format!("reason=\"{}\"", escaped(reason)), sum)).collect()
    }),
    // Guests choose the names and process IDs of their programs, so using them as labels would create an unbounded
    // number of series.
    ("gpu_mediator_vm_cuda_programs", "gauge", "Guest programs that use CUDA, by `state`: `served`, `lost`", |vm| {
        if vm.mode != VmMode::Cuda {
            return Vec::new();
        }
        let count = |lost| vm.programs.iter().filter(|program| program.lost == lost).count() as u64;
        vec![("state=\"served\"".to_owned(), count(false)), ("state=\"lost\"".to_owned(), count(true))]
    }),
    (
        "gpu_mediator_vm_cuda_window_bytes",
        "gauge",
        "Size of the window in use by guest programs, for VMs whose programs use CUDA",
        |vm| {
            let used = vm.programs.iter().fold(0u64, |sum, program| sum.saturating_add(program.window_bytes));
            if vm.mode == VmMode::Cuda { one(used) } else { Vec::new() }
        },
    ),
    (
        "gpu_mediator_vm_labels",
        "gauge",
        "1 for a VM with labels, each of which becomes a label `label_KEY` of the sample",
        |vm| described(&vm.labels).into_iter().map(|labels| (labels, 1)).collect(),
    ),
];

/// Returns a virtual machine's or tenant's labels as sample labels with a prefix; `None` if there are none.
fn described(labels: &Labels) -> Option<String> {
    let pairs: Vec<_> = labels.iter().map(|(key, value)| format!("label_{key}=\"{}\"", escaped(value))).collect();
    (!pairs.is_empty()).then(|| pairs.join(","))
}

/// Returns the metrics of cards, virtual machines, schedulers, memory and locks.
#[must_use]
pub fn text(cards: &[Card], vms: &[Vm], schedulers: &[CardScheduler], memories: &[CardMemory]) -> String {
    let mut text = String::new();
    samples(&mut text, &CARD, cards, |card| format!("card=\"{}\"", escaped(&card.name)));
    let of_vm = |vm: &Vm| format!("vm=\"{}\",card=\"{}\"", escaped(&vm.name), escaped(&vm.card));
    samples(&mut text, &VM, vms, of_vm);
    samples(&mut text, &counts::VM, vms, of_vm);
    scheduler::samples(&mut text, schedulers);
    memory::samples(&mut text, memories);
    locks::samples(&mut text);
    text
}

/// Returns the metrics of the daemon itself. `suppressed` is the number of suppressed log events.
#[must_use]
pub fn daemon(info: &api::DaemonInfo, suppressed: u64) -> String {
    let mut text = String::new();
    let name = "gpu_mediator_log_events_suppressed_total";
    let _ = writeln!(text, "# HELP {name} Log events suppressed by their rate limit");
    let _ = writeln!(text, "# TYPE {name} counter\n{name} {}", suppressed);
    let name = "gpu_mediator_upgrades_total";
    let _ = writeln!(text, "# HELP {name} Earlier daemons that served the same VMs, each replaced by an upgrade");
    let _ = writeln!(text, "# TYPE {name} counter\n{name} {}", info.upgrades);
    let name = "gpu_mediator_upgrade_failures_total";
    let _ = writeln!(text, "# HELP {name} Failed upgrades of this daemon, after which it continued");
    let _ = writeln!(text, "# TYPE {name} counter\n{name} {}", info.upgrade_failures);
    let name = "gpu_mediator_upgrade_pause_seconds";
    let _ = writeln!(
        text,
        "# HELP {name} Time for which VMs were paused when this daemon took over; no sample in the first daemon\n# TYPE {name} gauge"
    );
    if let Some(ms) = info.upgrade_pause_ms {
        let _ = writeln!(text, "{name} {}.{:03}", ms / 1000, ms % 1000);
    }
    text
}

fn samples<T, V: Display>(text: &mut String, metrics: &[Metric<T, V>], things: &[T], labels: impl Fn(&T) -> String) {
    for (name, kind, help, values) in metrics {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for thing in things {
            let labels = labels(thing);
            for (more, value) in values(thing) {
                let comma = if more.is_empty() { "" } else { "," };
                let _ = writeln!(text, "{name}{{{labels}{comma}{more}}} {value}");
            }
        }
    }
}

/// Escapes a label's value for Prometheus's text format.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use api::{Driver, GuestProgram, InterruptKind};

    use super::*;

    fn vm(name: &str, mode: VmMode, programs: Vec<GuestProgram>) -> Vm {
        let (pci_id, interrupts) = (String::new(), InterruptKind::Msi);
        Vm {
            name: name.to_owned(),
            card: String::new(),
            profile: None,
            mode,
            state: VmState::Connected,
            error: None,
            socket: None,
            xen_domain: None,
            client: None,
            vram_mib: 0,
            channels_limit: 0,
            channels_used: 0,
            memory_not_shared: false,
            memory_withdrawn: false,
            ram: api::Ram::default(),
            driver: Driver { pci_id, bus_master: false, interrupts, state: None },
            denied_total: 0,
            denied: Vec::new(),
            counters: std::collections::BTreeMap::new(),
            programs,
            transport: std::collections::BTreeMap::new(),
            labels: Labels::default(),
        }
    }

    #[test]
    fn programs_of_guests_are_counted_without_their_names() {
        let program = |lost| GuestProgram {
            name: "py\"thon".to_owned(),
            pid: Some(7),
            worker: Some(70),
            window_bytes: 3,
            waits: 0,
            lost,
        };
        let programs = vec![program(false), program(false), program(true)];
        let vms = [vm("a", VmMode::Cuda, programs), vm("b", VmMode::Mediated, Vec::new())];
        let text = text(&[], &vms, &[], &[]);
        for line in [
            "gpu_mediator_vm_cuda_programs{vm=\"a\",card=\"\",state=\"served\"} 2\n",
            "gpu_mediator_vm_cuda_programs{vm=\"a\",card=\"\",state=\"lost\"} 1\n",
            "gpu_mediator_vm_cuda_window_bytes{vm=\"a\",card=\"\"} 9\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert!(!text.contains("cuda_programs{vm=\"b\"") && !text.contains("thon"), "{text}");
    }
}
