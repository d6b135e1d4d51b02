//! Tests memory limits that change while programs run, and host memory for windows.

use super::*;

/// Changes the memory limit of a tenant.
fn resize(world: &mut World, name: &str, chunks: u64) {
    let id = world.core.tenant(name).expect("there");
    world.core.change_tenant(id, &spec(name, chunks, Limits::default())).expect("the request is valid");
    world.settle();
}

/// Frees the first `count` chunks of a program.
fn free(world: &mut World, session: SessionId, count: usize) {
    let program = world.programs.get_mut(&session).expect("there");
    let chunks: Vec<_> = program.chunks.keys().copied().take(count).collect();
    program.chunks.retain(|chunk, _| !chunks.contains(chunk));
    world.say(session, FromTenant::Free { chunks });
    world.settle();
    world.pass(300 * MS);
}

/// Returns the total and the free memory that the owner reports to a program, in chunks.
fn seen(world: &mut World, session: SessionId) -> (u64, u64) {
    world.say(session, FromTenant::AskMemory { request: 1000, card: 0 });
    world.settle();
    let (free, total) = world.programs[&session].memory.expect("answered");
    (total / CHUNK, free / CHUNK)
}

#[test]
fn lower_limit_evicts_as_a_lower_quota_and_refuses_more() {
    let mut world = two(16, 16);
    let (one, two) = (world.connect("one"), world.connect("two"));
    world.ask(one, 1, 12);
    world.ask(two, 1, 2);
    world.write(one);
    resize(&mut world, "one", 4);
    world.pass(100 * MS);
    world.check();
    assert_eq!((world.places(one), world.places(two)), ((4, 8), (2, 0)), "no data is lost");
    assert_eq!(seen(&mut world, one), (4, 0));
    let view = world.core.view(0);
    assert_eq!((view.memory_of(0).advertised, view.memory_of(0).unbacked), (4, 0));
    world.ask(one, 2, 1);
    assert_eq!(world.programs[&one].refused, [2]);
    // Free indices below the limit do not help: the tenant still has more chunks than its limit.
    free(&mut world, one, 8);
    world.ask(one, 3, 1);
    assert_eq!((world.programs[&one].refused.len(), world.programs[&one].chunks.len()), (2, 4));
    free(&mut world, one, 1);
    world.ask(one, 4, 1);
    assert_eq!((world.programs[&one].refused.len(), world.programs[&one].chunks.len()), (2, 4));
    // A neighbour gets the free memory.
    world.ask(two, 2, 10);
    world.pass(100 * MS);
    assert_eq!(world.places(two), (12, 0));
    world.check();
}

#[test]
fn higher_limit_applies_to_a_running_program() {
    let mut world = two(16, 16);
    resize(&mut world, "one", 4);
    let one = world.connect("one");
    world.ask(one, 1, 4);
    world.ask(one, 2, 1);
    assert_eq!(world.programs[&one].refused, [2]);
    resize(&mut world, "one", 20);
    assert_eq!(seen(&mut world, one), (20, 16));
    world.ask(one, 3, 16);
    world.pass(100 * MS);
    assert_eq!(world.places(one), (16, 4));
    assert_eq!(seen(&mut world, one), (20, 0));
    resize(&mut world, "one", 6);
    world.pass(100 * MS);
    assert_eq!(world.places(one), (6, 14));
    resize(&mut world, "one", 64);
    world.pass(1_000 * MS);
    assert_eq!(world.places(one), (16, 4));
    world.check();
}

#[test]
fn refused_size_changes_nothing() {
    let mut world = two(8, 8);
    let id = world.core.tenant("one").expect("there");
    let one = world.connect("one");
    world.ask(one, 1, 2);
    for spec in [
        spec("one", 0, Limits::default()),
        spec("one", u64::MAX / CHUNK, Limits::default()),
        spec("one", 32, Limits { guarantee: 9, ..Limits::default() }),
    ] {
        world.core.change_tenant(id, &spec).expect_err("impossible");
        assert_eq!(seen(&mut world, one), (64, 62));
    }
}

#[test]
fn program_beyond_a_lower_limit_continues_with_the_next_owner() {
    let mut world = two(16, 16);
    let one = world.connect("one");
    world.ask(one, 1, 12);
    world.write(one);
    resize(&mut world, "one", 4);
    world.pass(100 * MS);
    let mut next = World::new(16, 16);
    next.core.add_tenant(spec("one", 4, Limits::default())).expect("the request is valid");
    next.core.expect([102], 2_000 * MS);
    let sessions = world.restart(next.core);
    world.pass(500 * MS);
    world.check();
    assert_eq!(world.places(sessions[0]), (4, 8));
    world.ask(sessions[0], 2, 1);
    assert_eq!(world.programs[&sessions[0]].refused, [2]);
}

#[test]
fn process_that_no_owner_served_reports_at_most_its_limit() {
    let mut world = two(16, 16);
    let one = world.connect("one");
    world.ask(one, 1, 12);
    let mut next = World::new(16, 16);
    next.core.add_tenant(spec("one", 4, Limits::default())).expect("the request is valid");
    world.restart(next.core);
    assert_eq!(world.core.view(0).memory_of(0).placed, 0);
    assert!(world.ends.values().eq([&End::Violation]), "{:?}", world.ends);
}

#[test]
fn windows_are_host_memory_that_chunks_do_not_get() {
    let mut world = two(4, 16);
    let window =
        |name: &str, chunks: u64| TenantSpec { window_bytes: chunks * CHUNK, ..spec(name, 64, Limits::default()) };
    let budget = |world: &World| world.core.view(0).memory.summary.host.budget;
    world.core.add_tenant(window("vm", 10)).expect("the request is valid");
    assert_eq!(budget(&world), 6);
    let refused = world.core.add_tenant(window("second", 7)).expect_err("too large").to_string();
    assert!(refused.contains("a window of") && refused.contains("are for windows of other VMs"), "{refused}");
    assert_eq!(budget(&world), 6);
    let one = world.connect("one");
    world.ask(one, 1, 10);
    world.ask(one, 2, 1);
    world.pass(100 * MS);
    assert_eq!((world.places(one), &world.programs[&one].refused[..]), ((4, 6), &[2][..]));
    // If a window shrinks or disappears, chunks can use its memory. Existing chunks do not move.
    let id = world.core.tenant("vm").expect("there");
    world.core.change_tenant(id, &window("vm", 17)).expect_err("too large");
    world.core.change_tenant(id, &window("vm", 15)).expect("the request is valid");
    world.pass(100 * MS);
    assert_eq!((budget(&world), world.places(one)), (1, (4, 6)));
    world.core.remove_tenant(id).expect("it has no programs");
    assert_eq!(budget(&world), 16);
    world.ask(one, 3, 1);
    world.pass(100 * MS);
    assert_eq!(world.places(one), (4, 7));
    world.check();
}
