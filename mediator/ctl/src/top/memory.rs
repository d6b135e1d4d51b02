//! The page that shows the cards' memory.

use std::collections::BTreeMap;

use super::columns::{Column, Kind};
use super::view::{Cell, Line, Tone};
use crate::output::NOTHING;
use crate::output::memory::mib;
use crate::output::scheduler::duration;
use api::{CardMemory, VmMemory};

/// Columns of the page.
pub(super) const TABLE: [Column; 10] = [
    Column { head: "CARD", kind: Kind::Text, rank: 7 },
    Column { head: "VM", kind: Kind::Text, rank: 0 },
    Column { head: "SEES", kind: Kind::Number, rank: 5 },
    Column { head: "ON CARD", kind: Kind::Number, rank: 1 },
    Column { head: "ENTITLED", kind: Kind::Number, rank: 3 },
    Column { head: "QUOTA", kind: Kind::Number, rank: 6 },
    Column { head: "IN HOST", kind: Kind::Number, rank: 2 },
    Column { head: "MOVED", kind: Kind::Number, rank: 8 },
    Column { head: "SUSPENDED 99 %", kind: Kind::Number, rank: 9 },
    Column { head: "STATE", kind: Kind::Text, rank: 4 },
];

/// For each card and VM, the number of bytes moved and the number of submissions that were denied memory.
pub(super) type Counts = BTreeMap<(String, String), (u64, u64)>;

/// Returns a refresh's counts, for comparison with the next refresh.
pub(super) fn counts(cards: &[CardMemory]) -> Counts {
    each(cards).map(|(card, vm)| ((card.card.clone(), vm.vm.clone()), count(vm))).collect()
}

fn count(vm: &VmMemory) -> (u64, u64) {
    (vm.moved_out_bytes.saturating_add(vm.moved_in_bytes), vm.memory_denied)
}

/// Returns one line for each VM.
pub(super) fn lines(cards: &[CardMemory], before: &Counts) -> Vec<Line> {
    let line = |(card, vm): (&CardMemory, &VmMemory)| {
        let before = before.get(&(card.card.clone(), vm.vm.clone())).copied().unwrap_or_default();
        let now = count(vm);
        // A lower count means that the VM was removed and added again.
        let (moved, denied) = now.0.checked_sub(before.0).zip(now.1.checked_sub(before.1)).unwrap_or(now);
        let in_host = vm.in_reserve_bytes.saturating_add(vm.in_host_bytes);
        let suspended = match vm.suspensions.count {
            0 => NOTHING.into(),
            _ => Cell::number(duration(vm.suspensions.p99_ns), vm.suspensions.p99_ns),
        };
        let size = |bytes: u64| Cell::number(mib(bytes), bytes);
        Line {
            cells: vec![
                card.card.as_str().into(),
                vm.vm.as_str().into(),
                size(vm.advertised_bytes),
                size(vm.on_card_bytes),
                size(vm.entitled_bytes),
                size(vm.quota_bytes),
                size(in_host),
                size(moved),
                suspended,
                state(card, vm, denied).into(),
            ],
            tone: match () {
                () if denied > 0 => Tone::Bad,
                () if in_host > 0 => Tone::Odd,
                () => Tone::Good,
            },
        }
    };
    each(cards).map(line).collect()
}

fn state(card: &CardMemory, vm: &VmMemory, denied: u64) -> String {
    if denied > 0 {
        return format!("{denied} WITHOUT MEMORY");
    }
    match &card.turn {
        Some(turn) if turn.holder == vm.vm => "has its turn".to_owned(),
        Some(turn) if turn.members.contains(&vm.vm) => "waits for its turn".to_owned(),
        _ if vm.moving_bytes > 0 => format!("{} move", mib(vm.moving_bytes)),
        _ => NOTHING.to_owned(),
    }
}

/// Renders a card's total and spare memory, and its use of host memory.
pub(super) fn head(card: &CardMemory) -> String {
    let CardMemory { card: name, card_bytes, spare_bytes, host_used_bytes, host_budget_bytes, .. } = card;
    let host = format!("{} of {}", mib(*host_used_bytes), mib(*host_budget_bytes));
    format!("{name}: {}, spare {}; host memory {host}", mib(*card_bytes), mib(*spare_bytes))
}

/// Returns all virtual machines, each with its card.
fn each(cards: &[CardMemory]) -> impl Iterator<Item = (&CardMemory, &VmMemory)> {
    cards.iter().flat_map(|card| card.vms.iter().map(move |vm| (card, vm)))
}
