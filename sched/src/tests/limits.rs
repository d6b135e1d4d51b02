//! Tests caps, run time limits, strikes, and quarantine.

use super::harness::Harness;
use crate::trace::{Recorder, Trace};
use crate::{Channel, Config, Decision, Engine, Event, Nanos, PolicyKind, Quarantine, TenantId, Ticket, VgpuParams};
use std::collections::BTreeMap;

const MS: u64 = 1_000_000;
const LIMITED: VgpuParams = VgpuParams {
    weight: 100,
    guarantee_permille: 0,
    cap_permille: 1000,
    class: crate::LatencyClass::Normal,
    max_run_ns: Some(50 * MS),
    copies: crate::CopyShare::AS_COMPUTE,
};

fn harness(strikes: u32, quarantine_ns: u64) -> Harness {
    let mut harness = Harness::new(Config { strikes, quarantine_ns, ..Config::default() });
    harness.add(0, LIMITED);
    harness.add(1, LIMITED);
    harness
}

/// Makes a submission exceed its limit. Returns the time at which its channel is killed, and the decisions.
fn overrun(harness: &mut Harness, channel: u32) -> (u64, Vec<Decision>) {
    harness.arrive(0, channel, Engine::Compute, 1000 * MS);
    let (event, decisions) = harness.step(u64::MAX).unwrap();
    assert_eq!(event, Event::Tick);
    assert!(matches!(decisions[..], [Decision::Kill { vgpu: TenantId(0), .. }]), "{decisions:?}");
    let mut decisions = harness.feed(Event::Struck { vgpu: TenantId(0), engine: Engine::Compute });
    decisions.extend(harness.end_channel(0, channel));
    (harness.now, decisions)
}

#[test]
fn a_submission_beyond_its_limit_has_its_channel_killed_once() {
    let mut harness = harness(0, 0);
    harness.now = 7 * MS;
    harness.arrive(0, 3, Engine::Compute, 1000 * MS);
    let (event, decisions) = harness.step(u64::MAX).unwrap();
    assert_eq!((event, harness.now), (Event::Tick, 57 * MS));
    let (vgpu, channel, engine, ticket) = (TenantId(0), Channel(3), Engine::Compute, Ticket(1));
    assert_eq!(decisions, [Decision::Kill { vgpu, channel, engine, ticket, ran_ns: 50 * MS }]);
    harness.now += MS;
    assert_eq!(harness.feed(Event::Tick), []);
    assert_eq!(harness.scheduler.next_wakeup(), None);
    // The next submission starts as soon as the channel is removed from the card. Until then, the killed submission is
    // charged.
    assert_eq!(harness.arrive(1, 0, Engine::Compute, MS), []);
    assert_eq!(harness.end_channel(0, 3), [Decision::Start(Ticket(2))]);
    assert_eq!(harness.scheduler.account(vgpu, engine).unwrap().used, 51 * MS);
    assert_eq!(harness.scheduler.account(vgpu, engine).unwrap().killed, 0);
    harness.feed(Event::Struck { vgpu, engine });
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
    assert_eq!(harness.scheduler.account(TenantId(0), Engine::Compute).unwrap().killed, 0);
}

#[test]
fn the_last_strike_quarantines_until_the_operator_releases() {
    let mut harness = harness(2, 0);
    overrun(&mut harness, 0);
    assert_eq!(harness.scheduler.strikes(TenantId(0)), Some((1, Quarantine::Free)));
    let (_, decisions) = overrun(&mut harness, 1);
    assert_eq!(decisions.last(), Some(&Decision::Quarantined { vgpu: TenantId(0), until: None }));
    // The quarantined vGPU's work is neither started nor dropped, and the other vGPU continues.
    assert_eq!(harness.arrive(0, 2, Engine::Compute, MS), []);
    assert_eq!(harness.arrive(0, 2, Engine::Copy0, MS), []);
    assert_eq!(harness.arrive(1, 0, Engine::Compute, MS).len(), 1);
    harness.pass(1000 * MS);
    // The same applies to other policies.
    harness.feed(Event::Configured(Config { policy: PolicyKind::Fifo, ..*harness.scheduler.config() }));
    harness.pass(1000 * MS);
    assert_eq!(harness.scheduler.next_wakeup(), None);
    let released = harness.feed(Event::Released { vgpu: TenantId(0) });
    let expected = [Decision::Released { vgpu: TenantId(0) }, Decision::Start(Ticket(3)), Decision::Start(Ticket(4))];
    assert_eq!(released, expected);
    assert_eq!(harness.scheduler.strikes(TenantId(0)), Some((0, Quarantine::Free)));
    harness.drain();
    harness.audit();
}

#[test]
fn the_timer_releases_too() {
    let mut harness = harness(1, 200 * MS);
    let (at, decisions) = overrun(&mut harness, 0);
    let until = Nanos(at + 200 * MS);
    assert_eq!(decisions.last(), Some(&Decision::Quarantined { vgpu: TenantId(0), until: Some(until) }));
    harness.arrive(0, 1, Engine::Compute, MS);
    assert_eq!(harness.scheduler.next_wakeup(), Some(until));
    let (event, decisions) = harness.step(u64::MAX).unwrap();
    assert_eq!((event, harness.now), (Event::Tick, until.0));
    assert_eq!(decisions, [Decision::Released { vgpu: TenantId(0) }, Decision::Start(Ticket(2))]);
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
        let used = harness.scheduler.account(TenantId(0), Engine::Compute).unwrap().used;
        assert!((195 * MS..=210 * MS).contains(&used), "{policy:?}: {used}");
        harness.drain();
    }
}

#[test]
fn a_cap_that_is_raised_lets_go_at_once() {
    let mut harness = harness(0, 0);
    harness.feed(Event::Changed { vgpu: TenantId(0), params: VgpuParams { cap_permille: 1, ..LIMITED } });
    for _ in 0..4 {
        harness.arrive(0, 0, Engine::Compute, 10 * MS);
    }
    harness.pass(100 * MS);
    assert!(harness.scheduler.account(TenantId(0), Engine::Compute).unwrap().used < 40 * MS);
    harness.feed(Event::Changed { vgpu: TenantId(0), params: LIMITED });
    harness.pass(40 * MS);
    assert_eq!(harness.scheduler.account(TenantId(0), Engine::Compute).unwrap().used, 40 * MS);
}

#[test]
fn short_work_does_not_postpone_limit_of_long_submission() {
    // Short submissions end while a long one runs concurrently, but the long one's limit does not restart.
    let mut harness = Harness::new(Config { policy: PolicyKind::Direct, strikes: 0, ..Config::default() });
    harness.add(0, LIMITED);
    harness.arrive(0, 0, Engine::Compute, 1000 * MS);
    for ticket in 2..12 {
        harness.now += 6 * MS;
        let (vgpu, channel, engine) = (TenantId(0), Channel(1), Engine::Compute);
        let mut decisions = Vec::new();
        let now = Nanos(harness.now);
        harness.scheduler.event(now, Event::Arrival { vgpu, channel, engine, ticket: Ticket(ticket) }, &mut decisions);
        let ended = Event::Completed { ticket: Ticket(ticket), ended: Some(now) };
        harness.scheduler.event(now, ended, &mut decisions);
        if decisions.iter().any(|decision| matches!(decision, Decision::Kill { channel: Channel(0), .. })) {
            assert_eq!(harness.now, 54 * MS);
            return;
        }
    }
    panic!("the channel is not killed");
}

#[test]
fn engine_occupant_is_killed_rather_than_first_in_accounts() {
    let mut harness = Harness::new(Config { policy: PolicyKind::Direct, strikes: 1, ..Config::default() });
    harness.add(0, LIMITED);
    harness.add(1, LIMITED);
    harness.arrive(0, 0, Engine::Compute, MS);
    harness.now += MS / 4;
    harness.arrive(1, 7, Engine::Compute, 1000 * MS);
    // The engine has started the second submission first, and that submission does not end.
    harness.now = 50 * MS;
    let engine = Engine::Compute;
    let kill = |decisions: Vec<Decision>| match decisions[..] {
        [Decision::Kill { vgpu, channel, .. }] => (vgpu, channel),
        _ => panic!("{decisions:?}"),
    };
    assert_eq!(kill(harness.feed(Event::Tick)), (TenantId(0), Channel(0)));
    assert_eq!(harness.feed(Event::Occupied { engine, vgpu: TenantId(1), channel: Channel(7) }), []);
    assert_eq!(harness.scheduler.next_wakeup(), Some(Nanos(50 * MS + MS / 4)));
    harness.now += MS / 4;
    assert_eq!(kill(harness.feed(Event::Tick)), (TenantId(1), Channel(7)));
    harness.feed(Event::ChannelEnded { vgpu: TenantId(1), channel: Channel(7) });
    let decisions = harness.feed(Event::Struck { vgpu: TenantId(1), engine });
    assert_eq!(decisions, [Decision::Quarantined { vgpu: TenantId(1), until: None }]);
    // The waiting submission is charged only for its own time, and its run time limit restarts.
    harness.now += MS;
    harness.feed(Event::Completed { ticket: Ticket(1), ended: Some(Nanos(harness.now)) });
    let used = |vgpu| harness.scheduler.account(TenantId(vgpu), engine).unwrap().used;
    assert_eq!([used(0), used(1)], [MS, 50 * MS]);
    assert_eq!(harness.scheduler.strikes(TenantId(0)), Some((0, Quarantine::Free)));
}

#[test]
fn work_on_other_engine_is_charged_where_card_reports_it() {
    let mut harness = harness(0, 0);
    harness.arrive(0, 3, Engine::Compute, 1000 * MS);
    harness.arrive(1, 4, Engine::Copy0, MS);
    harness.now = 50 * MS;
    harness.feed(Event::Occupied { engine: Engine::Copy0, vgpu: TenantId(0), channel: Channel(3) });
    harness.now = 60 * MS;
    harness.feed(Event::ChannelEnded { vgpu: TenantId(0), channel: Channel(3) });
    let used = |vgpu, engine| harness.scheduler.account(TenantId(vgpu), engine).unwrap().used;
    assert_eq!([used(0, Engine::Compute), used(0, Engine::Copy0)], [50 * MS, 10 * MS]);
    assert_eq!(used(1, Engine::Copy0), 0);
}

#[test]
fn vgpu_blocking_an_engine_is_charged_instead_of_waiting_vgpu() {
    let mut harness = harness(0, 0);
    harness.arrive(0, 3, Engine::Copy0, 1000 * MS);
    harness.arrive(1, 4, Engine::Compute, MS);
    // The first vGPU's copy blocks the compute engine, so the second vGPU's submission does not run yet.
    for step in 1..=4 {
        let since = Nanos(harness.now);
        harness.now = step * 10 * MS;
        harness.feed(Event::Kept { engine: Engine::Compute, vgpu: TenantId(0), since });
    }
    let used = |harness: &Harness, vgpu| harness.scheduler.account(TenantId(vgpu), Engine::Compute).unwrap().used;
    assert_eq!([used(&harness, 0), used(&harness, 1)], [40 * MS, 0]);
    harness.now += MS;
    harness.feed(Event::Completed { ticket: Ticket(2), ended: Some(Nanos(harness.now)) });
    assert_eq!([used(&harness, 0), used(&harness, 1)], [40 * MS, MS]);
    assert_eq!(harness.scheduler.busy(Engine::Compute), 41 * MS);
    assert_eq!(harness.scheduler.strikes(TenantId(1)).unwrap().0, 0, "its limit starts when it has the engine");
}

#[test]
fn waiting_submission_progress_between_polls_is_charged() {
    let mut harness = harness(0, 0);
    harness.arrive(0, 0, Engine::Compute, 1000 * MS);
    harness.now += MS;
    harness.feed(Event::Waiting { ticket: Ticket(1) });
    for _ in 0..4 {
        let since = Nanos(harness.now);
        harness.now += MS;
        harness.feed(Event::Moved { ticket: Ticket(1), since });
    }
    assert_eq!(harness.scheduler.account(TenantId(0), Engine::Compute).unwrap().used, 5 * MS);
    assert_eq!(harness.scheduler.busy(Engine::Compute), 5 * MS);
}

#[test]
fn requeued_submission_restarts_before_later_work_of_channel() {
    for policy in [PolicyKind::Fifo, PolicyKind::Credit, PolicyKind::Band] {
        let mut harness = Harness::new(Config { policy, pipeline: crate::Pipeline::ONE, ..Config::default() });
        harness.add(0, LIMITED);
        harness.add(1, LIMITED);
        harness.arrive(0, 0, Engine::Compute, 20 * MS);
        harness.arrive(1, 0, Engine::Compute, MS);
        harness.arrive(0, 0, Engine::Compute, MS);
        harness.now += 10 * MS;
        // The engine is busy with other work, so the submission waits, but it runs ahead of later work of its channel.
        let mut order = harness.stall(Ticket(1));
        harness.requeue();
        order.extend(std::iter::from_fn(|| harness.step(u64::MAX)).flat_map(|(_, decisions)| decisions));
        let place = |ticket| order.iter().position(|decision| *decision == Decision::Start(Ticket(ticket)));
        assert!(place(2) < place(1) && place(1) < place(3), "{policy:?}: {order:?}");
        harness.drain();
        harness.audit();
    }
}

fn assert_near(share: f64, expected: f64) {
    assert!((share - expected).abs() < 0.02, "share {share}, expected {expected}");
}

#[test]
fn competing_settings_replace_own_ones_until_ended() {
    let mut harness = Harness::new(Config::default());
    harness.add(0, VgpuParams::default());
    harness.add(1, VgpuParams::default());
    let boosted = VgpuParams { weight: 300, ..VgpuParams::default() };
    let share = |harness: &mut Harness| {
        let used = |harness: &Harness, vgpu| harness.scheduler.account(TenantId(vgpu), Engine::Compute).unwrap().used;
        let before = [used(harness, 0), used(harness, 1)];
        for _ in 0..2000 {
            harness.arrive(0, 0, Engine::Compute, MS);
            harness.arrive(1, 0, Engine::Compute, MS);
        }
        // Both vGPUs always have work during this time.
        harness.pass(2000 * MS);
        let [one, other] = [used(harness, 0) - before[0], used(harness, 1) - before[1]];
        harness.drain();
        one as f64 / (one + other) as f64
    };
    assert_near(share(&mut harness), 0.5);
    harness.feed(Event::Competes { vgpu: TenantId(0), params: Some(boosted) });
    assert_near(share(&mut harness), 0.75);
    assert_eq!(harness.scheduler.params(TenantId(0)), Some(&VgpuParams::default()));
    assert_eq!(harness.scheduler.competing(TenantId(0)), Some(&boosted));
    // Changing the vGPU's own settings does not end the use of the replacement settings.
    harness.feed(Event::Changed { vgpu: TenantId(0), params: VgpuParams { weight: 50, ..VgpuParams::default() } });
    assert_near(share(&mut harness), 0.75);
    // Invalid settings are ignored.
    harness.feed(Event::Competes { vgpu: TenantId(0), params: Some(VgpuParams { weight: 0, ..boosted }) });
    assert_eq!(harness.scheduler.competing(TenantId(0)), Some(&boosted));
    harness.feed(Event::Competes { vgpu: TenantId(0), params: None });
    assert_near(share(&mut harness), 1.0 / 3.0);
    harness.feed(Event::Competes { vgpu: TenantId(0), params: Some(boosted) });
    harness.restore();
    assert_eq!(harness.scheduler.competing(TenantId(0)), None, "the card's next owner decides this again");
    assert_near(share(&mut harness), 1.0 / 3.0);
    harness.audit();
}

#[test]
fn record_of_competing_settings_replays() {
    let mut harness = Harness::new(Config::default());
    harness.add(0, VgpuParams::default());
    harness.add(1, VgpuParams::default());
    let params = Some(VgpuParams { weight: 300, ..VgpuParams::default() });
    harness.feed(Event::Competes { vgpu: TenantId(0), params });
    let at = Nanos(harness.now);
    let mut recorder = Recorder::new(Vec::new(), &harness.scheduler, at, &BTreeMap::new()).unwrap();
    let event = Event::Competes { vgpu: TenantId(1), params };
    let decisions = harness.feed(event);
    recorder.record(at, event, &decisions).unwrap();
    let replay = Trace::read(&*recorder.finish().unwrap()).unwrap().replay();
    assert!(replay.other.is_empty());
    assert_eq!(replay.scheduler.competing(TenantId(0)), params.as_ref());
    assert_eq!(replay.scheduler.competing(TenantId(1)), params.as_ref());
}
