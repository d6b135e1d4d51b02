//! Tests memory that the owner does not move (fixed, shared, and unaccounted), and processes that it does not manage.

use super::*;

#[test]
fn fixed_memory_counts_and_shared_chunks_stay() {
    let mut world = two(8, 8);
    let one = world.connect("one");
    world.say(one, FromTenant::Fix { request: 1, card: 0, kind: FixedKind::Array, bytes: 3 * CHUNK - 5 });
    world.ask(one, 2, 2);
    assert_eq!(world.core.view(0).memory.summary.free, 3);
    let chunks: Vec<_> = world.programs[&one].chunks.keys().copied().collect();
    world.say(one, FromTenant::Export { request: 3, chunks });
    let share = world.programs[&one].share.expect("shared");
    let other = world.connect("one");
    world.say(other, FromTenant::Open { request: 1, share });
    assert_eq!(world.places(other), (2, 0));
    let chunks = world.programs[&one].chunks.keys().copied().collect();
    world.say(one, FromTenant::Export { request: 4, chunks });
    assert_eq!(world.programs[&one].share, Some(share), "a second request returns the same token");
    let stranger = world.connect("two");
    world.say(stranger, FromTenant::Open { request: 1, share });
    assert_eq!(world.programs[&stranger].refused, [1], "another tenant cannot open the token");
    world.leave(one);
    world.settle();
    assert_eq!(world.places(other), (2, 0), "the process that opened it still has it");
    world.leave(other);
    world.settle();
    assert_eq!((world.core.view(0).memory.summary.free, world.core.view(0).pieces.0), (8, 0));
}

#[test]
fn a_token_cannot_be_computed() {
    let token = || {
        let mut world = two(8, 8);
        let one = world.connect("one");
        world.ask(one, 1, 1);
        let chunks: Vec<_> = world.programs[&one].chunks.keys().copied().collect();
        world.say(one, FromTenant::Export { request: 2, chunks });
        let share = world.programs[&one].share.expect("shared");
        // The other program knows the share's number but not its key.
        let other = world.connect("one");
        let mut guess = share;
        guess.0[31] ^= 1;
        world.say(other, FromTenant::Open { request: 1, share: guess });
        assert_eq!(world.programs[&other].refused, [1]);
        share.0
    };
    let (one, other) = (token(), token());
    assert_ne!(one[16..24], other[16..24]);
    assert_ne!(one[24..], other[24..]);
}

#[test]
fn adopted_chunk_without_descriptor_counts_until_freed() {
    let mut world = two(8, 16);
    let sessions = [1, 2].map(|_| world.connect_as("one", 1000, true));
    let id = ChunkId(77);
    for session in sessions {
        let shared = Adopted { card: 0, id, place: Place::Device, descriptor: false };
        world.say(session, FromTenant::Adopt { chunks: vec![shared], more: false });
    }
    world.settle();
    assert_eq!(world.core.view(0).memory.summary.free, 6, "each of its users is charged");
    world.say(sessions[0], FromTenant::Export { request: 1, chunks: vec![id] });
    assert_eq!(world.programs[&sessions[0]].refused, [1], "this owner cannot share it further");
    world.say(sessions[0], FromTenant::Free { chunks: vec![id] });
    assert!(world.programs.contains_key(&sessions[0]), "the program did nothing wrong");
    assert_eq!(world.core.view(0).memory.summary.free, 7);
    world.leave(sessions[1]);
    world.settle();
    assert_eq!(world.core.view(0).memory.summary.free, 8);
}

#[test]
fn process_outside_owner_is_unmanaged_when_seen_twice() {
    let mut world = two(8, 8);
    let one = world.connect("one");
    let own = world.core.pids().next().expect("its process");
    let user = |pid: u32| User { pid, program: "p".to_owned(), bytes: None, occupies: false };
    let pids = |world: &World| world.core.strangers().map(|stranger| stranger.pid).collect::<Vec<_>>();
    world.event(Event::Users { users: vec![user(own), user(7), user(8)], own: None });
    assert_eq!(pids(&world), [0; 0], "the process may just be starting or exiting");
    world.event(Event::Users { users: vec![user(own), user(7)], own: None });
    assert_eq!(pids(&world), [7]);
    world.event(Event::Users { users: vec![user(own), user(7), user(8)], own: None });
    assert_eq!(pids(&world), [7], "process 8 was not listed at every poll");
    world.leave(one);
    world.event(Event::Users { users: vec![user(own)], own: None });
    world.event(Event::Users { users: vec![user(own)], own: None });
    assert_eq!(pids(&world), [own], "its connection is closed, and the process continues");
    world.event(Event::Users { users: Vec::new(), own: None });
    assert_eq!(pids(&world), [0; 0]);
}

/// Runs an unresponsive program that fills the card, and a program that needs memory, for `ms` milliseconds. Returns
/// the world, and true if the first program still runs.
fn mute_beside_one_in_need(suspends: Option<bool>, ms: u64) -> (World, bool) {
    let mut world = World::new(8, 16);
    world.suspends = suspends;
    let mute = TenantSpec { on_stuck: OnStuck::Suspend, ..spec("one", 64, Limits::default()) };
    world.core.add_tenant(mute).expect("the request is valid");
    world.core.add_tenant(spec("two", 64, Limits::default())).expect("the request is valid");
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.programs.get_mut(&one).expect("there").mute = true;
    let two = world.connect("two");
    world.ask(two, 1, 8);
    world.write(two);
    world.pass(ms * MS);
    world.check();
    let there = world.programs.contains_key(&one);
    (world, there)
}

#[test]
fn a_program_that_is_suspended_leaves_its_memory_to_others() {
    let (world, there) = mute_beside_one_in_need(Some(true), 13_000);
    assert!(there, "its process still exists");
    let view = world.core.view(0);
    assert_eq!((view.tenants[0].suspended, view.tenants[0].killed), (1, 0));
    assert_eq!((view.memory_of(0).placed, view.memory_of(0).host), (0, 0));
    assert_eq!(view.memory_of(1).placed, 8, "all of the card");
    assert!(!view.runs(0), "the process has no turn");
}

#[test]
fn a_program_that_the_driver_cannot_suspend_is_killed() {
    let (world, there) = mute_beside_one_in_need(Some(false), 13_000);
    assert!(!there);
    assert_eq!((world.core.view(0).tenants[0].suspended, world.core.view(0).tenants[0].killed), (0, 1));
    let (world, there) = mute_beside_one_in_need(None, 13_000);
    assert!(there, "the driver may take as long as a program");
    let view = world.core.view(0);
    assert_eq!((view.tenants[0].killed, view.memory_of(1).placed), (0, 8), "its memory does not wait for the driver");
    let (world, there) = mute_beside_one_in_need(None, 23_000);
    assert!(!there, "a driver call that hangs does not keep memory from others");
    let view = world.core.view(0);
    assert_eq!((view.tenants[0].suspended, view.tenants[0].killed, view.memory_of(1).placed), (0, 1, 8));
}

#[test]
fn guarantee_is_granted_after_memory_of_others_has_moved() {
    let mut world = World::new(8, 16);
    for name in ["one", "two"] {
        world.core.add_tenant(spec(name, 64, Limits::default())).expect("the request is valid");
    }
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.write(one);
    let id = world.core.tenant("two").expect("there");
    let promised = |guarantee| spec("two", 64, Limits { guarantee, ..Limits::default() });
    let refused = world.core.change_tenant(id, &promised(6)).expect_err("the card is full");
    assert!(world.core.make_room(&refused));
    world.settle();
    world.pass(100 * MS);
    let told = world.told;
    // Wait longer than the minimum time between two moves of a chunk.
    world.pass(1_000 * MS);
    assert_eq!((world.places(one), world.told), ((2, 6), told), "no memory returns before the guarantee is granted");
    world.core.change_tenant(id, &promised(6)).expect("enough memory is free");
    world.core.promised();
    world.pass(1_000 * MS);
    world.check();
    assert_eq!(world.places(one), (2, 6), "promised memory stays free");
    let refused = world.core.change_tenant(id, &promised(9)).expect_err("more than the card has");
    assert!(!world.core.make_room(&refused), "moving memory does not help");
}

#[test]
fn a_tenant_learns_of_its_own_processes_only() {
    let mut world = World::new(8, 16);
    for name in ["one", "two"] {
        world.core.add_tenant(spec(name, 64, Limits::default())).expect("the request is valid");
    }
    let (first, other, second) = (world.connect("one"), world.connect("two"), world.connect("one"));
    for session in [first, other] {
        world.say(session, FromTenant::AskProcesses { request: 1, card: 0 });
    }
    let pid = |session: SessionId| 100 + session.0 as u32;
    assert_eq!(world.programs[&first].pids, [pid(first), pid(second)]);
    assert_eq!(world.programs[&other].pids, [pid(other)]);
}

#[test]
fn unreturned_slice_ends_at_limit_without_other_events() {
    let mut world = World::new(16, 16);
    for name in ["one", "two"] {
        world.core.add_tenant(spec(name, 64, Limits::default())).expect("the request is valid");
    }
    let (one, two) = (world.connect("one"), world.connect("two"));
    world.say(one, FromTenant::Waiting { card: 0 });
    world.settle();
    world.programs.get_mut(&one).expect("there").mute = true;
    world.say(two, FromTenant::Waiting { card: 0 });
    let limit = sched::VgpuParams::default().max_run_ns.expect("the action exists");
    while world.now < 2 * limit && world.programs.contains_key(&one) {
        // Like the server, wake only when the owner has requested it.
        world.now += world.core.next_wakeup().expect("a wakeup for the turn's end is requested");
        world.event(Event::Tick);
        world.settle();
    }
    assert!(!world.programs.contains_key(&one), "the process still occupies the card");
    assert!(world.programs[&two].run.is_some(), "the other tenant has its turn");
}

#[test]
fn owner_wakes_before_its_clock_ignores_time() {
    let mut world = World::new(8, 8);
    world.settle();
    world.core.expect([102], 2_000 * MS);
    let began = world.now;
    // Like the server, wake only when the owner has requested it.
    while let Some(ns) = world.core.next_wakeup() {
        assert!(ns <= STEP_MOST, "{ns} ns");
        world.now += ns;
        world.event(Event::Tick);
        world.settle();
    }
    assert!((2_000 * MS..2_200 * MS).contains(&(world.now - began)), "the limit of the expected program has passed");
}

#[test]
fn program_that_has_reported_its_memory_is_not_given_up() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 2);
    let mut next = World::new(8, 16);
    next.core.add_tenant(spec("one", 64, Limits::default())).expect("the request is valid");
    next.core.expect([102], 2_000 * MS);
    let sessions = world.restart(next.core);
    world.pass(30_000 * MS);
    assert!(world.programs.contains_key(&sessions[0]));
    assert_eq!(world.places(sessions[0]), (2, 0));
}

#[test]
fn program_without_slice_pays_for_delaying_another_tenant() {
    let mut world = World::new(16, 16);
    for name in ["one", "two", "three"] {
        world.core.add_tenant(spec(name, 64, Limits::default())).expect("the request is valid");
    }
    let (past, held_up, waiting) = (world.connect("one"), world.connect("two"), world.connect("three"));
    world.say(held_up, FromTenant::Waiting { card: 0 });
    world.settle();
    world.programs.get_mut(&held_up).expect("there").mute = true;
    world.say(waiting, FromTenant::Waiting { card: 0 });
    let limit = sched::VgpuParams::default().max_run_ns.expect("the action exists");
    let (mut next_look, begin) = (world.now, world.now);
    let mut gone = [None, None];
    while world.now - begin < 3 * limit && gone[1].is_none() {
        world.now += world.core.next_wakeup().expect("a wakeup for the turn's end is requested");
        world.event(Event::Tick);
        if world.now >= next_look {
            next_look += 1_000 * MS;
            let user = |session: SessionId| {
                let (pid, program) = (100 + session.0 as u32, "p".to_owned());
                User { pid, program, bytes: None, occupies: session == past }
            };
            let users = world.programs.keys().map(|session| user(*session)).collect();
            world.event(Event::Users { users, own: None });
        }
        world.settle();
        for (session, gone) in [past, held_up].into_iter().zip(&mut gone) {
            if gone.is_none() && !world.programs.contains_key(&session) {
                *gone = Some(world.now - begin);
            }
        }
    }
    let [past, held_up] = gone.map(|at| at.expect("the program is given up") / limit);
    assert_eq!((past, held_up), (1, 2), "the tenant's own work gets its limit once more, but no longer");
}

/// Returns the time, as a multiple of the turn limit, after which the owner abandons a program that occupies the card
/// at every poll while another tenant works. If `has_turns` is set, the program has a turn after each poll.
fn given_up_after(has_turns: bool) -> Option<u64> {
    let mut world = World::new(16, 16);
    for name in ["one", "two"] {
        world.core.add_tenant(spec(name, 64, Limits::default())).expect("the request is valid");
    }
    let (past, works) = (world.connect("one"), world.connect("two"));
    world.say(works, FromTenant::Waiting { card: 0 });
    world.settle();
    let limit = sched::VgpuParams::default().max_run_ns.expect("the action exists");
    let begin = world.now;
    while world.now - begin < 3 * limit {
        // Take short steps, because the owner's clock ignores long gaps.
        for _ in 0..10 {
            world.now += 100 * MS;
            world.event(Event::Tick);
        }
        let user = |session: SessionId| {
            let (pid, program) = (100 + session.0 as u32, "p".to_owned());
            User { pid, program, bytes: None, occupies: session == past }
        };
        let users = world.programs.keys().map(|session| user(*session)).collect();
        world.event(Event::Users { users, own: None });
        if has_turns {
            world.say(past, FromTenant::Waiting { card: 0 });
            world.settle();
            world.say(works, FromTenant::Waiting { card: 0 });
        }
        world.settle();
        assert!(world.programs.contains_key(&works), "the working tenant is not given up");
        if !world.programs.contains_key(&past) {
            return Some((world.now - begin) / limit);
        }
    }
    None
}

#[test]
fn program_that_occupies_the_card_without_a_turn_has_its_limit() {
    assert_eq!(given_up_after(false), Some(1));
}

#[test]
fn program_with_turns_between_looks_is_never_given_up() {
    assert_eq!(given_up_after(true), None);
}

#[test]
fn program_being_suspended_has_the_drivers_limit() {
    let mut world = World::new(16, 16);
    // The driver never replies.
    world.suspends = None;
    let mut suspended = TenantSpec { on_stuck: OnStuck::Suspend, ..spec("one", 64, Limits::default()) };
    suspended.time.max_run_ns = Some(1_000 * MS);
    world.core.add_tenant(suspended).expect("the request is valid");
    world.core.add_tenant(spec("two", 64, Limits::default())).expect("the request is valid");
    let (mute, works) = (world.connect("one"), world.connect("two"));
    world.say(mute, FromTenant::Waiting { card: 0 });
    world.settle();
    world.programs.get_mut(&mute).expect("there").mute = true;
    world.say(works, FromTenant::Waiting { card: 0 });
    for _ in 0..6 {
        world.pass(1_000 * MS);
        let user = |session: &SessionId| {
            let (pid, program) = (100 + session.0 as u32, "p".to_owned());
            User { pid, program, bytes: None, occupies: *session == mute }
        };
        let users = world.programs.keys().map(user).collect();
        world.event(Event::Users { users, own: None });
        world.settle();
    }
    assert!(world.programs[&works].run.is_some(), "the other tenant has its turn");
    assert!(world.programs.contains_key(&mute), "the program is killed before the driver's limit");
}
