//! Moves the chunks of processes between the card and host memory, as [`tenancy::relocation`] requests.
//!
//! ```text
//! plan -> Quiesce -> Quiet -> copies -> Redirect -> Redirected -> move committed, old piece released -> Resume
//! ```
//!
//! The users in [`tenancy::relocation`] are processes here. This module selects the pieces of each move and sends the
//! messages.

use super::given_up::Reason;
use super::sessions::Session;
use super::types::{self, BatchId, PieceId, SessionId};
use super::{Body, CardConfig, Core, memory_of};
use cuda_pieces::Receiver;
use cuda_protocol::{ChunkId, FromOwner, MAX_CHUNKS};
use owner_driver::Memory;
use sched::Nanos;
use sched::trace::MemoryMove;
use std::collections::BTreeSet;
use tenancy::relocation::{self, Action, Config, User};
use tenancy::{Deadline, Demand, Residency};
use vram::{Error, Step, TenantId, Tier};

/// Maximum size of a batch in bytes: large enough to use the link's full bandwidth, and small enough that the receiving
/// tenant gets memory soon. When quanta change, the last batch can move to the card only after the last eviction.
const BATCH_BYTES: u64 = 128 << 20;
/// Maximum number of concurrent batches per process.
const BATCHES_MOST: usize = 6;
/// Number of batches in progress above which a planning round starts no new ones for a process.
const BATCHES_FEW: usize = 3;
/// Maximum number of plans per event.
const MAX_PLANS_PER_EVENT: u32 = 8;

/// A process's chunk that is being moved.
type Chunk = relocation::Chunk<PieceId>;

/// State machine of a card's memory, with processes as users.
pub(super) type Machine = tenancy::Machine<SessionId, PieceId>;

/// Creates the state machine for the memory of an unused card.
pub(super) fn machine(config: &CardConfig) -> Machine {
    let residency = Residency::new(config.balance, config.quanta);
    let batch_chunks = (BATCH_BYTES / config.chunk_bytes).clamp(1, MAX_CHUNKS as u64) as usize;
    let (batches_most, batches_few) = (BATCHES_MOST, BATCHES_FEW);
    let answer_ns = config.patience_ns;
    let limits = Config { batch_chunks, batches_most, batches_few, answer_ns, force_ns: None };
    Machine::new(residency, limits)
}

impl Core {
    /// Plans and starts moves.
    pub(super) fn balance(&mut self) {
        self.follow_other_cards();
        self.take_quanta();
        self.machine.relocations.begin_round();
        self.put_in_place();
        // Reclaiming empty chunks frees memory without a copy.
        if !self.unmet.is_empty() && self.reclaim(None, None) {
            return self.relocate();
        }
        self.machine.relocations.begin_round();
        for _ in 0..MAX_PLANS_PER_EVENT {
            let steps = self.plan();
            if steps.is_empty() {
                break;
            }
            steps.into_iter().for_each(|step| self.begin(step));
            if !self.machine.relocations.submit(&self.table, self.clock) {
                break;
            }
        }
        self.relocate();
        let fixed = |tenant| self.tenants.get(&tenant).map_or(0, |known| known.fixed);
        self.machine.round_ended(&self.table, self.clock, Some(&fixed));
        self.carry_out_changes();
        self.renew_terms();
    }

    fn plan(&mut self) -> Vec<Step> {
        let now = self.clock;
        let promise = self.promise.filter(|_| self.deadlines.is_ahead(Deadline::Guarantee, now));
        let tenants: BTreeSet<_> = self.sessions.values().filter_map(|session| session.tenant).collect();
        let demand = Demand {
            unmet: std::mem::take(&mut self.unmet),
            // Memory evicted for a guarantee must not move back before the guarantee is granted.
            guarantee: promise,
            only_requests: false,
            // A single tenant's moves cannot delay other tenants.
            is_undisturbed: tenants.len() < 2,
        };
        self.machine.residency.plan(&self.table, now, demand).steps
    }

    /// Starts the move for a step, if that is possible now. If the memory is already at its destination, only updates
    /// the accounts.
    fn begin(&mut self, step: Step) {
        let Step { vm: tenant, index, .. } = step;
        let Some(body) = self.tenants.get(&tenant).and_then(|known| known.bodies.get(&index)) else { return };
        match (body, self.misplaced.get(&(tenant, index))) {
            // The driver has already placed this memory, so only update the accounts.
            (Body::Fixed, _) if step.to == vram::To::Card => drop(self.account_for(step)),
            // The piece is already at the destination.
            (Body::Chunk { .. }, Some(false)) => {
                if self.account_for(step) {
                    self.misplaced.remove(&(tenant, index));
                }
            }
            (Body::Fixed, _) | (Body::Chunk { .. }, Some(true)) | (Body::Chunk { pinned: true, .. }, None) => {}
            (&Body::Chunk { piece, .. }, None) => {
                let Some((id, chunk)) = body.only_user() else { return };
                let Some(session) = self.sessions.get(&id).filter(|session| session.takes_orders()) else { return };
                let to = if step.to == vram::To::Card { Tier::Card } else { Tier::Host };
                if !session.has_settled(chunk) || !self.machine.relocations.admits(id, to, self.clock) {
                    return;
                }
                let Ok(Some(moves)) = self.start(step) else { return };
                self.move_piece(id, Some(moves.id), (tenant, index), chunk, (piece, memory_of(moves.to)));
            }
        }
    }

    /// Adds a piece to the next order for the only process that uses it.
    fn move_piece(
        &mut self,
        session: SessionId,
        id: Option<vram::MoveId>,
        (tenant, index): (TenantId, u32),
        chunk: ChunkId,
        (from, memory): (PieceId, Memory),
    ) {
        let to = self.pieces.take_to_copy(memory, Receiver { tenant, session }, &mut self.actions);
        self.pieces.hold(from);
        let run_limit_ns = self.tenants.get(&tenant).and_then(|known| known.spec.time.max_run_ns);
        let is_missing = !self.pieces.is_ready(to);
        let tier = if memory == Memory::Device { Tier::Card } else { Tier::Host };
        let chunk = Chunk { id, tenant, index, position: chunk.0, from, to };
        self.machine.relocations.add(User { id: session, tenant, run_limit_ns }, tier, chunk, is_missing);
    }

    /// Updates the accounts for a piece that is already at its destination. Returns true on success.
    pub(super) fn account_for(&mut self, step: Step) -> bool {
        let Ok(Some(moves)) = self.start(step) else { return false };
        self.table.commit_move(moves.id);
        self.scrub();
        true
    }

    /// Starts moving misplaced pieces to the memory assigned to their chunks.
    fn put_in_place(&mut self) {
        let waiting: Vec<_> = self.misplaced.iter().filter(|(_, moves)| !**moves).map(|(&at, _)| at).collect();
        for (tenant, index) in waiting {
            let Some((from, memory)) = self.where_is(tenant, index) else { continue };
            let Some((id, chunk)) = self.body(tenant, index).and_then(|body| body.only_user()) else { continue };
            let (to, tier) =
                if memory == Memory::Device { (Memory::Host, Tier::Host) } else { (Memory::Device, Tier::Card) };
            // A process that already has an order gets these chunks with its next order.
            let takes_orders = self.sessions.get(&id).is_some_and(Session::takes_orders);
            if !takes_orders
                || self.machine.relocations.has_order(id)
                || !self.machine.relocations.admits(id, tier, self.clock)
            {
                continue;
            }
            self.move_piece(id, None, (tenant, index), chunk, (from, to));
            self.misplaced.insert((tenant, index), true);
        }
        self.machine.relocations.submit(&self.table, self.clock);
    }

    /// Calls [`vram::ChunkTable::start`], and retries it after a scrub if the destination must be scrubbed first.
    fn start(&mut self, step: Step) -> Result<Option<vram::Move>, Error> {
        match self.table.start(step) {
            Err(Error::NeedsScrub { .. }) if self.scrub() => self.table.start(step),
            other => other,
        }
    }

    /// Executes the pending actions of all relocations.
    pub(super) fn relocate(&mut self) {
        let mut given_up = Vec::new();
        while let Some(action) = self.machine.relocations.take_action() {
            match action {
                Action::Quiesce { user, tenant, order, decline_ns } => {
                    // Meanwhile, another tenant can have the turn.
                    self.pause_as_due(tenant);
                    let patience_us = u32::try_from(decline_ns / 1000).unwrap_or(u32::MAX);
                    self.send(user, FromOwner::Quiesce { order, patience_us });
                }
                // This action is never requested, because a process cannot be quiesced by force.
                Action::Force { .. } => {}
                Action::Copy { batch, chunks, to } => {
                    let pieces = chunks.iter().map(|chunk| (chunk.from, chunk.to)).collect();
                    self.actions.push(types::Action::Copy { batch: BatchId(batch), pieces, to: memory_in(to) });
                }
                Action::Remap { user, tenant, order, chunks, to, copied_ns } => {
                    self.note_copy(tenant, chunks.len() as u64 * self.config.chunk_bytes, to, copied_ns);
                    let place = super::said_place(memory_in(to));
                    let said = |chunk: &Chunk| cuda_protocol::Chunk { id: ChunkId(chunk.position), place };
                    let (moves, pieces) = (chunks.iter().map(said).collect(), chunks.iter().map(|c| c.to).collect());
                    let message = FromOwner::Redirect { order, moves };
                    self.actions.push(types::Action::Send { session: user, message, pieces });
                }
                Action::Ended { chunks, moved: true } => chunks.into_iter().for_each(|chunk| self.commit(chunk)),
                Action::Ended { chunks, moved: false } => chunks.into_iter().for_each(|chunk| self.give_back(chunk)),
                Action::Resume { user, tenant, order } => {
                    self.send(user, FromOwner::Resume { order });
                    self.has_stopped_moving(tenant);
                }
                Action::Cancelled { tenant, .. } => self.has_stopped_moving(tenant),
                Action::GiveUp { user, reason } => given_up.push((user, reason)),
            }
        }
        for (user, reason) in given_up {
            tracing::warn!(session = ?user, ?reason, "program does not execute orders about its memory");
            let silent = reason == relocation::Reason::Silent;
            self.stuck(user, if silent { Reason::Order } else { Reason::Declined });
        }
    }

    /// Handles the end of an order: resumes the tenant's turns, and requests a new plan.
    fn has_stopped_moving(&mut self, tenant: TenantId) {
        self.pause_as_due(tenant);
        self.needs_plan = true;
    }

    fn note_copy(&mut self, tenant: TenantId, bytes: u64, to: Tier, ns: u64) {
        self.machine.residency.moved(self.clock, bytes, ns);
        let (from, until) = (Nanos(self.clock.saturating_sub(ns)), Nanos(self.clock));
        let moved = MemoryMove { from, until, vgpu: tenant, bytes, to_card: to == Tier::Card };
        self.turns.with_turns(until, |turns| turns.note_move(moved));
    }

    pub(super) fn quiet(&mut self, id: SessionId, order: u32) {
        self.machine.relocations.quiet(&self.table, id, order);
        self.relocate();
    }

    pub(super) fn busy(&mut self, id: SessionId, order: u32) {
        self.machine.relocations.declined(self.clock, id, order);
        self.relocate();
    }

    pub(super) fn copied(&mut self, BatchId(batch): BatchId, done: bool, ns: u64) {
        self.machine.relocations.copied(&self.table, self.clock, batch, done, ns);
        self.relocate();
    }

    pub(super) fn redirected(&mut self, id: SessionId, order: u32, moved: u32) {
        let moved = |at| at < moved as usize;
        if self.machine.relocations.remapped(&self.table, self.clock, id, order, moved).is_err() {
            return self.end(id, cuda_protocol::End::Violation);
        }
        self.needs_plan = true;
        self.relocate();
    }

    /// Records the result of allocating a destination.
    pub(super) fn destination_made(&mut self, piece: PieceId, done: bool) {
        self.machine.relocations.made(&self.table, piece, done);
        self.relocate();
    }

    /// Cancels the order of a process that loses its memory.
    pub(super) fn abandon_relocation(&mut self, id: SessionId) {
        self.machine.relocations.cancel(id);
        self.relocate();
    }

    /// Records that a chunk is at its destination.
    fn commit(&mut self, chunk: Chunk) {
        let Chunk { id, tenant, index, from, to, .. } = chunk;
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
        if !gone && let Some(Body::Chunk { piece, .. }) = self.body(tenant, index) {
            *piece = to;
            // The chunk and the move each hold a reference to the piece.
            self.pieces.let_go(from, &mut self.actions);
        } else {
            self.pieces.let_go(to, &mut self.actions);
        }
        self.pieces.let_go(from, &mut self.actions);
    }

    /// Records that a chunk was not moved.
    fn give_back(&mut self, chunk: Chunk) {
        match chunk.id {
            Some(id) => self.table.abort_move(id),
            None => self.stays_misplaced(&chunk),
        }
        self.pieces.let_go(chunk.to, &mut self.actions);
        self.pieces.let_go(chunk.from, &mut self.actions);
    }

    /// Records that a piece could not be moved to the memory assigned to its chunk. The move is retried later.
    fn stays_misplaced(&mut self, chunk: &Chunk) {
        let at = (chunk.tenant, chunk.index);
        let is_it = self.where_is(at.0, at.1).is_some_and(|(piece, _)| piece == chunk.from);
        if let Some(moves) = self.misplaced.get_mut(&at).filter(|_| is_it) {
            *moves = false;
        }
        let user = self.body(at.0, at.1).and_then(|body| body.only_user());
        // The chunks of a disconnected process are released later.
        if let Some((session, _)) = user.filter(|(session, _)| self.sessions.contains_key(session)) {
            self.machine.relocations.postpone(session, self.clock);
        }
    }
}

/// Converts a tier into the driver's type.
fn memory_in(tier: Tier) -> Memory {
    match tier {
        Tier::Card => Memory::Device,
        Tier::Host => Memory::Host,
    }
}
