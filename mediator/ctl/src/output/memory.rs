//! Renders cards' memory and its usage as tables for people.

use super::scheduler::duration;
use super::{NOTHING, heads, row, table};
use api::{CardMemory, MoveReport, VmMemory, VmMemorySettings};

/// Renders a byte count, in MiB if it is a multiple of 1 MiB, and in KiB otherwise.
#[must_use]
pub fn mib(bytes: u64) -> String {
    match bytes % (1 << 20) {
        0 => format!("{} MiB", bytes >> 20),
        _ => format!("{} KiB", bytes >> 10),
    }
}

/// Renders all cards whose memory is divided.
#[must_use]
pub fn cards(cards: &[CardMemory]) -> String {
    if cards.is_empty() {
        return "no card divides its memory\n".to_owned();
    }
    cards.iter().map(card).collect::<Vec<_>>().join("\n")
}

/// Renders the memory of one card.
#[must_use]
pub fn card(card: &CardMemory) -> String {
    let settings = &card.settings;
    let mut rows = vec![
        row(&[&"card", &card.card]),
        row(&[&"memory", &mib(card.card_bytes)]),
        row(&[&"chunk", &mib(card.chunk_bytes)]),
        row(&[&"used by the mediator", &mib(card.mediator_bytes)]),
        row(&[&"spare", &mib(card.spare_bytes)]),
        row(&[&"to scrub", &mib(card.to_scrub_bytes)]),
        row(&[&"host memory", &format!("{} of {}", mib(card.host_used_bytes), mib(card.host_budget_bytes))]),
        row(&[&"reserve", &format!("{} of {} MiB", mib(card.reserve_used_bytes), settings.reserve_mib)]),
        row(&[&"victims", &settings.victims.name()]),
    ];
    if card.windows_bytes != 0 {
        rows.push(row(&[&"  windows of VMs", &mib(card.windows_bytes)]));
    }
    if card.quarantined_bytes != 0 {
        rows.push(row(&[&"quarantined", &mib(card.quarantined_bytes)]));
    }
    if card.copy_bytes_per_second != 0 {
        rows.push(row(&[&"copies", &format!("{}/s", mib(card.copy_bytes_per_second & !0xf_ffff))]));
    }
    if let Some(turn) = &card.turn {
        let others = turn.members.len().saturating_sub(1);
        let text = format!("{}, {others} wait, {} each", turn.holder, duration(turn.quantum_ms * 1_000_000));
        rows.push(row(&[&"turn", &text]));
    }
    let mut text = table(rows, &[]);
    if !card.vms.is_empty() {
        let heads = heads(&[
            "VM",
            "SEES",
            "CARD",
            "RESERVE",
            "HOST",
            "UNUSED",
            "ENTITLED",
            "GUARANTEE",
            "QUOTA",
            "PINNED",
            "MOVED OUT",
            "MOVED IN",
            "SUSPENDED",
        ]);
        text.push('\n');
        text += &table(
            std::iter::once(heads).chain(card.vms.iter().map(vm)).collect(),
            &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
        );
    }
    text
}

fn vm(vm: &VmMemory) -> Vec<String> {
    let suspended = if vm.relocations == 0 {
        NOTHING.to_owned()
    } else {
        let longest = duration(vm.suspended_longest_ns);
        format!("{}, 99 % {}, at most {longest}", duration(vm.suspended_ns), duration(vm.suspensions.p99_ns))
    };
    row(&[
        &vm.vm,
        &mib(vm.advertised_bytes),
        &mib(vm.on_card_bytes),
        &mib(vm.in_reserve_bytes),
        &mib(vm.in_host_bytes),
        &mib(vm.unbacked_bytes),
        &mib(vm.entitled_bytes),
        &mib(vm.guarantee_bytes),
        &mib(vm.quota_bytes),
        &mib(vm.pinned_bytes),
        &mib(vm.moved_out_bytes),
        &mib(vm.moved_in_bytes),
        &suspended,
    ])
}

/// Renders a virtual machine's limits.
#[must_use]
pub fn limits(memory: &VmMemorySettings) -> String {
    let size = |mib: Option<u64>| mib.map_or_else(|| "default".to_owned(), |mib| format!("{mib} MiB"));
    let rows = vec![
        row(&[&"quota", &size(memory.quota_mib)]),
        row(&[&"guarantee", &size(memory.guarantee_mib)]),
        row(&[&"swap cap", &size(memory.swap_cap_mib)]),
        row(&[&"weight", &memory.weight.map_or_else(|| "default".to_owned(), |weight| weight.to_string())]),
        row(&[&"on full", &memory.on_full.map_or("default", |policy| policy.name())]),
        row(&[
            &"queue limit",
            &memory.queue_ms.map_or_else(|| "default".to_owned(), |ms| duration(ms.saturating_mul(1_000_000))),
        ]),
        row(&[&"RAM quota", &size(memory.ram.quota_mib)]),
        row(&[&"RAM guarantee", &size(memory.ram.guarantee_mib)]),
        row(&[&"RAM touched first", &size(memory.ram.touch_mib)]),
    ];
    table(rows, &[])
}

/// Renders the result of an operator's request to move memory.
#[must_use]
pub fn moved(report: &MoveReport) -> String {
    let MoveReport { moved_bytes, stayed_bytes, suspended_ns, ref reason } = *report;
    let mut rows = vec![
        row(&[&"moved", &mib(moved_bytes)]),
        row(&[&"stayed", &mib(stayed_bytes)]),
        row(&[&"suspended for", &duration(suspended_ns)]),
    ];
    rows.extend(reason.iter().map(|reason| row(&[&"stayed because", reason])));
    table(rows, &[])
}
