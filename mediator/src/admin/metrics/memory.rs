//! Metrics of what lies where of cards' memory: sizes in bytes, times in seconds.

use std::fmt::Write;

use super::escaped;
use super::scheduler::{Seconds, head};
use crate::admin::api::{CardMemory, VmMemory};

/// A metric of a card: name, type, what it means, and its value.
type OfCard = (&'static str, &'static str, &'static str, fn(&CardMemory) -> u64);

const CARD: [OfCard; 5] = [
    ("card_memory_spare_bytes", "gauge", "Memory of a card that is neither used nor promised", |card| card.spare_bytes),
    ("card_memory_unscrubbed_bytes", "gauge", "Memory of a card without an owner that is still to be zeroed", |card| {
        card.to_scrub_bytes
    }),
    ("card_memory_scrubbed_bytes_total", "counter", "Memory of a card that was zeroed between two owners", |card| {
        card.scrubbed_bytes
    }),
    ("host_memory_budget_bytes", "gauge", "Host memory that may be pinned for a card", |card| card.host_budget_bytes),
    ("host_memory_used_bytes", "gauge", "Host memory that is pinned for a card", |card| card.host_used_bytes),
];

/// A metric of a virtual machine: name, type, what it means, and its samples as (further labels, value).
type OfVm = (&'static str, &'static str, &'static str, fn(&VmMemory) -> Vec<(&'static str, u64)>);

const VM: [OfVm; 9] = [
    ("vm_memory_bytes", "gauge", "VRAM that a VM's guest sees, by where it lies", |vm| {
        vec![
            (",place=\"card\"", vm.on_card_bytes),
            (",place=\"reserve\"", vm.in_reserve_bytes),
            (",place=\"host\"", vm.in_host_bytes),
            (",place=\"unbacked\"", vm.unbacked_bytes),
        ]
    }),
    ("vm_memory_visible_bytes", "gauge", "VRAM that a VM's CPU reaches without the mediator seeing it", |vm| {
        vec![("", vm.cpu_visible_bytes)]
    }),
    ("vm_memory_guarantee_bytes", "gauge", "Memory of the card that a VM is sure to get", |vm| {
        vec![("", vm.guarantee_bytes)]
    }),
    ("vm_memory_quota_bytes", "gauge", "Memory of the card that a VM may have at most", |vm| {
        vec![("", vm.quota_bytes)]
    }),
    ("vm_memory_entitled_bytes", "gauge", "Memory of the card that a VM is entitled to now", |vm| {
        vec![("", vm.entitled_bytes)]
    }),
    ("vm_memory_moved_bytes_total", "counter", "Memory of a VM that was moved, by where to", |vm| {
        vec![(",to=\"host\"", vm.moved_out_bytes), (",to=\"card\"", vm.moved_in_bytes)]
    }),
    ("vm_relocations_total", "counter", "Times that a VM's work was suspended to move memory", |vm| {
        vec![("", vm.relocations)]
    }),
    ("vm_memory_waits_total", "counter", "Submissions of a VM that waited for memory", |vm| {
        vec![("", vm.memory_waits)]
    }),
    ("vm_memory_denied_total", "counter", "Submissions of a VM that waited for memory in vain", |vm| {
        vec![("", vm.memory_denied)]
    }),
];

/// Appends all metrics of cards' memory.
pub(super) fn samples(text: &mut String, cards: &[CardMemory]) {
    for (name, kind, help, value) in CARD {
        let name = head(text, name, kind, help);
        for card in cards {
            let _ = writeln!(text, "{name}{{card=\"{}\"}} {}", escaped(&card.card), value(card));
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
    let help = "Time for which a VM's work was suspended to move memory";
    let name = head(text, "vm_suspended_seconds_total", "counter", help);
    for (card, vm) in vms() {
        let _ = writeln!(text, "{name}{{{}}} {}", labels(card, vm), Seconds(vm.suspended_ns));
    }
}
