//! Tests tenants that move to another card, and programs that arrive from one.

use super::*;
use cuda_protocol::{FixedKind, Obstacle};

fn tenant(world: &World) -> TenantId {
    world.core.tenant("one").expect("there")
}

/// Repeats the request to leave until it succeeds or fails.
fn leave(world: &mut World) -> Result<Vec<u32>, String> {
    let id = tenant(world);
    for _ in 0..100 {
        match world.core.leave(id)? {
            Leaving::Left(pids) => return Ok(pids),
            Leaving::Waits(_) => {}
        }
        world.event(Event::Tick);
        world.settle();
        world.pass(10 * MS);
    }
    panic!("the programs do not leave");
}

fn stay(world: &mut World) {
    let id = tenant(world);
    world.core.stay(id);
    world.event(Event::Tick);
    world.settle();
}

#[test]
fn programs_leave_once_all_their_memory_is_in_host_memory() {
    let mut world = two(8, 16);
    let (one, other, neighbour) = (world.connect("one"), world.connect("one"), world.connect("two"));
    world.ask(one, 1, 4);
    world.ask(other, 1, 2);
    world.ask(neighbour, 1, 2);
    world.write(one);
    let mut pids = leave(&mut world).expect("they leave");
    pids.sort_unstable();
    assert_eq!(pids, [101, 102]);
    world.check();
    assert_eq!((world.places(one), world.places(other), world.places(neighbour)), ((0, 4), (0, 2), (2, 0)));
    let late = world.connect("one");
    assert_eq!(world.ends.get(&late), Some(&End::Moved), "new programs wait for the other owner");
    let id = tenant(&world);
    assert_eq!(world.core.retire_tenant(id, false).map(|pids| pids.len()), Ok(2));
    world.event(Event::Tick);
    for session in [one, other] {
        assert_eq!(world.ends.get(&session), Some(&End::Moved));
    }
    // NVML lists the processes until the other owner has moved them.
    let user = User { pid: 101, program: "p".into(), bytes: None, occupies: false };
    for session in [one, other] {
        world.leave(session);
    }
    for _ in 0..3 {
        world.event(Event::Users { users: vec![user.clone()], own: None });
    }
    assert_eq!(world.core.strangers().count(), 0);
    world.settle();
    assert_eq!(world.core.tenant("one"), None);
    assert_eq!(world.core.view(0).memory.summary.free, 6);
}

#[test]
fn tenant_that_stays_gets_its_programs_and_limits_back() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 4);
    leave(&mut world).expect("it leaves");
    stay(&mut world);
    assert_eq!(world.ends.get(&one), Some(&End::Moved));
    world.leave(one);
    let again = world.connect("one");
    world.ask(again, 1, 8);
    assert_eq!(world.places(again), (8, 0), "its quota is not 0");
}

#[test]
fn tenant_stays_if_the_daemon_forgets_it() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    leave(&mut world).expect("it leaves");
    for _ in 0..200 {
        world.pass(100 * MS);
        world.event(Event::Tick);
    }
    assert_eq!(world.ends.get(&one), Some(&End::Moved));
    let id = tenant(&world);
    assert!(!world.core.deadlines.is_set(tenancy::Deadline::Departure(id)));
}

#[test]
fn program_that_cannot_leave_is_named() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    for (obstacle, reason) in [
        (Obstacle::Cards, "it uses several cards"),
        (Obstacle::Mappings, "it maps its memory itself"),
        (Obstacle::Shared, "it shares memory with other processes"),
    ] {
        world.programs.get_mut(&one).expect("there").obstacle = Some(obstacle);
        let why = leave(&mut world).expect_err("it stays");
        assert!(why.starts_with("program `test` (process 101): ") && why.contains(reason), "{why}");
        stay(&mut world);
        assert_eq!(world.ends.get(&one), None, "it continues");
    }
    world.say(one, FromTenant::Fix { request: 1, card: 0, kind: FixedKind::Managed, bytes: 1 });
    assert!(leave(&mut world).expect_err("it stays").contains("managed memory"));
    world.version = 7;
    let old = world.connect("two");
    let id = world.core.tenant("two").expect("there");
    let why = world.core.leave(id).expect_err("it stays");
    assert!(why.contains("process 102") && why.contains("earlier version"), "{why}");
    assert_eq!(world.ends.get(&old), None);
}

#[test]
fn program_of_another_card_is_fetched_before_it_is_adopted() {
    let mut world = two(8, 16);
    let id = tenant(&world);
    let one = world.connect_as("one", 1000, true);
    world.say(one, FromTenant::Elsewhere { uuid: [7; 16] });
    assert_eq!(world.core.arrivals(id), (vec![], None));
    // The driver may take longer than a process's time limit for reporting its memory.
    for _ in 0..200 {
        world.now += 100 * MS;
        world.event(Event::Tick);
    }
    assert!(!world.programs[&one].killed);
    world.settle();
    assert!(world.programs[&one].fetched);
    world.say(one, FromTenant::Adopt { chunks: Vec::new(), more: false });
    assert_eq!(world.core.arrivals(id), (vec![101], None));
    world.fetch_error = Some("error 2".to_owned());
    let two = world.connect_as("one", 1000, true);
    world.say(two, FromTenant::Elsewhere { uuid: [7; 16] });
    world.settle();
    assert_eq!(world.ends.get(&two), Some(&End::Moved));
    let (_, why) = world.core.arrivals(id);
    assert_eq!(why.as_deref(), Some("program `test` (process 102): the driver cannot move it: error 2"));
    world.say(one, FromTenant::Elsewhere { uuid: [7; 16] });
    assert_eq!(world.ends.get(&one), Some(&End::Violation), "it has reported its memory");
}
