//! Memory that several processes of a tenant share. A process exports chunks under a token, and other processes open
//! the token.

use super::types::SessionId;
use super::{Body, Core};
use cuda_protocol::{ChunkId, FromOwner, MAX_CHUNKS, Refusal, Share};
use owner_host::Named;
use std::collections::BTreeSet;
use std::hash::BuildHasher as _;
use vram::TenantId;

/// Maximum number of chunk numbers of a tenant's processes, per chunk of the tenant's memory limit. A process gets a
/// number for each chunk that it allocates or opens.
const USERS_PER_CHUNK: u64 = 8;
/// Minimum value of the resulting limit, for tenants with little memory.
const USERS_MIN: u64 = 1 << 16;

impl Core {
    /// Returns true if a tenant's processes may get `more` additional chunk numbers.
    pub(super) fn may_use(&self, tenant: TenantId, more: u64) -> bool {
        let most = self.most_ever(tenant).saturating_mul(USERS_PER_CHUNK).max(USERS_MIN);
        self.tenants.get(&tenant).is_some_and(|known| known.users + more <= most)
    }

    pub(super) fn export(&mut self, id: SessionId, tenant: TenantId, request: u32, chunks: &[ChunkId]) {
        self.work(chunks.len());
        let refuse = |core: &mut Self, reason| core.send(id, FromOwner::Refused { request, reason });
        let Some(session) = self.sessions.get(&id) else { return };
        let indices: Option<Vec<u32>> = chunks.iter().map(|chunk| session.chunks.get(chunk).copied()).collect();
        // Several of the process's numbers may refer to the same chunk.
        let distinct = |indices: &Vec<u32>| indices.iter().collect::<BTreeSet<_>>().len() == indices.len();
        let Some(indices) = indices.filter(|indices| !indices.is_empty() && distinct(indices)) else {
            return refuse(self, Refusal::Invalid);
        };
        let moves = |&index: &u32| {
            self.table.is_moving(tenant, index) || self.misplaced.get(&(tenant, index)).is_some_and(|moves| *moves)
        };
        if indices.iter().any(moves) {
            return refuse(self, Refusal::Moving);
        }
        let named: Option<Vec<Named>> = indices.iter().map(|&index| self.named(tenant, index)).collect();
        // Chunks that were adopted without a descriptor are fixed memory, which this owner cannot export.
        let Some(named) = named else { return refuse(self, Refusal::Unsupported) };
        // Programs export a buffer each time they send it, so most exports repeat an earlier one.
        if let Some(share) = self.shares.token(tenant, &named) {
            return self.send(id, FromOwner::Shared { request, share });
        }
        let known = self.tenants.get(&tenant);
        let exists = |&(index, number): &Named| matches!(known.and_then(|known| known.bodies.get(&index)), Some(Body::Chunk { number: now, .. }) if *now == number);
        let looked_at = self.shares.sweep(tenant, exists);
        self.work(looked_at);
        if !self.shares.has_room(tenant, named.len()) {
            return refuse(self, Refusal::Exhausted);
        }
        for &index in &indices {
            let Some(known) = self.tenants.get_mut(&tenant) else { continue };
            if let Some(Body::Chunk { pinned, .. }) = known.bodies.get_mut(&index) {
                known.fixed += u32::from(!std::mem::replace(pinned, true));
            }
        }
        let (first, second) = (self.number(), self.number());
        let mut token = [0; 32];
        token[..8].copy_from_slice(&first.to_le_bytes());
        token[8..16].copy_from_slice(&second.to_le_bytes());
        // A token is useless to other tenants. A token is secret within the tenant too, because the tenant's programs
        // may belong to several users: a program can open memory only if it was given the token.
        for (part, keys) in token[16..].chunks_exact_mut(8).zip(&self.token_keys) {
            part.copy_from_slice(&keys.hash_one((first, second)).to_le_bytes());
        }
        self.shares.add(tenant, Share(token), named);
        self.send(id, FromOwner::Shared { request, share: Share(token) });
    }

    /// Returns the index and number of a chunk, or `None` if the index does not refer to a chunk.
    fn named(&self, tenant: TenantId, index: u32) -> Option<Named> {
        let Body::Chunk { number, .. } = self.tenants.get(&tenant)?.bodies.get(&index)? else { return None };
        Some((index, *number))
    }

    pub(super) fn open(&mut self, id: SessionId, tenant: TenantId, request: u32, share: Share) {
        let refuse = |core: &mut Self, reason| core.send(id, FromOwner::Refused { request, reason });
        let Some(named) = self.shares.chunks(tenant, share).cloned() else { return refuse(self, Refusal::Invalid) };
        self.work(named.len());
        if named.iter().any(|&(index, number)| self.named(tenant, index) != Some((index, number))) {
            return refuse(self, Refusal::Invalid);
        }
        if !self.may_use(tenant, named.len() as u64) {
            return refuse(self, Refusal::Exhausted);
        }
        let mut items = Vec::new();
        for (index, _) in named {
            let chunk = ChunkId(self.number());
            if let Some(&mut Body::Chunk { ref mut users, piece, .. }) = self.body(tenant, index) {
                users.insert((id, chunk));
                items.push((chunk, index));
                self.pieces.share(piece);
            }
        }
        if let Some(known) = self.tenants.get_mut(&tenant) {
            known.users += items.len() as u64;
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            session.chunks.extend(items.iter().copied());
        }
        let parts = items.chunks(MAX_CHUNKS);
        let last = parts.len().saturating_sub(1);
        for (number, part) in parts.enumerate() {
            self.give(id, request, part, number != last);
        }
    }
}
