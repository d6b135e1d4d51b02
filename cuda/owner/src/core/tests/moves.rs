//! Tests tenants that move to another card, and programs that arrive from one.

use super::*;
use cuda_protocol::{FixedKind, Obstacle, VERSION_VISIBLE_CARDS};

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
fn programs_run_while_host_memory_is_allocated_for_a_move() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 4);
    let (id, before) = (tenant(&world), world.core.pieces.count(Memory::Host));
    for _ in 0..4 {
        let why = world.core.leave(id);
        assert!(matches!(&why, Ok(Leaving::Waits(why)) if why.contains("being allocated")), "{why:?}");
    }
    world.event(Event::Tick);
    world.settle();
    assert_eq!(world.core.pieces.count(Memory::Host), before + 4);
    assert!(world.core.machine.relocations.is_idle(), "nothing moves yet");
    assert_eq!(world.places(one), (4, 0));
    leave(&mut world).expect("it leaves");
    assert_eq!(world.core.pieces.count(Memory::Host), before + 4, "the prepared pieces are used");
    stay(&mut world);
    // A preparation that is cancelled leaves no memory behind.
    world.leave(one);
    world.settle();
    let two = world.connect("two");
    world.ask(two, 1, 4);
    let id = world.core.tenant("two").expect("there");
    let _ = world.core.leave(id);
    world.event(Event::Tick);
    world.settle();
    let prepared = world.core.pieces.count(Memory::Host);
    world.core.stay(id);
    world.event(Event::Tick);
    world.settle();
    assert_eq!(world.core.pieces.count(Memory::Host), prepared - 4);
    assert_eq!(world.places(two), (4, 0));
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
    world.version = VERSION_VISIBLE_CARDS - 1;
    let old = world.connect("two");
    let id = world.core.tenant("two").expect("there");
    let why = world.core.leave(id).expect_err("it stays");
    assert!(why.contains("process 102") && why.contains("earlier version"), "{why}");
    assert_eq!(world.ends.get(&old), None);
}

#[test]
fn program_of_another_card_is_served_after_it_was_fetched() {
    let mut world = two(8, 16);
    let id = tenant(&world);
    let one = world.connect_as("one", 1000, true);
    world.say(one, FromTenant::Elsewhere { uuid: OTHER });
    assert!(world.core.arrivals(id).0.is_empty());
    // The driver may take longer than the time limit for a process's memory report.
    for _ in 0..200 {
        world.now += 100 * MS;
        world.event(Event::Tick);
    }
    assert!(world.programs.get(&one).is_none_or(|program| !program.killed));
    // The process reports its memory meanwhile, and gets no orders.
    world.say(one, FromTenant::Adopt { chunks: Vec::new(), more: false });
    world.say(one, FromTenant::Waiting { card: 0 });
    assert!(world.core.arrivals(id).0.is_empty(), "the driver has not moved it");
    assert_eq!(world.programs[&one].run, None, "its gate stays closed");
    world.settle();
    assert!(world.programs[&one].fetched);
    let (here, moved, why) = world.core.arrivals(id);
    assert_eq!((here, why), (vec![101], None));
    assert_eq!(moved.iter().map(|moved| (moved.pid, moved.arrive_us)).collect::<Vec<_>>(), [(101, 20_000_000)]);
    world.fetch_error = Some("error 2".to_owned());
    let two = world.connect_as("one", 1000, true);
    world.say(two, FromTenant::Elsewhere { uuid: OTHER });
    world.settle();
    assert_eq!(world.ends.get(&two), Some(&End::Moved));
    let (_, _, why) = world.core.arrivals(id);
    assert_eq!(why.as_deref(), Some("program `test` (process 102): the driver cannot move it: error 2"));
    world.say(one, FromTenant::Elsewhere { uuid: OTHER });
    assert_eq!(world.ends.get(&one), Some(&End::Violation), "it has reported its memory");
}

#[test]
fn program_that_cannot_import_its_chunks_is_named_and_released() {
    let mut world = two(8, 16);
    let id = tenant(&world);
    let one = world.connect_as("one", 1000, true);
    world.say(one, FromTenant::Unusable { code: 3 });
    assert_eq!(world.ends.get(&one), Some(&End::Violation), "it has not moved");
    let one = world.connect_as("one", 1000, true);
    world.say(one, FromTenant::Elsewhere { uuid: OTHER });
    world.settle();
    world.say(one, FromTenant::Unusable { code: 3 });
    assert_eq!(world.ends.get(&one), Some(&End::Moved));
    assert!(world.programs.get(&one).is_none_or(|program| !program.killed));
    let (_, _, why) = world.core.arrivals(id);
    let expected = "program `test` (process 102): the driver cannot import its memory on that card: CUDA error 3";
    assert_eq!(why.as_deref(), Some(expected));
}

#[test]
fn only_cards_that_the_driver_sees_are_reached() {
    let mut world = two(8, 16);
    let id = tenant(&world);
    assert_eq!(world.core.may_leave(id, [9; 16]), Ok(None), "it has no programs");
    let one = world.connect("one");
    assert_eq!(world.core.may_leave(id, OTHER), Ok(None));
    let why = world.core.may_leave(id, [9; 16]).expect_err("not seen");
    assert!(why.starts_with("program `test` (process 101): ") && why.contains("does not show it that card"), "{why}");
    world.say(one, FromTenant::Sees { uuids: Vec::new() });
    let why = world.core.may_leave(id, OTHER).expect_err("not seen");
    assert!(why.contains("only its own card") && why.contains("start it again"), "{why}");
    assert_eq!(leave(&mut world).expect_err("it stays"), why);
}

#[test]
fn program_that_reconnects_is_not_refused_before_its_report() {
    let mut world = two(8, 16);
    let id = tenant(&world);
    world.version = VERSION_VISIBLE_CARDS - 1;
    // The program sends nothing after its first message.
    let one = world.connect_as("one", 1000, true);
    world.core.sessions.get_mut(&one).expect("there").version = VERSION_VISIBLE_CARDS;
    assert!(matches!(world.core.leave(id), Ok(Leaving::Waits(_))));
    let why = world.core.may_leave(id, OTHER).expect("it may leave later").expect("not known yet");
    assert!(why.contains("process 101") && why.contains("has not reported its memory"), "{why}");
    // Moves continue once the program has reported its memory.
    world.say(one, FromTenant::Sees { uuids: vec![[0; 16], OTHER] });
    world.say(one, FromTenant::Adopt { chunks: Vec::new(), more: false });
    world.settle();
    assert_eq!(world.core.may_leave(id, OTHER), Ok(None));
}

#[test]
fn tenant_does_not_leave_before_its_programs_reconnect() {
    let mut world = two(8, 16);
    let id = tenant(&world);
    world.core.expect([4711], 2000 * MS);
    let why = world.core.may_leave(id, OTHER).expect("it may leave later").expect("not known yet");
    assert!(why.starts_with("1 processes have not reconnected"), "{why}");
    assert_eq!(world.core.leave(id), Ok(Leaving::Waits(why)));
    world.pass(2100 * MS);
    world.event(Event::Tick);
    assert_eq!(world.core.may_leave(id, OTHER), Ok(None));
    assert_eq!(leave(&mut world), Ok(Vec::new()));
}

#[test]
fn other_cards_are_named_to_programs_that_could_move() {
    let mut world = two(8, 16);
    let id = tenant(&world);
    assert_eq!(world.core.others_for(id, VERSION_VISIBLE_CARDS), Vec::<[u8; 16]>::new(), "there are none");
    world.core.config.others = vec![OTHER];
    assert_eq!(world.core.others_for(id, VERSION_VISIBLE_CARDS), [OTHER]);
    assert_eq!(world.core.others_for(id, VERSION_VISIBLE_CARDS - 1), Vec::<[u8; 16]>::new(), "an earlier library");
    // Workers of VMs cannot move.
    world.core.tenants.get_mut(&id).expect("there").spec.window_bytes = 1;
    assert_eq!(world.core.others_for(id, VERSION_VISIBLE_CARDS), Vec::<[u8; 16]>::new());
}
