//! Allocates, delivers, shares and frees the chunks of processes.

use super::sessions::Pending;
use super::types::{Action, PieceId, SessionId};
use super::{Body, Core, Pieces, Tenant, memory_of, said_place};
use cuda_pieces::Receiver;
use cuda_protocol::{Chunk, ChunkId, End, FromOwner, MAX_CHUNKS, Refusal};
use owner_driver::Memory;
use std::collections::BTreeMap;
use tenancy::{Deadline, Residency};
use vram::{Error, GuestVramAddr, Limit, OnFull, Place, TenantId};

/// Maximum time that an allocation of the quantum's tenant waits for the eviction of other tenants' memory, in ns.
/// After this time, the tenant gets the memory that is free.
// TIMEOUT: evicting the memory of a whole card takes less time.
pub(super) const ROOM_NS: u64 = 500_000_000;
/// Time in ns during which allocations do not wait for evictions, after such a wait has timed out.
const CROWDED_NS: u64 = 10_000_000_000;
/// Maximum number of bytes to evict beyond the size of an allocation that waits for evictions. A program that fills its
/// memory will soon request more, and tenants that wait for a quantum do not need their memory.
const AHEAD_BYTES: u64 = 1 << 30;
/// Maximum number of pieces being allocated for one tenant. This bounds the waiting time of other tenants' requests.
pub(super) const MAKING_MOST: u32 = 32;

impl Core {
    pub(super) fn allocate(&mut self, id: SessionId, tenant: TenantId, request: u32, card: u8, chunks: u32) {
        let reason = match () {
            () if card != 0 || chunks == 0 => Some(Refusal::Invalid),
            // The tenant soon gets the memory that is being released; see `waits_for_releases`. Other processes of the
            // tenant may have empty chunks.
            () if u64::from(chunks) > self.most(tenant) => Some(Refusal::Quota),
            () if u64::from(chunks) > self.left(tenant)
                && !self.waits_for_releases(self.clock)
                && !self.reclaim(Some(tenant), Some(id)) =>
            {
                Some(Refusal::Quota)
            }
            () => None,
        };
        if let Some(reason) = reason {
            return self.send(id, FromOwner::Refused { request, reason });
        }
        let since = self.clock;
        let (items, missing) = Default::default();
        let pending = Pending { request, wanted: chunks, items, delivered: 0, missing, since };
        if let Some(session) = self.sessions.get_mut(&id) {
            session.pending.push_back(pending);
        }
        if let Some(known) = self.tenants.get_mut(&tenant) {
            known.wanted += u64::from(chunks);
        }
        self.serve(id, tenant);
    }

    /// Returns the number of chunks that a tenant may still allocate: its limit minus the chunks in use or reserved for
    /// requests.
    pub(super) fn left(&self, tenant: TenantId) -> u64 {
        let most = self.most(tenant);
        most.saturating_sub(self.tenants.get(&tenant).map_or(0, |known| known.bodies.len() as u64 + known.wanted))
    }

    /// Assigns places to a process's requests, oldest first, and delivers their allocated chunks. Rejects requests that
    /// cannot be fulfilled. Stops at the first request that must wait, or at the event's work limit.
    pub(super) fn serve(&mut self, id: SessionId, tenant: TenantId) {
        let waits_for_others = !self.expected.is_empty();
        let mut at = 0;
        let next =
            |core: &Self, at| core.sessions.get(&id)?.pending.get(at).map(|pending| (pending.wanted, pending.since));
        let mut has_asked = false;
        'requests: while let Some((wanted, since)) = next(self, at) {
            let mut refusal = None;
            for left in (1..=wanted).rev() {
                if waits_for_others || self.waits_for_missing(tenant) || self.waits_for_room(tenant, left, since) {
                    break 'requests;
                }
                if self.tenants.get(&tenant).is_none_or(|known| known.making >= MAKING_MOST) {
                    // Allocate pieces for other tenants before the remaining pieces for this tenant. Each completed
                    // piece triggers the next order.
                    self.hungry.insert((tenant, id));
                    break 'requests;
                }
                if !self.may_work() {
                    self.unserved.insert(id);
                    break 'requests;
                }
                // Reclaim empty chunks before using host memory, because chunks in host memory would immediately move
                // to the card.
                if !has_asked && Residency::swaps_next(&self.table, tenant) {
                    has_asked = true;
                    if self.reclaim(None, Some(id)) {
                        break 'requests;
                    }
                }
                match self.place(tenant) {
                    Ok((index, place)) => self.occupy(id, tenant, at, index, place),
                    Err(None) => {
                        self.reclaim(None, Some(id));
                        break 'requests;
                    }
                    Err(Some(_)) if self.waits_for_releases(since) => break 'requests,
                    Err(Some(reason)) => {
                        let of = (reason == Refusal::Quota).then_some(tenant);
                        if reason != Refusal::Failed && self.reclaim(of, Some(id)) {
                            break 'requests;
                        }
                        refusal = Some(reason);
                        break;
                    }
                }
            }
            match refusal {
                Some(reason) => self.refuse(id, at, reason),
                None => at += 1,
            }
        }
        self.answer(id);
    }

    /// Returns true if chunks of the quantum's tenant must wait for the eviction of waiting tenants' memory, and starts
    /// that eviction. Moving the chunks later would require quiescing the program.
    fn waits_for_room(&mut self, tenant: TenantId, chunks: u32, since: u64) -> bool {
        let is_crowded = self.deadlines.is_ahead(Deadline::EvictionWait, self.clock);
        if is_crowded || !self.machine.residency.should_wait_for_room(&self.table, tenant) {
            return false;
        }
        if self.clock.saturating_sub(since) >= ROOM_NS {
            tracing::debug!(tenant = tenant.0, chunks, "memory of other tenants was not evicted in time");
            self.deadlines.set(Deadline::EvictionWait, self.clock + CROWDED_NS);
            return false;
        }
        let ahead = u32::try_from(AHEAD_BYTES / self.table.chunk_bytes()).unwrap_or(u32::MAX);
        let ahead = ahead.min(self.table.vms().find(|(vm, _)| *vm == tenant).map_or(0, |(_, own)| own.placed));
        let unmet = self.unmet.entry(tenant).or_default();
        *unmet = (*unmet).max(chunks.saturating_add(ahead));
        self.needs_plan = true;
        true
    }

    /// Allocates a place for a chunk at the tenant's lowest free index, and returns both. Returns `Err(None)` if no
    /// place is available now and the request may wait.
    pub(super) fn place(&mut self, tenant: TenantId) -> Result<(u32, Place), Option<Refusal>> {
        let known = self.tenants.get(&tenant).ok_or(Some(Refusal::Failed))?;
        let index = known.indices.lowest();
        if self.is_full(tenant) {
            return Err(Some(Refusal::Quota));
        }
        self.work(1);
        let address = self.table.guest_address(index);
        match self.try_place(tenant, address) {
            Ok(place) => {
                if let Place::Host(_) = place {
                    *self.unmet.entry(tenant).or_default() += 1;
                    self.needs_plan = true;
                }
                Ok((index, place))
            }
            Err(Error::Full { limit, .. }) => {
                *self.unmet.entry(tenant).or_default() += 1;
                self.needs_plan = true;
                let queues = self.table.limits(tenant).is_some_and(|limits| limits.on_full == OnFull::Queue);
                Err(match limit {
                    Limit::Quota(_) => Some(Refusal::Quota),
                    _ if queues => None,
                    _ => Some(Refusal::Exhausted),
                })
            }
            Err(_) => Err(Some(Refusal::Failed)),
        }
    }

    /// Like [`vram::ChunkTable::place`], but scrubs places first if that is necessary.
    pub(super) fn try_place(&mut self, tenant: TenantId, address: GuestVramAddr) -> Result<Place, Error> {
        loop {
            match self.table.place(tenant, address) {
                Ok(placed) => return Ok(placed.place),
                Err(Error::NeedsScrub { .. }) => {
                    if !self.scrub() {
                        return Err(Error::NeedsScrub { tier: vram::Tier::Card, short: 1 });
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Marks the places that need scrubbing as scrubbed, and returns true if there are any. These places have no piece,
    /// and get a new, zeroed piece on their next use.
    pub(super) fn scrub(&mut self) -> bool {
        let mut any = false;
        while let Some(work) = self.table.take_scrub_work() {
            self.table.scrubbed(work.place);
            any = true;
        }
        any
    }

    /// Allocates a piece for the next chunk of a request: the chunk with the given index and place.
    fn occupy(&mut self, id: SessionId, tenant: TenantId, at: usize, index: u32, place: Place) {
        let by = Receiver { tenant, session: id };
        let piece = self.pieces.take(memory_of(place), by, &mut self.actions);
        if let Place::Host(_) = place {
            // More requests that use host memory may follow, or the chunk may soon move to the card.
            self.deadlines.set(Deadline::Restock, self.clock + super::RESTOCK_NS);
        }
        let chunk = ChunkId(self.number());
        self.put(tenant, Body::for_user(piece, (id, chunk)), 1);
        let ready = self.pieces.is_ready(piece);
        if let Some(known) = self.tenants.get_mut(&tenant) {
            known.wanted -= 1;
        }
        let Some(pending) = self.sessions.get_mut(&id).and_then(|session| session.pending.get_mut(at)) else { return };
        pending.wanted -= 1;
        pending.items.push((chunk, index));
        if !ready {
            pending.missing.insert(piece);
            self.awaits(id, tenant, piece);
        }
    }

    /// Records that a process's request waits for a piece to be allocated.
    fn awaits(&mut self, id: SessionId, tenant: TenantId, piece: PieceId) {
        self.making.insert(piece, (id, tenant));
        if let Some(known) = self.tenants.get_mut(&tenant) {
            known.making += 1;
        }
    }

    /// Records that a request no longer waits for a piece. Returns the request's process and tenant.
    fn awaits_no_more(&mut self, piece: PieceId) -> Option<(SessionId, TenantId)> {
        let (id, tenant) = self.making.remove(&piece)?;
        if let Some(known) = self.tenants.get_mut(&tenant) {
            known.making -= 1;
        }
        Some((id, tenant))
    }

    /// Assigns `body` to the lowest free index of a tenant. The index already has a place.
    pub(super) fn put(&mut self, tenant: TenantId, body: Body, users: u64) {
        if let Some(known) = self.tenants.get_mut(&tenant) {
            let index = known.indices.take();
            known.fixed += u32::from(body.is_fixed());
            known.bodies.insert(index, body);
            known.users += users;
        }
    }

    /// Delivers the allocated chunks of each request of a process: full messages immediately, and the last message when
    /// all of the request's chunks are allocated.
    fn answer(&mut self, id: SessionId) {
        let mut at = 0;
        while let Some(session) = self.sessions.get_mut(&id) {
            let Some(pending) = session.pending.get_mut(at) else { return };
            let rest = &pending.items[pending.delivered..];
            // Skip the lookup in the common case that no piece is missing.
            let ready = if pending.missing.is_empty() {
                rest.len()
            } else {
                rest.iter()
                    .take(MAX_CHUNKS)
                    .take_while(|(_, index)| is_there(&self.tenants, &self.pieces, session.tenant, *index))
                    .count()
            };
            let last = pending.wanted == 0 && ready == rest.len() && ready <= MAX_CHUNKS;
            if !last && ready < MAX_CHUNKS {
                at += 1;
                continue;
            }
            let part: Vec<_> = rest.iter().take(MAX_CHUNKS).copied().collect();
            let request = pending.request;
            pending.delivered += part.len();
            session.chunks.extend(part.iter().copied());
            if last {
                session.pending.remove(at);
            }
            self.give(id, request, &part, !last);
        }
    }

    /// Sends at most [`MAX_CHUNKS`] allocated chunks to a process.
    pub(super) fn give(&mut self, id: SessionId, request: u32, part: &[(ChunkId, u32)], more: bool) {
        let Some(tenant) = self.sessions.get(&id).and_then(|session| session.tenant) else { return };
        self.work(part.len());
        let (mut chunks, mut pieces) = (Vec::new(), Vec::new());
        for &(chunk, index) in part {
            let Some((piece, memory)) = self.where_is(tenant, index) else { continue };
            chunks.push(Chunk { id: chunk, place: said_place(memory) });
            pieces.push(piece);
        }
        let message = FromOwner::Granted { request, chunks, more };
        self.actions.push(Action::Send { session: id, message, pieces });
    }

    /// Returns a chunk's piece and its memory (card or host).
    pub(super) fn where_is(&self, tenant: TenantId, index: u32) -> Option<(PieceId, Memory)> {
        let Body::Chunk { piece, .. } = self.tenants.get(&tenant)?.bodies.get(&index)? else { return None };
        Some((*piece, self.pieces.memory(*piece)?))
    }

    fn refuse(&mut self, id: SessionId, at: usize, reason: Refusal) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let (Some(tenant), Some(pending)) = (session.tenant, session.pending.remove(at)) else { return };
        let request = pending.request;
        self.withdraw(id, tenant, pending);
        self.send(id, FromOwner::Refused { request, reason });
    }

    /// Cancels a removed request. The process keeps the chunks that were already delivered until it frees them.
    pub(super) fn withdraw(&mut self, id: SessionId, tenant: TenantId, pending: Pending) {
        if let Some(known) = self.tenants.get_mut(&tenant) {
            known.wanted -= u64::from(pending.wanted);
        }
        for &piece in &pending.missing {
            self.awaits_no_more(piece);
        }
        let rest = pending.items.into_iter().skip(pending.delivered);
        self.release_later(id, tenant, rest.collect(), Vec::new());
    }

    /// Records the result of allocating a piece.
    pub(super) fn made(&mut self, piece: PieceId, memory: Option<Memory>) {
        if self.adopted(piece, memory) {
            return;
        }
        self.pieces.made(piece, memory.is_some(), &mut self.actions);
        self.destination_made(piece, memory.is_some());
        let Some((id, tenant)) = self.awaits_no_more(piece) else { return };
        if let Some(session) = self.sessions.get_mut(&id)
            && let Some(at) = session.pending.iter_mut().position(|pending| pending.missing.remove(&piece))
        {
            match memory {
                Some(_) => self.answer(id),
                None if self.begin_in_host(id, at, piece) => self.answer(id),
                None => self.refuse(id, at, Refusal::Exhausted),
            }
        }
        self.feed(tenant);
    }

    /// Serves a tenant's processes whose requests wait for pieces, until [`MAKING_MOST`] pieces are being allocated.
    fn feed(&mut self, tenant: TenantId) {
        let of_it = (tenant, SessionId(0))..=(tenant, SessionId(u64::MAX));
        while self.tenants.get(&tenant).is_some_and(|known| known.making < MAKING_MOST) {
            let Some(&(_, id)) = self.hungry.range(of_it.clone()).next() else { return };
            self.hungry.remove(&(tenant, id));
            self.serve(id, tenant);
        }
    }

    /// Moves a new chunk to host memory because the driver has no card memory for it: an abandoned process has not
    /// exited yet, or a tenant uses memory beyond its account. The chunk moves to the card when memory becomes free. If
    /// neither is the case, an unmanaged process uses the memory, and the function returns false.
    fn begin_in_host(&mut self, id: SessionId, at: usize, piece: PieceId) -> bool {
        let is_known = !self.given_up.is_empty() || self.is_past();
        if !is_known || self.pieces.memory(piece) != Some(Memory::Device) {
            return false;
        }
        let Some(session) = self.sessions.get(&id) else { return false };
        let (Some(tenant), Some(pending)) = (session.tenant, session.pending.get(at)) else { return false };
        // Only undelivered chunks can lack a piece. At most one message of chunks waits for delivery, in addition to
        // the chunks being allocated.
        let indices: Vec<u32> = pending.items[pending.delivered..].iter().map(|(_, index)| *index).collect();
        let of_it = |index: &u32| self.where_is(tenant, *index).is_some_and(|(other, _)| other == piece);
        let Some(index) = indices.into_iter().find(of_it) else { return false };
        let host = self.pieces.take(Memory::Host, Receiver { tenant, session: id }, &mut self.actions);
        if let Some(Body::Chunk { piece, .. }) = self.body(tenant, index) {
            *piece = host;
        }
        self.pieces.let_go(piece, &mut self.actions);
        self.misplaced.insert((tenant, index), false);
        let ready = self.pieces.is_ready(host);
        let pending = self.sessions.get_mut(&id).and_then(|session| session.pending.get_mut(at));
        if let Some(pending) = pending.filter(|_| !ready) {
            pending.missing.insert(host);
            self.awaits(id, tenant, host);
        }
        true
    }

    pub(super) fn free(&mut self, id: SessionId, tenant: TenantId, chunks: &[ChunkId]) {
        for &chunk in chunks {
            let index = self.sessions.get_mut(&id).and_then(|session| {
                session.adopted.remove(&chunk);
                session.chunks.remove(&chunk)
            });
            match index {
                Some(index) => self.release_user(tenant, index, (id, chunk)),
                None if self.free_adopting(id, chunk) => {}
                None => return self.end(id, End::Violation),
            }
        }
    }

    /// Records that a process has freed a chunk.
    pub(super) fn release_user(&mut self, tenant: TenantId, index: u32, user: (SessionId, ChunkId)) {
        self.work(1);
        let Some(known) = self.tenants.get_mut(&tenant) else { return };
        let last = match known.bodies.get_mut(&index) {
            Some(Body::Chunk { users, .. }) => {
                known.users -= u64::from(users.remove(&user));
                users.is_empty()
            }
            Some(Body::Fixed) => true,
            None => false,
        };
        if last {
            self.release_body(tenant, index);
        }
    }

    /// Releases one of a tenant's indices, its place, and its reference to a piece.
    pub(super) fn release_body(&mut self, tenant: TenantId, index: u32) {
        self.work(1);
        let Some(known) = self.tenants.get_mut(&tenant) else { return };
        let Some(body) = known.bodies.remove(&index) else { return };
        known.fixed = known.fixed.saturating_sub(u32::from(body.is_fixed()));
        known.indices.free(index);
        let address = self.table.guest_address(index);
        let _ = self.table.unplace(tenant, address);
        self.misplaced.remove(&(tenant, index));
        if let Body::Chunk { piece, .. } = body {
            self.pieces.let_go(piece, &mut self.actions);
        }
        self.needs_plan = true;
    }

    pub(super) fn ask_memory(&mut self, id: SessionId, tenant: TenantId, request: u32) {
        let total_bytes = self.most(tenant) * self.table.chunk_bytes();
        let limits = self.table.limits(tenant).unwrap_or_default();
        let account = self.table.vms().find(|(vm, _)| *vm == tenant).map(|(_, account)| account).unwrap_or_default();
        let mut chunks = account.unbacked;
        if limits.on_full == OnFull::Refuse {
            let card = self.table.spare() + account.guarantee.saturating_sub(account.placed);
            chunks = chunks.min(card).min(limits.quota.saturating_sub(account.placed));
        }
        let chunks = u64::from(chunks) + self.releasing(tenant);
        let free_bytes = chunks * self.table.chunk_bytes();
        self.send(id, FromOwner::Memory { request, free_bytes: free_bytes.min(total_bytes), total_bytes });
    }

    pub(super) fn body(&mut self, tenant: TenantId, index: u32) -> Option<&mut Body> {
        self.tenants.get_mut(&tenant)?.bodies.get_mut(&index)
    }

    /// Retries requests that wait for memory, starting after the most recently retried process.
    pub(super) fn retry_queued(&mut self) {
        let waits = |session: &super::Session| {
            !session.fixing.is_empty() || session.pending.iter().any(|pending| pending.wanted > 0)
        };
        let waiting = self.sessions.iter().filter(|(_, session)| waits(session));
        let mut waiting: Vec<_> = waiting.filter_map(|(&id, session)| Some((id, session.tenant?))).collect();
        self.work(self.sessions.len());
        let first = waiting.partition_point(|&(id, _)| id <= self.retried);
        waiting.rotate_left(first);
        for (id, tenant) in waiting {
            if !self.may_work() {
                self.needs_plan = true;
                return;
            }
            self.retried = id;
            if self.sessions.get(&id).is_some_and(|session| !session.fixing.is_empty()) {
                self.count_fixed(id, tenant);
            }
            self.serve(id, tenant);
        }
    }
}

/// Returns true if a chunk's piece has been allocated.
fn is_there(tenants: &BTreeMap<TenantId, Tenant>, pieces: &Pieces, tenant: Option<TenantId>, index: u32) -> bool {
    let body = tenant.and_then(|tenant| tenants.get(&tenant)?.bodies.get(&index));
    matches!(body, Some(Body::Chunk { piece, .. }) if pieces.is_ready(*piece))
}
