//! Tests the detector with synthetic traffic on a card of 1000 bytes with copies at 1000 bytes per second.

use super::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;

fn config() -> QuantaConfig {
    QuantaConfig { min_ns: SECOND, max_ns: 30 * SECOND, ..QuantaConfig::default() }
}

fn sets(of: &[u64]) -> BTreeMap<TenantId, WorkingSet> {
    (1..).zip(of).map(|(vm, &bytes)| (TenantId(vm), WorkingSet::movable(bytes))).collect()
}

fn quanta(of: &[u64]) -> Quanta {
    let mut quanta = Quanta::new(config());
    quanta.set_working_sets(1000, sets(of));
    quanta
}

/// Simulates copies at full speed for `permille` of the time, every 10 ms for one second, starting at `from`. Returns
/// the first change.
fn copy(quanta: &mut Quanta, from: u64, permille: u64) -> Option<(u64, Change)> {
    (0..100).find_map(|step| {
        let now = from + step * 10 * MS;
        quanta.relocated(now, permille / 100, permille * MS / 100);
        quanta.tick(now).map(|change| (now, change))
    })
}

fn on(quanta: &mut Quanta) -> Turn {
    match copy(quanta, 0, 500) {
        Some((now, Change::On(turn))) => {
            quanta.copies_done(now);
            turn
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn modes_are_known_by_name() {
    for mode in [Mode::Auto, Mode::Off, Mode::Forced] {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    assert!("on".parse::<Mode>().is_err_and(|text| text.contains("`auto`, `off` or `forced`")));
}

#[test]
fn much_traffic_of_sets_that_do_not_fit_switches_on() {
    let mut quanta = quanta(&[700, 800]);
    assert_eq!(quanta.tick(0), None, "no traffic");
    let turn = on(&mut quanta);
    assert_eq!((&*turn.members, turn.holder), (&[TenantId(1), TenantId(2)][..], TenantId(1)));
    assert_eq!(quanta.bandwidth(), 1000);
    // 500 bytes are evicted and 500 are returned, at 1000 bytes per second. A quantum is ten times as long as these
    // copies.
    assert_eq!(turn.quantum_ns, 10 * SECOND);
    assert_eq!(quanta.turn(), Some(&turn));
}

#[test]
fn little_traffic_or_sets_that_fit_change_nothing() {
    assert_eq!(copy(&mut quanta(&[700, 800]), 0, 100), None, "half of the threshold");
    assert_eq!(copy(&mut quanta(&[200, 800]), 0, 900), None, "the working sets fit exactly");
    assert_eq!(copy(&mut quanta(&[1700]), 0, 900), None, "there is only one VM");
    let mut off = quanta(&[700, 800]);
    off.set_config(QuantaConfig { mode: Mode::Off, ..config() });
    assert_eq!(copy(&mut off, 0, 900), None);
}

#[test]
fn old_traffic_is_forgotten() {
    let mut quanta = quanta(&[700, 700]);
    // 150 bytes are moved within a second, and another 150 bytes two seconds later, so that no window contains 200
    // bytes.
    for now in [0, 2 * SECOND] {
        quanta.relocated(now, 150, 150 * MS);
        assert_eq!(quanta.tick(now), None);
    }
    quanta.relocated(2 * SECOND + 900 * MS, 50, 50 * MS);
    assert!(quanta.tick(2 * SECOND + 900 * MS).is_some());
}

#[test]
fn the_window_is_kept_in_so_many_slots() {
    let mut quanta = quanta(&[700]);
    for step in 0..100_000 {
        quanta.relocated(step * MS / 10, 1, MS);
    }
    assert!(quanta.traffic.len() <= SLOTS as usize + 1, "{} slots", quanta.traffic.len());
    let bytes: u64 = quanta.traffic.iter().map(|&(_, bytes)| bytes).sum();
    assert!((9_600..=10_000).contains(&bytes), "{bytes} bytes in the last second");
}

#[test]
fn small_working_set_that_fits_with_any_other_never_waits() {
    assert_eq!(on(&mut quanta(&[50, 700, 800, 100])).members, [TenantId(2), TenantId(3)]);
    assert_eq!(
        on(&mut quanta(&[50, 700, 1800])).members,
        [TenantId(1), TenantId(2), TenantId(3)],
        "the largest needs all of the memory"
    );
}

/// Returns working sets with the given sizes, resident parts, and weights.
fn claims(of: &[(u64, u64, u32)]) -> BTreeMap<TenantId, WorkingSet> {
    let set = |&(bytes, resident, weight): &(u64, u64, u32)| WorkingSet { bytes, resident, weight };
    (1..).zip(of).map(|(vm, claim)| (TenantId(vm), set(claim))).collect()
}

#[test]
fn quanta_are_as_long_as_weights_say() {
    let mut quanta = Quanta::new(config());
    quanta.set_working_sets(1000, claims(&[(700, 0, 100), (800, 0, 300)]));
    let mut turn = on(&mut quanta);
    let mut now = quanta.turn.as_ref().and_then(|turn| turn.1).unwrap();
    let mut lengths = Vec::new();
    for _ in 0..4 {
        lengths.push((turn.holder.0, turn.quantum_ns / MS));
        assert_eq!(quanta.tick(now + turn.quantum_ns - 1), None);
        now += turn.quantum_ns;
        let Some(Change::Next(next)) = quanta.tick(now) else { panic!("the turn does not change") };
        quanta.copies_done(now);
        turn = next;
    }
    // The mean is ten times the copy time, as with equal weights.
    assert_eq!(lengths, [(1, 5_000), (2, 15_000), (1, 5_000), (2, 15_000)]);
}

#[test]
fn bounds_of_quanta_keep_their_proportion() {
    let mut quanta = Quanta::new(config());
    quanta.set_working_sets(1000, claims(&[(700, 0, 10), (800, 0, 90)]));
    let lengths = |quanta: &Quanta| [1, 2].map(|vm| quanta.quantum_ns(&[TenantId(1), TenantId(2)], TenantId(vm)) / MS);
    on(&mut quanta);
    assert_eq!(lengths(&quanta), [2_000, 18_000]);
    quanta.set_config(QuantaConfig { max_ns: 9 * SECOND, ..config() });
    assert_eq!(lengths(&quanta), [1_000, 9_000], "the longest quantum is bounded");
    quanta.set_config(QuantaConfig { factor: 1, ..config() });
    assert_eq!(lengths(&quanta), [1_000, 9_000], "the shortest quantum is bounded");
    quanta.set_config(QuantaConfig { max_ns: 3 * SECOND, ..config() });
    assert_eq!(lengths(&quanta), [333, 3_000], "the upper bound takes priority");
}

#[test]
fn tenant_whose_memory_stays_takes_no_quantum() {
    let mut quanta = Quanta::new(config());
    quanta.set_working_sets(1000, claims(&[(300, 300, 100), (500, 100, 100), (500, 0, 100)]));
    let turn = on(&mut quanta);
    assert_eq!(turn.members, [TenantId(2), TenantId(3)]);
    assert_eq!(turn.quantum_ns, 6 * SECOND, "300 bytes do not fit and are copied in both directions");
    let mut alone = Quanta::new(config());
    alone.set_working_sets(1000, claims(&[(800, 800, 100), (500, 0, 100)]));
    assert_eq!(copy(&mut alone, 0, 900), None, "there is only one VM");
    assert!(!alone.detects());
    // The resident 800 bytes leave 200, in which the set of 50 bytes does not fit together with the one of 180.
    let mut tight = Quanta::new(config());
    tight.set_working_sets(1000, claims(&[(50, 0, 100), (900, 800, 100), (180, 0, 100)]));
    assert_eq!(on(&mut tight).members, [1, 2, 3].map(TenantId));
}

#[test]
fn quantum_grows_with_memory_allocated_in_it() {
    let mut quanta = quanta(&[600, 600]);
    assert_eq!(on(&mut quanta).quantum_ns, 4 * SECOND);
    let since = quanta.turn.as_ref().and_then(|turn| turn.1).unwrap();
    quanta.set_working_sets(1000, sets(&[900, 600]));
    assert_eq!(quanta.tick(since + 10 * SECOND - 1), None, "500 bytes are copied in each direction, not 200");
    assert!(matches!(quanta.tick(since + 10 * SECOND), Some(Change::Next(_))));
}

#[test]
fn quanta_rotate_and_skip_idle_tenants() {
    let mut quanta = quanta(&[700, 700, 700]);
    let quantum = on(&mut quanta).quantum_ns;
    let mut now = quanta.turn.as_ref().and_then(|turn| turn.1).unwrap();
    assert_eq!(quanta.tick(now + quantum - 1), None);
    for holder in [2, 3, 1, 2] {
        now += quantum;
        let turn = Turn { members: [1, 2, 3].map(TenantId).to_vec(), holder: TenantId(holder), quantum_ns: quantum };
        assert_eq!(quanta.tick(now), Some(Change::Next(turn)));
        // The copies are not part of the quantum, however long they take.
        now += 2 * quantum;
        assert_eq!(quanta.tick(now), None);
        quanta.copies_done(now);
        assert_eq!(quanta.tick(now + quantum - 1), None);
    }
    // The holder is no longer active, so the next VM does not wait for the end of the quantum.
    quanta.set_working_sets(1000, [1, 3].map(|vm| (TenantId(vm), WorkingSet::movable(700))).into());
    let Some(Change::On(turn)) = quanta.tick(now + 1) else { panic!("the quanta do not start again") };
    assert_eq!((turn.holder, turn.members), (TenantId(3), vec![TenantId(1), TenantId(3)]));
    quanta.set_working_sets(1000, [(TenantId(3), WorkingSet::movable(700))].into());
    assert_eq!(quanta.tick(now + 2), Some(Change::Off), "only one VM is left");
}

#[test]
fn it_goes_off_when_sets_have_fitted_for_a_window() {
    let mut quanta = quanta(&[900, 900]);
    on(&mut quanta);
    quanta.set_working_sets(1000, sets(&[500, 480]));
    assert_eq!(
        (quanta.tick(SECOND), quanta.tick(9 * SECOND)),
        (None, None),
        "the working sets fit, but leave no margin"
    );
    quanta.set_working_sets(1000, sets(&[400, 400]));
    assert_eq!((quanta.tick(10 * SECOND), quanta.tick(11 * SECOND - 1)), (None, None));
    quanta.set_working_sets(1000, sets(&[400, 580]));
    assert_eq!(quanta.tick(11 * SECOND), None, "the working sets no longer fit");
    quanta.set_working_sets(1000, sets(&[400, 400]));
    assert_eq!((quanta.tick(12 * SECOND), quanta.tick(13 * SECOND)), (None, Some(Change::Off)));
    // The copies of the last change of turns do not count as thrashing.
    quanta.set_working_sets(1000, sets(&[700, 700]));
    assert_eq!(quanta.tick(13 * SECOND), None);
    assert!(copy(&mut quanta, 14 * SECOND, 500).is_some());
}

#[test]
fn forced_mode_takes_turns_without_pressure() {
    let mut quanta = quanta(&[10, 20]);
    quanta.set_config(QuantaConfig { mode: Mode::Forced, ..config() });
    let Some(Change::On(turn)) = quanta.tick(0) else { panic!("quanta are forced") };
    assert_eq!((turn.members, turn.quantum_ns), (vec![TenantId(1), TenantId(2)], SECOND), "no copies are needed");
    quanta.copies_done(0);
    assert!(matches!(quanta.tick(SECOND), Some(Change::Next(turn)) if turn.quantum_ns == SECOND));
    quanta.set_config(QuantaConfig { mode: Mode::Off, ..config() });
    assert_eq!((quanta.tick(31 * SECOND), quanta.turn()), (Some(Change::Off), None));
}

#[test]
fn host_access_counts_as_traffic_once_bus_bandwidth_is_known() {
    let mut quanta = quanta(&[700, 800]);
    quanta.accessed(0, 1000);
    assert_eq!((quanta.wants_bandwidth(), quanta.tick(0)), (true, None));
    quanta.relocated(MS, 2, 2 * MS);
    assert!(!quanta.wants_bandwidth());
    assert!(matches!(quanta.tick(MS), Some(Change::On(_))));
    let mut fits = self::quanta(&[200, 800]);
    fits.accessed(0, 1000);
    assert!(!fits.wants_bandwidth());
}

#[test]
fn the_first_quantum_is_known_when_its_copies_have_ended() {
    let mut quanta = quanta(&[700, 800]);
    quanta.set_config(QuantaConfig { mode: Mode::Forced, ..config() });
    assert!(matches!(quanta.tick(0), Some(Change::On(turn)) if turn.quantum_ns == 30 * SECOND));
    quanta.relocated(SECOND / 4, 1000, SECOND / 4);
    quanta.copies_done(SECOND / 4);
    // 1000 bytes are copied at 4000 bytes per second. A quantum is ten times as long as this copy.
    assert_eq!(quanta.turn().map(|turn| turn.quantum_ns), Some(5 * SECOND / 2));
}

#[test]
fn idle_tenant_yields_quantum_only_to_a_tenant_with_work() {
    let mut quanta = quanta(&[700, 700, 700]);
    // A change of turns copies 1400 bytes.
    let (turn, change) = (on(&mut quanta), 1400 * MS);
    assert_eq!(turn.holder, TenantId(1));
    let idle = |of: &[(u32, u64)]| of.iter().map(|&(vm, ns)| (TenantId(vm), ns)).collect::<BTreeMap<_, _>>();
    quanta.set_idle(idle(&[(1, change - 1)]));
    assert_eq!(quanta.tick(SECOND), None);
    quanta.set_idle(idle(&[(1, change), (2, 1), (3, 1)]));
    assert_eq!(quanta.tick(SECOND), None, "no other VM has work");
    assert_eq!(quanta.tick(40 * SECOND), None, "the holder keeps the turn for any length of time");
    quanta.set_idle(idle(&[(1, change), (2, 1)]));
    assert!(matches!(quanta.tick(40 * SECOND), Some(Change::Next(turn)) if turn.holder == TenantId(3)));
}

proptest! {
    /// Checks that the members are always two or more active VMs, and that the holder is one of them. Also checks that
    /// no VM waits unnecessarily, that each member gets its quantum, and that no change is reported twice.
    #[test]
    fn turns_are_fair_and_end(
        events in prop::collection::vec((0u64..3000, prop::collection::btree_map(1u32..6, 0u64..1500, 0..5), 0u64..400), 1..60),
        mode in prop_oneof![4 => Just(Mode::Auto), 1 => Just(Mode::Forced), 1 => Just(Mode::Off)],
    ) {
        let mut quanta = Quanta::new(QuantaConfig { mode, ..config() });
        let mut now = 0;
        quanta.relocated(0, 1, MS);
        for (step, of, bytes) in events {
            now += step * MS;
            let of: BTreeMap<_, _> =
                of.into_iter().map(|(vm, bytes)| (TenantId(vm), WorkingSet::movable(bytes))).collect();
            quanta.set_working_sets(1000, of.clone());
            if bytes > 0 {
                quanta.relocated(now, bytes, bytes * MS);
            }
            let before = quanta.turn().cloned();
            let change = quanta.tick(now);
            let turn = quanta.turn();
            match &change {
                Some(Change::On(new) | Change::Next(new)) => prop_assert_eq!(Some(new), turn),
                Some(Change::Off) => prop_assert_eq!((turn, before.is_some()), (None, true)),
                None => prop_assert_eq!(turn, before.as_ref()),
            }
            prop_assert!(change.is_none() || turn != before.as_ref() || of.is_empty());
            prop_assert_eq!(quanta.tick(now), None, "a change is reported twice");
            prop_assert!(mode != Mode::Off || turn_of(&quanta).is_none());
            if let Some(turn) = turn_of(&quanta) {
                prop_assert!(turn.members.len() > 1 && turn.members.contains(&turn.holder));
                prop_assert!(turn.members.iter().all(|vm| of.contains_key(vm)));
                prop_assert!((SECOND..=30 * SECOND).contains(&turn.quantum_ns));
            }
            quanta.copies_done(now);
        }
        // Without other changes, each member gets one of the next N quanta, where N is the number of members.
        if let Some(turn) = turn_of(&quanta).filter(|_| !quanta.sets.fit(0) || mode == Mode::Forced) {
            let mut holders = vec![turn.holder];
            for _ in 1..turn.members.len() {
                now += 30 * SECOND;
                let Some(Change::Next(turn)) = quanta.tick(now) else { panic!("there is no next VM") };
                quanta.copies_done(now);
                holders.push(turn.holder);
            }
            holders.sort_unstable();
            prop_assert_eq!(holders, turn.members);
        }
    }
}

fn turn_of(quanta: &Quanta) -> Option<Turn> {
    quanta.turn().cloned()
}

/// An input for the detector.
#[derive(Clone, Debug)]
enum Told {
    Relocated(u64, u64),
    Sets(Vec<u64>),
    Idle(u32, u64),
    Settled,
    Mode(Mode),
}

fn told() -> impl Strategy<Value = Told> {
    prop_oneof![
        6 => (0..2000u64, 0..500 * MS).prop_map(|(bytes, took)| Told::Relocated(bytes, took)),
        3 => prop::collection::vec(0..1200u64, 0..4).prop_map(Told::Sets),
        2 => (1..4u32, 0..20 * SECOND).prop_map(|(vm, ns)| Told::Idle(vm, ns)),
        2 => Just(Told::Settled),
        1 => prop::sample::select(vec![Mode::Auto, Mode::Off, Mode::Forced]).prop_map(Told::Mode),
    ]
}

fn tell(quanta: &mut Quanta, now: u64, told: &Told) -> Option<Change> {
    match told {
        Told::Relocated(bytes, took) => quanta.relocated(now, *bytes, *took),
        Told::Sets(of) => quanta.set_working_sets(1000, sets(of)),
        Told::Idle(vm, ns) => quanta.set_idle(BTreeMap::from([(TenantId(*vm), *ns)])),
        Told::Settled => quanta.copies_done(now),
        Told::Mode(mode) => quanta.set_config(QuantaConfig { mode: *mode, ..config() }),
    }
    quanta.tick(now)
}

proptest! {
    /// Checks that a restored detector makes the same decisions as the original one.
    #[test]
    fn restored_quanta_decide_the_same(steps in prop::collection::vec((told(), 1..700u64, any::<bool>()), 1..60)) {
        let (mut kept, mut moved, mut now) = (Quanta::new(config()), Quanta::new(config()), 0);
        for (told, ms, restore) in steps {
            now += ms * MS;
            if restore {
                let bytes = postcard::to_allocvec(&moved.save()).unwrap();
                let saved: SavedQuanta = postcard::from_bytes(&bytes).unwrap();
                moved = Quanta::try_from(saved).map_err(|why| TestCaseError::fail(why.to_string()))?;
            }
            prop_assert_eq!(tell(&mut moved, now, &told), tell(&mut kept, now, &told));
            prop_assert_eq!(moved.save(), kept.save());
        }
    }

    /// Checks that corrupted saved quanta are either rejected or harmless.
    #[test]
    fn edited_turns_never_panic(
        steps in prop::collection::vec((told(), 1..700u64), 1..20),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let (mut quanta, mut now) = (Quanta::new(config()), 0);
        for (told, ms) in &steps {
            now += ms * MS;
            tell(&mut quanta, now, told);
        }
        let mut bytes = postcard::to_allocvec(&quanta.save()).unwrap();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let Ok((saved, _)) = postcard::take_from_bytes::<SavedQuanta>(&bytes) else { return Ok(()) };
        let Ok(mut quanta) = Quanta::try_from(saved) else { return Ok(()) };
        for (told, ms) in &steps {
            now += ms * MS;
            tell(&mut quanta, now, told);
        }
    }
}
