//! Tests programs on a card that is too small for them. They allocate, free, write, connect and disconnect, and reply
//! late or out of order.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Connect(bool),
    Leave(usize),
    Allocate(usize, u32),
    Free(usize, usize),
    Write(usize),
    Wait(usize),
    Steps(u8, u64),
    Pass(u64),
    Quota(bool, u32),
    Size(bool, u64),
}

fn op() -> impl Strategy<Value = Op> {
    let which = 0..4usize;
    prop_oneof![
        2 => any::<bool>().prop_map(Op::Connect),
        1 => which.clone().prop_map(Op::Leave),
        4 => (which.clone(), 1..7u32).prop_map(|(w, n)| Op::Allocate(w, n)),
        3 => (which.clone(), 0..8usize).prop_map(|(w, n)| Op::Free(w, n)),
        3 => which.clone().prop_map(Op::Write),
        2 => which.prop_map(Op::Wait),
        6 => (1..12u8, any::<u64>()).prop_map(|(n, seed)| Op::Steps(n, seed)),
        4 => (1..80u64).prop_map(|ms| Op::Pass(ms * MS)),
        1 => (any::<bool>(), 0..10u32).prop_map(|(one, quota)| Op::Quota(one, quota)),
        1 => (any::<bool>(), 1..20u64).prop_map(|(one, size)| Op::Size(one, size)),
    ]
}

fn apply(world: &mut World, op: Op, request: u32) {
    let sessions: Vec<_> = world.programs.keys().copied().collect();
    let session = |at: usize| sessions.get(at % sessions.len().max(1)).copied();
    match op {
        Op::Connect(first) if sessions.len() < 4 => {
            world.connect_as(if first { "one" } else { "two" }, 1000, false);
        }
        Op::Connect(_) => {}
        Op::Leave(at) => session(at).into_iter().for_each(|id| world.leave(id)),
        Op::Allocate(at, chunks) => {
            if let Some(id) = session(at) {
                world.say(id, FromTenant::Allocate { request, card: 0, chunks });
            }
        }
        Op::Free(at, which) => {
            let Some(id) = session(at) else { return };
            let program = world.programs.get_mut(&id).expect("there");
            let chunk = program.chunks.keys().nth(which).copied();
            if let Some(chunk) = chunk {
                program.chunks.remove(&chunk);
                world.say(id, FromTenant::Free { chunks: vec![chunk] });
            }
        }
        Op::Write(at) => {
            if let Some(id) = session(at).filter(|id| world.programs[id].quiet.is_none()) {
                world.write(id);
            }
        }
        Op::Wait(at) => {
            if let Some(id) = session(at).filter(|id| world.programs[id].run.is_none()) {
                world.say(id, FromTenant::Waiting { card: 0 });
            }
        }
        Op::Steps(count, seed) => {
            let mut choice = seed;
            for _ in 0..count {
                choice = choice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                world.step(choice >> 33);
            }
        }
        Op::Pass(ns) => {
            world.now += ns;
            world.event(Event::Tick);
        }
        Op::Quota(first, quota) => {
            let name = if first { "one" } else { "two" };
            let id = world.core.tenant(name).expect("there");
            world
                .core
                .change_tenant(id, &spec(name, 12, Limits { quota, ..Limits::default() }))
                .expect("the request is valid");
        }
        Op::Size(first, size) => {
            let name = if first { "one" } else { "two" };
            let id = world.core.tenant(name).expect("there");
            world.core.change_tenant(id, &spec(name, size, Limits::default())).expect("the request is valid");
        }
    }
}

proptest! {
    #[test]
    fn contents_follow_their_chunks_and_nothing_is_lost(ops in proptest::collection::vec(op(), 1..150)) {
        let mut world = World::new(8, 20);
        for name in ["one", "two"] {
            world.core.add_tenant(spec(name, 12, Limits::default())).expect("the request is valid");
        }
        for (number, op) in ops.into_iter().enumerate() {
            apply(&mut world, op, number as u32);
            world.check();
        }
        world.settle();
        world.check();
        let sessions: Vec<_> = world.programs.keys().copied().collect();
        sessions.into_iter().for_each(|id| world.leave(id));
        world.settle();
        let view = world.core.view(0);
        prop_assert_eq!((view.memory.summary.free, view.memory.summary.host.used), (8, 0));
        prop_assert_eq!(view.pieces.0, 0, "pieces of the card are left");
        prop_assert_eq!(world.pieces.values().filter(|(memory, _)| *memory == Memory::Device).count(), 0);
        prop_assert!(view.pieces.1 <= 2, "only the stock");
    }
}
