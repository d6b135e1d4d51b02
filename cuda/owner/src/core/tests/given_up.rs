//! Tests programs that the owner abandons: they lose their turns and memory regardless of their behaviour, even if they
//! cannot be killed.

use super::world::*;
use super::*;
use cuda_protocol::{End, FromTenant, Hello, VERSION};
use vram::Limits;

fn two(card: u64, kills: bool) -> World {
    let mut world = World::new(card, 64);
    world.kills = kills;
    for name in ["one", "two"] {
        world.core.add_tenant(spec(name, 64, Limits::default())).expect("the request is valid");
    }
    world
}

/// Creates an unresponsive program that fills the card and has the turn, and a second program that waits for memory and
/// the turn.
fn held(world: &mut World) -> (SessionId, SessionId) {
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.say(one, FromTenant::Waiting { card: 0 });
    world.settle();
    assert!(world.core.view(0).runs(0));
    world.programs.get_mut(&one).expect("there").mute = true;
    let two = world.connect("two");
    world.say(two, FromTenant::Waiting { card: 0 });
    (one, two)
}

#[test]
fn unkillable_program_loses_slice_memory_and_connection() {
    for kills in [true, false] {
        let mut world = two(8, kills);
        let (one, two) = held(&mut world);
        world.pass(11_000 * MS);
        assert!(!world.programs.contains_key(&one), "its connection is closed");
        let view = world.core.view(0);
        let (first, memory) = (&view.tenants[0], view.memory_of(0));
        assert_eq!((memory.placed, memory.host, first.programs.len()), (0, 0, 0), "{first:?}");
        assert!(view.runs(1) && !view.runs(0));
        assert_eq!((first.killed, first.kill_failures), if kills { (1, 0) } else { (0, 1) });
        world.ask(two, 1, 8);
        assert_eq!(world.places(two), (8, 0));
    }
}

#[test]
fn given_up_program_is_served_again_only_after_it_ends() {
    let mut world = two(8, false);
    let (one, _) = held(&mut world);
    let pid = 100 + one.0 as u32;
    world.pass(11_000 * MS);
    let hello = |world: &mut World, session: u64| {
        let session = SessionId(session);
        world.programs.insert(session, Program::default());
        world.event(Event::Connected { session, pid, uid: 1000, tenant: None });
        let (tenant, program) = ("one".to_owned(), "test".to_owned());
        let hello = Hello { version: VERSION, pid: 1, instance: 1, tenant, program, adopts: true };
        world.event(Event::Said { session, message: FromTenant::Hello(hello), pieces: Vec::new() });
        world.programs.contains_key(&session)
    };
    assert!(!hello(&mut world, 1000), "the program continues");
    world.event(Event::Ended { pid });
    assert!(hello(&mut world, 1001), "another process has its process ID");
}

#[test]
fn a_program_loses_all_of_its_connections() {
    let mut world = two(8, false);
    let (one, two) = held(&mut world);
    let other = SessionId(1000);
    world.programs.insert(other, Program::default());
    world.event(Event::Connected { session: other, pid: 100 + one.0 as u32, uid: 1000, tenant: None });
    let (tenant, program) = ("one".to_owned(), "test".to_owned());
    let hello = Hello { version: VERSION, pid: 1, instance: 1, tenant, program, adopts: false };
    world.say(other, FromTenant::Hello(hello));
    world.ask(other, 1, 1);
    world.pass(12_000 * MS);
    assert!(!world.programs.contains_key(&other));
    assert!(world.programs[&two].run.is_some());
    assert_eq!(world.core.view(0).memory_of(0).placed, 0);
}

#[test]
fn a_tenant_is_removed_at_once_though_nothing_ends_its_program() {
    let mut world = two(8, false);
    let (one, two) = held(&mut world);
    let id = world.core.tenant("one").expect("there");
    world.core.retire_tenant(id, true).expect("there");
    world.event(Event::Tick);
    assert_eq!(world.core.tenant("one"), None);
    assert_eq!(world.core.lingering("one"), [100 + one.0 as u32], "the operator is notified");
    world.settle();
    assert!(world.programs[&two].run.is_some(), "another tenant has its turn");
}

#[test]
fn a_program_that_declines_every_order_loses_its_memory_in_time() {
    for partly in [false, true] {
        let mut world = two(8, true);
        let one = world.connect("one");
        world.ask(one, 1, 8);
        world.programs.get_mut(&one).expect("there").declines = Some(partly);
        let two = world.connect("two");
        world.ask(two, 1, 8);
        world.pass(5_000 * MS);
        assert!(world.programs.contains_key(&one), "the program may be honest");
        assert_eq!(world.places(two).0, 0, "the card is full");
        world.pass(15_000 * MS);
        assert!(!world.programs.contains_key(&one), "the program prevents others from using the card's memory");
        assert_eq!(world.places(two), (8, 0));
    }
}

#[test]
fn a_program_may_decline_for_as_long_as_its_work_may_run() {
    let mut world = World::new(8, 64);
    let time = sched::VgpuParams { max_run_ns: Some(60_000 * MS), ..sched::VgpuParams::default() };
    world.core.add_tenant(TenantSpec { time, ..spec("one", 64, Limits::default()) }).expect("the request is valid");
    world.core.add_tenant(spec("two", 64, Limits::default())).expect("the request is valid");
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.programs.get_mut(&one).expect("there").declines = Some(false);
    let two = world.connect("two");
    world.ask(two, 1, 8);
    world.pass(50_000 * MS);
    assert!(world.programs.contains_key(&one));
    world.programs.get_mut(&one).expect("there").declines = None;
    world.pass(3_000 * MS);
    assert!(world.places(two).0 > 0, "its memory has finally moved");
    world.pass(30_000 * MS);
    assert!(world.programs.contains_key(&one), "the declined orders are forgotten");
}

#[test]
fn program_that_never_finishes_adoption_is_given_up() {
    let mut world = two(8, true);
    let session = world.connect_as("one", 1000, true);
    world.settle();
    world.pass(9_000 * MS);
    assert!(world.programs.contains_key(&session));
    for _ in 0..20 {
        world.say(session, FromTenant::Adopt { chunks: Vec::new(), more: true });
        world.pass(200 * MS);
    }
    assert!(!world.programs.contains_key(&session), "empty messages do not count as progress");
}

#[test]
fn chunk_starts_on_host_while_given_up_program_holds_card() {
    let mut world = two(8, false);
    let (_, two) = held(&mut world);
    world.device_most = 8;
    world.keeps_dropped = true;
    world.pass(11_000 * MS);
    world.ask(two, 1, 4);
    assert_eq!(world.places(two), (0, 4), "no request is refused because of it");
    world.keeps_dropped = false;
    world.dropped_are_free();
    world.pass(2_000 * MS);
    assert_eq!(world.places(two), (4, 0));
    world.check();
    assert!(world.programs[&two].ended != Some(End::Evicted));
}

#[test]
fn tenant_whose_work_exceeds_its_limit_is_quarantined() {
    let mut world = two(16, true);
    let other = world.connect("two");
    world.say(other, FromTenant::Waiting { card: 0 });
    // Make the owner abandon three of a tenant's programs because their work does not complete. The default limit is
    // three strikes.
    for strikes in 1..=3 {
        let one = world.connect("one");
        world.say(one, FromTenant::Waiting { card: 0 });
        while world.programs[&one].run.is_none() {
            world.pass(5 * MS);
        }
        world.programs.get_mut(&one).expect("there").mute = true;
        world.pass(11_000 * MS);
        assert!(!world.programs.contains_key(&one), "the program is given up");
        assert_eq!(world.core.view(0).strikes(0), (strikes, strikes == 3));
    }
    let one = world.connect("one");
    world.say(one, FromTenant::Waiting { card: 0 });
    for _ in 0..400 {
        world.pass(5 * MS);
        assert!(world.programs[&one].run.is_none(), "a quarantined tenant has no turn");
    }
    assert!(world.programs[&other].run.is_some());
    assert_eq!(world.core.view(0).strikes(1), (0, false));
    let id = world.core.view(0).tenants[0].id;
    world.core.release(id);
    world.settle();
    assert_eq!(world.core.view(0).strikes(0), (0, false));
    // The tenant gets turns again once it has compensated the other tenants for their lost time.
    let has_turn = (0..8_000).any(|_| {
        world.pass(5 * MS);
        world.programs[&one].run.is_some()
    });
    assert!(has_turn, "the tenant is released");
}
