//! Tests that the next owner of a card restores the accounts.

use super::world::*;
use super::*;
use sched::Quarantine;
use vram::Limits;

const IDENTITY: [u8; 16] = [7; 16];

/// Creates a card that restores the accounts in `file`, and adds tenants with the given names.
fn continued(file: &[u8], names: &[&str]) -> World {
    let mut world = World::new(64, 64);
    world.core.restore(file).expect("the file is valid");
    for name in names {
        world.core.add_tenant(spec(name, 32, Limits::default())).expect("the request is valid");
    }
    world
}

fn strikes(world: &World, name: &str) -> (u32, Quarantine) {
    let id = world.core.tenant(name).expect("a tenant");
    world.core.turns.turns().scheduler().strikes(id).expect("an account")
}

fn used(world: &World, name: &str) -> u64 {
    let id = world.core.tenant(name).expect("a tenant");
    world.core.turns.turns().scheduler().account(id, sched::Engine::Compute).expect("an account").used
}

/// Creates a card with two tenants. The first one has used the card and is quarantined.
fn struck() -> World {
    let mut world = World::new(64, 64);
    for name in ["one", "two"] {
        world.core.add_tenant(spec(name, 32, Limits::default())).expect("the request is valid");
    }
    let one = world.connect("one");
    world.ask(one, 1, 2);
    world.say(one, FromTenant::Waiting { card: 0 });
    world.pass(40 * MS);
    let (id, now) = (world.core.tenant("one").expect("a tenant"), world.core.now());
    // Several strikes in one slice are counted once, so end the slice first.
    world.core.turns.ended(id, now, false, now);
    for _ in 0..world.core.config().time.strikes {
        world.core.turns.with_turns(now, |turns| turns.strike(id, now));
    }
    assert_ne!(strikes(&world, "one").1, Quarantine::Free);
    world
}

#[test]
fn strikes_and_use_outlive_the_owner() {
    let before = struck();
    assert!(used(&before, "one") > 0);
    let file = before.core.save(IDENTITY).expect("encoded");
    assert_eq!(before.core.strikes_and_use().0, u64::from(strikes(&before, "one").0));
    // The order of the tenants in the configuration may have changed.
    let mut after = continued(&file, &["three", "two", "one"]);
    assert_eq!(strikes(&after, "one"), strikes(&before, "one"));
    assert!(used(&after, "one") >= used(&before, "one"));
    assert_eq!((strikes(&after, "two"), used(&after, "three")), ((0, Quarantine::Free), 0));
    let numbers: BTreeSet<_> = ["one", "two", "three"].iter().map(|name| after.core.tenant(name)).collect();
    assert_eq!(numbers.len(), 3);
    assert!(after.core.clock_ns() >= before.core.clock_ns(), "the clock continues");
    let one = after.connect("one");
    after.say(one, FromTenant::Waiting { card: 0 });
    after.settle();
    assert!(!after.core.turns.turns().has_turn(after.core.tenant("one").expect("a tenant")), "it is quarantined");
    // The accounts can be saved again.
    let third = continued(&after.core.save(IDENTITY).expect("encoded"), &["one"]);
    assert_eq!(strikes(&third, "one"), strikes(&before, "one"));
}

#[test]
fn tenant_that_is_not_added_in_time_loses_its_accounts() {
    let file = struck().core.save(IDENTITY).expect("encoded");
    let mut after = continued(&file, &["two"]);
    after.pass(59_000 * MS);
    let kept = continued(&after.core.save(IDENTITY).expect("encoded"), &["one"]);
    assert_ne!(strikes(&kept, "one").1, Quarantine::Free);
    after.pass(2_000 * MS);
    after.core.add_tenant(spec("one", 32, Limits::default())).expect("the request is valid");
    assert_eq!(strikes(&after, "one"), (0, Quarantine::Free));
    assert_eq!(after.core.turns.turns().scheduler().vgpus().count(), 2);
}

#[test]
fn refused_tenant_keeps_its_earlier_accounts() {
    let mut after = continued(&struck().core.save(IDENTITY).expect("encoded"), &["two"]);
    let guarantee = Limits { guarantee: 65, ..Limits::default() };
    for name in ["one", "three"] {
        assert!(after.core.add_tenant(spec(name, 128, guarantee)).is_err(), "the card is smaller");
    }
    let again = continued(&after.core.save(IDENTITY).expect("encoded"), &["one"]);
    assert_ne!(strikes(&again, "one").1, Quarantine::Free);
}

#[test]
fn damaged_accounts_change_nothing() {
    let mut world = World::new(64, 64);
    let mut file = struck().core.save(IDENTITY).expect("encoded");
    file.pop();
    let error = world.core.restore(&file).expect_err("it is damaged").to_string();
    assert!(!error.is_empty());
    assert_eq!(world.core.clock_ns(), 0);
    let id = world.core.add_tenant(spec("one", 32, Limits::default())).expect("the request is valid");
    assert_eq!((id, strikes(&world, "one")), (vram::TenantId(1), (0, Quarantine::Free)));
}
