//! Tests that compare the accounts with NVML and the driver.

use super::*;

/// Size of one context in bytes.
const CONTEXT: u64 = 512 << 20;
/// Bytes that NVML does not attribute to any process while no program uses the card.
const IDLE: u64 = 483 << 20;

/// Creates two tenants of eight chunks each on a card of 32 chunks.
fn small() -> World {
    let mut world = World::new(32, 8);
    world.core.set_margin(CHUNK);
    for name in ["one", "two"] {
        world.core.add_tenant(spec(name, 8, Limits::default())).expect("the request is valid");
    }
    look(&mut world, &[], 0);
    world
}

fn pid(world: &World, session: SessionId) -> u32 {
    let tenants = world.core.view(0).tenants;
    let all: Vec<u32> = tenants.iter().flat_map(|tenant| &tenant.programs).map(|(pid, _)| *pid).collect();
    *all.iter().find(|pid| **pid == 100 + session.0 as u32).expect("the request is served")
}

/// Simulates a poll of NVML. `users` contains each process's bytes in addition to its context; `lost` bytes do not
/// belong to any process.
fn look(world: &mut World, users: &[(u32, u64)], lost: u64) {
    let user = |&(pid, bytes): &(u32, u64)| User {
        pid,
        program: "p".to_owned(),
        bytes: Some(CONTEXT + bytes),
        occupies: false,
    };
    let chunks = world.core.view(0).pieces.0 as u64 * CHUNK;
    world.event(Event::Users { users: users.iter().map(user).collect(), own: Some(CONTEXT + chunks) });
    world.event(Event::InUseForNobody(IDLE + lost));
    world.settle();
}

fn twice(world: &mut World, users: &[(u32, u64)], lost: u64) {
    look(world, users, lost);
    look(world, users, lost);
}

/// Returns a tenant's memory beyond its account, its retained memory and its memory beyond the quota, all in chunks,
/// and its number of chunks.
fn past(world: &World, tenant: usize) -> (u64, u64, u64, u32) {
    let card = world.core.view(0);
    let (view, memory) = (&card.tenants[tenant], card.memory_of(tenant));
    let beyond: u64 = view.unaccounted.iter().map(|one| one.bytes).sum();
    (beyond / CHUNK, view.kept_bytes / CHUNK, view.over_quota_bytes / CHUNK, memory.placed + memory.host)
}

#[test]
fn process_above_its_account_is_charged_when_seen_twice() {
    let mut world = small();
    let one = world.connect("one");
    let pid = pid(&world, one);
    world.say(one, FromTenant::Fix { request: 1, card: 0, kind: FixedKind::Array, bytes: 2 * CHUNK });
    // NVML does not attribute managed memory to the process, so a managed allocation cannot account for other memory.
    world.say(one, FromTenant::Fix { request: 2, card: 0, kind: FixedKind::Managed, bytes: CHUNK });
    twice(&mut world, &[(pid, 3 * CHUNK)], 0);
    assert_eq!(past(&world, 0), (0, 0, 0, 3), "the account plus the margin");
    look(&mut world, &[(pid, 7 * CHUNK)], 0);
    assert_eq!(past(&world, 0), (0, 0, 0, 3), "the release may still be in progress");
    look(&mut world, &[(pid, 6 * CHUNK)], 0);
    assert_eq!(past(&world, 0), (3, 0, 0, 6), "the minimum of both polls");
    assert_eq!(world.core.view(0).tenants[0].unaccounted[0].pid, pid);
    world.ask(one, 3, 3);
    assert_eq!(world.programs[&one].refused, [3], "the tenant has two chunks left");
    twice(&mut world, &[(pid, 40 * CHUNK)], 0);
    assert_eq!(past(&world, 0), (37, 0, 32, 8), "beyond the tenant's whole limit");
    assert!(!world.programs[&one].killed, "the excess is reported");
    assert_eq!(past(&world, 1), (0, 0, 0, 0), "the other tenant is not affected");
    look(&mut world, &[(pid, CHUNK)], 0);
    assert_eq!(past(&world, 0), (0, 0, 0, 3));
    world.ask(one, 4, 5);
    assert_eq!(world.places(one).0, 5);
}

#[test]
fn process_beyond_tenant_quota_is_killed_when_configured() {
    let mut world = small();
    world.core.set_on_stranger(OnStranger::Kill);
    let (one, other, two) = (world.connect("one"), world.connect("one"), world.connect("two"));
    let pids = [one, other, two].map(|session| pid(&world, session));
    let users = |bytes| pids.iter().zip(bytes).map(|(pid, bytes): (_, u64)| (*pid, bytes * CHUNK)).collect::<Vec<_>>();
    twice(&mut world, &users([5, 1, 1]), 0);
    assert!(!world.programs[&one].killed, "the tenant is charged, and is within its quota");
    twice(&mut world, &users([12, 1, 1]), 0);
    assert!(!world.programs.contains_key(&one), "killed");
    world.event(Event::InUseForNobody(IDLE));
    world.settle();
    assert!(world.programs.contains_key(&other) && world.programs.contains_key(&two), "uninvolved programs still run");
    assert_eq!(world.core.view(0).tenants[0].killed, 1);
}

/// Makes a program free `count` chunks, of which `missing` remain in use.
fn frees(world: &mut World, session: SessionId, tenant: u32, count: usize, missing: u64) {
    let chunks: Vec<ChunkId> =
        world.programs.get_mut(&session).expect("there").chunks.keys().copied().take(count).collect();
    for chunk in &chunks {
        world.programs.get_mut(&session).expect("there").chunks.remove(chunk);
    }
    world.say(session, FromTenant::Free { chunks });
    world.settle();
    world.event(Event::Missing { tenant: vram::TenantId(tenant), sure: true, bytes: missing * CHUNK });
}

#[test]
fn retained_memory_is_charged_to_tenant_that_freed_it() {
    let mut world = small();
    let (one, two) = (world.connect("one"), world.connect("two"));
    let pids = [one, two].map(|session| (pid(&world, session), 0));
    twice(&mut world, &pids, 0);
    world.ask(one, 1, 8);
    world.ask(two, 1, 8);
    frees(&mut world, two, 2, 8, 0);
    frees(&mut world, one, 1, 8, 8);
    world.ask(two, 2, 8);
    assert_eq!(world.places(two), (8, 0), "its memory was released");
    world.ask(one, 2, 8);
    assert_eq!(world.places(one), (0, 0), "the tenant may already have this much memory, so it waits");
    let hidden = 3 * (8 << 20);
    twice(&mut world, &pids, 8 * CHUNK + hidden);
    assert_eq!((past(&world, 0), past(&world, 1)), ((0, 8, 0, 8), (0, 0, 0, 8)));
    world.pass(10 * MS);
    assert_eq!((world.places(one), &world.programs[&one].refused[..]), ((0, 0), &[2][..]), "the request is refused");
    world.leave(one);
    world.settle();
    look(&mut world, &pids[1..], 8 * CHUNK + hidden);
    assert_eq!(past(&world, 0), (0, 8, 0, 8), "no memory is freed when the program exits");
    look(&mut world, &pids[1..], 0);
    assert_eq!(past(&world, 0), (0, 0, 0, 0), "now memory has been freed");
    assert_eq!(world.core.view(0).unexplained_bytes, 0);
}

#[test]
fn tenant_is_not_charged_for_memory_briefly_missing() {
    let mut world = small();
    let one = world.connect("one");
    let pids = [(pid(&world, one), 0)];
    twice(&mut world, &pids, 0);
    world.ask(one, 1, 8);
    frees(&mut world, one, 1, 8, 8);
    world.ask(one, 2, 4);
    twice(&mut world, &pids, 0);
    world.pass(10 * MS);
    assert_eq!((past(&world, 0), world.places(one)), ((0, 0, 0, 4), (4, 0)));
    frees(&mut world, one, 1, 4, 4);
    world.event(Event::Blind);
    world.ask(one, 3, 8);
    assert_eq!(world.places(one), (8, 0), "without NVML no tenant is suspected");
}

#[test]
fn tenant_is_not_charged_for_memory_of_uncertain_owner() {
    let mut world = small();
    let (one, two) = (world.connect("one"), world.connect("two"));
    let pids = [one, two].map(|session| (pid(&world, session), 0));
    twice(&mut world, &pids, 0);
    let hidden = 3 * (8 << 20);
    // Both programs exit, and their memory is freed a little later. The missing bytes may belong to either of them.
    for tenant in [1, 2] {
        world.event(Event::Missing { tenant: vram::TenantId(tenant), sure: false, bytes: 8 * CHUNK });
    }
    twice(&mut world, &pids, 6 * CHUNK + hidden);
    assert_eq!((past(&world, 0).1, past(&world, 1).1), (0, 0));
    assert_eq!(world.core.view(0).unexplained_bytes, 5 * CHUNK, "except for the margin");
    twice(&mut world, &pids, 0);
    for tenant in [1, 2] {
        world.event(Event::Missing { tenant: vram::TenantId(tenant), sure: false, bytes: 8 * CHUNK });
    }
    twice(&mut world, &pids, 12 * CHUNK + hidden);
    assert_eq!((past(&world, 0).1, past(&world, 1).1), (4, 4), "at least this much belongs to each tenant");
}

#[test]
fn managed_memory_is_counted_only_by_its_request() {
    let mut world = small();
    let one = world.connect("one");
    let pids = [(pid(&world, one), 0)];
    twice(&mut world, &pids, 0);
    world.say(one, FromTenant::Fix { request: 1, card: 0, kind: FixedKind::Managed, bytes: 6 * CHUNK });
    world.event(Event::Missing { tenant: vram::TenantId(1), sure: true, bytes: 8 * CHUNK });
    // Maximum hidden memory of the program's and the owner's contexts, in bytes.
    let hidden = 2 * (8 << 20);
    twice(&mut world, &pids, 6 * CHUNK + hidden);
    assert_eq!(past(&world, 0), (0, 0, 0, 6), "managed memory is charged when it is requested");
    world.say(one, FromTenant::Unfix { card: 0, kind: FixedKind::Managed, bytes: 6 * CHUNK });
    twice(&mut world, &pids, 0);
    assert_eq!(past(&world, 0), (0, 0, 0, 0));
}
