//! Tests groups of tenants whose programs use the card at the same time.

use super::*;
use sched::groups::Sharing;

fn group(name: &str, sharing: Sharing) -> TenantSpec {
    let share_group = Some(ShareGroup { name: "group".to_owned(), sharing });
    TenantSpec { share_group, ..spec(name, 64, Limits::default()) }
}

/// Creates a card with the tenants `one` and `two` in one group, and `three` outside.
fn world(sharing: Sharing) -> World {
    let mut world = World::new(16, 16);
    world.core.add_tenant(group("one", sharing)).expect("the request is valid");
    world.core.add_tenant(group("two", sharing)).expect("the request is valid");
    world.core.add_tenant(spec("three", 64, Limits::default())).expect("the request is valid");
    world
}

/// Connects a program that is a client of the card's MPS server.
fn client(world: &mut World, tenant: &str) -> SessionId {
    let session = world.connect(tenant);
    world.say(session, FromTenant::Concurrent { card: 0 });
    session
}

fn want(world: &mut World, sessions: &[SessionId]) {
    for &session in sessions {
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.settle();
}

fn runs(world: &World, session: SessionId) -> bool {
    world.programs[&session].run.is_some()
}

/// Reports the use of all open gates while time passes. Returns how long the gates of several sessions were open at
/// once, and how long each gate was open, in ms.
fn observe(world: &mut World, sessions: &[SessionId], ms: u64) -> (u64, Vec<u64>) {
    let (mut both, mut each) = (0, vec![0; sessions.len()]);
    for _ in 0..ms / 2 {
        world.pass(2 * MS);
        world.check();
        let open: Vec<bool> = sessions.iter().map(|&session| runs(world, session)).collect();
        both += if open.iter().filter(|is_open| **is_open).count() > 1 { 2 } else { 0 };
        for (at, &session) in sessions.iter().enumerate().filter(|(at, _)| open[*at]) {
            each[at] += 2;
            let usage = Usage { busy_ns: 2 * MS, copy_ns: 0, launches: 20 };
            let turn = world.programs[&session].run.expect("it runs").turn;
            world.say(session, FromTenant::Used { card: 0, turn, usage });
        }
        want(world, sessions);
    }
    (both, each)
}

#[test]
fn programs_of_one_group_have_open_gates_at_once() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    want(&mut world, &[one, two]);
    let (both, each) = observe(&mut world, &[one, two], 1000);
    assert!(both >= 800, "{both} ms together");
    assert!(each.iter().all(|ms| *ms >= 850), "{each:?}");
    let terms = world.programs[&one].run.expect("it runs");
    assert!(terms.run_ahead_us > 0 && terms.report_us > 0, "its use is measured and reported: {terms:?}");
    let charged: Vec<u64> = {
        let view = world.core.view(0);
        (0..view.tenants.len()).map(|at| view.charged_ns(at) / MS).collect()
    };
    assert!(charged[0] + charged[1] > 1500, "each is charged for its own work: {charged:?}");
}

#[test]
fn group_and_single_tenant_take_turns() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    let three = world.connect("three");
    want(&mut world, &[one, two, three]);
    // `World::check` fails if the gates of two parties are open at the same time.
    let (_, each) = observe(&mut world, &[one, two, three], 2000);
    assert!((550..=800).contains(&each[2]), "the group has the weights of both: {each:?}");
    assert!(each[0].abs_diff(each[1]) <= 150, "{each:?}");
}

#[test]
fn program_that_is_no_mps_client_has_exclusive_turns() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), world.connect("two"));
    want(&mut world, &[one, two]);
    let (both, each) = observe(&mut world, &[one, two], 1000);
    assert_eq!(both, 0);
    assert!(each.iter().all(|ms| *ms >= 350), "{each:?}");
    let view = world.core.view(0);
    let names: Vec<&str> = view.tenants[1].not_concurrent.iter().map(|(_, program)| program.as_str()).collect();
    assert_eq!(names, ["test"]);
    assert!(view.tenants[0].membership.is_some_and(|state| state.joined));
    assert!(view.tenants[1].membership.is_some_and(|state| !state.joined));
    // The tenant takes part as soon as this program has exited.
    world.leave(two);
    let two = client(&mut world, "two");
    want(&mut world, &[one, two]);
    assert!(observe(&mut world, &[one, two], 500).0 >= 350);
}

#[test]
fn strictest_mode_of_members_applies_and_changes_live() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    want(&mut world, &[one, two]);
    observe(&mut world, &[one, two], 100);
    let id = world.core.tenant("two").expect("there");
    world.core.change_tenant(id, &group("two", Sharing::Turns)).expect("the request is valid");
    observe(&mut world, &[one, two], 100);
    assert_eq!(observe(&mut world, &[one, two], 500).0, 0);
    world.core.change_tenant(id, &group("two", Sharing::Together)).expect("the request is valid");
    assert!(observe(&mut world, &[one, two], 500).0 >= 350);
    world.core.change_tenant(id, &spec("two", 64, Limits::default())).expect("the request is valid");
    observe(&mut world, &[one, two], 100);
    assert_eq!(observe(&mut world, &[one, two], 500).0, 0, "the tenant has left the group");
}

#[test]
fn relocation_quiesces_only_member_with_moving_chunks() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    world.ask(one, 1, 4);
    world.ask(two, 1, 4);
    world.write(one);
    world.write(two);
    want(&mut world, &[one, two]);
    observe(&mut world, &[one, two], 200);
    assert!(runs(&world, one) && runs(&world, two));
    let before = world.programs[&two].run.expect("it runs").turn;
    // `one` gets less memory, so its chunks move to host memory.
    let id = world.core.tenant("one").expect("there");
    let lower = TenantSpec { limits: Limits { quota: 2, ..Limits::default() }, ..group("one", Sharing::Together) };
    world.core.change_tenant(id, &lower).expect("the request is valid");
    world.event(Event::Tick);
    let mut quiet = false;
    for choice in 0..200 {
        if !world.step(choice) {
            break;
        }
        quiet |= world.programs[&one].quiet.is_some();
        assert!(world.programs[&two].quiet.is_none() && runs(&world, two), "the other member runs");
    }
    assert!(quiet, "chunks were moved");
    world.pass(20 * MS);
    world.check();
    assert_eq!(world.places(one), (2, 2));
    assert!(world.programs[&two].run.is_some_and(|run| run.turn >= before));
}

#[test]
fn members_get_exclusive_time_when_they_fall_behind() {
    let mut world = world(Sharing::Together);
    let id = world.core.tenant("one").expect("there");
    let heavy = TenantSpec { time: sched::VgpuParams::weight(300), ..group("one", Sharing::Together) };
    world.core.change_tenant(id, &heavy).expect("the request is valid");
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    want(&mut world, &[one, two]);
    let (_, each) = observe(&mut world, &[one, two], 2000);
    assert!(each[0] >= 1900 && each[1] < 1100, "{each:?}");
    let charged: Vec<u64> = {
        let view = world.core.view(0);
        (0..view.tenants.len()).map(|at| view.charged_ns(at)).collect()
    };
    let part = charged[0] as f64 / (charged[0] + charged[1]) as f64;
    assert!((part - 0.75).abs() < 0.03, "{charged:?}");
}

#[test]
fn ended_member_leaves_the_card_to_others() {
    let mut world = world(Sharing::Together);
    let (one, two) = (client(&mut world, "one"), client(&mut world, "two"));
    want(&mut world, &[one, two]);
    observe(&mut world, &[one, two], 50);
    world.leave(one);
    let (_, each) = observe(&mut world, &[two], 200);
    assert!(each[0] >= 190, "{each:?}");
    let id = world.core.tenant("one").expect("there");
    world.core.remove_tenant(id).expect("the tenant has no programs");
    assert!(observe(&mut world, &[two], 100).1[0] >= 90);
}

#[test]
fn waiting_program_yields_its_turn_to_another_tenant() {
    let mut world = two(8, 8);
    let (one, other) = (world.connect("one"), world.connect("two"));
    world.say(one, FromTenant::Waiting { card: 0 });
    world.say(other, FromTenant::Waiting { card: 0 });
    world.pass(5 * MS);
    let run = world.programs[&one].run.expect("it runs");
    assert_eq!(world.programs[&one].yields, Some(run.turn));
    // The program waits for a result, and submits work after its gate has closed.
    world.programs.get_mut(&one).expect("there").run = None;
    world.say(one, FromTenant::Stopped { card: 0, turn: run.turn, usage: Usage::default(), waiting: true });
    assert!(runs(&world, other) && !runs(&world, one));
    world.pass(40 * MS);
    assert!(runs(&world, one) || runs(&world, other));
    world.check();
    // A library with an older protocol version does not get a request to give up the turn.
    let mut world = two(8, 8);
    world.version = cuda_protocol::VERSION_RECLAIM;
    let (one, other) = (world.connect("one"), world.connect("two"));
    world.say(one, FromTenant::Waiting { card: 0 });
    world.say(other, FromTenant::Waiting { card: 0 });
    world.pass(10 * MS);
    assert_eq!(world.programs[&one].yields, None);
}
