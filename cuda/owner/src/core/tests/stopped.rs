//! Tests programs that are stopped during a turn, and kernels that do not complete.

use super::*;

/// Creates a tenant whose program is stopped with an open gate, and another tenant with work.
fn stopped_beside_another() -> (World, SessionId, SessionId) {
    let mut world = two(16, 16);
    let [one, other] = ["one", "two"].map(|name| world.connect(name));
    for session in [one, other] {
        world.ask(session, 1, 2);
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    while world.programs[&one].run.is_none() {
        world.pass(5 * MS);
    }
    world.programs.get_mut(&one).expect("there").stopped = true;
    (world, one, other)
}

fn runs(world: &World, session: SessionId) -> bool {
    world.programs[&session].run.is_some()
}

/// Makes NVML list both programs. The first one has work on the card if `occupies` is set.
fn users(world: &mut World, occupies: bool) {
    let users = world.programs.keys().map(|session| {
        let (pid, program) = (100 + session.0 as u32, String::new());
        User { pid, program, bytes: None, occupies: session.0 != 1 || occupies }
    });
    let users = users.collect();
    world.event(Event::Users { users, own: None });
    world.settle();
}

/// Returns the longest time in ms during which a program's gate stays closed within the next `ms` milliseconds.
fn longest_gap(world: &mut World, session: SessionId, ms: u64) -> u64 {
    let (mut gap, mut longest) = (0, 0);
    for _ in 0..ms / 5 {
        world.pass(5 * MS);
        gap = if runs(world, session) { 0 } else { gap + 5 };
        longest = longest.max(gap);
    }
    longest
}

#[test]
fn stopped_program_holds_its_neighbour_for_moments() {
    let (mut world, one, other) = stopped_beside_another();
    let gap = longest_gap(&mut world, other, 9_000);
    assert!(gap <= 100, "{gap} ms");
    assert!(world.programs.contains_key(&one));
}

#[test]
fn stopped_program_without_work_loses_its_turn_only() {
    let (mut world, one, other) = stopped_beside_another();
    world.pass(500 * MS);
    assert!(world.core.view(0).runs(0), "the state of its work is not known yet");
    users(&mut world, false);
    world.pass(1_000 * MS);
    assert!(world.core.view(0).runs(0), "the poll may precede the overrun");
    users(&mut world, false);
    world.pass(10 * MS);
    assert!(!world.core.view(0).runs(0), "none of its work is on the card");
    let charged = world.core.view(0).charged_ns(0);
    let gap = longest_gap(&mut world, other, 20_000);
    assert_eq!((gap, world.core.view(0).charged_ns(0)), (0, charged), "the tenant is alone");
    // The program runs again, replies, and gets its share.
    let program = world.programs.get_mut(&one).expect("the program is not killed");
    program.stopped = false;
    world.settle();
    let gap = longest_gap(&mut world, one, 1_000);
    assert!(gap <= 100, "{gap} ms");
    world.check();
}

#[test]
fn stopped_program_gets_no_turn_with_its_tenant() {
    let (mut world, one, _) = stopped_beside_another();
    let second = world.connect("one");
    for _ in 0..2 {
        world.pass(1_000 * MS);
        users(&mut world, false);
    }
    world.say(second, FromTenant::Waiting { card: 0 });
    world.programs.get_mut(&one).expect("there").run = None;
    let gap = longest_gap(&mut world, second, 2_000);
    assert!(gap < 1_000, "the tenant's other program has turns: {gap} ms");
    assert!(!runs(&world, one), "the process has not replied");
    world.programs.get_mut(&one).expect("there").stopped = false;
    world.settle();
    let gap = longest_gap(&mut world, one, 2_000);
    assert!(gap < 1_000, "{gap} ms");
}

#[test]
fn stopped_program_survives_its_limit_without_nvml() {
    let (mut world, one, other) = stopped_beside_another();
    world.pass(11_000 * MS);
    assert!(world.programs.contains_key(&one) && !world.core.view(0).runs(0));
    assert_eq!(world.core.view(0).tenants[0].killed, 0);
    let gap = longest_gap(&mut world, other, 5_000);
    assert_eq!(gap, 0);
    world.programs.get_mut(&one).expect("there").stopped = false;
    world.settle();
    let gap = longest_gap(&mut world, one, 1_000);
    assert!(gap <= 100, "{gap} ms");
}

#[test]
fn stopped_program_with_endless_kernel_is_killed() {
    let (mut world, one, other) = stopped_beside_another();
    for _ in 0..22 {
        users(&mut world, true);
        world.pass(1_000 * MS);
    }
    assert!(!world.programs.contains_key(&one), "its kernel is over its limit");
    assert!(runs(&world, other));
}

#[test]
fn endless_kernel_shares_the_card_until_its_limit() {
    let (mut world, one, other) = stopped_beside_another();
    let program = world.programs.get_mut(&one).expect("there");
    (program.stopped, program.mute) = (false, true);
    let gap = longest_gap(&mut world, other, 9_500);
    assert!(gap <= 100, "{gap} ms");
    assert!(world.programs.contains_key(&one), "its limit is 10 s");
    let charged = [0, 1].map(|tenant| world.core.view(0).charged_ns(tenant) / MS);
    assert!(charged[0].abs_diff(charged[1]) < 500, "both are charged: {charged:?}");
    assert!(world.core.view(0).tenants[0].overrun_ns > 9_000 * MS, "its turn continues");
    world.pass(1_500 * MS);
    assert!(!world.programs.contains_key(&one));
    let tenant = &world.core.view(0).tenants[0];
    let reasons: Vec<_> = tenant.given_up.iter().map(|program| program.reason).collect();
    assert_eq!((tenant.killed, tenant.overrun_ns, reasons), (1, 0, vec![Reason::Turn]));
}
