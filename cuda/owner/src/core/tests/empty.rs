//! Tests empty chunks that programs keep, and empty chunks that they have returned.

use super::*;

/// Creates a world with two tenants whose requests are rejected if the chunks do not fit on the card.
fn refusing(card: u64) -> World {
    let mut world = World::new(card, 8);
    for name in ["one", "two"] {
        let limits = Limits { on_full: OnFull::Refuse, ..Limits::default() };
        world.core.add_tenant(spec(name, 64, limits)).expect("the request is valid");
    }
    world
}

/// Marks `count` of a program's chunks as empty.
fn empty(world: &mut World, session: SessionId, count: usize) {
    let program = world.programs.get_mut(&session).expect("there");
    program.empty = program.chunks.keys().copied().take(count).collect();
}

#[test]
fn empty_chunks_of_busy_program_prevent_rejection() {
    let mut world = refusing(8);
    let (one, two) = (world.connect("one"), world.connect("two"));
    world.ask(one, 1, 8);
    world.write(one);
    world.say(one, FromTenant::Waiting { card: 0 });
    empty(&mut world, one, 5);
    world.ask(two, 1, 5);
    assert_eq!((world.places(one), world.places(two)), ((3, 0), (5, 0)));
    assert_eq!(world.programs[&two].refused, [0u32; 0]);
    world.check();
    // All other chunks stay with their program.
    world.pass(300 * MS);
    world.ask(two, 2, 1);
    world.pass(100 * MS);
    assert_eq!(world.programs[&two].refused, [2]);
}

#[test]
fn a_program_that_does_not_answer_is_waited_for_once() {
    let mut world = refusing(8);
    let (one, two) = (world.connect("one"), world.connect("two"));
    world.ask(one, 1, 8);
    empty(&mut world, one, 5);
    world.programs.get_mut(&one).expect("there").mute = true;
    world.ask(two, 1, 5);
    assert_eq!(world.programs[&two].refused, [0u32; 0], "it waits");
    world.pass(50 * MS);
    assert_eq!(world.programs[&two].refused, [1], "the owner waits no longer than a reply takes");
    world.pass(1_000 * MS);
    world.say(two, FromTenant::Allocate { request: 2, card: 0, chunks: 5 });
    assert_eq!(world.programs[&two].refused, [1, 2], "at once");
    let program = world.programs.get_mut(&one).expect("there");
    program.mute = false;
    world.settle();
    world.ask(two, 3, 5);
    assert_eq!(
        (world.places(two), world.programs[&two].refused.len()),
        ((5, 0), 2),
        "the program has replied since then"
    );
}

#[test]
fn empty_chunks_of_another_program_serve_one_of_the_same_tenant() {
    let mut world = two(128, 8);
    let (first, second) = (world.connect("one"), world.connect("one"));
    // Request memory up to the tenant's limit.
    world.ask(first, 1, 64);
    empty(&mut world, first, 10);
    world.ask(second, 1, 10);
    assert_eq!((world.places(first), world.places(second)), ((54, 0), (10, 0)));
    world.ask(second, 2, 65);
    assert_eq!(world.programs[&second].refused, [2], "a request beyond the limit is refused immediately");
}

#[test]
fn empty_chunks_are_returned_and_not_copied() {
    let mut world = two(8, 16);
    let (one, two) = (world.connect("one"), world.connect("two"));
    world.ask(one, 1, 8);
    world.write(one);
    empty(&mut world, one, 4);
    world.ask(two, 1, 4);
    world.pass(1_000 * MS);
    world.check();
    assert_eq!((world.places(one), world.places(two)), ((4, 0), (4, 0)));
    assert_eq!(world.core.view(0).relocations, 0, "no chunk had to move to host memory and back");
}

#[test]
fn chunks_freed_before_quiesce_are_not_copied() {
    let mut world = two(8, 16);
    let (one, two) = (world.connect("one"), world.connect("two"));
    world.ask(one, 1, 8);
    world.write(one);
    world.ask(two, 1, 1);
    // The program has just received an order, and gets no other before its memory moves. `World` checks each copy.
    empty(&mut world, one, 6);
    world.ask(two, 2, 5);
    world.pass(1_000 * MS);
    world.check();
    assert!(world.programs[&one].empty.is_empty(), "the program got an order to quiesce");
    assert_eq!((world.places(one), world.places(two)), ((2, 0), (6, 0)));
}

#[test]
fn host_memory_of_program_is_not_reused_by_other_of_its_tenant() {
    let mut world = two(2, 16);
    let first = world.connect("one");
    world.ask(first, 1, 6);
    world.write(first);
    let program = world.programs.get_mut(&first).expect("there");
    let chunks: Vec<_> = std::mem::take(&mut program.chunks).into_keys().collect();
    world.say(first, FromTenant::Free { chunks });
    world.settle();
    let second = world.connect("one");
    world.ask(second, 1, 6);
    // `World` checks that no piece previously belonged to another program.
    assert!(world.programs[&second].chunks.values().all(|(_, value)| *value == 0));
    assert_eq!(world.places(second), (2, 4));
    world.leave(first);
    world.pass(300 * MS);
    assert_eq!(
        world.core.view(0).pieces.1,
        4 + 2,
        "the pieces of the second program and the stock; those kept for the first are gone"
    );
}
