//! Tests memory quanta, and the host memory that they need.

use super::*;
use cuda_control::Gang;
use gang::{CardId, GangId};
use owner_host::{CardState, LinkEvent};
use vram::QuantumState;

#[test]
fn quantum_waits_for_memory_of_ending_program() {
    let mut world = two(8, 16);
    let config = world.core.config().clone();
    let second = 1_000 * MS;
    let quanta = vram::QuantaConfig {
        mode: vram::Mode::Forced,
        min_ns: 20 * second,
        max_ns: 20 * second,
        factor: 80,
        ..config.quanta
    };
    let off = vram::QuantaConfig { mode: vram::Mode::Off, ..quanta };
    world.core.tune(config.time, config.balance, off, config.host_bytes).expect("the request is valid");
    let (one, other) = (world.connect("one"), world.connect("two"));
    world.ask(one, 1, 8);
    world.ask(other, 1, 8);
    for session in [one, other] {
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.pass(500 * MS);
    assert_eq!(world.places(one), (4, 4), "the card is shared");
    // From now on, the program's driver rejects all calls.
    world.programs.get_mut(&other).expect("there").ends = true;
    world.core.tune(config.time, config.balance, quanta, config.host_bytes).expect("the request is valid");
    world.pass(100 * MS);
    assert!(world.core.memory_turn().is_some());
    let runs = |world: &World| world.programs[&one].run.is_some();
    assert!(!runs(&world), "half of its memory is evicted");
    world.leave(other);
    world.pass(100 * MS);
    assert_eq!((world.places(one), runs(&world)), ((8, 0), true));

    let stays = world.connect("two");
    world.ask(stays, 1, 8);
    world.programs.get_mut(&stays).expect("there").ends = true;
    world.say(stays, FromTenant::Waiting { card: 0 });
    world.pass(second);
    let terms = [one, stays].iter().find_map(|session| world.programs[session].run);
    let terms = terms.expect("the work in flight is limited");
    assert_eq!(terms.idle_us, 10_000, "no other tenant could use the card");
}

/// Creates two programs whose memory does not fit on the card together. Quanta last 20 s.
fn two_that_take_turns() -> (World, [SessionId; 2]) {
    let mut world = two(16, 32);
    let config = world.core.config().clone();
    let length = 20_000 * MS;
    let quanta = vram::QuantaConfig { mode: vram::Mode::Forced, min_ns: length, max_ns: length, ..config.quanta };
    world.core.tune(config.time, config.balance, quanta, config.host_bytes).expect("the request is valid");
    let sessions = ["one", "two"].map(|name| world.connect(name));
    for session in sessions {
        world.ask(session, 1, 12);
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.pass(1_000 * MS);
    (world, sessions)
}

#[test]
fn wait_for_memory_of_others_is_bounded() {
    let (mut world, mut sessions) = two_that_take_turns();
    let turn = world.core.memory_turn().expect("the tenants take turns").clone();
    if turn.holder.0 == 2 {
        sessions.reverse();
    }
    let [first, other] = sessions;
    assert_eq!((world.places(first), world.places(other)), ((12, 0), (4, 8)));
    // From now on, the program's driver rejects all calls.
    world.programs.get_mut(&other).expect("there").ends = true;
    world.ask(first, 2, 2);
    world.pass(400 * MS);
    assert_eq!(world.places(first), (12, 0), "memory of the other tenant must be evicted first");
    world.pass(200 * MS);
    assert_eq!(world.places(first), (12, 2), "the memory is not evicted in time");
    world.ask(first, 3, 1);
    assert_eq!(world.places(first), (12, 3), "another wait would fail too");
    assert_eq!(world.core.memory_turn().map(|turn| turn.holder), Some(turn.holder), "in the same quantum");
}

#[test]
fn view_says_why_a_tenant_waits_and_for_how_long() {
    let (mut world, _) = two_that_take_turns();
    let holder = world.core.memory_turn().expect("the tenants take turns").holder;
    let waits = |world: &World| {
        let view = world.core.view(0);
        let (id, time) = view.time.tenants.iter().find(|(id, _)| **id != holder).expect("two");
        (time.wait, view.memory.held_ns[id])
    };
    let before = waits(&world);
    let Some(Wait::MemoryQuantum { holder: of, left_ns: Some(left) }) = before.0 else { panic!("{before:?}") };
    assert!(of == holder && left <= 20_000 * MS);
    world.pass(2_000 * MS);
    let after = waits(&world);
    assert_eq!(after.0, Some(Wait::MemoryQuantum { holder, left_ns: Some(left - 2_000 * MS) }));
    assert_eq!(after.1 - before.1, 2_000 * MS);
    let other = &world.core.view(0).time.tenants[&holder];
    assert_eq!((other.wait, other.in_flight), (None, 1));
}

#[test]
fn view_names_the_tenant_that_has_the_slice() {
    let mut world = two(8, 8);
    let sessions = ["one", "two"].map(|name| world.connect(name));
    for session in sessions {
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.pass(5 * MS);
    let tenants = world.core.view(0).time.tenants.into_iter();
    let (running, waiting): (Vec<_>, Vec<_>) = tenants.partition(|(_, time)| time.in_flight > 0);
    assert_eq!((waiting[0].1.queued, waiting[0].1.wait), (1, Some(Wait::Slice { holder: Some(running[0].0) })));
    assert_eq!(running[0].1.wait, None);
}

#[test]
fn quantum_holder_waiting_for_memory_is_not_idle() {
    let (mut world, sessions) = two_that_take_turns();
    let holder = |world: &World| world.core.memory_turn().map(|turn| turn.holder.0);
    let first = holder(&world).expect("the tenants take turns");
    let session = sessions[first as usize - 1];
    let run = world.programs[&session].run.expect("its gate is open");
    world.say(session, FromTenant::Allocate { request: 2, card: 0, chunks: 2 });
    let usage = Usage::default();
    world.say(session, FromTenant::Stopped { card: 0, turn: run.turn, usage, waiting: false });
    // The programs are idle.
    for _ in 0..40 {
        world.now += 10 * MS;
        world.event(Event::Tick);
    }
    assert_eq!(holder(&world), Some(first), "its memory has not returned yet");
    world.programs.get_mut(&session).expect("there").run = None;
    world.settle();
    assert_eq!(world.programs[&session].chunks.len(), 14);
    world.pass(1_000 * MS);
    assert_ne!(holder(&world), Some(first), "now the program has no work");
}

#[test]
fn stock_is_refilled_without_other_events() {
    let mut world = World::new(8, 16);
    let all = Limits { guarantee: 8, ..Limits::default() };
    for (name, limits) in [("one", all), ("two", Limits::default())] {
        world.core.add_tenant(spec(name, 64, limits)).expect("the request is valid");
    }
    let one = world.connect("one");
    world.ask(one, 1, 8);
    let two = world.connect("two");
    world.ask(two, 1, 2);
    assert_eq!((world.places(two), world.core.view(0).pieces.1), ((0, 2), 2), "the memory pinned in advance is in use");
    world.leave(two);
    world.settle();
    assert_eq!(world.core.view(0).pieces.1, 0);
    assert!(world.core.next_wakeup().is_some_and(|ns| ns <= 200 * MS));
    world.pass(250 * MS);
    assert_eq!(world.core.view(0).pieces.1, 2);
}

/// Creates two programs of tenants with the cards 0 and 1 on the card `own`, where their memory does not fit together.
/// Quanta last 20 s. Returns the numbers of the tenant with the quantum and of the other one.
fn two_gangs_that_take_turns(own: CardId) -> (World, [u32; 2]) {
    let mut world = World::with_number(own, 16, 32);
    for (number, name) in (1..).zip(["one", "two"]) {
        let cards = [0, 1].map(|card| (CardId(card), Default::default())).into();
        let gang = Some(Gang { number: GangId(number), cards });
        world.core.add_tenant(TenantSpec { gang, ..spec(name, 64, Limits::default()) }).expect("the request is valid");
    }
    let config = world.core.config().clone();
    let length = 20_000 * MS;
    let quanta = vram::QuantaConfig { mode: vram::Mode::Forced, min_ns: length, max_ns: length, ..config.quanta };
    world.core.tune(config.time, config.balance, quanta, config.host_bytes).expect("the request is valid");
    world.event(Event::Link(LinkEvent::Reached(CardId(1 - own.0))));
    for name in ["one", "two"] {
        let session = world.connect(name);
        world.ask(session, 1, 12);
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.pass(1_000 * MS);
    let holder = world.core.memory_turn().expect("the tenants take turns").holder.0;
    (world, [holder, 3 - holder])
}

/// Reports the state of a tenant's quantum on the card `from`.
fn hear(world: &mut World, from: CardId, gang: u32, quantum: QuantumState, is_stuck: bool) {
    world.event(Event::Link(LinkEvent::Quantum(from, GangId(gang), CardState { quantum, is_stuck })));
}

#[test]
fn quantum_follows_the_quantum_of_a_lower_card() {
    let (mut world, [first, other]) = two_gangs_that_take_turns(CardId(1));
    hear(&mut world, CardId(0), first, QuantumState::Waits, false);
    hear(&mut world, CardId(0), other, QuantumState::Holds, false);
    world.pass(1_000 * MS);
    assert_eq!(world.core.memory_turn().map(|turn| turn.holder.0), Some(other));
}

#[test]
fn gang_that_waits_for_quantum_gets_turns_while_stuck_elsewhere() {
    let (mut world, [_, other]) = two_gangs_that_take_turns(CardId(0));
    let is_offered = |world: &World| world.core.turns.view(GangId(other)).expect("it was added").is_offered;
    assert!(!is_offered(&world), "its memory is not on the card");
    hear(&mut world, CardId(1), other, QuantumState::Waits, true);
    world.pass(100 * MS);
    assert!(is_offered(&world), "its kernel on card 1 may wait for one on this card");
    hear(&mut world, CardId(1), other, QuantumState::Waits, false);
    world.pass(100 * MS);
    assert!(!is_offered(&world));
}
