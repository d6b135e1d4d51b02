//! Caps, run time limits, strikes, quarantine.

use super::harness::Harness;
use crate::{Channel, Config, Decision, Engine, Event, Nanos, PolicyKind, Quarantine, Ticket, VgpuId, VgpuParams};

const MS: u64 = 1_000_000;
const LIMITED: VgpuParams = VgpuParams {
    weight: 100,
    guarantee_permille: 0,
    cap_permille: 1000,
    class: crate::LatencyClass::Normal,
    max_run_ns: Some(50 * MS),
};

fn harness(strikes: u32, quarantine_ns: u64) -> Harness {
    let mut harness = Harness::new(Config { strikes, quarantine_ns, ..Config::default() });
    harness.add(0, LIMITED);
    harness.add(1, LIMITED);
    harness
}

/// Lets a submission run into its limit; returns what the scheduler then decided, and when.
fn overrun(harness: &mut Harness, channel: u32) -> (u64, Vec<Decision>) {
    harness.arrive(0, channel, Engine::Compute, 1000 * MS);
    let (event, decisions) = harness.step(u64::MAX).unwrap();
    assert_eq!(event, Event::Tick);
    (harness.now, decisions)
}

#[test]
fn a_submission_beyond_its_limit_has_its_channel_killed_once() {
    let mut harness = harness(0, 0);
    harness.now = 7 * MS;
    let (at, decisions) = overrun(&mut harness, 3);
    assert_eq!(at, 57 * MS);
    let (vgpu, channel, engine, ticket) = (VgpuId(0), Channel(3), Engine::Compute, Ticket(1));
    assert_eq!(decisions, [Decision::Kill { vgpu, channel, engine, ticket, ran_ns: 50 * MS }]);
    harness.now += MS;
    assert_eq!(harness.feed(Event::Tick), []);
    assert_eq!(harness.scheduler.next_wakeup(), None);
    // What waited behind it runs as soon as the channel is off the card, and the time is charged.
    assert_eq!(harness.arrive(1, 0, Engine::Compute, MS), []);
    assert_eq!(harness.end_channel(0, 3), [Decision::Start(Ticket(2))]);
    assert_eq!(harness.scheduler.account(vgpu, engine).unwrap().used, 51 * MS);
    assert_eq!(harness.scheduler.account(vgpu, engine).unwrap().killed, 1);
    harness.drain();
    harness.audit();
}

#[test]
fn a_limit_counts_from_when_the_engine_began() {
    let mut harness = harness(0, 0);
    harness.arrive(0, 0, Engine::Compute, 40 * MS);
    harness.arrive(0, 0, Engine::Compute, 40 * MS);
    harness.drain();
    assert_eq!(harness.scheduler.account(VgpuId(0), Engine::Compute).unwrap().killed, 0);
}

#[test]
fn the_last_strike_quarantines_until_the_operator_releases() {
    let mut harness = harness(2, 0);
    overrun(&mut harness, 0);
    harness.end_channel(0, 0);
    assert_eq!(harness.scheduler.strikes(VgpuId(0)), Some((1, Quarantine::Free)));
    let (_, decisions) = overrun(&mut harness, 1);
    assert_eq!(decisions.last(), Some(&Decision::Quarantined { vgpu: VgpuId(0), until: None }));
    harness.end_channel(0, 1);
    // Held back, and not dropped; the other goes on.
    assert_eq!(harness.arrive(0, 2, Engine::Compute, MS), []);
    assert_eq!(harness.arrive(0, 2, Engine::Copy0, MS), []);
    assert_eq!(harness.arrive(1, 0, Engine::Compute, MS).len(), 1);
    harness.pass(1000 * MS);
    // Also by another policy.
    harness.feed(Event::Configured(Config { policy: PolicyKind::Fifo, ..*harness.scheduler.config() }));
    harness.pass(1000 * MS);
    assert_eq!(harness.scheduler.next_wakeup(), None);
    let released = harness.feed(Event::Released { vgpu: VgpuId(0) });
    let expected = [Decision::Released { vgpu: VgpuId(0) }, Decision::Start(Ticket(3)), Decision::Start(Ticket(4))];
    assert_eq!(released, expected);
    assert_eq!(harness.scheduler.strikes(VgpuId(0)), Some((0, Quarantine::Free)));
    harness.drain();
    harness.audit();
}

#[test]
fn the_timer_releases_too() {
    let mut harness = harness(1, 200 * MS);
    let (at, decisions) = overrun(&mut harness, 0);
    let until = Nanos(at + 200 * MS);
    assert_eq!(decisions.last(), Some(&Decision::Quarantined { vgpu: VgpuId(0), until: Some(until) }));
    harness.end_channel(0, 0);
    harness.arrive(0, 1, Engine::Compute, MS);
    assert_eq!(harness.scheduler.next_wakeup(), Some(until));
    let (event, decisions) = harness.step(u64::MAX).unwrap();
    assert_eq!((event, harness.now), (Event::Tick, until.0));
    assert_eq!(decisions, [Decision::Released { vgpu: VgpuId(0) }, Decision::Start(Ticket(2))]);
}

#[test]
fn a_cap_holds_even_on_an_idle_card_and_under_each_policy() {
    for policy in PolicyKind::ALL {
        let mut harness = Harness::new(Config { policy, ..Config::default() });
        harness.add(0, VgpuParams { cap_permille: 200, ..VgpuParams::default() });
        for _ in 0..1000 {
            harness.arrive(0, 0, Engine::Compute, MS);
        }
        harness.pass(1000 * MS);
        let used = harness.scheduler.account(VgpuId(0), Engine::Compute).unwrap().used;
        assert!((195 * MS..=210 * MS).contains(&used), "{policy:?}: {used}");
        harness.drain();
    }
}

#[test]
fn a_cap_that_is_raised_lets_go_at_once() {
    let mut harness = harness(0, 0);
    harness.feed(Event::Changed { vgpu: VgpuId(0), params: VgpuParams { cap_permille: 1, ..LIMITED } });
    for _ in 0..4 {
        harness.arrive(0, 0, Engine::Compute, 10 * MS);
    }
    harness.pass(100 * MS);
    assert!(harness.scheduler.account(VgpuId(0), Engine::Compute).unwrap().used < 40 * MS);
    harness.feed(Event::Changed { vgpu: VgpuId(0), params: LIMITED });
    harness.pass(40 * MS);
    assert_eq!(harness.scheduler.account(VgpuId(0), Engine::Compute).unwrap().used, 40 * MS);
}
