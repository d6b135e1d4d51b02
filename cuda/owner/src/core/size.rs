//! Sizes that can change while programs run: each tenant's memory, and the host memory for chunks.

use super::{Core, SessionId, TenantError, TenantSpec};
use vram::{GuestVramAddr, Limits, Place, TenantId};

impl Core {
    /// Returns a tenant's memory limit, in chunks.
    pub(super) fn most(&self, tenant: TenantId) -> u64 {
        self.tenants.get(&tenant).map_or(0, |known| known.spec.memory_bytes) / self.table.chunk_bytes()
    }

    /// Returns the largest memory limit that a tenant has had, in chunks.
    pub(super) fn most_ever(&self, tenant: TenantId) -> u64 {
        self.table.vm_bytes(tenant).unwrap_or(0) / self.table.chunk_bytes()
    }

    /// Returns true if a tenant has reached its memory limit, or exceeds it because the limit was lowered.
    pub(super) fn is_full(&self, tenant: TenantId) -> bool {
        self.tenants.get(&tenant).is_none_or(|known| known.bodies.len() as u64 >= self.most(tenant))
    }

    /// Changes a tenant's memory limit and its limits on the card. Chunks beyond a reduced limit move to host memory,
    /// as after a quota reduction.
    pub(super) fn resize(&mut self, id: TenantId, spec: &TenantSpec) -> Result<(), TenantError> {
        let chunks = u32::try_from(spec.memory_bytes / self.table.chunk_bytes()).unwrap_or(u32::MAX);
        let quota = spec.limits.quota.min(chunks.max(spec.limits.guarantee));
        Ok(self.table.resize_vm(id, spec.memory_bytes, Limits { quota, ..spec.limits })?)
    }

    /// Returns the maximum number of chunks that a process may report to this owner. If the tenant's limit was lowered
    /// below its current use, a process that the previous owner served keeps its memory.
    pub(super) fn most_adopted(&self, id: SessionId, tenant: TenantId) -> u64 {
        let most = self.most(tenant);
        if self.is_expected(id) { most.max(self.whole_bytes() / self.table.chunk_bytes()) } else { most }
    }

    /// Places a chunk beyond its tenant's limit if the previous owner served the chunk's process. Returns `None` if
    /// this is not possible.
    pub(super) fn place_beyond(&mut self, id: SessionId, tenant: TenantId, address: GuestVramAddr) -> Option<Place> {
        if !self.is_expected(id) {
            return None;
        }
        let spec = self.tenants.get(&tenant)?.spec.clone();
        let limits = self.table.limits(tenant)?;
        self.table.resize_vm(tenant, self.whole_bytes().max(spec.memory_bytes), limits).ok()?;
        let place = self.try_place(tenant, address);
        if let Err(error) = self.resize(tenant, &spec) {
            tracing::error!(tenant = spec.name, %error, "the tenant's memory limit is not enforced");
        }
        place.ok()
    }

    /// Returns true if the previous owner served the process and the process has not reported all of its memory yet.
    fn is_expected(&self, id: SessionId) -> bool {
        self.sessions.get(&id).is_some_and(|session| self.expected.contains(&session.pid))
    }

    fn whole_bytes(&self) -> u64 {
        self.config.card_bytes.saturating_add(self.config.host_bytes)
    }

    /// Checks that the card's host memory suffices for all tenants' windows if tenant `number` has a window of `bytes`
    /// bytes.
    pub(super) fn check_windows(&self, number: u32, bytes: u64) -> Result<(), TenantError> {
        let others: u64 = self.windows().filter(|(id, _)| id.0 != number).map(|(_, bytes)| bytes).sum();
        match bytes == 0 || others.saturating_add(bytes) <= self.host_bytes {
            true => Ok(()),
            false => Err(TenantError::Window { bytes, others, host_bytes: self.host_bytes }),
        }
    }

    /// Sets the size of the host memory for chunks to the card's host memory minus the windows.
    pub(super) fn renew_host_budget(&mut self) {
        let windows: u64 = self.windows().map(|(_, bytes)| bytes).sum();
        let slots = self.host_bytes.saturating_sub(windows) / self.config.chunk_bytes;
        self.table.set_host_budget(u32::try_from(slots).unwrap_or(u32::MAX));
    }

    fn windows(&self) -> impl Iterator<Item = (TenantId, u64)> + '_ {
        self.tenants.iter().map(|(&id, tenant)| (id, tenant.spec.window_bytes))
    }
}
