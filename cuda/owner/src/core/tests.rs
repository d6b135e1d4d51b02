//! Tests the owner's state machine, with programs and workers that execute its orders in arbitrary sequence.

mod accounts;
mod bounds;
mod empty;
mod gangs;
mod given_up;
mod moves;
mod outside;
mod quanta;
mod random;
mod saved;
mod share_groups;
mod shares;
mod size;
mod stopped;
mod timed;
mod views;
mod world;

use super::*;
use cuda_protocol::{Adopted, End, FromTenant, Place, Share, Usage};
use owner_driver::Memory;
use vram::{Limits, OnFull};
use world::{CHUNK, MS, OTHER, World, spec};

fn two(card: u64, host: u64) -> World {
    let mut world = World::new(card, host);
    for name in ["one", "two"] {
        world.core.add_tenant(spec(name, 64, Limits::default())).expect("the request is valid");
    }
    world
}

#[test]
fn a_program_gets_zeroed_chunks_and_gives_them_back() {
    let mut world = two(16, 16);
    let one = world.connect("one");
    world.ask(one, 1, 5);
    assert_eq!(world.places(one), (5, 0));
    assert!(world.programs[&one].chunks.values().all(|(_, value)| *value == 0));
    world.write(one);
    let chunks = world.programs.get_mut(&one).map(|p| std::mem::take(&mut p.chunks)).expect("there");
    world.say(one, FromTenant::Free { chunks: chunks.keys().copied().collect() });
    world.settle();
    assert_eq!(world.core.view(0).pieces.0, 0, "the card's memory is free");
    assert_eq!(world.core.view(0).memory.summary.free, 16);
}

#[test]
fn memory_of_ended_program_is_free_and_not_leaked() {
    let mut world = two(8, 8);
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.write(one);
    world.leave(one);
    world.settle();
    let two = world.connect("two");
    world.ask(two, 1, 8);
    // `World` checks that no piece previously belonged to another tenant.
    assert_eq!(world.places(two), (8, 0));
    assert!(world.programs[&two].chunks.values().all(|(_, value)| *value == 0));
}

#[test]
fn tenant_accepts_only_its_own_user_and_root() {
    let mut world = two(8, 8);
    let owned = TenantSpec { uid: Some(77), ..spec("private", 8, Limits::default()) };
    world.core.add_tenant(owned).expect("the request is valid");
    let stranger = world.connect_as("private", 1000, false);
    assert!(!world.programs.contains_key(&stranger), "the connection of an unknown process is closed");
    let owner = world.connect_as("private", 77, false);
    assert_eq!(world.programs[&owner].tenant, Some(3));
    let root = world.connect_as("private", 0, false);
    assert_eq!(world.programs[&root].tenant, Some(3));
}

#[test]
fn more_than_fits_goes_to_host_memory_and_is_shared_fairly() {
    let mut world = two(16, 32);
    let one = world.connect("one");
    world.ask(one, 1, 16);
    world.write(one);
    let two = world.connect("two");
    world.ask(two, 1, 16);
    world.write(two);
    for session in [one, two] {
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.pass(600 * MS);
    world.check();
    let (first, second) = (world.places(one), world.places(two));
    assert_eq!((first.0 + first.1, second.0 + second.1), (16, 16));
    assert!(first.0.abs_diff(8) <= 1 && second.0.abs_diff(8) <= 1, "{first:?} {second:?}");
}

#[test]
fn freed_memory_lets_evicted_chunks_return() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 8);
    let two = world.connect("two");
    world.ask(two, 1, 8);
    world.write(two);
    world.pass(300 * MS);
    world.leave(one);
    world.pass(1000 * MS);
    world.check();
    assert_eq!(world.places(two), (8, 0));
}

#[test]
fn a_quota_that_is_lowered_takes_effect_on_a_running_program() {
    let mut world = two(16, 16);
    let one = world.connect("one");
    world.ask(one, 1, 12);
    world.write(one);
    let id = world.core.tenant("one").expect("there");
    let lower = Limits { quota: 4, ..Limits::default() };
    world.core.change_tenant(id, &spec("one", 64, lower)).expect("the request is valid");
    world.pass(100 * MS);
    world.check();
    assert_eq!(world.places(one), (4, 8));
}

#[test]
fn retired_tenant_releases_programs_memory_and_name() {
    for kills in [true, false] {
        let mut world = two(8, 16);
        let (one, two) = (world.connect("one"), world.connect("two"));
        world.ask(one, 1, 6);
        world.ask(two, 1, 6);
        world.pass(500 * MS);
        let id = world.core.tenant("one").expect("there");
        assert_eq!(world.core.retire_tenant(id, kills).expect("there").len(), 1);
        world.pass(1_000 * MS);
        world.check();
        assert_eq!((world.core.tenant("one"), world.places(two)), (None, (6, 0)), "kills: {kills}");
        // The name and the guarantee of the removed tenant are available again.
        let all = Limits { guarantee: 2, ..Limits::default() };
        world.core.add_tenant(spec("one", 8, all)).expect("the request is valid");
        let again = world.connect("one");
        world.ask(again, 1, 2);
        world.pass(1_000 * MS);
        assert_eq!(world.places(again), (2, 0));
    }
}

#[test]
fn rules_change_while_programs_work() {
    let mut world = two(8, 16);
    let (one, two) = (world.connect("one"), world.connect("two"));
    world.ask(one, 1, 8);
    world.ask(two, 1, 8);
    world.pass(500 * MS);
    assert_eq!(world.places(one).1 + world.places(two).1, 8, "the chunks do not fit");
    let config = world.core.config().clone();
    let time = sched::Config { policy: sched::PolicyKind::Fifo, ..config.time };
    let quanta = vram::QuantaConfig { mode: vram::Mode::Forced, ..config.quanta };
    world.core.tune(time, config.balance, quanta, config.host_bytes).expect("the request is valid");
    for session in [one, two] {
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.pass(2_000 * MS);
    world.check();
    assert!(world.core.memory_turn().is_some(), "the tenants take turns with memory now");
    world
        .core
        .tune(time, config.balance, vram::QuantaConfig { mode: vram::Mode::Off, ..quanta }, 0)
        .expect("the request is valid");
    world.pass(2_000 * MS);
    world.check();
    assert!(world.core.memory_turn().is_none(), "the tenants no longer take turns");
    world.ask(one, 2, 1);
    assert_eq!(world.programs[&one].refused, [2], "no host memory is left for more");
    let wrong = sched::Config { band: sched::BandParams { period_ns: 1, ..time.band }, ..time };
    assert!(world.core.tune(wrong, config.balance, quanta, config.host_bytes).is_err());
    assert_eq!(world.core.config().time, time, "nothing has changed");
}

#[test]
fn exhaustion_is_as_declared() {
    let mut world = World::new(4, 16);
    for (name, on_full) in [("refuse", OnFull::Refuse), ("queue", OnFull::Queue), ("swap", OnFull::Swap)] {
        let guarantee = if on_full == OnFull::Refuse { 4 } else { 0 };
        let limits = Limits { on_full, guarantee, ..Limits::default() };
        world.core.add_tenant(spec(name, 8, limits)).expect("the request is valid");
    }
    let first = world.connect("refuse");
    world.ask(first, 1, 4);
    world.ask(first, 2, 1);
    assert_eq!(world.programs[&first].refused, [2]);
    let queued = world.connect("queue");
    world.ask(queued, 1, 2);
    assert_eq!((world.programs[&queued].refused.len(), world.places(queued)), (0, (0, 0)), "it waits");
    let swapped = world.connect("swap");
    world.ask(swapped, 1, 2);
    assert_eq!(world.places(swapped).0 + world.places(swapped).1, 2);
    world.ask(swapped, 2, 7);
    assert_eq!(world.programs[&swapped].refused, [2], "beyond the tenant's memory limit");
    world.leave(first);
    let id = world.core.tenant("refuse").expect("there");
    world.core.remove_tenant(id).expect("the tenant has no programs");
    world.pass(300 * MS);
    assert_eq!(world.places(queued), (2, 0), "the tenant has its turn");
}

#[test]
fn a_card_that_somebody_else_fills_refuses_and_keeps_its_books() {
    let mut world = two(8, 8);
    world.device_most = 3;
    let one = world.connect("one");
    world.ask(one, 1, 5);
    assert_eq!(world.programs[&one].refused, [1]);
    assert_eq!(world.core.view(0).pieces.0, 0);
    world.ask(one, 2, 3);
    assert_eq!(world.places(one), (3, 0));
}

#[test]
fn one_gate_opens_at_a_time_and_solo_program_is_unbounded() {
    let mut world = two(8, 8);
    let one = world.connect("one");
    world.say(one, FromTenant::Waiting { card: 0 });
    let terms = world.programs[&one].run.expect("it runs");
    assert_eq!((terms.length_us, terms.run_ahead_us, terms.idle_us), (0, 0, 0));
    let two = world.connect("two");
    let terms = world.programs[&one].run.expect("the program still runs");
    assert!(terms.run_ahead_us > 0 && terms.idle_us > 0, "the work is limited now");
    world.say(two, FromTenant::Waiting { card: 0 });
    let mut held = BTreeMap::<SessionId, u32>::new();
    for _ in 0..200 {
        world.pass(5 * MS);
        world.check();
        for (&session, program) in &world.programs {
            *held.entry(session).or_default() += u32::from(program.run.is_some());
        }
    }
    assert!(held[&one].abs_diff(held[&two]) <= 10, "{held:?}");
    world.leave(two);
    world.pass(20 * MS);
    assert_eq!(world.programs[&one].run.map(|run| run.run_ahead_us), Some(0), "alone again");
}

#[test]
fn programs_of_the_only_tenant_are_unbounded() {
    let mut world = two(8, 8);
    let programs = [world.connect("one"), world.connect("one")];
    let ahead = |world: &World| programs.map(|id| world.programs[&id].run.map(|run| run.run_ahead_us));
    for program in programs {
        world.say(program, FromTenant::Waiting { card: 0 });
    }
    assert_eq!(ahead(&world), [Some(0); 2]);
    let other = world.connect("two");
    assert!(ahead(&world).iter().all(|us| *us > Some(0)), "the work is limited now");
    world.leave(other);
    world.pass(20 * MS);
    assert_eq!(ahead(&world), [Some(0); 2]);
}

#[test]
fn run_ahead_shrinks_while_better_class_is_connected() {
    let mut world = two(8, 8);
    let urgent = sched::VgpuParams { class: sched::LatencyClass::Interactive, ..sched::VgpuParams::default() };
    world
        .core
        .add_tenant(TenantSpec { time: urgent, ..spec("urgent", 8, Limits::default()) })
        .expect("the request is valid");
    let [one, _two] = ["one", "two"].map(|name| world.connect(name));
    let ahead = |world: &World, of: &SessionId| world.programs[of].run.expect("it runs").run_ahead_us;
    world.say(one, FromTenant::Waiting { card: 0 });
    let usual = ahead(&world, &one);
    let third = world.connect("urgent");
    assert!(ahead(&world, &one) < usual, "the program is notified immediately");
    world.pass(300 * MS);
    world.check();
    let id = world.core.tenant("urgent").expect("there");
    world.core.change_tenant(id, &spec("urgent", 8, Limits::default())).expect("the request is valid");
    world.event(Event::Tick);
    assert_eq!(ahead(&world, &one), usual, "no tenant is more urgent now");
    world
        .core
        .change_tenant(id, &TenantSpec { time: urgent, ..spec("urgent", 8, Limits::default()) })
        .expect("the request is valid");
    world.leave(third);
    assert_eq!(ahead(&world, &one), usual, "no other tenant has programs");
}

#[test]
fn reported_usage_is_bounded_by_slices() {
    let mut world = two(8, 8);
    let sessions = ["one", "two"].map(|name| world.connect(name));
    for session in sessions {
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.pass(500 * MS);
    let view = world.core.view(0);
    let busy: u64 = view.tenants.iter().map(|tenant| tenant.busy_ns).sum();
    assert!(busy > 400 * MS && busy <= 500 * MS, "{busy} ns of half a second");
}

#[test]
fn program_that_ignores_order_is_killed_and_memory_freed() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.programs.get_mut(&one).expect("there").mute = true;
    let two = world.connect("two");
    world.ask(two, 1, 6);
    world.write(two);
    world.pass(9_000 * MS);
    assert!(world.programs.contains_key(&one), "not before the time limit");
    world.pass(2_000 * MS);
    assert!(!world.programs.contains_key(&one));
    world.pass(1_000 * MS);
    world.check();
    assert_eq!(world.places(two), (6, 0));
    let tenant = &world.core.view(0).tenants[0];
    let [given_up] = tenant.given_up.as_slice() else { panic!("{:?}", tenant.given_up) };
    assert_eq!((tenant.killed, given_up.reason), (1, Reason::Order));
}

#[test]
fn an_owner_that_was_not_let_run_kills_no_one() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.programs.get_mut(&one).expect("there").mute = true;
    let two = world.connect("two");
    world.ask(two, 1, 6);
    world.now += 60_000 * MS;
    world.event(Event::Tick);
    world.settle();
    assert!(world.programs.contains_key(&one), "a minute without polls does not count as a minute without a reply");
}

#[test]
fn memory_is_not_copied_again_and_again_for_a_program_that_ends() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.programs.get_mut(&one).expect("there").ends = true;
    let two = world.connect("two");
    world.ask(two, 1, 8);
    world.pass(1_000 * MS);
    world.check();
    assert!((1..=4).contains(&world.told), "{} batches were copied unnecessarily", world.told);
    world.leave(one);
    world.pass(1_000 * MS);
    assert_eq!(world.places(two), (8, 0));
}

#[test]
fn host_memory_is_not_pinned_ahead_while_chunks_move() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 8);
    let two = world.connect("two");
    world.say(two, FromTenant::Allocate { request: 1, card: 0, chunks: 8 });
    let (mut since, mut longest) = (None, 0);
    for round in 0..2000 {
        let (before, short) = (world.core.pieces.stocking(), world.core.pieces.is_short());
        if round % 2 == 0 {
            // Make each step take a long time.
            world.now += 50 * MS;
            world.event(Event::Tick);
        } else {
            world.step(0);
        }
        if world.core.machine.relocations.is_idle() || !short {
            since = None;
            continue;
        }
        longest = longest.max(world.now - *since.get_or_insert(world.now));
        let stocking = world.core.pieces.stocking();
        assert!(stocking <= before, "{stocking} pieces are being allocated for the stock, and {before} before");
    }
    assert!(longest > 2 * RESTOCK_NS, "chunks move for {} ms while the stock is short", longest / MS);
}

#[test]
fn a_program_that_declines_keeps_running_and_is_asked_again() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.write(one);
    world.programs.get_mut(&one).expect("there").mute = true;
    let two = world.connect("two");
    world.ask(two, 1, 4);
    // The program does not report its empty chunks either.
    world.pass(50 * MS);
    let order = world.programs[&one].quiet.expect("the program gets an order to quiesce");
    let program = world.programs.get_mut(&one).expect("there");
    (program.quiet, program.mute) = (None, false);
    program.answers.clear();
    world.say(one, FromTenant::Busy { order });
    assert_eq!(world.core.view(0).declined, 1);
    world.write(one);
    for session in [one, two] {
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    let came = (0..200).any(|_| {
        world.pass(10 * MS);
        world.check();
        world.places(two) == (4, 0)
    });
    assert!(came, "{:?}", world.places(two));
}

#[test]
fn another_owner_takes_programs_over_with_their_contents() {
    let mut world = two(8, 16);
    let (one, second) = (world.connect("one"), world.connect("two"));
    world.ask(one, 1, 6);
    world.ask(second, 1, 6);
    world.pass(300 * MS);
    world.write(one);
    world.write(second);
    let mut core = two(8, 16).core;
    let pids: Vec<u32> = [3, 4].map(|number| 100 + number).into();
    core.expect(pids, 2_000 * MS);
    let sessions = world.restart(core);
    world.check();
    let account = world.core.view(0).memory.summary;
    let places = [0, 1].map(|at| world.places(sessions[at]));
    assert_eq!(places.map(|(card, host)| card + host), [6, 6]);
    assert_eq!(account.free as usize, 8 - places[0].0 - places[1].0);
    assert_eq!(account.host.used as usize, places[0].1 + places[1].1);
    world.pass(500 * MS);
    world.check();
}

#[test]
fn memory_waits_for_programs_of_earlier_owner_to_return() {
    let mut world = two(8, 16);
    world.core.expect([4711], 2_000 * MS);
    let one = world.connect("one");
    world.ask(one, 1, 4);
    assert_eq!(world.places(one), (0, 0));
    world.pass(2_100 * MS);
    assert_eq!(world.places(one), (4, 0), "a program that has not reconnected by now never will");
}

#[test]
fn invalid_message_ends_only_its_own_connection() {
    let mut world = two(8, 8);
    let other = world.connect("two");
    world.ask(other, 1, 2);
    let said = [
        FromTenant::Free { chunks: vec![ChunkId(1)] },
        FromTenant::Free { chunks: world.programs[&other].chunks.keys().copied().collect() },
        FromTenant::Adopt { chunks: Vec::new(), more: true },
    ];
    for message in said {
        let one = world.connect("one");
        world.say(one, message);
        assert!(!world.programs.contains_key(&one));
    }
    let one = world.connect("one");
    let usage = Usage { busy_ns: u64::MAX, copy_ns: u64::MAX, launches: u32::MAX };
    for message in [
        FromTenant::Quiet { order: 9 },
        FromTenant::Busy { order: 9 },
        FromTenant::Redirected { order: 0, moved: u32::MAX },
        FromTenant::Stopped { card: 3, turn: 9, usage, waiting: true },
        FromTenant::Used { card: 0, turn: 0, usage },
        FromTenant::Ending { card: 0, turn: 9, in_us: u32::MAX },
        FromTenant::Allocate { request: 1, card: 9, chunks: 1 },
        FromTenant::Allocate { request: 1, card: 0, chunks: u32::MAX },
        FromTenant::Fix { request: 1, card: 0, kind: FixedKind::Driver, bytes: u64::MAX },
        FromTenant::Unfix { card: 0, kind: FixedKind::Driver, bytes: u64::MAX },
        FromTenant::Export { request: 1, chunks: vec![ChunkId(1)] },
        FromTenant::Open { request: 1, share: Share([0; 32]) },
    ] {
        world.say(one, message);
    }
    world.settle();
    assert_eq!(world.core.view(0).memory.summary.free, 6, "no data is lost");
    world.check();
    assert_eq!(world.programs[&other].ended, None::<End>);
}

#[test]
fn next_program_is_notified_shortly_before_recalled_slice_ends() {
    let mut world = two(8, 8);
    let [one, other, third] = ["one", "two", "two"].map(|tenant| world.connect(tenant));
    world.say(one, FromTenant::Waiting { card: 0 });
    world.settle();
    world.say(other, FromTenant::Waiting { card: 0 });
    let turn = world.programs[&one].run.expect("the program has the turn").turn;
    let ending = FromTenant::Ending { card: 0, turn, in_us: u32::MAX };
    world.say(one, ending.clone());
    assert_eq!(world.programs[&other].soon, None, "the turn continues");
    // The slice ends before the program replies.
    for program in world.programs.values_mut() {
        program.mute = true;
    }
    world.pass(20 * MS);
    assert_eq!(world.programs[&one].run.map(|run| run.turn), Some(turn));
    world.say(third, ending.clone());
    assert_eq!(world.programs[&other].soon, None, "the program does not have the turn");
    world.say(one, ending);
    assert_eq!(world.programs[&other].soon, Some(1000), "as long as the owner is polled");
    assert_eq!(world.programs[&third].soon, None, "the tenant does not wait");
    let is_attending = |action: &Action| matches!(action, Action::Attend { ns } if *ns <= 2 * MS);
    assert_eq!(world.work.iter().filter(|action| is_attending(action)).count(), 1);
    world.programs.get_mut(&other).expect("there").soon = None;
    world.say(one, FromTenant::Ending { card: 0, turn, in_us: 100 });
    assert_eq!(world.programs[&other].soon, None, "further notices of the same turn are ignored");
}

#[test]
fn previous_library_version_gets_only_known_messages() {
    let mut world = two(8, 8);
    let one = world.connect("one");
    world.version = cuda_protocol::VERSION_OLDEST;
    let other = world.connect("two");
    world.ask(other, 1, 2);
    assert_eq!(world.places(other), (2, 0));
    for session in [one, other] {
        world.say(session, FromTenant::Waiting { card: 0 });
        world.settle();
    }
    let turn = world.programs[&one].run.expect("the program has the turn").turn;
    for program in world.programs.values_mut() {
        program.mute = true;
    }
    world.pass(20 * MS);
    world.say(one, FromTenant::Ending { card: 0, turn, in_us: 100 });
    assert_eq!(world.programs[&other].soon, None);
    world.version = 0;
    let ancient = world.connect("two");
    assert_eq!(world.programs.get(&ancient).and_then(|program| program.ended), None::<End>, "the program is gone");
    assert!(!world.programs.contains_key(&ancient));
}

#[test]
fn programs_returning_to_smaller_card_keep_contents() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 8);
    world.write(one);
    assert_eq!(world.places(one), (8, 0));
    let mut core = two(4, 16).core;
    core.expect([102], 2_000 * MS);
    let sessions = world.restart(core);
    world.check();
    assert_eq!(world.places(sessions[0]), (4, 4), "as much memory as the card has now");
    assert_eq!(world.core.view(0).memory.summary.free, 0);
    let other = world.connect("two");
    world.ask(other, 1, 4);
    for session in [sessions[0], other] {
        world.say(session, FromTenant::Waiting { card: 0 });
    }
    world.pass(2_000 * MS);
    world.check();
    let places = [sessions[0], other].map(|session| world.places(session));
    assert_eq!(places.map(|(card, host)| card + host), [8, 4]);
    assert_eq!(places.map(|(card, _)| card).iter().sum::<usize>(), 4, "the card is still shared");
}

#[test]
fn a_chunk_that_is_given_up_while_it_is_adopted_is_no_violation() {
    let mut world = two(8, 16);
    let one = world.connect("one");
    world.ask(one, 1, 4);
    let chunk = *world.programs[&one].chunks.keys().next().expect("the tenant has some chunks");
    let sessions = world.restart_and(two(8, 16).core, |world, session| {
        world.programs.get_mut(&session).expect("there").chunks.remove(&chunk);
        world.say(session, FromTenant::Free { chunks: vec![chunk] });
    });
    assert!(world.programs.contains_key(&sessions[0]), "the program did nothing wrong");
    assert_eq!(world.core.view(0).memory.summary.free, 5);
    world.check();
}
