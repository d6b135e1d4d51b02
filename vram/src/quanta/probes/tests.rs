//! Tests probes of VMs whose bus accesses are not counted, on a card of 1000 bytes with copies at 1000 bytes per
//! second.

use super::super::{Change, Done, Quanta, QuantaConfig, WorkingSet};
use crate::TenantId;
use std::collections::BTreeMap;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
/// Time between two polls, in ns.
const POLL_INTERVAL_NS: u64 = 50 * MS;

/// Two VMs with work that together use 1.5 times the card's memory.
struct Stage {
    quanta: Quanta,
    now: u64,
    done: BTreeMap<TenantId, Done>,
    /// Engine time per submission outside and during quanta, in ns.
    lengths: (u64, u64),
    /// Percentage of the time during which the engine has work.
    busy: u64,
}

impl Stage {
    fn new(lengths: (u64, u64), busy: u64) -> Self {
        let mut quanta = Quanta::new(QuantaConfig { min_ns: SECOND / 2, ..QuantaConfig::default() });
        quanta.relocated(0, 1, MS);
        let done: BTreeMap<_, _> = [1, 2].map(|vm| (TenantId(vm), Done::default())).into();
        quanta.set_working_sets(1000, done.keys().map(|vm| (*vm, WorkingSet::movable(750))).collect());
        Self { quanta, now: 0, done, lengths, busy }
    }

    /// Runs the VMs until there is a change, for at most `limit` ns. Returns the change and its time.
    fn until_change(&mut self, limit: u64) -> Option<(u64, Change)> {
        let end = self.now + limit;
        while self.now < end {
            self.now += POLL_INTERVAL_NS;
            let holder = self.quanta.turn().map(|turn| turn.holder);
            for (vm, done) in &mut self.done {
                let (used, length) = match holder {
                    None => (POLL_INTERVAL_NS / 2, self.lengths.0),
                    Some(holder) if holder == *vm => (POLL_INTERVAL_NS, self.lengths.1),
                    Some(_) => continue,
                };
                done.used_ns += used * self.busy / 100;
                done.ended += used * self.busy / 100 / length;
            }
            self.quanta.set_done(self.done.clone());
            if let Some(change) = self.quanta.tick(self.now) {
                self.quanta.copies_done(self.now);
                return Some((self.now, change));
            }
        }
        None
    }
}

#[test]
fn probe_starts_without_counters_and_quanta_stay_if_it_helps() {
    let mut stage = Stage::new((5 * MS, MS), 100);
    let Some((began, Change::On(turn))) = stage.until_change(10 * SECOND) else { panic!("no probe starts") };
    // The VMs are observed for two windows. After that, 500 bytes are evicted and 500 bytes are returned.
    assert_eq!((began, turn.quantum_ns, stage.quanta.tries()), (2 * SECOND + POLL_INTERVAL_NS, SECOND, true));
    let Some((at, Change::Next(turn))) = stage.until_change(10 * SECOND) else { panic!("the other VM got no turn") };
    assert_eq!((at, turn.quantum_ns), (began + SECOND, SECOND));
    let Some((at, Change::Next(turn))) = stage.until_change(10 * SECOND) else { panic!("the turns must not end") };
    assert_eq!((at, turn.quantum_ns, stage.quanta.tries()), (began + 2 * SECOND, 10 * SECOND, false));
    let mut turns = 0;
    while let Some((_, Change::Next(_))) = stage.until_change(20 * SECOND) {
        turns += 1;
    }
    assert_eq!((turns, stage.quanta.turn()), (64, None), "the result expires");
    assert!(matches!(stage.until_change(10 * SECOND), Some((_, Change::On(_)))));
}

#[test]
fn turns_that_do_not_help_end_and_are_tried_later_and_later() {
    for lengths in [(5 * MS, 5 * MS), (5 * MS, 25 * MS / 6)] {
        let mut stage = Stage::new(lengths, 100);
        let mut ended = 0;
        let mut rests = Vec::new();
        for _ in 0..4 {
            let Some((began, Change::On(_))) = stage.until_change(10_000 * SECOND) else { panic!("no probe starts") };
            assert!(matches!(stage.until_change(10 * SECOND), Some((_, Change::Next(_)))));
            let Some((at, Change::Off)) = stage.until_change(10 * SECOND) else { panic!("turns continue") };
            assert_eq!(at - began, 2 * SECOND);
            rests.push((began - ended) / SECOND);
            ended = at;
        }
        assert_eq!(rests, [2, 64 + 2, 128 + 2, 256 + 2], "the rests include two windows of observation");
    }
}

#[test]
fn no_probe_starts_with_idle_card_or_few_completions() {
    assert_eq!(Stage::new((5 * MS, MS), 40).until_change(60 * SECOND), None);
    assert_eq!(Stage::new((300 * MS, MS), 100).until_change(60 * SECOND), None, "no submission completes");
    let mut fits = Stage::new((5 * MS, MS), 100);
    fits.quanta.set_working_sets(1000, fits.done.keys().map(|vm| (*vm, WorkingSet::movable(500))).collect());
    assert_eq!(fits.until_change(60 * SECOND), None);
    let mut unknown = Stage::new((5 * MS, MS), 100);
    unknown.quanta = Quanta::new(*unknown.quanta.config());
    unknown.quanta.set_working_sets(1000, unknown.done.keys().map(|vm| (*vm, WorkingSet::movable(750))).collect());
    assert_eq!(unknown.until_change(60 * SECOND), None, "the length of a quantum is unknown");
    assert!(unknown.quanta.wants_bandwidth());
}

#[test]
fn tenant_with_few_completions_is_probed_for_whole_quantum() {
    let mut stage = Stage::new((5 * MS, 200 * MS), 100);
    assert!(matches!(stage.until_change(10 * SECOND), Some((_, Change::On(_)))));
    let began = stage.now;
    let Some((at, Change::Next(_))) = stage.until_change(30 * SECOND) else { panic!("the other VM got no turn") };
    assert_eq!(at - began, 10 * SECOND, "a submission of 200 ms does not end within a poll");
}
