//! Relocation, which controls the steps in which chunks move between the card and host memory.
//!
//! ```text
//! draft -> Quiesce -> quiet -> Copy -> copied -> Remap -> remapped -> Ended -> Resume
//! ```
//!
//! A *user* of memory is a process of a CUDA tenant, or a VM. It maps chunks, and is quiesced while they move. A user
//! has one order at a time. The order consists of batches: while the user remaps one batch, the next one is copied.
//! Orders of different users run concurrently, so that evictions of one user overlap with returns of another.
//!
//! A move takes effect only after its user has remapped the chunk. Otherwise, the chunk stays in place. A user that
//! declines an order gets no new order for some time, and its time limit for quiescing doubles. A user whose chunks
//! could not be copied also gets no order for some time. If a user does not quiesce, the executor forces it to, if
//! possible. A user that still does not quiesce is abandoned.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Debug;
use vram::{ChunkTable, MoveId, TenantId, Tier};

/// Time for which a user gets no new order after it has declined one or its chunks could not be moved, in ns.
pub const RETRY_NS: u64 = 500_000_000;
/// Time after which a user should decline instead of continuing to drain, in ns. This is the initial value, which
/// doubles with each declined order, up to 4/5 of [`Config::answer_ns`].
const QUIESCE_NS: u64 = 2_000_000_000;
/// Excess of declined over completed orders at which a user is abandoned, because it keeps memory from other users. The
/// user must also have been declining for at least as long as its work may run.
const MAX_DECLINES: u32 = 6;

/// Relocation limits.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Maximum number of chunks per batch. It is large enough for the link's full bandwidth, and small enough for
    /// memory to change owners quickly.
    pub batch_chunks: usize,
    /// Maximum number of concurrent batches per user.
    pub batches_most: usize,
    /// Number of batches in progress above which a user gets no new ones. Otherwise, a new batch would start whenever
    /// one ends, and batches would shrink to one chunk each.
    pub batches_few: usize,
    /// Time limit for a user's response, in ns.
    pub answer_ns: u64,
    /// Additional time during which the executor tries to force a user to quiesce, in ns, or `None` if the executor
    /// cannot force it.
    pub force_ns: Option<u64>,
}

/// A user of memory.
#[derive(Clone, Copy, Debug)]
pub struct User<U> {
    /// ID of the user.
    pub id: U,
    /// Tenant to which the user belongs.
    pub tenant: TenantId,
    /// Run time limit of the user's work in ns, or `None` if there is no limit. The work may prevent quiescence for
    /// this long.
    pub run_limit_ns: Option<u64>,
}

/// A chunk that moves between two backings of type `P`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk<P> {
    /// ID of the move in the chunk table, or `None` if the memory moves to the tier in which the table already counts
    /// its chunk.
    pub id: Option<MoveId>,
    /// Tenant that owns the chunk.
    pub tenant: TenantId,
    /// Index of the chunk in the tenant's memory.
    pub index: u32,
    /// Position among the user's chunks. Chunks at consecutive positions are remapped together.
    pub position: u64,
    /// Source backing.
    pub from: P,
    /// Destination backing.
    pub to: P,
}

/// Reason for abandoning a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The user did not respond in time.
    Silent,
    /// The user declined too many orders.
    Declines,
}

/// A step for the executor to execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<U, P> {
    /// Stop a user's work. The executor responds with [`Relocations::quiet`] or [`Relocations::declined`].
    Quiesce {
        /// User to quiesce.
        user: U,
        /// Tenant of the user.
        tenant: TenantId,
        /// Order number.
        order: u32,
        /// Time after which the user should decline, in ns.
        decline_ns: u64,
    },
    /// Force a user to quiesce, because it has not done so in time.
    Force {
        /// User to force.
        user: U,
    },
    /// Copy chunks. The executor responds with [`Relocations::copied`].
    Copy {
        /// Batch ID, repeated in the response.
        batch: u64,
        /// Chunks to copy.
        chunks: Vec<Chunk<P>>,
        /// Tier of the destinations.
        to: Tier,
    },
    /// Make a user use the copies of its chunks. The executor responds with [`Relocations::remapped`], in the order of
    /// these actions.
    Remap {
        /// User that remaps the chunks.
        user: U,
        /// Tenant of the user.
        tenant: TenantId,
        /// Order number.
        order: u32,
        /// Chunks to remap.
        chunks: Vec<Chunk<P>>,
        /// Tier of the destinations.
        to: Tier,
        /// Duration of the copy in ns.
        copied_ns: u64,
    },
    /// Moves of chunks have ended. Release the sources of chunks that moved, and the destinations of chunks that did
    /// not.
    Ended {
        /// Chunks whose moves have ended.
        chunks: Vec<Chunk<P>>,
        /// True if the chunks are now at their destinations.
        moved: bool,
    },
    /// An order is complete, so the user's work may resume.
    Resume {
        /// User to resume.
        user: U,
        /// Tenant of the user.
        tenant: TenantId,
        /// Order number.
        order: u32,
    },
    /// An order was cancelled, because its user declined it, ended, or was abandoned.
    Cancelled {
        /// User of the cancelled order.
        user: U,
        /// Tenant of the user.
        tenant: TenantId,
    },
    /// Abandon a user. [`Relocations::cancel`] or [`Relocations::forget`] then ends its order.
    GiveUp {
        /// User to abandon.
        user: U,
        /// Reason for abandoning the user.
        reason: Reason,
    },
}

/// Error for a response that does not match any request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unasked;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The batch's destinations are being allocated, or its user is not quiescent yet.
    Waiting,
    /// The batch is being copied.
    Copying(u64),
}

/// Chunks that move to the same tier together.
#[derive(Debug)]
struct Batch<P> {
    chunks: Vec<Chunk<P>>,
    to: Tier,
    /// Destinations that have not been allocated yet.
    missing: BTreeSet<P>,
    stage: Stage,
}

/// A user's order.
#[derive(Debug)]
struct Order<P> {
    number: u32,
    tenant: TenantId,
    quiet: bool,
    /// Batches that have not been copied yet.
    batches: VecDeque<Batch<P>>,
    /// Batches that the user is remapping, in the order in which they were sent. Copies may finish in another order.
    remapping: VecDeque<Vec<Chunk<P>>>,
    /// Time since which the order has been waiting for a response from the user, in ns.
    since: Option<u64>,
    /// True if the user has remapped all chunks that it was asked to remap.
    complied: bool,
    /// True if the user has declined a part of the order. Each order counts once.
    declined: bool,
}

impl<P> Order<P> {
    /// Returns the number of batches in progress.
    fn batches(&self) -> usize {
        self.batches.len() + self.remapping.len()
    }
}

/// History of a user's orders.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Number of the last order.
    order: u32,
    /// Counter that each declined order increments, and each completed order decrements down to 0.
    declines: u32,
    /// Time since which `declines` has been positive, in ns, or `None` if it is 0.
    declining_since: Option<u64>,
    /// Time before which the user gets no order, in ns.
    retry_at: u64,
    run_limit_ns: Option<u64>,
}

/// Chunks to be moved, each with a flag that is true if its destination has not been allocated yet.
type Draft<P> = Vec<(Chunk<P>, bool)>;

/// All relocations on a card. `U` identifies users of memory, and `P` identifies backing memory.
#[derive(Debug)]
pub struct Relocations<U, P> {
    config: Config,
    orders: BTreeMap<U, Order<P>>,
    records: BTreeMap<U, Record>,
    /// Chunks that the next [`Self::submit`] starts to move.
    drafts: BTreeMap<(U, Tier), Draft<P>>,
    /// Users that get no new batches in this planning round.
    full: BTreeSet<U>,
    /// Chunks of cancelled orders that are still being copied. Their memory stays in use until the copies finish.
    orphans: BTreeMap<u64, Vec<Chunk<P>>>,
    /// Number of orders per tenant.
    moving: BTreeMap<TenantId, usize>,
    actions: VecDeque<Action<U, P>>,
    batches: u64,
    moved: u64,
    declined: u64,
}

impl<U: Copy + Ord + Debug, P: Copy + Ord + Debug> Relocations<U, P> {
    /// Creates the state of a card on which no memory is moving.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let (orders, records, drafts, full, orphans, moving, actions) = Default::default();
        let (batches, moved, declined) = (0, 0, 0);
        Self { config, orders, records, drafts, full, orphans, moving, actions, batches, moved, declined }
    }

    /// Removes and returns the oldest pending action.
    pub fn take_action(&mut self) -> Option<Action<U, P>> {
        self.actions.pop_front()
    }

    /// Returns true if no user has an order.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.orders.is_empty()
    }

    /// Returns true if a user has an order.
    #[must_use]
    pub fn has_order(&self, user: U) -> bool {
        self.orders.contains_key(&user)
    }

    /// Returns true if a tenant's memory is moving.
    #[must_use]
    pub fn is_moving(&self, tenant: TenantId) -> bool {
        self.moving.contains_key(&tenant)
    }

    /// Returns true if a user currently gets no orders, because an earlier order failed.
    #[must_use]
    pub fn is_left_alone(&self, user: U, now: u64) -> bool {
        self.records.get(&user).is_some_and(|record| record.retry_at > now)
    }

    /// Returns the total number of chunks moved.
    #[must_use]
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Returns the total number of orders that were declined.
    #[must_use]
    pub fn declined_orders(&self) -> u64 {
        self.declined
    }

    /// Starts a planning round. Users with many batches in progress get no new ones in this round.
    pub fn begin_round(&mut self) {
        let few = self.config.batches_few;
        self.full = self.orders.iter().filter(|(_, order)| order.batches() > few).map(|(&user, _)| user).collect();
    }

    /// Returns true if another chunk of a user can start to move to a tier.
    #[must_use]
    pub fn admits(&self, user: U, to: Tier, now: u64) -> bool {
        if self.is_left_alone(user, now) {
            return false;
        }
        let chunks = |tier| self.drafts.get(&(user, tier)).map_or(0, Vec::len);
        if chunks(to) % self.config.batch_chunks != 0 {
            return true;
        }
        let drafts: usize =
            [Tier::Card, Tier::Host].into_iter().map(|tier| chunks(tier).div_ceil(self.config.batch_chunks)).sum();
        let batches = self.orders.get(&user).map_or(0, Order::batches);
        batches + drafts < self.config.batches_most && !self.full.contains(&user)
    }

    /// Adds a chunk to the moves that the next [`Self::submit`] starts, after [`Self::admits`] has returned true.
    /// `is_missing` is true if the destination has not been allocated yet. The executor then reports its allocation
    /// through [`Self::made`].
    pub fn add(&mut self, user: User<U>, to: Tier, chunk: Chunk<P>, is_missing: bool) {
        self.records.entry(user.id).or_default().run_limit_ns = user.run_limit_ns;
        self.drafts.entry((user.id, to)).or_default().push((chunk, is_missing));
    }

    /// Starts the moves of the added chunks. Returns true if there were any.
    pub fn submit(&mut self, table: &ChunkTable, now: u64) -> bool {
        let drafts = std::mem::take(&mut self.drafts);
        let started = !drafts.is_empty();
        for ((user, to), mut draft) in drafts {
            draft.sort_unstable_by_key(|(chunk, _)| chunk.position);
            let batch = |draft: &[(Chunk<P>, bool)]| Batch {
                chunks: draft.iter().map(|(chunk, _)| *chunk).collect(),
                to,
                missing: draft.iter().filter(|(_, missing)| *missing).map(|(chunk, _)| chunk.to).collect(),
                stage: Stage::Waiting,
            };
            let batches: Vec<_> = draft.chunks(self.config.batch_chunks).map(batch).collect();
            let Some((first, _)) = draft.first() else { continue };
            self.order(user, first.tenant, now).extend(batches);
            self.advance(user, table);
        }
        started
    }

    /// Returns the batches of a user's order, creating the order if necessary.
    fn order(&mut self, user: U, tenant: TenantId, now: u64) -> &mut VecDeque<Batch<P>> {
        let order = self.orders.entry(user).or_insert_with(|| {
            let record = self.records.entry(user).or_default();
            record.order = record.order.wrapping_add(1);
            *self.moving.entry(tenant).or_default() += 1;
            // Each declined order extends the time until a user should decline. However, it stays below the time limit
            // for the user's response.
            let longest = self.config.answer_ns / 5 * 4;
            let decline_ns = (QUIESCE_NS << record.declines.min(8)).min(longest);
            let number = record.order;
            tracing::debug!(?user, order = number, "quiescing a user of memory");
            self.actions.push_back(Action::Quiesce { user, tenant, order: number, decline_ns });
            let (batches, remapping) = Default::default();
            Order {
                number,
                tenant,
                quiet: false,
                batches,
                remapping,
                since: Some(now),
                complied: true,
                declined: false,
            }
        });
        &mut order.batches
    }

    /// Records that a user is quiescent.
    pub fn quiet(&mut self, table: &ChunkTable, user: U, order: u32) {
        let Some(known) = self.orders.get_mut(&user).filter(|known| known.number == order) else { return };
        (known.quiet, known.since) = (true, None);
        self.advance(user, table);
    }

    /// Records that a user has declined to quiesce and continues its work.
    pub fn declined(&mut self, now: u64, user: U, order: u32) {
        let declines = self.orders.get(&user).is_some_and(|known| known.number == order && !known.quiet);
        if declines {
            self.declined += 1;
            self.cancel(user);
            self.decline(now, user);
        }
    }

    /// Records the end of a destination's allocation. If `done` is false, the allocation failed, and the chunk does not
    /// move.
    pub fn made(&mut self, table: &ChunkTable, piece: P, done: bool) {
        let waits = |order: &Order<P>| order.batches.iter().any(|batch| batch.missing.contains(&piece));
        let Some((&user, order)) = self.orders.iter_mut().find(|(_, order)| waits(order)) else { return };
        let mut lost = Vec::new();
        for batch in &mut order.batches {
            if batch.missing.remove(&piece) && !done {
                lost.extend(batch.chunks.extract_if(.., |chunk| chunk.to == piece));
            }
        }
        order.batches.retain(|batch| !batch.chunks.is_empty());
        // Memory may become free at any time, so the next plan may try again.
        self.end(lost, false);
        self.advance(user, table);
    }

    /// Records that a copy has finished (successfully or not) after `ns` ns.
    pub fn copied(&mut self, table: &ChunkTable, now: u64, number: u64, done: bool, ns: u64) {
        if let Some(chunks) = self.orphans.remove(&number) {
            return self.end(chunks, false);
        }
        let is_it = |batch: &Batch<P>| batch.stage == Stage::Copying(number);
        let Some((&user, order)) = self.orders.iter_mut().find(|(_, order)| order.batches.iter().any(is_it)) else {
            return;
        };
        let at = order.batches.iter().position(is_it);
        let Some(Batch { chunks, to, .. }) = at.and_then(|at| order.batches.remove(at)) else { return };
        if !done {
            // A failed copy would usually fail again.
            self.postpone(user, now);
            self.end(chunks, false);
            return self.advance(user, table);
        }
        order.since = Some(now);
        order.remapping.push_back(chunks.clone());
        let (tenant, order) = (order.tenant, order.number);
        tracing::debug!(?user, order, chunks = chunks.len(), ?to, us = ns / 1000, "copied chunks");
        self.actions.push_back(Action::Remap { user, tenant, order, chunks, to, copied_ns: ns });
    }

    /// Records that a user has processed the oldest [`Action::Remap`]. `moved` returns true for the chunks that were
    /// remapped, given their position in the action.
    ///
    /// # Errors
    /// Returns an error if the user has no chunks to remap.
    pub fn remapped(
        &mut self,
        table: &ChunkTable,
        now: u64,
        user: U,
        order: u32,
        moved: impl Fn(usize) -> bool,
    ) -> Result<(), Unasked> {
        let Some(known) = self.orders.get_mut(&user).filter(|known| known.number == order) else { return Ok(()) };
        let chunks = known.remapping.pop_front().ok_or(Unasked)?;
        known.since = (!known.remapping.is_empty()).then_some(now);
        let (there, rest): (Vec<_>, Vec<_>) = chunks.into_iter().enumerate().partition(|(at, _)| moved(*at));
        let is_whole = rest.is_empty();
        known.complied &= is_whole;
        let declines = !is_whole && !std::mem::replace(&mut known.declined, !is_whole);
        let chunks = |list: Vec<(usize, Chunk<P>)>| list.into_iter().map(|(_, chunk)| chunk).collect();
        self.end(chunks(there), true);
        self.end(chunks(rest), false);
        if declines {
            // The user cannot remap chunks now, usually because it is about to end. Immediately copying them again
            // would not help.
            self.decline(now, user);
        }
        self.advance(user, table);
        Ok(())
    }

    /// Forces users whose responses are overdue to quiesce, or abandons them.
    pub fn tick(&mut self, now: u64) {
        let Config { answer_ns, force_ns, .. } = self.config;
        for (&user, order) in &mut self.orders {
            let Some(late) = order.since.and_then(|since| now.saturating_sub(since).checked_sub(answer_ns)) else {
                continue;
            };
            if !order.quiet && force_ns.is_some_and(|force_ns| late < force_ns) {
                self.actions.push_back(Action::Force { user });
                continue;
            }
            // The executor must react only once to a late response.
            order.since = None;
            self.records.entry(user).or_default().retry_at = now.saturating_add(RETRY_NS);
            self.actions.push_back(Action::GiveUp { user, reason: Reason::Silent });
        }
    }

    /// Cancels a user's order. The memory of copies in progress is released after they finish.
    pub fn cancel(&mut self, user: U) {
        let Some(order) = self.orders.remove(&user) else { return };
        for batch in order.batches {
            match batch.stage {
                Stage::Copying(number) => drop(self.orphans.insert(number, batch.chunks)),
                Stage::Waiting => self.end(batch.chunks, false),
            }
        }
        order.remapping.into_iter().for_each(|chunks| self.end(chunks, false));
        self.is_done(order.tenant);
        self.actions.push_back(Action::Cancelled { user, tenant: order.tenant });
    }

    /// Removes all state of a user that has ended.
    pub fn forget(&mut self, user: U) {
        self.cancel(user);
        self.records.remove(&user);
    }

    /// Suspends a user's orders for some time, because a chunk could not be moved.
    pub fn postpone(&mut self, user: U, now: u64) {
        let record = self.records.entry(user).or_default();
        record.retry_at = record.retry_at.max(now.saturating_add(RETRY_NS));
    }

    /// Starts the copies of all batches that are ready, and ends the order if no batch remains.
    fn advance(&mut self, user: U, table: &ChunkTable) {
        let Some(order) = self.orders.get_mut(&user).filter(|order| order.quiet) else { return };
        // Chunks that the user has freed in the meantime do not need a copy.
        let mut freed = Vec::new();
        for batch in order.batches.iter_mut().filter(|batch| batch.stage == Stage::Waiting) {
            for chunk in batch.chunks.extract_if(.., |chunk| chunk.id.is_some_and(|id| table.is_gone(id))) {
                batch.missing.remove(&chunk.to);
                freed.push(chunk);
            }
        }
        order.batches.retain(|batch| !batch.chunks.is_empty());
        for batch in &mut order.batches {
            if batch.stage == Stage::Waiting && batch.missing.is_empty() {
                self.batches += 1;
                batch.stage = Stage::Copying(self.batches);
                let chunks = batch.chunks.clone();
                self.actions.push_back(Action::Copy { batch: self.batches, chunks, to: batch.to });
            }
        }
        let (is_done, number, tenant, complied) = (order.batches() == 0, order.number, order.tenant, order.complied);
        self.end(freed, false);
        if is_done {
            self.orders.remove(&user);
            if complied {
                self.comply(user);
            }
            self.is_done(tenant);
            tracing::debug!(?user, order = number, "resuming a user of memory");
            self.actions.push_back(Action::Resume { user, tenant, order: number });
        }
    }

    /// Ends the moves of chunks.
    fn end(&mut self, chunks: Vec<Chunk<P>>, moved: bool) {
        if !chunks.is_empty() {
            self.moved += if moved { chunks.len() as u64 } else { 0 };
            self.actions.push_back(Action::Ended { chunks, moved });
        }
    }

    /// Records that one of a tenant's orders has ended.
    fn is_done(&mut self, tenant: TenantId) {
        if let Some(orders) = self.moving.get_mut(&tenant) {
            *orders -= 1;
            if *orders == 0 {
                self.moving.remove(&tenant);
            }
        }
    }

    /// Suspends the orders of a user that has declined an order or a part of it. A user that declines too many orders
    /// is abandoned.
    fn decline(&mut self, now: u64, user: U) {
        let answer_ns = self.config.answer_ns;
        let record = self.records.entry(user).or_default();
        record.retry_at = now.saturating_add(RETRY_NS);
        record.declines = record.declines.saturating_add(1);
        let since = *record.declining_since.get_or_insert(now);
        // Work may prevent quiescence for up to its run time limit.
        let Some(longest) = record.run_limit_ns.map(|limit| limit.max(answer_ns)) else { return };
        if record.declines >= MAX_DECLINES && now.saturating_sub(since) >= longest {
            self.actions.push_back(Action::GiveUp { user, reason: Reason::Declines });
        }
    }

    /// Records that a user has completed an order.
    fn comply(&mut self, user: U) {
        let Some(record) = self.records.get_mut(&user) else { return };
        record.declines = record.declines.saturating_sub(1);
        if record.declines == 0 {
            record.declining_since = None;
        }
    }
}

#[cfg(test)]
mod tests;
