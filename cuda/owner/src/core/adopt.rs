//! Processes that outlived an owner. This owner adopts their chunks.

use super::types::{Action, PieceId, SessionId};
use super::{Body, Core};
use cuda_pieces::Receiver;
use cuda_protocol::{Adopted, ChunkId, End};
use owner_driver::Memory;
use std::collections::BTreeSet;
use tenancy::Deadline;
use vram::{Place, Step, TenantId, To};

impl Core {
    pub(super) fn adopt(
        &mut self,
        id: SessionId,
        tenant: TenantId,
        chunks: &[Adopted],
        more: bool,
        pieces: Vec<PieceId>,
    ) {
        self.work(chunks.len());
        let (most, unused) = (self.most_adopted(id, tenant), self.unused_numbers());
        let Some(session) = self.sessions.get_mut(&id) else { return self.drop_all(pieces) };
        let known = session.chunks.len() + session.adopting.len() + chunks.len();
        // A number identifies one chunk, and only this owner assigns new numbers.
        let mut named = BTreeSet::new();
        let is_new = |chunk: &Adopted| {
            named.insert(chunk.id)
                && !unused.contains(&chunk.id.0)
                && !session.chunks.contains_key(&chunk.id)
                && !session.adopting.contains_key(&chunk.id)
                && !session.pending.iter().any(|pending| pending.holds(chunk.id))
        };
        if !session.adopts || known as u64 > most || !chunks.iter().all(is_new) {
            self.drop_all(pieces);
            return self.end(id, End::Violation);
        }
        if !chunks.is_empty() && !session.fetching {
            self.deadlines.set(Deadline::Report(id), self.clock + self.config.patience_ns);
        }
        let mut pieces = pieces.into_iter();
        let mut fixed = Vec::new();
        for chunk in chunks {
            match chunk.descriptor.then(|| pieces.next()).flatten() {
                Some(piece) => {
                    session.adopting.insert(chunk.id, piece);
                    self.adopters.insert(piece, (id, chunk.id));
                    self.actions.push(Action::Import { piece });
                }
                // The chunk must not move, because another process shares it, or because the process could not keep a
                // descriptor.
                None => fixed.push(chunk.id),
            }
        }
        for chunk in fixed {
            let Ok((index, _)) = self.place(tenant) else { return self.end(id, End::Evicted) };
            self.put(tenant, Body::Fixed, 0);
            if let Some(session) = self.sessions.get_mut(&id) {
                session.chunks.insert(chunk, index);
                session.adopted.insert(chunk);
            }
        }
        if !more {
            if let Some(session) = self.sessions.get_mut(&id) {
                session.adopts = false;
            }
            self.deadlines.cancel(Deadline::Report(id));
            self.look_whether_adopted(id);
        }
    }

    /// Records that a piece of a process was mapped, or could not be mapped. Returns true if the piece belongs to an
    /// adoption.
    pub(super) fn adopted(&mut self, piece: PieceId, memory: Option<Memory>) -> bool {
        let Some((id, chunk)) = self.adopters.remove(&piece) else { return false };
        let Some(session) = self.sessions.get_mut(&id) else { return false };
        session.adopting.remove(&chunk);
        let Some(tenant) = session.tenant else { return false };
        let placed = memory.and_then(|memory| Some((memory, self.place_adopted(id, tenant, memory)?)));
        let Some((memory, index)) = placed else {
            self.drop_all(vec![piece]);
            self.end(id, End::Evicted);
            return true;
        };
        self.pieces.adopt(piece, memory, Receiver { tenant, session: id });
        self.put(tenant, Body::for_user(piece, (id, chunk)), 1);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.chunks.insert(chunk, index);
            session.adopted.insert(chunk);
        }
        self.look_whether_adopted(id);
        true
    }

    /// Allocates an index and a place for an adopted chunk. If the place cannot be in the chunk's memory (card or
    /// host), records that the chunk is misplaced, so that it is moved.
    fn place_adopted(&mut self, id: SessionId, tenant: TenantId, memory: Memory) -> Option<u32> {
        let index = self.tenants.get(&tenant)?.indices.lowest();
        let address = self.table.guest_address(index);
        let place = match self.is_full(tenant) {
            true => self.place_beyond(id, tenant, address)?,
            false => self.try_place(tenant, address).ok()?,
        };
        let to = match (place, memory) {
            (Place::Card(_), Memory::Device) | (Place::Host(_), Memory::Host) => return Some(index),
            (Place::Card(_), Memory::Host) => To::Host,
            (Place::Host(_), Memory::Device) => To::Card,
        };
        if !self.account_for(Step { vm: tenant, index, to }) {
            self.misplaced.insert((tenant, index), false);
            self.needs_plan = true;
        }
        Some(index)
    }

    /// Releases a chunk whose piece is being mapped. Returns true if the chunk existed.
    pub(super) fn free_adopting(&mut self, id: SessionId, chunk: ChunkId) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else { return false };
        let Some(piece) = session.adopting.remove(&chunk) else { return false };
        self.adopters.remove(&piece);
        self.drop_all(vec![piece]);
        self.look_whether_adopted(id);
        true
    }

    /// Completes the adoption of a process if the process is on the card and has reported all of its memory. After the
    /// last adoption, other processes may get memory.
    pub(super) fn look_whether_adopted(&mut self, id: SessionId) {
        if let Some(session) =
            self.sessions.get_mut(&id).filter(|session| !session.adopts && session.adopting.is_empty())
            && !session.fetching
        {
            let pid = session.pid;
            session.has_arrived(self.clock);
            self.actions.push(Action::Adopted { session: id });
            self.expected.remove(&pid);
            self.needs_plan |= self.expected.is_empty();
        }
    }
}
