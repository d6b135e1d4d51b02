//! Metrics of cards' memory and its usage. Sizes are in bytes, and times in seconds.

use std::fmt::Write;

use super::escaped;
use super::scheduler::{Seconds, head, histogram};
use api::{CardMemory, VmMemory};

/// Samples of one object, as (further labels, value).
type Samples = Vec<(&'static str, u64)>;

/// A metric of a card: name, type, meaning, and a function that returns its samples.
type OfCard = (&'static str, &'static str, &'static str, fn(&CardMemory) -> Samples);

const CARD: [OfCard; 14] = [
    ("card_memory_spare_bytes", "gauge", "Memory of a card that is neither used nor guaranteed", |card| {
        one(card.spare_bytes)
    }),
    ("card_memory_unscrubbed_bytes", "gauge", "Unowned memory of a card that is not zeroed yet", |card| {
        one(card.to_scrub_bytes)
    }),
    (
        "card_memory_quarantined_bytes",
        "gauge",
        "Memory of a card and the host that is unusable until the card is reset, because the card may still access it",
        |card| one(card.quarantined_bytes),
    ),
    ("card_memory_scrubbed_bytes_total", "counter", "Memory of a card that was zeroed between owners", |card| {
        one(card.scrubbed_bytes)
    }),
    ("card_memory_reserve_bytes", "gauge", "Memory of a card reserved for evictions", |card| {
        one(card.settings.reserve_mib << 20)
    }),
    ("card_memory_reserve_used_bytes", "gauge", "Part of a card's reserve that holds evicted chunks", |card| {
        one(card.reserve_used_bytes)
    }),
    (
        "card_memory_moved_bytes_total",
        "counter",
        "Moved memory of all VMs of a card, including removed VMs, by `to`: `host`, `card`",
        |card| to(card.moved_out_bytes, card.moved_in_bytes),
    ),
    (
        "card_memory_copy_bytes_per_second",
        "gauge",
        "Measured rate of copies between a card and the host; 0 before the first copy",
        |card| one(card.copy_bytes_per_second),
    ),
    ("card_memory_chunk_bytes", "gauge", "Chunk size of a card's memory", |card| one(card.chunk_bytes)),
    ("card_turns_total", "counter", "Quanta that VMs had on a card's memory", |card| one(card.turns)),
    ("card_turn_members", "gauge", "VMs that currently alternate in quanta", |card| {
        one(card.turn.as_ref().map_or(0, |turn| turn.members.len() as u64))
    }),
    ("host_memory_budget_bytes", "gauge", "Maximum pinned host memory of a card", |card| one(card.host_budget_bytes)),
    ("host_memory_used_bytes", "gauge", "Pinned host memory of a card", |card| one(card.host_used_bytes)),
    (
        "host_memory_windows_bytes",
        "gauge",
        "Part of a card's pinned host memory for windows of VMs whose programs use CUDA",
        |card| one(card.windows_bytes),
    ),
];

/// A metric of a virtual machine: name, type, meaning, and a function that returns its samples.
type OfVm = (&'static str, &'static str, &'static str, fn(&VmMemory) -> Samples);

const VM: [OfVm; 11] = [
    (
        "vm_memory_bytes",
        "gauge",
        "Memory that a VM's guest sees, by `place`: `card`, `reserve`, `host`, `unbacked` (never used)",
        |vm| {
            vec![
                (",place=\"card\"", vm.on_card_bytes),
                (",place=\"reserve\"", vm.in_reserve_bytes),
                (",place=\"host\"", vm.in_host_bytes),
                (",place=\"unbacked\"", vm.unbacked_bytes),
            ]
        },
    ),
    ("vm_memory_visible_bytes", "gauge", "Memory that a VM's CPU accesses without notifying the mediator", |vm| {
        one(vm.cpu_visible_bytes)
    }),
    ("vm_memory_guarantee_bytes", "gauge", "Guaranteed memory of a VM on the card", |vm| one(vm.guarantee_bytes)),
    ("vm_memory_quota_bytes", "gauge", "Maximum memory of a VM on the card", |vm| one(vm.quota_bytes)),
    ("vm_memory_entitled_bytes", "gauge", "Memory on the card to which a VM is currently entitled", |vm| {
        one(vm.entitled_bytes)
    }),
    ("vm_memory_pinned_bytes", "gauge", "Memory of a VM that is pinned to the card", |vm| one(vm.pinned_bytes)),
    ("vm_memory_born_in_host_bytes_total", "counter", "Memory of a VM that was first placed in host memory", |vm| {
        one(vm.born_in_host_bytes)
    }),
    (
        "vm_memory_moved_bytes_total",
        "counter",
        "Moved memory of a VM, by `to`: `host` (evicted), `card` (returned)",
        |vm| to(vm.moved_out_bytes, vm.moved_in_bytes),
    ),
    ("vm_memory_waits_total", "counter", "Submissions of a VM that waited for memory under `queue`", |vm| {
        one(vm.memory_waits)
    }),
    (
        "vm_memory_denied_total",
        "counter",
        "Submissions of a VM that waited for memory until the time limit, and faulted",
        |vm| one(vm.memory_denied),
    ),
    (
        "vm_memory_refused_bytes_total",
        "counter",
        "Memory of a VM that could not be placed on first use, by `limit`: `card`, `quota`, `host_budget`, `swap_cap`",
        |vm| {
            let of = |limit: &str| vm.refused_bytes.get(limit).copied().unwrap_or(0);
            vec![
                (",limit=\"card\"", of("card")),
                (",limit=\"quota\"", of("quota")),
                (",limit=\"host_budget\"", of("host_budget")),
                (",limit=\"swap_cap\"", of("swap_cap")),
            ]
        },
    ),
];

fn one(value: u64) -> Samples {
    vec![("", value)]
}

fn to(host: u64, card: u64) -> Samples {
    vec![(",to=\"host\"", host), (",to=\"card\"", card)]
}

/// Appends all metrics of card memory.
pub(super) fn samples(text: &mut String, cards: &[CardMemory]) {
    for (name, kind, help, values) in CARD {
        let name = head(text, name, kind, help);
        for card in cards {
            for (further, value) in values(card) {
                let _ = writeln!(text, "{name}{{card=\"{}\"{further}}} {value}", escaped(&card.card));
            }
        }
    }
    let vms = || cards.iter().flat_map(|card| card.vms.iter().map(move |vm| (card, vm)));
    let labels =
        |card: &CardMemory, vm: &VmMemory| format!("vm=\"{}\",card=\"{}\"", escaped(&vm.vm), escaped(&card.card));
    for (name, kind, help, values) in VM {
        let name = head(text, name, kind, help);
        for (card, vm) in vms() {
            for (further, value) in values(vm) {
                let _ = writeln!(text, "{name}{{{}{further}}} {value}", labels(card, vm));
            }
        }
    }
    let help = "Time that a tenant has waited for memory: for quanta, and for chunks (completed waits only)";
    let name = head(text, "vm_memory_waited_seconds_total", "counter", help);
    for (card, vm) in vms() {
        let _ = writeln!(text, "{name}{{{}}} {}", labels(card, vm), Seconds(vm.memory_waited_ns));
    }
    let help = "Time for which a VM's work was suspended per relocation, in buckets from 10 us to 30 s; times may be counted as up to one eighth longer";
    let name = head(text, "vm_suspended_seconds", "histogram", help);
    for (card, vm) in vms() {
        histogram(text, &name, &labels(card, vm), &vm.suspensions);
    }
}
