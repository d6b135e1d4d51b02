//! Tests turns that continue the accounts of an earlier owner.

use super::{Order, Turns, TurnsConfig, scheduler_defaults};
use crate::{Nanos, PolicyKind, Quarantine, TenantId, VgpuParams};

const MS: u64 = 1_000_000;
const ONE: TenantId = TenantId(1);
const TWO: TenantId = TenantId(2);

fn turns(policy: PolicyKind) -> Turns {
    Turns::new(crate::Config { policy, ..scheduler_defaults() }, TurnsConfig::default(), Nanos(0)).expect("in bounds")
}

#[test]
fn ended_turns_are_charged_until_they_are_saved() {
    for policy in PolicyKind::ALL {
        let mut before = turns(policy);
        [ONE, TWO].into_iter().for_each(|tenant| before.add(tenant, VgpuParams::default(), Nanos(0)));
        before.wants(ONE, Nanos(0));
        before.wants(TWO, Nanos(MS));
        let saved = before.at_rest(Nanos(5 * MS), |_| true);
        assert_eq!((saved.queued(), saved.in_flight()), (0, 0), "{policy:?}");
        assert!(before.has_turn(ONE), "the turns themselves continue");
        let mut after = turns(policy);
        after.continue_from(saved, Nanos(6 * MS));
        after.add(TWO, VgpuParams::weight(300), Nanos(6 * MS));
        after.add(ONE, VgpuParams::default(), Nanos(6 * MS));
        assert_eq!(after.account(ONE).map(|account| account.used), Some(5 * MS), "{policy:?}");
        assert_eq!(after.params(TWO).map(|params| params.weight), Some(300), "the current settings apply");
        after.wants(ONE, Nanos(6 * MS));
        assert_eq!(after.take_orders(), [Order::Grant(ONE)], "{policy:?}");
    }
}

#[test]
fn quarantine_outlives_the_owner() {
    let mut before = turns(PolicyKind::Band);
    before.add(ONE, VgpuParams::default(), Nanos(0));
    while before.scheduler().strikes(ONE).is_some_and(|(_, state)| state == Quarantine::Free) {
        before.strike(ONE, Nanos(MS));
    }
    let mut after = turns(PolicyKind::Band);
    after.continue_from(before.at_rest(Nanos(2 * MS), |_| true), Nanos(2 * MS));
    after.add(ONE, VgpuParams::default(), Nanos(2 * MS));
    assert_eq!(after.scheduler().strikes(ONE), before.scheduler().strikes(ONE));
    after.wants(ONE, Nanos(3 * MS));
    assert!(!after.has_turn(ONE));
}

#[test]
fn omitted_and_forgotten_tenants_have_no_accounts() {
    let mut before = turns(PolicyKind::Band);
    [ONE, TWO].into_iter().for_each(|tenant| before.add(tenant, VgpuParams::default(), Nanos(0)));
    let saved = before.at_rest(Nanos(MS), |tenant| tenant == ONE);
    assert_eq!(saved.vgpus().collect::<Vec<_>>(), [ONE]);
    let mut after = turns(PolicyKind::Band);
    after.continue_from(saved, Nanos(MS));
    after.add(TWO, VgpuParams::default(), Nanos(MS));
    after.forget(TWO, Nanos(MS));
    after.forget(ONE, Nanos(MS));
    assert_eq!(after.scheduler().vgpus().collect::<Vec<_>>(), [TWO], "an added tenant is not forgotten");
}
