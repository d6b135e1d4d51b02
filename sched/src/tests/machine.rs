//! Tests the effects of the scheduler's events.

use super::harness::Harness;
use crate::{
    Channel, Config, Decision, Engine, Event, Nanos, Pipeline, PolicyKind, Queues, Scheduler, TenantId, Ticket,
    VgpuParams,
};

const MS: u64 = 1_000_000;

fn config(policy: PolicyKind) -> Config {
    Config { policy, pipeline: Pipeline::ONE, ..Config::default() }
}

fn two(config: Config) -> Harness {
    let mut harness = Harness::new(config);
    harness.add(0, VgpuParams::default());
    harness.add(1, VgpuParams::default());
    harness
}

fn starts(tickets: &[u64]) -> Vec<Decision> {
    tickets.iter().map(|ticket| Decision::Start(Ticket(*ticket))).collect()
}

#[test]
fn direct_starts_each_arrival_at_once() {
    let mut harness = two(config(PolicyKind::Direct));
    for ticket in 1..=5 {
        assert_eq!(harness.arrive(ticket % 2, 0, Engine::Compute, MS), starts(&[ticket.into()]));
    }
}

#[test]
fn an_idle_engine_starts_an_arrival_at_once_whatever_the_policy() {
    for policy in PolicyKind::ALL {
        let mut harness = two(config(policy));
        assert_eq!(harness.arrive(1, 0, Engine::Compute, MS), starts(&[1]), "{policy:?}");
        harness.drain();
        // The other vGPU's work also starts immediately, because the engine is idle.
        assert_eq!(harness.arrive(0, 0, Engine::Compute, MS), starts(&[2]), "{policy:?}");
    }
}

#[test]
fn an_idle_scheduler_wants_no_wakeup() {
    for policy in PolicyKind::ALL {
        let mut harness = two(config(policy));
        assert_eq!(harness.scheduler.next_wakeup(), None, "{policy:?}");
        for vgpu in [0, 1, 0, 1] {
            harness.arrive(vgpu, 0, Engine::Compute, MS);
        }
        harness.drain();
        assert_eq!(harness.scheduler.next_wakeup(), None, "{policy:?}");
    }
}

#[test]
fn fifo_is_in_order_of_arrival() {
    let mut harness = two(config(PolicyKind::Fifo));
    for vgpu in [0, 0, 1, 0] {
        harness.arrive(vgpu, 0, Engine::Compute, MS);
    }
    let order: Vec<_> = std::iter::from_fn(|| harness.step(u64::MAX)).flat_map(|(_, decisions)| decisions).collect();
    assert_eq!(order, starts(&[2, 3, 4]));
}

#[test]
fn engines_do_not_wait_for_each_other_unless_they_share_a_queue() {
    for (queues, expected) in [(Queues::Separate, starts(&[2])), (Queues::Single, starts(&[]))] {
        let mut harness = two(Config { queues, ..config(PolicyKind::Band) });
        harness.arrive(0, 0, Engine::Compute, MS);
        assert_eq!(harness.arrive(1, 0, Engine::Copy0, MS), expected, "{queues:?}");
        harness.drain();
        harness.audit();
    }
}

#[test]
fn submissions_run_ahead_only_for_same_vgpu() {
    let pipeline = Pipeline { contended: 2, alone: 4, ahead_ns: 10 * MS };
    let mut harness = two(Config { pipeline, ..config(PolicyKind::Band) });
    let alone: usize = (0..6).map(|_| harness.arrive(0, 0, Engine::Compute, MS).len()).sum();
    assert_eq!(alone, 4);
    assert_eq!(harness.arrive(1, 0, Engine::Compute, MS), []);
    harness.drain();
    harness.audit();
}

/// Runs `count` submissions of each of two vGPUs, all queued at the start. Returns the vGPUs in the order in which
/// their submissions start.
fn owners(config: Config, count: u64, length: u64) -> Vec<u32> {
    let mut harness = two(config);
    let mut started = Vec::new();
    for ticket in 0..2 * count {
        started.extend(harness.arrive(u32::from(ticket >= count), 0, Engine::Compute, length));
    }
    started.extend(std::iter::from_fn(|| harness.step(u64::MAX)).flat_map(|(_, decisions)| decisions));
    harness.audit();
    let owner = |decision: &Decision| match decision {
        Decision::Start(ticket) => u32::from(ticket.0 > count),
        other => panic!("{other:?}"),
    };
    started.iter().map(owner).collect()
}

#[test]
fn vgpu_keeps_engine_for_a_slice() {
    let changes = |owners: &[u32]| owners.windows(2).filter(|two| two[0] != two[1]).count();
    for pipeline in [Pipeline::ONE, Pipeline::default()] {
        let config = Config { pipeline, ..config(PolicyKind::Band) };
        // Each vGPU has 36 ms of work, in slices of 2 to 3 ms. At the start of a slice, a vGPU is up to 1.5 ms behind
        // the other, and at its end, it is up to 1.5 ms ahead.
        let short = owners(config, 90, 400_000);
        assert!((20..=36).contains(&changes(&short)), "{short:?}");
        // If submissions are longer than a slice, vGPUs alternate after each submission, except when both have used the
        // same time.
        let long = owners(config, 12, 4 * MS);
        assert!(changes(&long) >= 15, "{long:?}");
    }
}

#[test]
fn a_charge_begins_at_the_end_before_it() {
    let mut scheduler = Scheduler::new(config(PolicyKind::Direct), Nanos(0)).unwrap();
    let mut decisions = Vec::new();
    let mut feed = |at: u64, event| scheduler.event(Nanos(at), event, &mut decisions);
    let (vgpu, channel, engine) = (TenantId(0), Channel(0), Engine::Compute);
    feed(0, Event::Added { vgpu, params: VgpuParams::default() });
    for ticket in [1, 2] {
        feed(100, Event::Arrival { vgpu, channel, engine, ticket: Ticket(ticket) });
    }
    feed(110, Event::Started { ticket: Ticket(1) });
    feed(500, Event::Completed { ticket: Ticket(1), ended: Some(Nanos(450)) });
    feed(700, Event::Completed { ticket: Ticket(2), ended: Some(Nanos(600)) });
    let account = scheduler.account(vgpu, engine).unwrap();
    assert_eq!(decisions, starts(&[1, 2]));
    assert_eq!((account.used, account.longest), ((450 - 110) + (600 - 450), 340));
}

/// Runs two vGPUs. The first one has the engine from the start. Returns the time in ns that the events debit from the
/// first vGPU's budget.
fn paid(policy: PolicyKind, events: &[(u64, Event)]) -> i64 {
    let mut scheduler = Scheduler::new(Config { policy, ..Config::default() }, Nanos(0)).unwrap();
    let mut decisions = Vec::new();
    for vgpu in [TenantId(0), TenantId(1)] {
        scheduler.event(Nanos(0), Event::Added { vgpu, params: VgpuParams::default() }, &mut decisions);
    }
    let before = scheduler.standing(TenantId(0), Engine::Compute).credit;
    for (at, event) in events {
        scheduler.event(Nanos(*at), *event, &mut decisions);
    }
    before - scheduler.standing(TenantId(0), Engine::Compute).credit
}

fn arrives(at: u64, vgpu: u32, ticket: u64) -> (u64, Event) {
    let (vgpu, channel, engine) = (TenantId(vgpu), Channel(0), Engine::Compute);
    (at, Event::Arrival { vgpu, channel, engine, ticket: Ticket(ticket) })
}

fn is_seen(at: u64, ticket: u64, ended: u64) -> (u64, Event) {
    (at, Event::Completed { ticket: Ticket(ticket), ended: Some(Nanos(ended)) })
}

#[test]
fn completion_seen_late_costs_only_engine_idle_time() {
    for policy in [PolicyKind::Credit, PolicyKind::Band] {
        // The card receives the second submission before the end of the first one, after it, or never.
        for (given, lost) in [(Some(200_000), 0), (Some(600_000), 100_000), (None, 300_000)] {
            let mut events = vec![arrives(0, 0, 1)];
            events.extend(given.map(|at| arrives(at, 0, 2)));
            // The other vGPU now has work, so it could have used the engine.
            events.extend([arrives(700_000, 1, 3), is_seen(800_000, 1, 500_000)]);
            let free = if policy == PolicyKind::Band { 500_000 / 8 } else { 0 };
            assert_eq!(paid(policy, &events), 500_000 + (lost - free).max(0), "{policy:?}, {given:?}");
        }
    }
}

#[test]
fn an_eighth_of_all_that_a_vgpu_has_used_is_free() {
    // The end of a kernel is observed immediately, and the end of its fence is observed 300 us late.
    let ends = [is_seen(500_000, 1, 500_000), is_seen(860_000, 2, 560_000)];
    let events = [&[arrives(0, 0, 1), arrives(0, 0, 2), arrives(0, 1, 3)][..], &ends].concat();
    assert_eq!(paid(PolicyKind::Band, &events), 560_000 + 300_000 - 560_000 / 8);
}

#[test]
fn vgpu_pays_for_idle_engine_time_until_card_starts_its_work() {
    let had = (100_000, Event::Started { ticket: Ticket(1) });
    let events = [arrives(0, 0, 1), arrives(0, 1, 2), had, is_seen(500_000, 1, 500_000)];
    assert_eq!(paid(PolicyKind::Band, &events), 500_000);
}

#[test]
fn too_early_completion_time_is_clamped_to_slack() {
    let mut scheduler = Scheduler::new(config(PolicyKind::Band), Nanos(0)).unwrap();
    let mut decisions = Vec::new();
    let (vgpu, channel, engine, ticket) = (TenantId(0), Channel(0), Engine::Compute, Ticket(1));
    scheduler.event(Nanos(0), Event::Added { vgpu, params: VgpuParams::default() }, &mut decisions);
    scheduler.event(Nanos(0), Event::Arrival { vgpu, channel, engine, ticket }, &mut decisions);
    scheduler.event(Nanos(9 * MS), Event::Completed { ticket, ended: Some(Nanos(1)) }, &mut decisions);
    assert_eq!(scheduler.account(vgpu, engine).unwrap().used, 8 * MS);
}

#[test]
fn a_withdrawn_ticket_frees_its_place_and_costs_nothing() {
    let mut harness = two(config(PolicyKind::Fifo));
    harness.arrive(0, 0, Engine::Compute, MS);
    harness.arrive(1, 0, Engine::Compute, MS);
    harness.arrive(0, 0, Engine::Compute, MS);
    harness.now += 5;
    assert_eq!(harness.feed(Event::Withdrawn { ticket: Ticket(2) }), []);
    assert_eq!(harness.feed(Event::Withdrawn { ticket: Ticket(1) }), starts(&[3]));
    assert_eq!(harness.scheduler.account(TenantId(0), Engine::Compute).unwrap().used, 0);
    assert_eq!(harness.scheduler.account(TenantId(1), Engine::Compute).unwrap().dropped, 1);
}

#[test]
fn adopted_submission_starts_and_is_charged_when_requeued() {
    for policy in PolicyKind::ALL {
        let mut scheduler = Scheduler::new(config(policy), Nanos(0)).unwrap();
        let (vgpu, channel, engine, ticket) = (TenantId(0), Channel(0), Engine::Compute, Ticket(1));
        let mut decisions = Vec::new();
        let mut feed = |at, event| scheduler.event(Nanos(at), event, &mut decisions);
        feed(0, Event::Added { vgpu, params: VgpuParams::default() });
        feed(100, Event::Adopted { vgpu, channel, engine, ticket });
        feed(200, Event::Tick);
        feed(300, Event::Requeued { ticket });
        feed(900, Event::Completed { ticket, ended: Some(Nanos(800)) });
        let account = scheduler.account(vgpu, engine).unwrap();
        let counts = (account.arrived, account.started, account.completed, account.used);
        assert_eq!((counts, scheduler.ignored()), ((1, 1, 1, 500), 0), "{policy:?}");
        assert_eq!(decisions, starts(&[1]), "{policy:?}: the submission starts only after it is requeued");
    }
}

#[test]
fn unknown_or_invalid_events_are_counted_and_ignored() {
    let mut harness = two(config(PolicyKind::Band));
    let params = VgpuParams { weight: 0, ..VgpuParams::default() };
    let bad = Config { pipeline: Pipeline { contended: 0, alone: 0, ahead_ns: 0 }, ..Config::default() };
    let events = [
        Event::Added { vgpu: TenantId(0), params: VgpuParams::default() },
        Event::Added { vgpu: TenantId(5), params },
        Event::Removed { vgpu: TenantId(7) },
        Event::Completed { ticket: Ticket(9), ended: None },
        Event::Waiting { ticket: Ticket(9) },
        Event::Resumed { ticket: Ticket(9) },
        Event::Requeued { ticket: Ticket(9) },
        Event::Moved { ticket: Ticket(9), since: Nanos(0) },
        Event::Adopted { vgpu: TenantId(7), channel: Channel(0), engine: Engine::Compute, ticket: Ticket(9) },
        Event::Kept { engine: Engine::Compute, vgpu: TenantId(7), since: Nanos(0) },
        Event::Struck { vgpu: TenantId(7), engine: Engine::Compute },
        Event::Withdrawn { ticket: Ticket(9) },
        Event::ChannelEnded { vgpu: TenantId(7), channel: Channel(0) },
        Event::Changed { vgpu: TenantId(0), params },
        Event::Configured(bad),
        Event::Released { vgpu: TenantId(7) },
    ];
    for (count, event) in (1..).zip(events) {
        assert_eq!(harness.feed(event), []);
        assert_eq!(harness.scheduler.ignored(), count, "{event:?}");
    }
    assert_eq!(harness.scheduler.vgpus().count(), 2);
}

#[test]
fn a_class_goes_first_among_those_that_are_due() {
    use crate::LatencyClass::{Background, Interactive, Normal};
    let mut harness = Harness::new(config(PolicyKind::Band));
    for (vgpu, class) in (0..).zip([Normal, Background, Normal, Interactive]) {
        harness.add(vgpu, VgpuParams { class, ..VgpuParams::default() });
    }
    harness.arrive(0, 0, Engine::Compute, MS);
    for vgpu in [1, 2, 3] {
        harness.arrive(vgpu, 0, Engine::Compute, MS);
    }
    let order: Vec<_> = std::iter::from_fn(|| harness.step(u64::MAX)).flat_map(|(_, decisions)| decisions).collect();
    assert_eq!(order, starts(&[4, 3, 2]));
}

#[test]
fn stalled_submission_lets_others_run_and_is_charged_own_time() {
    for policy in PolicyKind::ALL {
        let mut harness = two(config(policy));
        harness.arrive(0, 0, Engine::Compute, MS);
        harness.arrive(0, 1, Engine::Compute, MS);
        harness.arrive(1, 0, Engine::Compute, MS);
        harness.now += MS / 2;
        let started = harness.stall(Ticket(1));
        // These two policies have already started all submissions.
        let free = matches!(policy, PolicyKind::Direct | PolicyKind::Disengaged);
        assert!(free || !started.is_empty(), "{policy:?}");
        harness.drain();
        harness.audit();
        assert_eq!(harness.scheduler.account(TenantId(0), Engine::Compute).unwrap().used, 2 * MS, "{policy:?}");
    }
}
