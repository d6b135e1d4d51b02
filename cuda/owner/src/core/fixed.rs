//! Memory that is accounted for but cannot move, and memory that is released in batches.
//!
//! In both cases, one message may affect all chunks of a card. Each event performs a bounded part of the work, and the
//! next event continues it.

use super::memory::ROOM_NS;
use super::sessions::Session;
use super::types::SessionId;
use super::{Body, Core, WORK_AT_ONCE, on_card};
use cuda_protocol::{ChunkId, FixedKind, FromOwner, Refusal};
use std::collections::VecDeque;
use std::vec::IntoIter;
use vram::TenantId;

/// A request to charge fixed memory to the tenant.
#[derive(Debug)]
pub(super) struct Fixing {
    request: u32,
    kind: FixedKind,
    bytes: u64,
    /// Set if the bytes of this request have been added to the process's total.
    begun: bool,
    since: u64,
}

/// Memory to release after a process has exited or a request was rejected.
#[derive(Debug)]
pub(super) struct Release {
    id: SessionId,
    tenant: TenantId,
    /// The process's numbers for the chunks, with the chunks' indices.
    users: IntoIter<(ChunkId, u32)>,
    /// Indices of the fixed memory to release.
    fixed: IntoIter<u32>,
}

#[cfg(any(test, feature = "fuzz"))]
impl Release {
    /// Returns true if this release includes a process's number for a chunk.
    pub(super) fn has(&self, id: SessionId, chunk: ChunkId, index: u32) -> bool {
        self.id == id && self.users.as_slice().contains(&(chunk, index))
    }
}

/// Memory to release, oldest first.
pub(super) type Releases = VecDeque<Release>;

impl Core {
    pub(super) fn fix(&mut self, id: SessionId, tenant: TenantId, request: u32, what: (u8, FixedKind, u64)) {
        let (card, kind, bytes) = what;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let pending = session.fixing.iter().filter(|fixing| !fixing.begun).map(|fixing| fixing.bytes);
        let sum = session.fixed.values().copied().chain(pending).try_fold(bytes, u64::checked_add);
        if card != 0 || sum.is_none() {
            return self.send(id, FromOwner::Refused { request, reason: Refusal::Invalid });
        }
        session.fixing.push_back(Fixing { request, kind, bytes, begun: false, since: self.clock });
        self.count_fixed(id, tenant);
    }

    pub(super) fn unfix(&mut self, id: SessionId, tenant: TenantId, kind: FixedKind, bytes: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let sum = session.fixed.entry(kind).or_default();
        let less = bytes.min(*sum);
        *sum -= less;
        self.gave_back(tenant, kind, less);
        self.count_fixed(id, tenant);
    }

    /// Reserves or releases indices to match a process's fixed memory on the card, and replies to its requests in
    /// order. If this event reaches its work limit, the next event continues.
    pub(super) fn count_fixed(&mut self, id: SessionId, tenant: TenantId) {
        loop {
            let Some(session) = self.sessions.get_mut(&id) else { return };
            let has = session.fixed_indices.len() as u64;
            if let Some(head) = session.fixing.front_mut()
                && !head.begun
            {
                head.begun = true;
                *session.fixed.entry(head.kind).or_default() += head.bytes;
                let wanted = wanted(session, self.table.chunk_bytes());
                // Other processes of the tenant may have empty chunks that they can return.
                if wanted.saturating_sub(has) > self.left(tenant)
                    && !self.waits_for_releases(self.clock)
                    && !self.reclaim(Some(tenant), Some(id))
                {
                    self.refuse_fixed(id, Refusal::Quota);
                    continue;
                }
            }
            let Some(session) = self.sessions.get_mut(&id) else { return };
            let wanted = wanted(session, self.table.chunk_bytes());
            if has == wanted || (has < wanted && session.fixing.is_empty()) {
                let Some(Fixing { request, .. }) = session.fixing.pop_front() else { return };
                self.send(id, FromOwner::Fixed { request });
                continue;
            }
            let since = session.fixing.front().map_or(self.clock, |head| head.since);
            if self.spent >= WORK_AT_ONCE {
                self.uncounted.insert(id);
                return;
            }
            if has > wanted {
                if let Some(index) = session.fixed_indices.pop() {
                    self.release_body(tenant, index);
                }
                continue;
            }
            match self.place(tenant) {
                Ok((index, _)) => {
                    self.put(tenant, Body::Fixed, 0);
                    if let Some(session) = self.sessions.get_mut(&id) {
                        session.fixed_indices.push(index);
                    }
                }
                Err(_) if self.waits_for_releases(since) => {
                    self.uncounted.insert(id);
                    return;
                }
                Err(reason) => {
                    let of = (reason == Some(Refusal::Quota)).then_some(tenant);
                    if reason != Some(Refusal::Failed) && self.reclaim(of, Some(id)) {
                        // The request is retried after each reply and when the wait times out.
                        return;
                    }
                    self.refuse_fixed(id, reason.unwrap_or(Refusal::Exhausted));
                }
            }
        }
    }

    /// Rejects the oldest request for fixed memory, and subtracts its bytes from the process's total.
    fn refuse_fixed(&mut self, id: SessionId, reason: Refusal) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Some(Fixing { request, kind, bytes, .. }) = session.fixing.pop_front() else { return };
        let sum = session.fixed.entry(kind).or_default();
        *sum = sum.saturating_sub(bytes);
        self.send(id, FromOwner::Refused { request, reason });
    }

    /// Returns true if a request that arrived at `since` must wait instead of being rejected, because memory that it
    /// may need is being released.
    pub(super) fn waits_for_releases(&self, since: u64) -> bool {
        !self.releases.is_empty() && self.clock.saturating_sub(since) < ROOM_NS
    }

    /// Returns an upper bound on the number of a tenant's chunks being released.
    pub(super) fn releasing(&self, tenant: TenantId) -> u64 {
        let of_it = self.releases.iter().filter(|release| release.tenant == tenant);
        let bodies = self.tenants.get(&tenant).map_or(0, |known| known.bodies.len() as u64);
        of_it.map(|release| (release.users.len() + release.fixed.len()) as u64).sum::<u64>().min(bodies)
    }

    /// Releases a process's memory: as much as this event may release immediately, and the rest in later events.
    pub(super) fn release_later(
        &mut self,
        id: SessionId,
        tenant: TenantId,
        users: Vec<(ChunkId, u32)>,
        fixed: Vec<u32>,
    ) {
        self.releases.push_back(Release { id, tenant, users: users.into_iter(), fixed: fixed.into_iter() });
        self.release_some();
    }

    fn release_some(&mut self) {
        while let Some(mut release) = self.releases.pop_front() {
            // An exiting program closes its connection a little before it releases its memory.
            self.pieces.ends = true;
            while self.may_work() {
                if let Some((chunk, index)) = release.users.next() {
                    self.release_user(release.tenant, index, (release.id, chunk));
                } else if let Some(index) = release.fixed.next() {
                    self.release_body(release.tenant, index);
                } else {
                    break;
                }
            }
            self.pieces.ends = false;
            if release.users.len() + release.fixed.len() > 0 {
                // Serve the tenants in rotation.
                return self.releases.push_back(release);
            }
        }
        self.needs_plan = true;
    }

    /// Returns true if memory of the tenant is being released.
    pub(super) fn releases_of(&self, tenant: TenantId) -> bool {
        self.releases.iter().any(|release| release.tenant == tenant)
    }

    /// Continues work that earlier events deferred.
    pub(super) fn go_on_working(&mut self) {
        if !self.releases.is_empty() {
            self.release_some();
        }
        for id in std::mem::take(&mut self.uncounted) {
            if let Some(tenant) = self.sessions.get(&id).and_then(|session| session.tenant) {
                self.count_fixed(id, tenant);
            }
        }
        for id in std::mem::take(&mut self.unserved) {
            if let Some(tenant) = self.sessions.get(&id).and_then(|session| session.tenant) {
                self.serve(id, tenant);
            }
        }
    }

    /// Returns true if earlier events have left deferred work.
    pub(super) fn has_work(&self) -> bool {
        self.needs_plan || !self.releases.is_empty() || !self.uncounted.is_empty() || !self.unserved.is_empty()
    }
}

/// Returns the size of a process's fixed memory on the card, in chunks.
fn wanted(session: &Session, chunk_bytes: u64) -> u64 {
    let bytes = session.fixed.iter().filter(|(kind, _)| on_card(**kind)).map(|(_, bytes)| *bytes);
    bytes.fold(0, u64::saturating_add).div_ceil(chunk_bytes)
}
