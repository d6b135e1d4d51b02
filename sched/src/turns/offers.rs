//! Tests offered and reserved turns of one card.

use super::{Order, Turns, TurnsConfig, scheduler_defaults};
use crate::{Config, Engine, LatencyClass, Nanos, PolicyKind, TenantId, VgpuParams};

const MS: u64 = 1_000_000;
const GANG: TenantId = TenantId(1);
const ONE: TenantId = TenantId(2);
const TWO: TenantId = TenantId(3);

/// Creates turns with slices of 10 ms and three tenants. The first tenant's turns are offered.
fn turns(policy: PolicyKind) -> Turns {
    let config = TurnsConfig { slice_ns: 10 * MS, ..TurnsConfig::default() };
    let mut turns =
        Turns::new(Config { policy, ..scheduler_defaults() }, config, Nanos(0)).expect("the settings are valid");
    for tenant in [GANG, ONE, TWO] {
        turns.add(tenant, VgpuParams::default(), Nanos(0));
    }
    turns.set_offered(GANG, true);
    turns
}

#[test]
fn free_card_offers_itself_and_stays_free() {
    for policy in PolicyKind::ALL {
        let mut turns = turns(policy);
        turns.wants(GANG, Nanos(0));
        assert_eq!((turns.take_orders(), turns.take_offers()), (vec![], vec![GANG]), "{policy:?}");
        assert!(!turns.is_busy(GANG) && turns.holders().next().is_none());
        turns.wants(ONE, Nanos(MS));
        assert_eq!(turns.take_orders(), [Order::Grant(ONE)], "{policy:?}");
    }
}

#[test]
fn holder_keeps_the_card_while_it_is_offered() {
    let mut turns = turns(PolicyKind::Band);
    turns.wants(ONE, Nanos(0));
    turns.wants(GANG, Nanos(0));
    assert_eq!((turns.take_orders(), turns.take_offers()), (vec![Order::Grant(ONE)], vec![]));
    turns.tick(Nanos(10 * MS));
    assert_eq!((turns.take_orders(), turns.take_offers()), (vec![], vec![GANG]));
    turns.tick(Nanos(20 * MS));
    assert_eq!((turns.take_orders(), turns.take_offers()), (vec![], vec![]), "there is only one offer");
    assert_eq!(turns.account(ONE).map(|account| account.used), Some(20 * MS));
}

#[test]
fn urgent_tenant_is_offered_the_card_within_a_slice() {
    let mut turns = turns(PolicyKind::Band);
    turns.change(GANG, VgpuParams { class: LatencyClass::Interactive, ..VgpuParams::default() }, Nanos(0));
    turns.wants(ONE, Nanos(0));
    turns.wants(GANG, Nanos(2 * MS));
    assert_eq!((turns.take_orders(), turns.take_offers()), (vec![Order::Grant(ONE)], vec![GANG]));
}

#[test]
fn no_tenant_comes_between_holder_and_reserved_turn() {
    let mut turns = turns(PolicyKind::Band);
    turns.wants(ONE, Nanos(0));
    turns.wants(TWO, Nanos(0));
    assert!(turns.reserve(GANG, Nanos(5 * MS)));
    assert!(!turns.reserve(TWO, Nanos(5 * MS)), "only one reservation is possible at a time");
    assert_eq!(turns.take_orders(), [Order::Grant(ONE), Order::Recall(ONE)]);
    assert_eq!(turns.next_after(ONE, Nanos(5 * MS)), Some(GANG));
    turns.ended(ONE, Nanos(7 * MS), true, Nanos(7 * MS));
    assert_eq!(turns.take_orders(), [Order::Grant(GANG)]);
    // The turn's gate is still closed, so the turn is charged but not cut short.
    turns.tick(Nanos(25 * MS));
    assert_eq!(turns.take_orders(), []);
    turns.open(GANG, Nanos(27 * MS));
    turns.tick(Nanos(36 * MS));
    assert_eq!(turns.take_orders(), [Order::Yield(GANG)]);
    turns.tick(Nanos(37 * MS));
    assert_eq!(turns.take_orders(), [Order::Recall(GANG)]);
    turns.ended(GANG, Nanos(38 * MS), false, Nanos(38 * MS));
    let used = [GANG, ONE, TWO].map(|tenant| turns.account(tenant).map_or(0, |account| account.used) / MS);
    assert_eq!(used, [31, 7, 0]);
    assert_eq!(turns.scheduler().busy(Engine::Compute), 38 * MS);
    assert_eq!(turns.take_orders(), [Order::Grant(TWO)]);
}

#[test]
fn reserved_turn_begins_when_its_holder_overruns_or_goes() {
    let mut turns = turns(PolicyKind::Band);
    turns.wants(ONE, Nanos(0));
    assert!(turns.reserve(GANG, Nanos(5 * MS)));
    assert_eq!(turns.next_wakeup(), Some(Nanos(35 * MS)));
    turns.tick(Nanos(34 * MS));
    assert_eq!(turns.take_orders(), [Order::Grant(ONE), Order::Recall(ONE)]);
    turns.tick(Nanos(35 * MS));
    assert_eq!(turns.take_orders(), [Order::Grant(GANG)]);
    assert!(turns.overruns(ONE));
    turns.ended(GANG, Nanos(40 * MS), false, Nanos(40 * MS));
    turns.ended(ONE, Nanos(41 * MS), false, Nanos(41 * MS));
    turns.wants(TWO, Nanos(50 * MS));
    assert!(turns.reserve(GANG, Nanos(51 * MS)));
    turns.take_orders();
    turns.remove(TWO, Nanos(52 * MS));
    assert_eq!(turns.take_orders(), [Order::Grant(GANG)]);
}

#[test]
fn withdrawn_reservation_leaves_the_card_to_others() {
    let mut turns = turns(PolicyKind::Band);
    turns.wants(ONE, Nanos(0));
    turns.wants(TWO, Nanos(0));
    assert!(turns.reserve(GANG, Nanos(5 * MS)));
    turns.unreserve(GANG);
    turns.ended(ONE, Nanos(6 * MS), false, Nanos(6 * MS));
    assert_eq!(turns.take_orders(), [Order::Grant(ONE), Order::Recall(ONE), Order::Grant(TWO)]);
    turns.pause(GANG, true, Nanos(7 * MS));
    assert!(!turns.reserve(GANG, Nanos(7 * MS)), "a paused tenant gets no turn");
    assert!(!turns.reserve(TWO, Nanos(7 * MS)), "the tenant has a turn");
    assert!(!turns.reserve(TenantId(9), Nanos(7 * MS)), "the tenant does not exist");
}
