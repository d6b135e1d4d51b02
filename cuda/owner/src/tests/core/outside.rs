//! Memory and processes outside of what the owner moves: fixed, shared, and past it.

use super::*;

#[test]
fn fixed_memory_counts_and_shared_chunks_stay() {
    let mut world = two(8, 8);
    let one = world.connect("one");
    world.say(one, FromTenant::Fix { request: 1, card: 0, kind: FixedKind::Array, bytes: 3 * CHUNK - 5 });
    world.ask(one, 2, 2);
    assert_eq!(world.core.view().memory.free, 3);
    let chunks: Vec<_> = world.programs[&one].chunks.keys().copied().collect();
    world.say(one, FromTenant::Export { request: 3, chunks });
    let share = world.programs[&one].share.expect("shared");
    let other = world.connect("one");
    world.say(other, FromTenant::Open { request: 1, share });
    assert_eq!(world.places(other), (2, 0));
    let chunks = world.programs[&one].chunks.keys().copied().collect();
    world.say(one, FromTenant::Export { request: 4, chunks });
    assert_eq!(world.programs[&one].share, Some(share), "asked for again, it is the same");
    let stranger = world.connect("two");
    world.say(stranger, FromTenant::Open { request: 1, share });
    assert_eq!(world.programs[&stranger].refused, [1], "another tenant opens nothing");
    world.leave(one);
    world.settle();
    assert_eq!(world.places(other), (2, 0), "who opened it has it still");
    world.leave(other);
    world.settle();
    assert_eq!((world.core.view().memory.free, world.core.view().pieces.0), (8, 0));
}

#[test]
fn a_chunk_without_a_descriptor_counts_under_the_next_owner_until_it_is_freed() {
    let mut world = two(8, 16);
    let sessions = [1, 2].map(|_| world.connect_as("one", 1000, true));
    let id = ChunkId(77);
    for session in sessions {
        let shared = Adopted { card: 0, id, place: Place::Device, descriptor: false };
        world.say(session, FromTenant::Adopt { chunks: vec![shared], more: false });
    }
    world.settle();
    assert_eq!(world.core.view().memory.free, 6, "each of its users is charged");
    world.say(sessions[0], FromTenant::Export { request: 1, chunks: vec![id] });
    assert_eq!(world.programs[&sessions[0]].refused, [1], "this owner cannot hand it on");
    world.say(sessions[0], FromTenant::Free { chunks: vec![id] });
    assert!(world.programs.contains_key(&sessions[0]), "it did nothing wrong");
    assert_eq!(world.core.view().memory.free, 7);
    world.leave(sessions[1]);
    world.settle();
    assert_eq!(world.core.view().memory.free, 8);
}

#[test]
fn a_process_past_the_owner_is_a_stranger_when_it_is_found_twice() {
    let mut world = two(8, 8);
    let one = world.connect("one");
    let own = world.core.pids().next().expect("its process");
    let user = |pid: u32| User { pid, program: "p".to_owned(), bytes: None };
    let pids = |world: &World| world.core.strangers().map(|stranger| stranger.pid).collect::<Vec<_>>();
    world.event(Event::Users(vec![user(own), user(7), user(8)]));
    assert_eq!(pids(&world), [0; 0], "it may begin or end just now");
    world.event(Event::Users(vec![user(own), user(7)]));
    assert_eq!(pids(&world), [7]);
    world.event(Event::Users(vec![user(own), user(7), user(8)]));
    assert_eq!(pids(&world), [7], "8 was not there all the time");
    world.leave(one);
    world.event(Event::Users(vec![user(own)]));
    world.event(Event::Users(vec![user(own)]));
    assert_eq!(pids(&world), [own], "its connection has ended, and it goes on");
    world.event(Event::Users(Vec::new()));
    assert_eq!(pids(&world), [0; 0]);
}
