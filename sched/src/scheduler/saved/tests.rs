use super::*;
use crate::{Channel, Config, Event, PolicyKind, VgpuParams};

/// Creates a scheduler with work on an engine, deferred work, queued work, and one vGPU in quarantine.
fn scheduler(policy: PolicyKind) -> Scheduler {
    let config = Config { policy, strikes: 1, ..Config::default() };
    let mut scheduler = Scheduler::new(config, Nanos(0)).unwrap();
    let mut told = 0;
    let mut tell = |event| {
        told += 1000;
        scheduler.event(Nanos(told), event, &mut Vec::new());
    };
    for vgpu in 1..4 {
        tell(Event::Added { vgpu: TenantId(vgpu), params: VgpuParams::weight(vgpu) });
    }
    for ticket in 1..20 {
        let (vgpu, channel) = (TenantId(1 + ticket % 3), Channel(ticket % 2));
        tell(Event::Arrival { vgpu, channel, engine: Engine::Compute, ticket: Ticket(ticket.into()) });
    }
    tell(Event::Waiting { ticket: Ticket(1) });
    tell(Event::Completed { ticket: Ticket(2), ended: None });
    tell(Event::Struck { vgpu: TenantId(3), engine: Engine::Compute });
    scheduler
}

fn bytes(saved: &SavedScheduler) -> Vec<u8> {
    postcard::to_allocvec(saved).unwrap()
}

#[test]
fn a_scheduler_is_as_it_was_with_its_accounts() {
    for policy in PolicyKind::ALL {
        let before = scheduler(policy);
        let read = postcard::from_bytes(&bytes(&before.save())).unwrap();
        let after = Scheduler::restored(read, before.now).unwrap();
        assert_eq!(bytes(&after.save()), bytes(&before.save()));
        for vgpu in before.vgpus() {
            assert_eq!(after.account(vgpu, Engine::Compute), before.account(vgpu, Engine::Compute));
            assert_eq!(after.history(vgpu), before.history(vgpu));
            assert_eq!(after.strikes(vgpu), before.strikes(vgpu));
        }
        assert!(after.account(TenantId(3), Engine::Compute).is_some_and(|account| account.arrived > 0));
    }
}

#[test]
fn schedulers_that_cannot_be_are_refused() {
    let refused = |edit: &dyn Fn(&mut SavedScheduler)| {
        let mut saved = scheduler(PolicyKind::Band).save();
        edit(&mut saved);
        Scheduler::restored(saved, Nanos(1 << 40)).expect_err("restoring succeeded").to_string()
    };
    assert!(refused(&|saved| saved.accounts.truncate(1)).contains("accounts belong to other vGPUs"));
    assert!(refused(&|saved| saved.scheduler.now = Nanos(u64::MAX)).contains("after the current time"));
    assert!(refused(&|saved| saved.scheduler.lanes.truncate(1)).contains("1 lanes"));
    assert!(refused(&|saved| saved.scheduler.order = u64::MAX).contains("counts of events"));
    assert!(refused(&|saved| saved.scheduler.order = 0).contains("is not in order"));
    assert!(refused(&|saved| saved.scheduler.config.policy = PolicyKind::Credit).contains("policy of a lane differs"));
    assert!(refused(&|saved| saved.scheduler.config.band.period_ns = 0).contains("band.period_ns"));
    assert!(
        refused(&|saved| {
            let gone = saved.scheduler.engines[0].flights().next().unwrap().vgpu;
            saved.scheduler.vgpus.remove(&gone);
            saved.accounts.retain(|(vgpu, ..)| *vgpu != gone);
        })
        .contains("nonexistent vGPU")
    );
    assert!(
        refused(&|saved| {
            let known = saved.scheduler.vgpus.get_mut(&TenantId(1)).unwrap();
            known.params.weight = 0;
        })
        .contains("vGPU 1: weight")
    );
    assert!(
        refused(&|saved| {
            let known = saved.scheduler.vgpus.get_mut(&TenantId(3)).unwrap();
            known.quarantine = Quarantine::Free;
        })
        .contains("differs from that of the scheduler")
    );
    // With each of these changes, an engine would be considered idle or busy forever.
    assert!(refused(&|saved| saved.scheduler.engines[0] = Default::default()).contains("in flight"));
    assert!(
        refused(&|saved| {
            let [compute, copy, _] = &mut saved.scheduler.engines;
            *copy = compute.clone();
        })
        .contains("has two states")
    );
    assert!(refused(&|saved| saved.accounts[0].1[0].edit()).contains("account"));
}
