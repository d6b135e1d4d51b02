//! The page that shows the cards' time.

use std::collections::BTreeMap;

use sched::Engine;

use super::columns::{Column, Kind};
use super::history::{History, bar};
use super::view::{Cell, Line, Tone};
use crate::output::NOTHING;
use crate::output::memory::mib;
use crate::output::scheduler::{duration, percent, state};
use api::{CardMemory, CardScheduler, VmEngine, VmShare};

/// Columns of the page.
pub(super) const TABLE: [Column; 14] = [
    Column { head: "CARD", kind: Kind::Text, rank: 10 },
    Column { head: "VM", kind: Kind::Text, rank: 0 },
    Column { head: "ENGINE", kind: Kind::Text, rank: 3 },
    Column { head: "ENTITLED", kind: Kind::Number, rank: 6 },
    Column { head: "RECEIVED", kind: Kind::Number, rank: 1 },
    Column { head: "SHARE", kind: Kind::Picture, rank: 2 },
    Column { head: "LAST MINUTE", kind: Kind::Picture, rank: 9 },
    Column { head: "WAIT", kind: Kind::Number, rank: 11 },
    Column { head: "WAIT 99 %", kind: Kind::Number, rank: 8 },
    Column { head: "ON CARD", kind: Kind::Number, rank: 4 },
    Column { head: "IN HOST", kind: Kind::Number, rank: 7 },
    Column { head: "QUEUED", kind: Kind::Number, rank: 12 },
    Column { head: "STRIKES", kind: Kind::Number, rank: 13 },
    Column { head: "STATE", kind: Kind::Text, rank: 5 },
];

/// For each card, VM and engine, the number of started submissions and their total wait in ns.
pub(super) type Waits = BTreeMap<(String, String, Engine), (u64, u64)>;

/// Returns a refresh's waits, for comparison with the next refresh.
pub(super) fn waits(cards: &[CardScheduler]) -> Waits {
    let each = each(cards).map(|(card, vm, engine, used)| {
        ((card.card.clone(), vm.vm.clone(), engine), (used.wait.count, used.wait.sum_ns))
    });
    each.collect()
}

/// Returns the mean wait since the previous refresh, or the overall mean if the VM is new or there was no previous
/// refresh.
fn wait(before: &Waits, card: &CardScheduler, vm: &VmShare, engine: Engine, used: &VmEngine) -> Cell {
    let before = before.get(&(card.card.clone(), vm.vm.clone(), engine)).copied().unwrap_or_default();
    let since = used.wait.count.checked_sub(before.0).zip(used.wait.sum_ns.checked_sub(before.1));
    // A lower count means that the VM was removed and added again.
    let (count, sum) = since.unwrap_or((used.wait.count, used.wait.sum_ns));
    sum.checked_div(count).map_or_else(|| NOTHING.into(), |mean_ns| Cell::number(duration(mean_ns), mean_ns))
}

/// Returns the lines of each VM: one for compute, and one for each other engine that the VM has used.
pub(super) fn lines(cards: &[CardScheduler], memories: &[CardMemory], before: &Waits, history: &History) -> Vec<Line> {
    let memory = |card: &str, vm: &str| {
        let there = memories.iter().find(|memory| memory.card == card)?;
        there.vms.iter().find(|one| one.vm == vm)
    };
    let line = |(card, vm, engine, used): (&CardScheduler, &VmShare, Engine, &VmEngine)| {
        let memory = memory(&card.card, &vm.vm);
        let size = |bytes: Option<u64>| bytes.map_or_else(|| NOTHING.into(), |bytes| Cell::number(mib(bytes), bytes));
        let share = |permille: u32| Cell::number(percent(permille), permille.into());
        let in_host = memory.map(|memory| memory.in_reserve_bytes.saturating_add(memory.in_host_bytes));
        Line {
            cells: vec![
                card.card.as_str().into(),
                vm.vm.as_str().into(),
                engine.name().into(),
                share(vm.entitled_permille),
                share(used.received_permille),
                Cell::number(bar(used.received_permille, vm.entitled_permille), used.received_permille.into()),
                history.picture(&(card.card.clone(), vm.vm.clone(), engine)).into(),
                wait(before, card, vm, engine, used),
                Cell::number(duration(used.wait.p99_ns), used.wait.p99_ns),
                size(memory.map(|memory| memory.on_card_bytes)),
                size(in_host),
                Cell::number(vm.queued.to_string(), vm.queued),
                Cell::number(vm.strikes.to_string(), vm.strikes.into()),
                state(vm).into(),
            ],
            tone: match () {
                () if vm.quarantine.is_some() => Tone::Bad,
                () if vm.strikes > 0 => Tone::Odd,
                () => Tone::Good,
            },
        }
    };
    each(cards).filter(|(_, _, engine, used)| used.arrived > 0 || *engine == Engine::Compute).map(line).collect()
}

/// Renders a card's policy, its engines' load, and its numbers of queued and running submissions.
pub(super) fn head(card: &CardScheduler) -> String {
    let engines =
        card.engines.iter().map(|(engine, used)| format!("{} {}", engine.name(), percent(used.busy_permille)));
    let CardScheduler { card: name, settings, queued, in_flight, .. } = card;
    let busy = engines.collect::<Vec<_>>().join(", ");
    format!("{name}: {}; busy: {busy}; queued {queued}, on the card {in_flight}", settings.policy.name())
}

/// Returns each combination of a virtual machine and an engine.
fn each(cards: &[CardScheduler]) -> impl Iterator<Item = (&CardScheduler, &VmShare, Engine, &VmEngine)> {
    let vms = cards.iter().flat_map(|card| card.vms.iter().map(move |vm| (card, vm)));
    vms.flat_map(|(card, vm)| vm.engines.iter().map(move |(engine, used)| (card, vm, *engine, used)))
}
