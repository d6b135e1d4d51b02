//! Tests gangs in simulated time. `schedules` tests various orders of messages, submissions, and failures.

mod messages;
mod schedules;
mod world;

use super::GangCounts;
use super::member::Stage;
use proptest::prelude::*;
use sched::VgpuParams;
use world::{MS, Tenant, World, gang, id};

/// Simulation step, in ns.
const STEP: u64 = 20_000;
const COARSE_STEP: u64 = 100_000;
/// Maximum message latency between two idle processes on a host, in ns.
const QUICK_NS: u64 = 60_000;

/// Minimum ratio of a tenant's actual share to its expected share. The expected share assumes mutual exclusion of all
/// tenants that share a card with the tenant. In 500 random sets of tenants, the minimum was 0.75. Another set had a
/// ratio of 0.72.
const LEAST_PART: f64 = 0.6;

/// Creates cards that exchange messages with the latency of a socket.
fn quick(cards: u32, tenants: &[Tenant]) -> World {
    let mut world = World::new(cards, tenants, 1);
    world.transit_ns = (10_000, QUICK_NS);
    world
}

fn part(world: &World, number: usize, of: &[usize]) -> f64 {
    world.work(number) / of.iter().map(|&other| world.work(other)).sum::<f64>()
}

/// Returns the statistics of all gangs on all cards.
fn all_counts(world: &World) -> Vec<GangCounts> {
    world.cards.values().flat_map(|turns| turns.members.values()).map(|member| member.counts.clone()).collect()
}

#[test]
fn two_gangs_get_their_weights_and_lose_little() {
    for weights in [[100, 100], [300, 100], [100, 700]] {
        let tenants = [Tenant::flood(&[0, 1], weights[0], MS), Tenant::flood(&[0, 1], weights[1], 2 * MS)];
        let mut world = quick(2, &tenants);
        world.run(4000 * MS, STEP);
        let due = f64::from(weights[0]) / f64::from(weights[0] + weights[1]);
        let part = part(&world, 0, &[0, 1]);
        assert!((part - due).abs() < 0.02, "{weights:?}: {part}, expected {due}");
        let lost = 1.0 - (world.work(0) + world.work(1)) / (4000 * MS) as f64;
        println!("weights {weights:?}: share {part:.3}, {:.1} % lost", lost * 100.0);
        assert!(lost < 0.03, "{weights:?}: {lost} of the time lost");
    }
}

#[test]
fn gang_gets_its_part_next_to_single_tenants() {
    let tenants = [Tenant::flood(&[0, 1], 100, MS), Tenant::flood(&[0], 100, 2 * MS), Tenant::flood(&[1], 100, MS / 2)];
    let mut world = quick(2, &tenants);
    world.run(4000 * MS, STEP);
    for (card, single) in [(0, 1), (1, 2)] {
        let charged = world.used(card, 0) as f64 / world.busy(card) as f64;
        let counts = world.counts(card, 0);
        println!("card {card}: {charged:.3} for the gang, {} ms of it lost", counts.gather_ns / MS);
        assert!(charged > 0.42 && charged < 0.52, "{charged} of card {card} for the gang");
        assert!(world.work(single) > 0.48 * (4000 * MS) as f64, "card {card}: {} ns", world.work(single));
        // The holder has at most two kernels in flight.
        assert!(counts.longest_gather_ns <= 5 * MS, "{counts:?}");
    }
    assert!(world.work(0) > 0.40 * (4000 * MS) as f64, "{} ns of the gang", world.work(0));
    assert!(world.gap(1).max(world.gap(2)) < 60 * MS);
}

#[test]
fn gangs_in_a_ring_take_equal_turns() {
    let ring = [[0, 1], [1, 2], [0, 2]];
    let tenants = ring.map(|cards| Tenant::flood(&cards, 100, MS));
    let mut world = quick(3, &tenants);
    world.run(4000 * MS, STEP);
    for number in 0..3 {
        let part = world.work(number) / (4000 * MS) as f64;
        assert!((part - 1.0 / 3.0).abs() < 0.03, "gang {number} has a share of {part}");
    }
}

#[test]
fn gang_with_one_busy_card_keeps_its_turn_for_it() {
    let pauses = Tenant { burst: Some((5, 20 * MS)), ..Tenant::flood(&[0, 1], 100, MS) };
    let tenants = [pauses, Tenant::flood(&[0], 100, MS), Tenant::flood(&[1], 100, MS)];
    let mut world = quick(2, &tenants);
    world.run(2000 * MS, STEP);
    // The gang works for at most 5 ms of every 25 ms. The other tenants use the remaining time.
    assert!(world.work(0) > 0.10 * (2000 * MS) as f64, "{} ns of the gang", world.work(0));
    for single in [1, 2] {
        assert!(world.work(single) > 0.70 * (2000 * MS) as f64, "{} ns", world.work(single));
    }
}

#[test]
fn kernel_that_does_not_end_delays_gather_for_bounded_time() {
    let endless = Tenant::flood(&[1], 100, 400 * MS);
    let tenants = [Tenant::flood(&[0, 1], 100, MS), endless, Tenant::flood(&[0], 100, MS)];
    let mut world = quick(2, &tenants);
    world.run(4000 * MS, STEP);
    for counts in all_counts(&world) {
        assert!(counts.longest_gather_ns <= 46 * MS, "{counts:?}");
    }
    assert!(world.work(2) > 0.40 * (4000 * MS) as f64, "{} ns of the tenant on the other card", world.work(2));
    assert!(world.work(0) > 0.10 * (4000 * MS) as f64, "{} ns of the gang", world.work(0));
    assert!(world.gap(2) < 150 * MS, "{} ns", world.gap(2));
}

#[test]
fn stopped_process_of_a_card_costs_other_cards_nothing() {
    let tenants = [
        Tenant::flood(&[0, 1], 100, MS),
        Tenant::flood(&[0], 100, MS),
        Tenant::flood(&[2], 100, MS),
        Tenant::flood(&[0, 2], 100, MS),
    ];
    // Stop the gang's home, and then another card.
    for stopped in [0, 1] {
        let mut world = quick(3, &tenants);
        world.run(200 * MS, STEP);
        world.stopped.insert(stopped);
        let before = [2, 3].map(|number| world.work(number));
        world.run(1000 * MS, STEP);
        let [single, gang] = [(2, before[0]), (3, before[1])].map(|(number, was)| world.work(number) - was);
        assert!(single > 0.49 * (1000 * MS) as f64, "card {stopped} is stopped: {single} ns of the tenant of card 2");
        assert_eq!(stopped == 1, gang > 0.40 * (1000 * MS) as f64, "card {stopped} is stopped: {gang} ns");
        world.stopped.clear();
        let before = world.work(0);
        // The turn in progress on the stopped card is charged for the second in which the card was stopped.
        world.run(3000 * MS, COARSE_STEP);
        let work = world.work(0) - before;
        assert!(work > 0.1 * (3000 * MS) as f64, "card {stopped} continues: {work} ns of its gang");
    }
}

#[test]
fn lost_card_takes_only_its_gangs_out() {
    let tenants = [Tenant::flood(&[0, 1], 100, MS), Tenant::flood(&[0], 100, MS), Tenant::flood(&[0, 2], 100, MS)];
    let mut world = quick(3, &tenants);
    world.run(200 * MS, STEP);
    world.cut(0, 1);
    world.run(100 * MS, STEP);
    let view = world.card(0).view(gang(id(0))).expect("the gang exists");
    assert_eq!(view.missing.iter().map(|card| card.0).collect::<Vec<_>>(), [1]);
    assert!(!view.runs);
    let before = [0, 1, 2].map(|number| world.work(number));
    world.run(1000 * MS, STEP);
    let [lost, single, other] = [0, 1, 2].map(|number| world.work(number) - before[number]);
    assert_eq!(lost, 0.0);
    assert!(single > 0.45 * (1000 * MS) as f64 && other > 0.45 * (1000 * MS) as f64, "{single} and {other} ns");
    world.connect(0, 1);
    world.run(1000 * MS, STEP);
    assert!(world.work(0) > before[0] + 0.25 * (1000 * MS) as f64, "the gang is running again");
}

#[test]
fn gang_resumed_before_its_work_ended_makes_progress() {
    for card in [0, 1] {
        let tenants = [Tenant::flood(&[0, 1], 100, MS), Tenant::flood(&[0, 1], 100, MS)];
        let mut world = quick(2, &tenants);
        for round in 0..40 {
            world.run(100 * MS + round * STEP, STEP);
            let now = sched::Nanos(world.now);
            // The owner of a card pauses the tenants whose memory does not fit, and then resumes the first one.
            for paused in [true, false] {
                world.card(card).pause(id(0), paused, now);
            }
            world.follow(card);
        }
        let total = world.work(0) + world.work(1);
        for number in [0, 1] {
            assert!(world.work(number) > 0.3 * total, "gang {number}: {} of {total} ns", world.work(number));
            assert!(world.gap(number) < 200 * MS, "gang {number} waited {} ns", world.gap(number));
        }
    }
}

#[test]
fn tenants_paused_more_often_than_slices_end_keep_shares() {
    for (cards, other) in [(vec![0], vec![0]), (vec![0, 1], vec![0, 1]), (vec![0, 1], vec![0])] {
        for interval in [3 * MS, 10 * MS, 16 * MS, 40 * MS] {
            let tenants = [Tenant::flood(&cards, 100, MS), Tenant::flood(&other, 100, MS)];
            let mut world = quick(2, &tenants);
            for _ in 0..1000 * MS / interval {
                world.run(interval, STEP);
                let now = sched::Nanos(world.now);
                for paused in [true, false] {
                    world.card(0).pause(id(0), paused, now);
                }
                world.follow(0);
            }
            let part = part(&world, 0, &[0, 1]);
            assert!((0.45..0.55).contains(&part), "cards {cards:?}, every {interval} ns: {part} for the paused tenant");
        }
    }
}

#[test]
fn gang_paused_on_one_card_leaves_all_its_cards() {
    let tenants = [Tenant::flood(&[0, 1], 100, MS), Tenant::flood(&[0], 100, MS), Tenant::flood(&[1], 100, MS)];
    let mut world = quick(2, &tenants);
    world.run(200 * MS, STEP);
    let now = sched::Nanos(world.now);
    world.card(1).pause(id(0), true, now);
    world.follow(1);
    world.run(100 * MS, STEP);
    let before = [0, 1, 2].map(|number| world.work(number));
    world.run(500 * MS, STEP);
    let [paused, one, two] = [0, 1, 2].map(|number| world.work(number) - before[number]);
    assert_eq!(paused, 0.0);
    assert!(one.min(two) > 0.97 * (500 * MS) as f64, "{one} and {two} ns");
    let now = sched::Nanos(world.now);
    world.card(1).pause(id(0), false, now);
    world.follow(1);
    world.run(500 * MS, STEP);
    assert!(world.work(0) > before[0] + 0.3 * (500 * MS) as f64);
}

#[test]
fn gang_that_leaves_a_card_frees_it_at_once() {
    let tenants = [Tenant::flood(&[0, 1], 100, MS), Tenant::flood(&[1], 100, MS)];
    let mut world = quick(2, &tenants);
    world.run(200 * MS, STEP);
    let now = sched::Nanos(world.now);
    world.card(1).leave(gang(id(0)), now);
    world.follow(1);
    world.card(1).with_turns(now, |turns| turns.remove(id(0), now));
    world.programs.get_mut(&id(0)).expect("the program exists").ranks.remove(&1);
    world.follow(1);
    let before = world.work(1);
    world.run(500 * MS, STEP);
    assert!(world.work(1) - before > 0.95 * (500 * MS) as f64, "{} ns", world.work(1) - before);
    assert_eq!(world.card(1).view(gang(id(0))), None);
}

fn any_tenants() -> impl Strategy<Value = (u32, Vec<Tenant>)> {
    (2..=4u32).prop_flat_map(|cards| {
        let set = (1..1u32 << cards).prop_map(move |bits| (0..cards).filter(|card| bits & (1 << card) != 0).collect());
        let tenant =
            (set, 1..=3u32, 1..=4u64, 1..=2u64).prop_map(|(cards, weight, quarters, ahead): (Vec<u32>, _, _, _)| {
                let params = VgpuParams::weight(weight * 100);
                let kernel_ns = quarters * MS / 2;
                Tenant { cards, params, kernel_ns, ahead, kernels: u64::MAX, burst: None }
            });
        (Just(cards), proptest::collection::vec(tenant, 2..6))
    })
}

/// Returns a tenant's expected share if all tenants that share a card with it exclude each other.
fn least_part(tenants: &[Tenant], number: usize) -> f64 {
    let meets = |other: &&Tenant| other.cards.iter().any(|card| tenants[number].cards.contains(card));
    let weights: u32 = tenants.iter().filter(meets).map(|tenant| tenant.params.weight).sum();
    f64::from(tenants[number].params.weight) / f64::from(weights)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn tenants_of_any_card_sets_get_their_parts((cards, tenants) in any_tenants()) {
        let mut world = World::new(cards, &tenants, 1);
        world.run(3000 * MS, COARSE_STEP);
        for number in 0..tenants.len() {
            let part = world.work(number) / (3000 * MS) as f64;
            let due = least_part(&tenants, number);
            prop_assert!(part > LEAST_PART * due, "tenant {number}: {part}, expected {due}: {tenants:?}");
        }
        for card in 0..cards {
            // Tenants are charged only for time during which the card is busy or reserved.
            prop_assert!(world.busy(card) <= 3000 * MS);
            let used: u64 = (0..tenants.len()).map(|number| world.used(card, number)).sum();
            prop_assert_eq!(used, world.busy(card));
        }
        for counts in all_counts(&world) {
            prop_assert!(counts.longest_gather_ns <= 31 * MS, "{counts:?}");
        }
    }
}

#[test]
fn gang_of_many_cards_is_not_passed_over() {
    let tenants =
        [Tenant::flood(&[0, 2], 300, MS), Tenant::flood(&[0, 1], 300, MS), Tenant::flood(&[0, 1, 2], 100, MS)];
    let mut world = quick(3, &tenants);
    world.run(3000 * MS, STEP);
    let part = world.work(2) / (3000 * MS) as f64;
    assert!(part > 0.12, "share {part}, expected a seventh");
}

/// Runs the simulation until a card is ready for the first gang.
fn run_until_ready(world: &mut World, card: u32) {
    let is_ready = |world: &World| matches!(world.cards[&card].members[&gang(id(0))].stage, Stage::Ready { .. });
    for _ in 0..100_000 {
        if is_ready(world) {
            return;
        }
        world.run(STEP, STEP);
    }
    panic!("card {card} is not gathered");
}

#[test]
fn gather_of_a_stopped_home_ends_by_itself() {
    let tenants = [Tenant::flood(&[0, 1], 100, MS), Tenant::flood(&[0], 100, 4 * MS), Tenant::flood(&[1], 100, MS / 2)];
    let mut world = quick(2, &tenants);
    run_until_ready(&mut world, 1);
    world.stopped.insert(0);
    let before = world.work(2);
    world.run(500 * MS, STEP);
    let work = world.work(2) - before;
    assert!(work > 0.80 * (500 * MS) as f64, "{work} ns of the tenant of the other card");
}

#[test]
fn gather_of_a_stopped_card_is_cancelled_by_home() {
    let tenants = [Tenant::flood(&[0, 1], 100, MS), Tenant::flood(&[0], 100, MS / 2), Tenant::flood(&[1], 100, 4 * MS)];
    let mut world = quick(2, &tenants);
    run_until_ready(&mut world, 0);
    world.stopped.insert(1);
    let before = world.work(1);
    world.run(500 * MS, STEP);
    let counts = world.counts(0, 0);
    assert!((40 * MS..46 * MS).contains(&counts.longest_gather_ns), "{} ns", counts.longest_gather_ns);
    assert_eq!(counts.cancelled, 1, "the card is not gathered again");
    assert!(world.work(1) - before > 0.88 * (500 * MS) as f64, "{} ns", world.work(1) - before);
}
