//! Moves of chunks between the card and host memory.
//!
//! ```text
//! plan -> Quiesce -> Quiet -> copies -> Redirect -> Redirected -> move committed, old piece given up -> Resume
//! ```
//!
//! A process has one order at a time, of several batches: while one batch is redirected the next is copied. Orders of
//! different processes run concurrently, so that one process's evictions overlap another's returns. A move takes effect
//! only when its process has redirected it; if that never happens, the chunk stays where it was.

use super::deadlines::Deadline;
use super::given_up::Reason;
use super::pieces::Receiver;
use super::types::{Action, BatchId, PieceId, SessionId};
use super::{Body, Core, memory_of};
use cuda_protocol::{Chunk, ChunkId, FromOwner, MAX_CHUNKS};
use owner_driver::Memory;
use sched::Nanos;
use sched::trace::MemoryMove;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use tenancy::Demand;
use vram::{Error, MoveId, Step, TenantId};

/// Maximum size of a batch in bytes: large enough for the link's full rate, and small enough that memory changes hands
/// soon.
const BATCH_BYTES: u64 = 256 << 20;
/// Maximum number of concurrent batches of a process.
const BATCHES_MOST: usize = 6;
/// A process with more batches than this gets no new ones: starting one new batch for each that ends would shrink the
/// batches to one chunk each.
const BATCHES_FEW: usize = 3;
/// Maximum number of plans per event.
const MAX_PLANS_PER_EVENT: u32 = 8;
/// Time in ns during which a process that declined to quiesce gets no new order.
const DECLINED_NS: u64 = 500_000_000;
/// Initial time in microseconds after which a process should decline instead of continuing to drain; doubled each time.
const QUIESCE_US: u32 = 2_000_000;
/// Maximum excess of declined over completed orders, tolerated for as long as its tenant's work may run: a process
/// beyond both limits keeps memory from others, and counts as stuck.
const DECLINES_MOST: u32 = 6;

/// A move of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    /// The move in the accounts; `None` for a piece that moves to the memory of its chunk's place.
    id: Option<MoveId>,
    tenant: TenantId,
    index: u32,
    chunk: ChunkId,
    from: PieceId,
    to: PieceId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The batch's destinations are being made, or the process is not quiescent.
    Waiting,
    /// The batch is being copied.
    Copying(BatchId),
}

/// Chunks that move together, to one memory.
#[derive(Debug)]
pub(super) struct Batch {
    items: Vec<Item>,
    to: Memory,
    /// Destinations that do not exist yet.
    missing: BTreeSet<PieceId>,
    stage: Stage,
}

/// An order of a process.
#[derive(Debug)]
pub(super) struct Relocation {
    order: u32,
    tenant: TenantId,
    quiet: bool,
    /// Batches that are not copied yet.
    batches: VecDeque<Batch>,
    /// Batches that the process maps, in the order in which they were sent: copies may end in another order.
    redirecting: VecDeque<Vec<Item>>,
    /// Time since which the process owes an answer.
    since: Option<u64>,
    /// Set if the process has redirected all requested chunks.
    complied: bool,
    /// Set if the process has declined a part of the order; an order counts once.
    declined: bool,
}

impl Relocation {
    /// Batches in progress.
    fn batches(&self) -> usize {
        self.batches.len() + self.redirecting.len()
    }
}

impl Core {
    /// Plans moves, and starts them.
    pub(super) fn balance(&mut self) {
        self.take_quanta();
        let mut started = self.put_in_place();
        // Empty chunks free memory without a copy.
        if !self.unmet.is_empty() && self.reclaim(None, None) {
            return started.into_iter().for_each(|session| self.go_on(session));
        }
        let full = |relocation: &Relocation| relocation.batches() > BATCHES_FEW;
        let full: BTreeSet<SessionId> =
            self.relocations.iter().filter(|(_, relocation)| full(relocation)).map(|(&id, _)| id).collect();
        for _ in 0..MAX_PLANS_PER_EVENT {
            let steps = self.plan();
            if steps.is_empty() {
                break;
            }
            let mut by_session: BTreeMap<(SessionId, Memory), Vec<Item>> = BTreeMap::new();
            let mut missing = BTreeSet::new();
            for step in steps {
                if let Some((session, to, item)) = self.begin(step, &by_session, &full) {
                    if !self.pieces.is_ready(item.to) {
                        missing.insert(item.to);
                    }
                    by_session.entry((session, to)).or_default().push(item);
                }
            }
            if by_session.is_empty() {
                break;
            }
            for ((session, to), items) in by_session {
                started.insert(session);
                self.enqueue(session, to, items, &missing);
            }
        }
        for session in started {
            self.go_on(session);
        }
        if self.relocations.is_empty() {
            let holds = self.residency.is_still(&self.table, self.clock, true);
            self.hold(holds);
        } else {
            self.residency.moves();
        }
        self.renew_terms();
    }

    fn plan(&mut self) -> Vec<Step> {
        let now = self.clock;
        let promise = self.promise.filter(|_| self.deadlines.is_ahead(Deadline::Guarantee, now));
        let tenants: BTreeSet<_> = self.sessions.values().filter_map(|session| session.tenant).collect();
        let demand = Demand {
            unmet: std::mem::take(&mut self.unmet),
            // Memory evicted for a guarantee must not return before the guarantee is given.
            guarantee: promise,
            only_requests: false,
            // The moves of a lone tenant do not delay other tenants.
            is_undisturbed: tenants.len() < 2,
        };
        self.residency.plan(&self.table, now, demand).steps
    }

    /// Begins a step: takes the destination's place. Returns `None` if the step is already done, or impossible now.
    fn begin(
        &mut self,
        step: Step,
        begun: &BTreeMap<(SessionId, Memory), Vec<Item>>,
        full: &BTreeSet<SessionId>,
    ) -> Option<(SessionId, Memory, Item)> {
        let Step { vm: tenant, index, .. } = step;
        match self.tenants.get(&tenant)?.bodies.get(&index)? {
            Body::Fixed => {
                // The piece already is where the driver put it: only the accounts change, and only towards the real
                // state.
                if step.to == vram::To::Card {
                    self.account_for(step);
                }
                None
            }
            Body::Chunk { .. } if self.misplaced.get(&(tenant, index)) == Some(&true) => None,
            Body::Chunk { .. } if self.misplaced.contains_key(&(tenant, index)) => {
                // The piece is already at the destination.
                if self.account_for(step) {
                    self.misplaced.remove(&(tenant, index));
                }
                None
            }
            Body::Chunk { pinned: true, .. } => None,
            body @ &Body::Chunk { piece, .. } => {
                let (session, chunk) = body.only_user()?;
                let known = self.sessions.get(&session)?;
                let settled = known.has_settled(chunk);
                if !settled || known.stuck || self.is_left_alone(session) {
                    return None;
                }
                let under_way = self.relocations.get(&session).map_or(0, Relocation::batches);
                let new = begun.keys().filter(|(other, _)| *other == session).count();
                if under_way + new >= BATCHES_MOST || full.contains(&session) {
                    return None;
                }
                let moves = self.start(step).ok()??;
                let to = memory_of(moves.to);
                let most = (BATCH_BYTES / self.table.chunk_bytes()).clamp(1, MAX_CHUNKS as u64) as usize;
                if begun.get(&(session, to)).is_some_and(|items| items.len() >= most) {
                    self.table.abort_move(moves.id);
                    return None;
                }
                let destination = self.pieces.take_to_copy(to, Receiver { tenant, session }, &mut self.actions);
                self.pieces.hold(piece);
                Some((session, to, Item { id: Some(moves.id), tenant, index, chunk, from: piece, to: destination }))
            }
        }
    }

    /// Updates the accounts for a piece that is already at its destination; returns true on success.
    pub(super) fn account_for(&mut self, step: Step) -> bool {
        let Ok(Some(moves)) = self.start(step) else { return false };
        self.table.commit_move(moves.id);
        self.scrub();
        true
    }

    /// Begins to move pieces to the memory that their chunks have places in; returns the affected processes.
    fn put_in_place(&mut self) -> BTreeSet<SessionId> {
        let mut by_session: BTreeMap<(SessionId, Memory), Vec<Item>> = BTreeMap::new();
        let mut missing = BTreeSet::new();
        let most = (BATCH_BYTES / self.table.chunk_bytes()).clamp(1, MAX_CHUNKS as u64) as usize;
        let waiting: Vec<_> = self.misplaced.iter().filter(|(_, moves)| !**moves).map(|(&at, _)| at).collect();
        for (tenant, index) in waiting {
            let Some((from, memory)) = self.where_is(tenant, index) else { continue };
            let Some((session, chunk)) = self.body(tenant, index).and_then(|body| body.only_user()) else { continue };
            let to = if memory == Memory::Device { Memory::Host } else { Memory::Device };
            let Some(known) = self.sessions.get(&session) else { continue };
            // One order at a time, and one batch of these chunks.
            let busy = known.stuck || self.is_left_alone(session);
            if busy || self.relocations.contains_key(&session) {
                continue;
            }
            let items = by_session.entry((session, to)).or_default();
            if items.len() >= most {
                continue;
            }
            let into = self.pieces.take_to_copy(to, Receiver { tenant, session }, &mut self.actions);
            self.pieces.hold(from);
            if !self.pieces.is_ready(into) {
                missing.insert(into);
            }
            items.push(Item { id: None, tenant, index, chunk, from, to: into });
            self.misplaced.insert((tenant, index), true);
        }
        by_session.retain(|_, items| !items.is_empty());
        let sessions = by_session.keys().map(|(session, _)| *session).collect();
        for ((session, to), items) in by_session {
            self.enqueue(session, to, items, &missing);
        }
        sessions
    }

    /// Returns true if a process gets no order about its memory now, because it has declined one.
    fn is_left_alone(&self, session: SessionId) -> bool {
        self.deadlines.is_ahead(Deadline::Retry(session), self.clock)
    }

    /// Like [`vram::ChunkTable::start`], after scrubbing pending places.
    fn start(&mut self, step: Step) -> Result<Option<vram::Move>, Error> {
        match self.table.start(step) {
            Err(Error::NeedsScrub { .. }) if self.scrub() => self.table.start(step),
            other => other,
        }
    }

    fn enqueue(&mut self, id: SessionId, to: Memory, mut items: Vec<Item>, missing: &BTreeSet<PieceId>) {
        // Consecutive chunks in a program's addresses usually have ascending numbers: the program maps them together.
        items.sort_unstable_by_key(|item| item.chunk);
        let missing = items.iter().map(|item| item.to).filter(|to| missing.contains(to)).collect();
        let Some(tenant) = items.first().map(|item| item.tenant) else { return };
        let batch = Batch { items, to, missing, stage: Stage::Waiting };
        if let Some(relocation) = self.relocations.get_mut(&id) {
            return relocation.batches.push_back(batch);
        }
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.order += 1;
        let order = session.order;
        let since = Some(self.clock);
        let batches = VecDeque::from([batch]);
        // Each refusal extends its time; it must answer before it counts as stuck.
        let longest = u32::try_from(self.config.patience_ns / 1000 * 4 / 5).unwrap_or(u32::MAX);
        let patience_us = QUIESCE_US.saturating_mul(1 << session.declines.min(8)).min(longest);
        let (redirecting, complied, declined) = (VecDeque::new(), true, false);
        let relocation = Relocation { order, tenant, quiet: false, batches, redirecting, since, complied, declined };
        self.relocations.insert(id, relocation);
        if let Some(known) = self.tenants.get_mut(&tenant) {
            known.moving.insert(id);
        }
        tracing::debug!(session = id.0, order, ?to, "a program is to be quiet");
        // Another tenant has the turn in the meantime.
        self.pause_as_due(tenant);
        self.send(id, FromOwner::Quiesce { order, patience_us });
    }

    pub(super) fn quiet(&mut self, id: SessionId, order: u32) {
        let Some(relocation) = self.relocations.get_mut(&id).filter(|relocation| relocation.order == order) else {
            return;
        };
        (relocation.quiet, relocation.since) = (true, None);
        self.go_on(id);
    }

    pub(super) fn busy(&mut self, id: SessionId, order: u32) {
        let declined =
            self.relocations.get(&id).is_some_and(|relocation| relocation.order == order && !relocation.quiet);
        if !declined {
            return;
        }
        self.declined += 1;
        self.abandon_relocation(id);
        self.decline(id);
    }

    /// Handles a process that declined all or part of an order: it gets no orders for a while. A process that only
    /// declines counts as stuck.
    fn decline(&mut self, id: SessionId) {
        let (clock, patience) = (self.clock, self.config.patience_ns);
        let Some(session) = self.sessions.get_mut(&id) else { return };
        self.deadlines.set(Deadline::Retry(id), clock + DECLINED_NS);
        session.declines += 1;
        let since = *session.declining_since.get_or_insert(clock);
        let Some(tenant) = session.tenant.and_then(|tenant| self.tenants.get(&tenant)) else { return };
        // Work with this time limit may prevent quiescence for as long.
        let Some(longest) = tenant.spec.time.max_run_ns.map(|limit| limit.max(patience)) else { return };
        if session.declines >= DECLINES_MOST && clock.saturating_sub(since) >= longest {
            tracing::warn!(session = ?id, declines = session.declines, "program declines every order about its memory");
            self.stuck(id, Reason::Declined);
        }
    }

    /// Records that a process has completed an order.
    fn comply(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.declines = session.declines.saturating_sub(1);
        if session.declines == 0 {
            session.declining_since = None;
        }
    }

    /// Copies all chunks that can be copied, and resumes the process when no chunk is left.
    fn go_on(&mut self, id: SessionId) {
        self.forget_freed(id);
        let Some(relocation) = self.relocations.get_mut(&id).filter(|relocation| relocation.quiet) else { return };
        if relocation.batches() == 0 {
            let (order, tenant, complied) = (relocation.order, relocation.tenant, relocation.complied);
            self.relocations.remove(&id);
            if complied {
                self.comply(id);
            }
            tracing::debug!(session = id.0, order, "a program goes on");
            self.send(id, FromOwner::Resume { order });
            return self.moved(id, tenant);
        }
        let mut copies = Vec::new();
        for batch in &mut relocation.batches {
            if batch.stage == Stage::Waiting && batch.missing.is_empty() {
                self.next += 1;
                let number = BatchId(self.next);
                batch.stage = Stage::Copying(number);
                let pieces = batch.items.iter().map(|item| (item.from, item.to)).collect();
                copies.push(Action::Copy { batch: number, pieces, to: batch.to });
            }
        }
        self.actions.extend(copies);
    }

    /// Removes chunks from a move that their process frees before the copy.
    fn forget_freed(&mut self, id: SessionId) {
        let Some(relocation) = self.relocations.get_mut(&id).filter(|relocation| relocation.quiet) else { return };
        let table = &self.table;
        let mut freed = Vec::new();
        for batch in relocation.batches.iter_mut().filter(|batch| batch.stage == Stage::Waiting) {
            for item in batch.items.extract_if(.., |item| item.id.is_some_and(|id| table.is_gone(id))) {
                batch.missing.remove(&item.to);
                freed.push(item);
            }
        }
        relocation.batches.retain(|batch| !batch.items.is_empty());
        self.give_back(freed);
    }

    pub(super) fn copied(&mut self, number: BatchId, done: bool, ns: u64) {
        if let Some(batch) = self.orphans.remove(&number) {
            return self.give_back(batch.items);
        }
        let is_it = |batch: &Batch| batch.stage == Stage::Copying(number);
        let found = self.relocations.iter().find(|(_, relocation)| relocation.batches.iter().any(is_it));
        let Some(id) = found.map(|(&id, _)| id) else { return };
        let Some(relocation) = self.relocations.get_mut(&id) else { return };
        let at = relocation.batches.iter().position(is_it);
        let Some(Batch { items, to, .. }) = at.and_then(|at| relocation.batches.remove(at)) else { return };
        if !done {
            self.give_back(items);
            return self.go_on(id);
        }
        let (order, tenant) = (relocation.order, relocation.tenant);
        let moves = items.iter().map(|item| Chunk { id: item.chunk, place: super::said_place(to) }).collect();
        let pieces = items.iter().map(|item| item.to).collect();
        let copied = items.len() as u64 * self.config.chunk_bytes;
        relocation.since = Some(self.clock);
        relocation.redirecting.push_back(items);
        self.residency.moved(self.clock, copied, ns);
        let (from, until) = (Nanos(self.clock.saturating_sub(ns)), Nanos(self.clock));
        let to_card = to == Memory::Device;
        self.turns.note_move(MemoryMove { from, until, vgpu: tenant, bytes: copied, to_card });
        tracing::debug!(session = id.0, order, mib = copied >> 20, ?to, us = ns / 1000, "copied");
        self.actions.push(Action::Send { session: id, message: FromOwner::Redirect { order, moves }, pieces });
    }

    pub(super) fn redirected(&mut self, id: SessionId, order: u32, moved: u32) {
        let Some(relocation) = self.relocations.get_mut(&id).filter(|relocation| relocation.order == order) else {
            return;
        };
        let Some(mut items) = relocation.redirecting.pop_front() else {
            return self.end(id, cuda_protocol::End::Violation);
        };
        relocation.since = (!relocation.redirecting.is_empty()).then_some(self.clock);
        let rest = items.split_off(items.len().min(moved as usize));
        relocation.complied &= rest.is_empty();
        let declines = !rest.is_empty() && !std::mem::replace(&mut relocation.declined, !rest.is_empty());
        for item in items {
            self.commit(item);
        }
        self.give_back(rest);
        if declines {
            // The process cannot redirect chunks now, usually because its program is about to end. Repeating the copy
            // immediately does not help.
            self.decline(id);
        }
        self.needs_plan = true;
        self.go_on(id);
    }

    /// Records that a chunk is at its destination.
    fn commit(&mut self, item: Item) {
        let Item { id, tenant, index, from, to, .. } = item;
        let gone = match id {
            Some(id) => {
                let gone = self.table.is_gone(id);
                self.table.commit_move(id);
                gone
            }
            // The index may belong to another chunk by now.
            None => self.where_is(tenant, index).is_none_or(|(piece, _)| piece != from),
        };
        if id.is_none() && !gone {
            self.misplaced.remove(&(tenant, index));
        }
        self.relocations_done += 1;
        if !gone && let Some(Body::Chunk { piece, .. }) = self.body(tenant, index) {
            *piece = to;
            // The chunk has one hold, and the move has another.
            self.pieces.let_go(from, &mut self.actions);
        } else {
            self.pieces.let_go(to, &mut self.actions);
        }
        self.pieces.let_go(from, &mut self.actions);
    }

    /// Records that chunks will not move.
    fn give_back(&mut self, items: Vec<Item>) {
        for item in items {
            match item.id {
                Some(id) => self.table.abort_move(id),
                None => self.stays_misplaced(&item),
            }
            self.pieces.let_go(item.to, &mut self.actions);
            self.pieces.let_go(item.from, &mut self.actions);
        }
    }

    /// Records that a piece could not be moved to its chunk's place: the move is retried later.
    fn stays_misplaced(&mut self, item: &Item) {
        let is_it = self.where_is(item.tenant, item.index).is_some_and(|(piece, _)| piece == item.from);
        if let Some(moves) = self.misplaced.get_mut(&(item.tenant, item.index)).filter(|_| is_it) {
            *moves = false;
        }
        let until = self.clock + DECLINED_NS;
        let user = self.body(item.tenant, item.index).and_then(|body| body.only_user());
        if let Some((session, _)) = user {
            self.deadlines.postpone(Deadline::Retry(session), until);
        }
    }

    /// Records that a destination exists, or could not be made: then its chunk does not move.
    pub(super) fn destination_made(&mut self, piece: PieceId, done: bool) {
        let found = self
            .relocations
            .iter()
            .find(|(_, relocation)| relocation.batches.iter().any(|batch| batch.missing.contains(&piece)));
        let Some(id) = found.map(|(&id, _)| id) else { return };
        let Some(relocation) = self.relocations.get_mut(&id) else { return };
        let mut lost = Vec::new();
        for batch in &mut relocation.batches {
            if batch.missing.remove(&piece) && !done {
                lost.extend(batch.items.extract_if(.., |item| item.to == piece));
            }
        }
        relocation.batches.retain(|batch| !batch.items.is_empty());
        self.give_back(lost);
        self.go_on(id);
    }

    /// Cancels an order of a process. Copies in progress end before their pieces are released.
    pub(super) fn abandon_relocation(&mut self, id: SessionId) {
        let Some(relocation) = self.relocations.remove(&id) else { return };
        for batch in relocation.batches {
            match batch.stage {
                Stage::Copying(number) => {
                    self.orphans.insert(number, batch);
                }
                Stage::Waiting => self.give_back(batch.items),
            }
        }
        for items in relocation.redirecting {
            self.give_back(items);
        }
        self.moved(id, relocation.tenant);
    }

    /// Records the end of an order: the tenant may have turns again.
    fn moved(&mut self, id: SessionId, tenant: TenantId) {
        if let Some(known) = self.tenants.get_mut(&tenant) {
            known.moving.remove(&id);
        }
        self.pause_as_due(tenant);
        self.needs_plan = true;
    }

    /// Returns the processes whose answers are overdue.
    pub(super) fn late_answers(&mut self) {
        let (clock, patience) = (self.clock, self.config.patience_ns);
        let late =
            |relocation: &Relocation| relocation.since.is_some_and(|since| clock.saturating_sub(since) >= patience);
        let late: Vec<_> =
            self.relocations.iter().filter(|(_, relocation)| late(relocation)).map(|(&id, _)| id).collect();
        for id in late {
            tracing::warn!(session = ?id, "program does not answer an order about its memory");
            self.stuck(id, Reason::Order);
        }
        self.late_suspensions();
    }
}
