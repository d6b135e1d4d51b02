//! Tests relocation.

use super::*;
use std::collections::BTreeMap;
use vram::{Contents, Limits, Place, Step, To};

const CHUNK: u64 = 1 << 20;
const TENANT: TenantId = TenantId(1);
const ANSWER_NS: u64 = 10_000_000_000;

type Taken = Action<u32, Place>;

/// A card with one tenant. All of the tenant's chunks are on the card.
struct World {
    table: ChunkTable,
    relocations: Relocations<u32, Place>,
    now: u64,
}

impl World {
    fn new(force_ns: Option<u64>) -> Self {
        let mut table = ChunkTable::new(64 * CHUNK, CHUNK, Contents::Zeroed).expect("the sizes are valid");
        table.set_host_budget(64);
        table
            .create_vm(TENANT, 32 * CHUNK, Limits { quota: 64, swap_cap: 64, ..Limits::default() })
            .expect("the VM fits");
        for index in 0..32 {
            let at = table.guest_address(index);
            table.place(TENANT, at).expect("a chunk is free");
        }
        let config = Config { batch_chunks: 2, batches_most: 4, batches_few: 2, answer_ns: ANSWER_NS, force_ns };
        Self { table, relocations: Relocations::new(config), now: 0 }
    }

    fn user(id: u32) -> User<u32> {
        User { id, tenant: TENANT, run_limit_ns: Some(ANSWER_NS) }
    }

    /// Orders chunks to be moved to host memory, and returns the number of admitted chunks.
    fn evict(&mut self, user: u32, indices: impl IntoIterator<Item = u32>, is_missing: bool) -> usize {
        let mut admitted = 0;
        for index in indices {
            if !self.relocations.admits(user, Tier::Host, self.now) {
                continue;
            }
            let Ok(Some(moves)) = self.table.start(Step { vm: TENANT, index, to: To::Host }) else { continue };
            let (position, from, to) = (u64::from(index), moves.from, moves.to);
            let chunk = Chunk { id: Some(moves.id), tenant: TENANT, index, position, from, to };
            self.relocations.add(Self::user(user), Tier::Host, chunk, is_missing);
            admitted += 1;
        }
        self.relocations.submit(&self.table, self.now);
        admitted
    }

    /// Takes all pending actions, and applies the ends of moves to the table.
    fn actions(&mut self) -> Vec<Taken> {
        let mut taken = Vec::new();
        while let Some(action) = self.relocations.take_action() {
            if let Action::Ended { chunks, moved } = &action {
                for id in chunks.iter().filter_map(|chunk| chunk.id) {
                    if *moved {
                        self.table.commit_move(id);
                    } else {
                        self.table.abort_move(id);
                    }
                }
            }
            taken.push(action);
        }
        taken
    }

    fn quiet(&mut self, user: u32, order: u32) -> Vec<Taken> {
        self.relocations.quiet(&self.table, user, order);
        self.actions()
    }

    fn copied(&mut self, batch: u64, done: bool) -> Vec<Taken> {
        self.relocations.copied(&self.table, self.now, batch, done, 5);
        self.actions()
    }

    fn remapped(&mut self, user: u32, order: u32, moved: usize) -> Vec<Taken> {
        self.relocations
            .remapped(&self.table, self.now, user, order, |at| at < moved)
            .expect("the remapping was requested");
        self.actions()
    }

    fn ticked(&mut self) -> Vec<Taken> {
        self.relocations.tick(self.now);
        self.actions()
    }

    fn in_host(&self) -> u32 {
        self.table.vms().map(|(_, account)| account.host).sum()
    }
}

/// Formats each action as a word and its number of chunks.
fn words(actions: &[Taken]) -> Vec<String> {
    let word = |action: &Taken| match action {
        Action::Quiesce { .. } => "quiesce".to_owned(),
        Action::Force { .. } => "force".to_owned(),
        Action::Copy { batch, chunks, .. } => format!("copy{batch}:{}", chunks.len()),
        Action::Remap { chunks, .. } => format!("remap:{}", chunks.len()),
        Action::Ended { chunks, moved } => format!("{}:{}", if *moved { "moved" } else { "stayed" }, chunks.len()),
        Action::Resume { .. } => "resume".to_owned(),
        Action::Cancelled { .. } => "cancelled".to_owned(),
        Action::GiveUp { reason, .. } => format!("give up: {reason:?}"),
    };
    actions.iter().map(word).collect()
}

#[test]
fn order_runs_from_quiesce_to_resume() {
    let mut world = World::new(None);
    assert_eq!(world.evict(7, [2, 0, 1], false), 3);
    assert_eq!(words(&world.actions()), ["quiesce"]);
    assert!(world.relocations.is_moving(TENANT) && world.relocations.has_order(7));
    let copies = world.quiet(7, 1);
    assert_eq!(words(&copies), ["copy1:2", "copy2:1"]);
    let Action::Copy { chunks, .. } = &copies[0] else { panic!("{copies:?}") };
    assert_eq!(chunks.iter().map(|chunk| chunk.index).collect::<Vec<_>>(), [0, 1], "the order is by address");
    // Copies may finish in another order. Each batch is remapped while the other one is copied.
    assert_eq!(words(&world.copied(2, true)), ["remap:1"]);
    assert_eq!(words(&world.remapped(7, 1, 1)), ["moved:1"]);
    assert_eq!(words(&world.copied(1, true)), ["remap:2"]);
    assert_eq!(words(&world.remapped(7, 1, 2)), ["moved:2", "resume"]);
    assert_eq!((world.in_host(), world.relocations.moved()), (3, 3));
    assert!(world.relocations.is_idle() && !world.relocations.is_moving(TENANT));
    assert_eq!(world.relocations.remapped(&world.table, 0, 7, 1, |_| true), Ok(()), "a late reply is ignored");
}

#[test]
fn remapping_without_a_request_is_refused() {
    let mut world = World::new(None);
    world.evict(7, [0], false);
    world.quiet(7, 1);
    assert_eq!(world.relocations.remapped(&world.table, 0, 7, 1, |_| true), Err(Unasked));
}

#[test]
fn batches_of_a_user_are_bounded() {
    let mut world = World::new(None);
    assert_eq!(world.evict(7, 0..32, false), 8, "four batches of two");
    world.quiet(7, 1);
    world.copied(1, true);
    world.remapped(7, 1, 2);
    // With three batches in progress, no new one starts.
    world.relocations.begin_round();
    assert_eq!(world.evict(7, 8..32, false), 0);
    world.copied(2, true);
    world.remapped(7, 1, 2);
    world.relocations.begin_round();
    assert_eq!(world.evict(7, 8..32, false), 4);
}

#[test]
fn declined_order_is_retried_later_and_longer() {
    let mut world = World::new(None);
    let mut times = Vec::new();
    let mut given_up_after = None;
    for order in 1..100 {
        assert_eq!(world.evict(7, [0], false), 1, "order {order}");
        let asked = world.actions();
        let [Action::Quiesce { decline_ns, .. }] = asked[..] else { panic!("{asked:?}") };
        times.push(decline_ns);
        world.relocations.declined(world.now, 7, order);
        let answer = words(&world.actions());
        assert_eq!(answer[..2], ["stayed:1", "cancelled"]);
        assert_eq!(world.evict(7, [0], false), 0, "the user gets no orders for a while");
        if answer.len() > 2 {
            assert_eq!(answer[2], "give up: Declines");
            given_up_after = Some((order, world.now));
            break;
        }
        world.now += RETRY_NS;
    }
    assert_eq!(times[..4], [QUIESCE_NS, 2 * QUIESCE_NS, 4 * QUIESCE_NS, ANSWER_NS / 5 * 4]);
    let (order, at) = given_up_after.expect("the user is abandoned");
    assert!(order > MAX_DECLINES && (ANSWER_NS..ANSWER_NS + RETRY_NS).contains(&at), "after {order} orders, at {at}");
    assert_eq!((world.in_host(), world.relocations.declined_orders()), (0, u64::from(order)));
}

#[test]
fn completed_orders_outweigh_declined_ones() {
    let mut world = World::new(None);
    for order in 1..200 {
        assert_eq!(world.evict(7, [0], false), 1, "order {order}");
        if order % 2 == 1 {
            world.relocations.declined(world.now, 7, order);
            assert_eq!(words(&world.actions())[1..], ["stayed:1", "cancelled"]);
            world.now += RETRY_NS;
            continue;
        }
        let Some(Action::Copy { batch, .. }) = world.quiet(7, order).pop() else { panic!("no copy starts") };
        world.copied(batch, true);
        world.remapped(7, order, 1);
        let back = world
            .table
            .start(Step { vm: TENANT, index: 0, to: To::Card })
            .expect("a chunk is free")
            .expect("the chunk must move");
        world.table.commit_move(back.id);
        while let Some(work) = world.table.take_scrub_work() {
            world.table.scrubbed(work.place);
        }
    }
}

#[test]
fn partly_remapped_order_counts_once_as_declined() {
    let mut world = World::new(None);
    world.evict(7, 0..4, false);
    world.quiet(7, 1);
    for batch in [1, 2] {
        world.copied(batch, true);
    }
    assert_eq!(words(&world.remapped(7, 1, 1)), ["moved:1", "stayed:1"]);
    assert_eq!(words(&world.remapped(7, 1, 0)), ["stayed:2", "resume"]);
    assert_eq!(world.relocations.records[&7].declines, 1);
    assert!(world.relocations.is_left_alone(7, world.now) && !world.relocations.is_left_alone(7, RETRY_NS));
    assert_eq!(world.in_host(), 1);
}

#[test]
fn silent_user_is_forced_and_then_given_up() {
    for force_ns in [None, Some(1000)] {
        let mut world = World::new(force_ns);
        world.evict(7, [0], false);
        world.actions();
        world.now = ANSWER_NS - 1;
        assert!(world.ticked().is_empty());
        if force_ns.is_some() {
            world.now = ANSWER_NS + 999;
            assert_eq!(words(&world.ticked()), ["force"]);
        }
        world.now = ANSWER_NS + force_ns.unwrap_or(0);
        assert_eq!(words(&world.ticked()), ["give up: Silent"]);
        assert!(world.ticked().is_empty(), "once");
        world.relocations.cancel(7);
        assert_eq!(words(&world.actions()), ["stayed:1", "cancelled"]);
        assert!(world.relocations.is_left_alone(7, world.now), "the user is not quiesced again immediately");
    }
}

#[test]
fn freed_chunk_is_not_copied() {
    let mut world = World::new(None);
    world.evict(7, 0..3, false);
    world.actions();
    let at = world.table.guest_address(1);
    world.table.unplace(TENANT, at).expect("the chunk has a place");
    assert_eq!(words(&world.quiet(7, 1)), ["copy1:1", "copy2:1", "stayed:1"]);
}

#[test]
fn failed_copy_leaves_the_chunk_and_waits() {
    let mut world = World::new(None);
    world.evict(7, 0..3, false);
    world.quiet(7, 1);
    assert_eq!(words(&world.copied(1, false)), ["stayed:2"]);
    assert_eq!(words(&world.copied(2, true)), ["remap:1"]);
    assert_eq!(words(&world.remapped(7, 1, 1)), ["moved:1", "resume"]);
    assert_eq!((world.in_host(), world.evict(7, [0], false)), (1, 0), "no order after the failure");
    world.now = RETRY_NS;
    assert_eq!(world.evict(7, [0], false), 1);
}

#[test]
fn copy_waits_for_its_destinations() {
    let mut world = World::new(None);
    world.evict(7, 0..2, true);
    assert_eq!(words(&world.actions()), ["quiesce"]);
    assert!(world.quiet(7, 1).is_empty());
    let places: Vec<Place> = world.table.moves().map(|moves| moves.to).collect();
    world.relocations.made(&world.table, places[0], true);
    assert!(world.actions().is_empty());
    world.relocations.made(&world.table, places[1], false);
    assert_eq!(words(&world.actions()), ["stayed:1", "copy1:1"]);
    assert!(!world.relocations.is_left_alone(7, 0), "the next plan may find memory");
}

#[test]
fn cancelled_copy_keeps_its_memory_until_it_ends() {
    let mut world = World::new(None);
    world.evict(7, 0..3, false);
    world.quiet(7, 1);
    world.copied(2, true);
    world.relocations.forget(7);
    assert_eq!(words(&world.actions()), ["stayed:1", "cancelled"], "the chunk to remap stays in place");
    assert_eq!(world.table.moves().count(), 2);
    assert_eq!(words(&world.copied(1, true)), ["stayed:2"]);
    assert!(world.relocations.records.is_empty() && world.relocations.orphans.is_empty());
}

/// Checks with random responses from random users that each chunk's move ends exactly once, and that no chunk remains.
#[test]
fn each_move_ends_once_whatever_the_answers() {
    let mut random = 1_u64;
    let mut draw = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    for _ in 0..50 {
        let mut world = World::new((draw(2) == 0).then_some(1_000_000_000));
        let (mut orders, mut copies, mut remaps) = (BTreeMap::new(), Vec::new(), Vec::new());
        let mut admitted = 0;
        let mut ended = 0;
        for _ in 0..300 {
            let user = draw(3) as u32;
            match draw(9) {
                0 | 1 => {
                    let indices: Vec<u32> = (0..4).map(|_| draw(32) as u32).collect();
                    admitted += world.evict(user, indices, draw(4) == 0);
                }
                2 => {
                    orders.get(&user).into_iter().for_each(|order| world.relocations.quiet(&world.table, user, *order));
                }
                3 => {
                    let pieces: Vec<Place> = world.table.moves().map(|moves| moves.to).collect();
                    pieces.iter().for_each(|piece| world.relocations.made(&world.table, *piece, draw(3) > 0));
                }
                4 if !copies.is_empty() => {
                    let batch = copies.swap_remove(draw(copies.len() as u64) as usize);
                    world.relocations.copied(&world.table, world.now, batch, draw(5) > 0, 1);
                }
                5 if !remaps.is_empty() => {
                    let (user, order) = remaps.remove(0);
                    let below = draw(3) as usize;
                    // In the meantime, the order may have been cancelled and another one may have started.
                    let _ = world.relocations.remapped(&world.table, world.now, user, order, |at| at < below);
                }
                6 if draw(4) == 0 => world.relocations.forget(user),
                7 => {
                    let order = orders.get(&user).copied().unwrap_or(0);
                    world.relocations.declined(world.now, user, order);
                }
                _ => {
                    world.now += draw(2_000_000_000);
                    world.relocations.tick(world.now);
                }
            }
            for action in world.actions() {
                match action {
                    Action::Quiesce { user, order, .. } => drop(orders.insert(user, order)),
                    Action::Copy { batch, .. } => copies.push(batch),
                    Action::Remap { user, order, .. } => remaps.push((user, order)),
                    Action::GiveUp { user, .. } => world.relocations.cancel(user),
                    Action::Ended { chunks, .. } => ended += chunks.len(),
                    Action::Force { .. } | Action::Resume { .. } | Action::Cancelled { .. } => {}
                }
            }
        }
        (0..3).for_each(|user| world.relocations.forget(user));
        copies.iter().for_each(|batch| world.relocations.copied(&world.table, world.now, *batch, true, 1));
        for action in world.actions() {
            if let Action::Ended { chunks, .. } = action {
                ended += chunks.len();
            }
        }
        assert_eq!((admitted, world.table.moves().count()), (ended, 0));
        assert!(world.relocations.is_idle() && world.relocations.moving.is_empty());
        assert!(world.relocations.orphans.is_empty() && world.relocations.records.is_empty());
    }
}
