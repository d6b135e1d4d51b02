//! The page of the cards' time.

use std::collections::BTreeMap;

use sched::Engine;

use super::view::{Line, Table, Tone};
use crate::output::NOTHING;
use crate::output::scheduler::{duration, percent, state};
use api::{CardScheduler, VmEngine, VmShare};

/// The columns.
pub(super) const TABLE: Table = Table {
    heads: &["CARD", "VM", "ENGINE", "ENTITLED", "RECEIVED", "WAIT", "WAIT 99 %", "QUEUED", "STRIKES", "STATE"],
    widths: &[12, 20, 8, 9, 9, 9, 9, 7, 8, 24],
    numbers: &[3, 4, 5, 6, 7, 8],
};

/// Started submissions of a VM to an engine, and their total wait, in ns.
pub(super) type Waits = BTreeMap<(String, String, Engine), (u64, u64)>;

/// Returns the waits of a refresh, for comparison with the next.
pub(super) fn waits(cards: &[CardScheduler]) -> Waits {
    let each = each(cards).map(|(card, vm, engine, used)| {
        ((card.card.clone(), vm.vm.clone(), engine), (used.wait.count, used.wait.sum_ns))
    });
    each.collect()
}

/// Returns the mean wait since the previous refresh, or overall without one.
fn wait(before: &Waits, card: &CardScheduler, vm: &VmShare, engine: Engine, used: &VmEngine) -> String {
    let before = before.get(&(card.card.clone(), vm.vm.clone(), engine)).copied().unwrap_or_default();
    let since = used.wait.count.checked_sub(before.0).zip(used.wait.sum_ns.checked_sub(before.1));
    // Less than before: the VM was removed and added again.
    let (count, sum) = since.unwrap_or((used.wait.count, used.wait.sum_ns));
    sum.checked_div(count).map_or_else(|| NOTHING.to_owned(), duration)
}

/// Returns one line for each engine that a VM uses.
pub(super) fn lines(cards: &[CardScheduler], before: &Waits) -> Vec<Line> {
    let line = |(card, vm, engine, used): (&CardScheduler, &VmShare, Engine, &VmEngine)| Line {
        cells: vec![
            card.card.clone(),
            vm.vm.clone(),
            engine.name().to_owned(),
            percent(vm.entitled_permille),
            percent(used.received_permille),
            wait(before, card, vm, engine, used),
            duration(used.wait.p99_ns),
            vm.queued.to_string(),
            vm.strikes.to_string(),
            state(vm),
        ],
        tone: match () {
            () if vm.quarantine.is_some() => Tone::Bad,
            () if vm.strikes > 0 => Tone::Odd,
            () => Tone::Good,
        },
    };
    each(cards).filter(|(_, _, engine, used)| used.arrived > 0 || *engine == Engine::Compute).map(line).collect()
}

/// Returns a card's policy, and how busy its engines are.
pub(super) fn head(card: &CardScheduler) -> String {
    let engines =
        card.engines.iter().map(|(engine, used)| format!("{} {}", engine.name(), percent(used.busy_permille)));
    let CardScheduler { card: name, settings, queued, in_flight, .. } = card;
    let busy = engines.collect::<Vec<_>>().join(", ");
    format!("{name}: {}; busy: {busy}; queued {queued}, on the card {in_flight}", settings.policy.name())
}

/// Returns all virtual machines with each engine.
fn each(cards: &[CardScheduler]) -> impl Iterator<Item = (&CardScheduler, &VmShare, Engine, &VmEngine)> {
    let vms = cards.iter().flat_map(|card| card.vms.iter().map(move |vm| (card, vm)));
    vms.flat_map(|(card, vm)| vm.engines.iter().map(move |(engine, used)| (card, vm, *engine, used)))
}
