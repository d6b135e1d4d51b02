//! Chunks of processes: asked for, given, shared and returned.

use super::sessions::Pending;
use super::types::{Action, PieceId, SessionId};
use super::{Body, Core, memory_of, on_card, said_place};
use crate::driver::Memory;
use cuda_protocol::{Chunk, ChunkId, End, FixedKind, FromOwner, MAX_CHUNKS, Refusal, Share};
use std::collections::BTreeSet;
use vram::{Error, GuestAddr, Limit, OnFull, Place, VmId as TenantId};

/// Longest wait of an allocation of the tenant whose quantum it is for others' memory to go, in ns; then it gets what there is.
// TIMEOUT: all of a card's memory changes hands in less.
const ROOM_NS: u64 = 500_000_000;
/// Time for which nobody waits for that after one has waited in vain, in ns.
const CROWDED_NS: u64 = 10_000_000_000;
/// Bytes that go beyond those of such an allocation, at most: a program that fills its memory asks for the next part soon, and
/// who is waiting for a quantum loses nothing by that.
const AHEAD_BYTES: u64 = 1 << 30;

impl Core {
    pub(super) fn allocate(&mut self, id: SessionId, tenant: TenantId, request: u32, card: u8, chunks: u32) {
        let reason = match () {
            () if card != 0 || chunks == 0 => Some(Refusal::Invalid),
            () if u64::from(chunks) > self.left(tenant) => Some(Refusal::Quota),
            () => None,
        };
        if let Some(reason) = reason {
            return self.send(id, FromOwner::Refused { request, reason });
        }
        let since = self.clock;
        let pending = Pending { request, wanted: chunks, items: Vec::new(), missing: BTreeSet::new(), since };
        if let Some(session) = self.sessions.get_mut(&id) {
            session.pending.push_back(pending);
        }
        self.serve(id, tenant);
    }

    /// Chunks that a tenant believes to have and that stand for nothing.
    fn left(&self, tenant: TenantId) -> u64 {
        let most = self.table.vm_bytes(tenant).unwrap_or(0) / self.table.chunk_bytes();
        most.saturating_sub(self.tenants.get(&tenant).map_or(0, |known| known.bodies.len() as u64))
    }

    /// Gives a process's requests their places, the oldest first, as far as there are some.
    fn serve(&mut self, id: SessionId, tenant: TenantId) {
        let waits_for_others = !self.expected.is_empty();
        let mut at = 0;
        let next =
            |core: &Self, at| core.sessions.get(&id)?.pending.get(at).map(|pending| (pending.wanted, pending.since));
        'requests: while let Some((wanted, since)) = next(self, at) {
            let mut refusal = None;
            for left in (1..=wanted).rev() {
                if waits_for_others || self.waits_for_room(tenant, left, since) {
                    break 'requests;
                }
                match self.place(tenant) {
                    Ok((index, place)) => self.occupy(id, tenant, at, index, place),
                    Err(None) => break 'requests,
                    Err(Some(reason)) => {
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

    /// Says if chunks of the tenant whose quantum it is wait until memory of those that wait for theirs has gone, and has that
    /// go. In host memory they would be used over the link, and moved at once, for which the program would have to be quiet.
    fn waits_for_room(&mut self, tenant: TenantId, chunks: u32, since: u64) -> bool {
        let Some(turn) = self.quanta.turn().filter(|turn| turn.holder == tenant) else { return false };
        let of = |id| self.table.vms().find(|(vm, _)| *vm == id).map(|(_, account)| account);
        let Some(own) = of(tenant) else { return false };
        let swaps = own.limits.on_full == OnFull::Swap && own.placed < own.limits.quota;
        let has_room = self.table.spare() > 0 || own.placed < own.guarantee;
        let others = turn.members.iter().filter(|&&member| member != tenant);
        let any_goes = others.filter_map(|&member| of(member)).any(|other| other.placed > other.guarantee);
        if !swaps || has_room || !any_goes || self.table.host_room() == 0 || self.clock < self.crowded_until {
            return false;
        }
        if self.clock.saturating_sub(since) >= ROOM_NS {
            tracing::debug!(tenant = tenant.0, chunks, "others' memory does not go in time");
            self.crowded_until = self.clock + CROWDED_NS;
            return false;
        }
        let ahead = u32::try_from(AHEAD_BYTES / self.table.chunk_bytes()).unwrap_or(u32::MAX).min(own.placed);
        let unmet = self.unmet.entry(tenant).or_default();
        *unmet = (*unmet).max(chunks.saturating_add(ahead));
        self.bell = true;
        true
    }

    /// A new chunk of a tenant: its index and its place. `Err(None)`: not now, but it may wait.
    pub(super) fn place(&mut self, tenant: TenantId) -> Result<(u32, Place), Option<Refusal>> {
        let known = self.tenants.get(&tenant).ok_or(Some(Refusal::Failed))?;
        let most = self.table.vm_bytes(tenant).unwrap_or(0) / self.table.chunk_bytes();
        // The lowest index that is free.
        let mut index = 0;
        for (&used, _) in known.bodies.range(..) {
            if used != index {
                break;
            }
            index += 1;
        }
        if u64::from(index) >= most {
            return Err(Some(Refusal::Quota));
        }
        let address = self.table.guest_address(index);
        match self.try_place(tenant, address) {
            Ok(place) => {
                if let Place::Host(_) = place {
                    *self.unmet.entry(tenant).or_default() += 1;
                    self.bell = true;
                }
                Ok((index, place))
            }
            Err(Error::Full { limit, .. }) => {
                *self.unmet.entry(tenant).or_default() += 1;
                self.bell = true;
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

    /// As [`vram::ChunkTable::place`], with what waits to be scrubbed scrubbed.
    pub(super) fn try_place(&mut self, tenant: TenantId, address: GuestAddr) -> Result<Place, Error> {
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

    /// Places without an owner have no piece any more, and get a new, zeroed one with their next: there is nothing in
    /// them to scrub.
    pub(super) fn scrub(&mut self) -> bool {
        let mut any = false;
        while let Some(work) = self.table.take_scrub_work() {
            self.table.scrubbed(work.place);
            any = true;
        }
        any
    }

    /// A request has got one more place.
    fn occupy(&mut self, id: SessionId, tenant: TenantId, at: usize, index: u32, place: Place) {
        let piece = self.pieces.take(memory_of(place), tenant, &mut self.actions);
        if let Place::Host(_) = place {
            // More of that may follow, or it moves to the card soon.
            self.moved_at = Some(self.clock);
        }
        let chunk = ChunkId(self.number());
        let body = Body::Chunk { piece, users: vec![(id, chunk)], pinned: false };
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.bodies.insert(index, body);
        }
        let ready = self.pieces.is_ready(piece);
        let Some(pending) = self.sessions.get_mut(&id).and_then(|session| session.pending.get_mut(at)) else { return };
        pending.wanted -= 1;
        pending.items.push((chunk, index));
        if !ready {
            pending.missing.insert(piece);
        }
    }

    /// Answers the requests of a process that have all that they want.
    fn answer(&mut self, id: SessionId) {
        while let Some(session) = self.sessions.get_mut(&id) {
            let complete = |pending: &Pending| pending.wanted == 0 && pending.missing.is_empty();
            let Some(at) = session.pending.iter().position(complete) else { return };
            let Some(Pending { request, items, .. }) = session.pending.remove(at) else { return };
            session.chunks.extend(items.iter().copied());
            self.give(id, request, &items);
        }
    }

    /// Tells a process of chunks that it has got.
    fn give(&mut self, id: SessionId, request: u32, items: &[(ChunkId, u32)]) {
        let Some(tenant) = self.sessions.get(&id).and_then(|session| session.tenant) else { return };
        let batches = items.chunks(MAX_CHUNKS);
        let last = batches.len().saturating_sub(1);
        for (number, batch) in batches.enumerate() {
            let (mut chunks, mut pieces) = (Vec::new(), Vec::new());
            for &(chunk, index) in batch {
                let Some((piece, memory)) = self.where_is(tenant, index) else { continue };
                chunks.push(Chunk { id: chunk, place: said_place(memory) });
                pieces.push(piece);
            }
            let message = FromOwner::Granted { request, chunks, more: number != last };
            self.actions.push(Action::Send { session: id, message, pieces });
        }
    }

    /// The piece of a chunk, and its memory.
    pub(super) fn where_is(&self, tenant: TenantId, index: u32) -> Option<(PieceId, Memory)> {
        let Body::Chunk { piece, .. } = self.tenants.get(&tenant)?.bodies.get(&index)? else { return None };
        Some((*piece, self.pieces.memory(*piece)?))
    }

    fn refuse(&mut self, id: SessionId, at: usize, reason: Refusal) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let (Some(tenant), Some(pending)) = (session.tenant, session.pending.remove(at)) else { return };
        for (chunk, index) in pending.items {
            self.release_user(tenant, index, (id, chunk));
        }
        self.send(id, FromOwner::Refused { request: pending.request, reason });
    }

    /// A piece exists, or could not be had.
    pub(super) fn made(&mut self, piece: PieceId, memory: Option<Memory>) {
        if self.adopted(piece, memory) {
            return;
        }
        let Some(tenant) = self.pieces.made(piece, memory.is_some(), &mut self.actions) else { return };
        self.destination_made(piece, memory.is_some());
        let sessions: Vec<_> = self.sessions_of(tenant).collect();
        for id in sessions {
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            let Some(at) = session.pending.iter_mut().position(|pending| pending.missing.remove(&piece)) else {
                continue;
            };
            match memory {
                Some(_) => self.answer(id),
                None if self.begin_in_host(id, at, piece) => self.answer(id),
                None => self.refuse(id, at, Refusal::Exhausted),
            }
        }
    }

    /// The driver has no memory of the card for a chunk that has its place there, since a process that was given up has not ended
    /// yet: the chunk begins in host memory, and is moved when there is some. False if no such process is there: then somebody
    /// uses the card past the owner.
    fn begin_in_host(&mut self, id: SessionId, at: usize, piece: PieceId) -> bool {
        if self.given_up.is_empty() || self.pieces.memory(piece) != Some(Memory::Device) {
            return false;
        }
        let Some(session) = self.sessions.get(&id) else { return false };
        let (Some(tenant), Some(pending)) = (session.tenant, session.pending.get(at)) else { return false };
        let indices: Vec<u32> = pending.items.iter().map(|(_, index)| *index).collect();
        let of_it = |index: &u32| self.where_is(tenant, *index).is_some_and(|(other, _)| other == piece);
        let Some(index) = indices.into_iter().find(of_it) else { return false };
        let host = self.pieces.take(Memory::Host, tenant, &mut self.actions);
        if let Some(Body::Chunk { piece, .. }) = self.body(tenant, index) {
            *piece = host;
        }
        self.pieces.let_go(piece, &mut self.actions);
        self.misplaced.insert((tenant, index), false);
        let ready = self.pieces.is_ready(host);
        let pending = self.sessions.get_mut(&id).and_then(|session| session.pending.get_mut(at));
        if let Some(pending) = pending.filter(|_| !ready) {
            pending.missing.insert(host);
        }
        true
    }

    pub(super) fn free(&mut self, id: SessionId, tenant: TenantId, chunks: &[ChunkId]) {
        for &chunk in chunks {
            let index = self.sessions.get_mut(&id).and_then(|session| session.chunks.remove(&chunk));
            match index {
                Some(index) => self.release_user(tenant, index, (id, chunk)),
                None if self.free_adopting(id, chunk) => {}
                None => return self.end(id, End::Violation),
            }
        }
    }

    /// A process does not have a chunk any more.
    pub(super) fn release_user(&mut self, tenant: TenantId, index: u32, user: (SessionId, ChunkId)) {
        let Some(known) = self.tenants.get_mut(&tenant) else { return };
        let last = match known.bodies.get_mut(&index) {
            Some(Body::Chunk { users, .. }) => {
                users.retain(|&other| other != user);
                users.is_empty()
            }
            Some(Body::Fixed) => true,
            None => false,
        };
        if last {
            self.release_body(tenant, index);
        }
    }

    /// An index of a tenant stands for nothing any more.
    pub(super) fn release_body(&mut self, tenant: TenantId, index: u32) {
        let Some(body) = self.tenants.get_mut(&tenant).and_then(|tenant| tenant.bodies.remove(&index)) else { return };
        let address = self.table.guest_address(index);
        let _ = self.table.unplace(tenant, address);
        self.misplaced.remove(&(tenant, index));
        if let Body::Chunk { piece, .. } = body {
            self.pieces.let_go(piece, &mut self.actions);
            self.shares.forget(tenant, index);
        }
        self.bell = true;
    }

    pub(super) fn fix(&mut self, id: SessionId, tenant: TenantId, request: u32, what: (u8, FixedKind, u64)) {
        let (card, kind, bytes) = what;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let sum = session.fixed.entry(kind).or_default();
        let Some(all) = sum.checked_add(bytes).filter(|_| card == 0) else {
            return self.send(id, FromOwner::Refused { request, reason: Refusal::Invalid });
        };
        *sum = all;
        if let Err(reason) = self.count_fixed(id, tenant) {
            self.unfix(id, tenant, kind, bytes);
            return self.send(id, FromOwner::Refused { request, reason: reason.unwrap_or(Refusal::Exhausted) });
        }
        self.send(id, FromOwner::Fixed { request });
    }

    pub(super) fn unfix(&mut self, id: SessionId, tenant: TenantId, kind: FixedKind, bytes: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let sum = session.fixed.entry(kind).or_default();
        *sum = sum.saturating_sub(bytes);
        // Less never fails.
        let _ = self.count_fixed(id, tenant);
    }

    /// Has as many indices stand for what is fixed on the card as that takes.
    fn count_fixed(&mut self, id: SessionId, tenant: TenantId) -> Result<(), Option<Refusal>> {
        let Some(session) = self.sessions.get(&id) else { return Ok(()) };
        let bytes = session.fixed.iter().filter(|(kind, _)| on_card(**kind));
        let bytes = bytes.fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let wanted = bytes.div_ceil(self.table.chunk_bytes());
        if wanted.saturating_sub(session.fixed_indices.len() as u64) > self.left(tenant) {
            return Err(Some(Refusal::Quota));
        }
        loop {
            let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
            let has = session.fixed_indices.len() as u64;
            if has > wanted {
                if let Some(index) = session.fixed_indices.pop() {
                    self.release_body(tenant, index);
                }
            } else if has < wanted {
                let (index, _) = self.place(tenant)?;
                if let Some(tenant) = self.tenants.get_mut(&tenant) {
                    tenant.bodies.insert(index, Body::Fixed);
                }
                if let Some(session) = self.sessions.get_mut(&id) {
                    session.fixed_indices.push(index);
                }
            } else {
                return Ok(());
            }
        }
    }

    pub(super) fn ask_memory(&mut self, id: SessionId, tenant: TenantId, request: u32) {
        let total_bytes = self.table.vm_bytes(tenant).unwrap_or(0);
        let limits = self.table.limits(tenant).unwrap_or_default();
        let account = self.table.vms().find(|(vm, _)| *vm == tenant).map(|(_, account)| account).unwrap_or_default();
        let mut chunks = account.unbacked;
        if limits.on_full == OnFull::Refuse {
            let card = self.table.spare() + account.guarantee.saturating_sub(account.placed);
            chunks = chunks.min(card).min(limits.quota.saturating_sub(account.placed));
        }
        let free_bytes = u64::from(chunks) * self.table.chunk_bytes();
        self.send(id, FromOwner::Memory { request, free_bytes: free_bytes.min(total_bytes), total_bytes });
    }

    pub(super) fn export(&mut self, id: SessionId, tenant: TenantId, request: u32, chunks: &[ChunkId]) {
        let Some(session) = self.sessions.get(&id) else { return };
        let indices: Option<Vec<u32>> = chunks.iter().map(|chunk| session.chunks.get(chunk).copied()).collect();
        let Some(indices) = indices.filter(|indices| !indices.is_empty()) else {
            return self.send(id, FromOwner::Refused { request, reason: Refusal::Invalid });
        };
        let refuse = if indices.iter().any(|&index| self.table.is_moving(tenant, index)) {
            Some(Refusal::Moving)
        } else if indices.iter().any(|&index| self.where_is(tenant, index).is_none()) {
            // It was shared under an owner before, and this one has no descriptor of it.
            Some(Refusal::Unsupported)
        } else {
            None
        };
        if let Some(reason) = refuse {
            return self.send(id, FromOwner::Refused { request, reason });
        }
        // Programs ask for each buffer that they send.
        if let Some(share) = self.shares.token(tenant, &indices) {
            return self.send(id, FromOwner::Shared { request, share });
        }
        if !self.shares.has_room(tenant) {
            return self.send(id, FromOwner::Refused { request, reason: Refusal::Exhausted });
        }
        for &index in &indices {
            if let Some(Body::Chunk { pinned, .. }) = self.body(tenant, index) {
                *pinned = true;
            }
        }
        let (first, second) = (self.number(), self.number());
        let mut token = [0; 32];
        token[..8].copy_from_slice(&first.to_le_bytes());
        token[8..16].copy_from_slice(&second.to_le_bytes());
        // A token opens nothing for another tenant, so it need not be secret.
        self.shares.add(tenant, Share(token), indices);
        self.send(id, FromOwner::Shared { request, share: Share(token) });
    }

    pub(super) fn open(&mut self, id: SessionId, tenant: TenantId, request: u32, share: Share) {
        let Some(indices) = self.shares.chunks(tenant, share).cloned() else {
            return self.send(id, FromOwner::Refused { request, reason: Refusal::Invalid });
        };
        let mut items = Vec::new();
        for index in indices {
            let chunk = ChunkId(self.number());
            if let Some(Body::Chunk { users, .. }) = self.body(tenant, index) {
                users.push((id, chunk));
                items.push((chunk, index));
            }
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            session.chunks.extend(items.iter().copied());
        }
        self.give(id, request, &items);
    }

    pub(super) fn body(&mut self, tenant: TenantId, index: u32) -> Option<&mut Body> {
        self.tenants.get_mut(&tenant)?.bodies.get_mut(&index)
    }

    /// Requests that wait for memory are tried again.
    pub(super) fn retry_queued(&mut self) {
        let waits = |session: &super::Session| session.pending.iter().any(|pending| pending.wanted > 0);
        let waiting: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, session)| waits(session))
            .filter_map(|(&id, session)| Some((id, session.tenant?)))
            .collect();
        for (id, tenant) in waiting {
            self.serve(id, tenant);
        }
    }
}
