//! Counts denied memory requests of guests, for operators.

use std::collections::{BTreeMap, BTreeSet};
use vram::{Limit, TenantId};

/// Number of denied memory requests, by VM and limit. Repeated requests for the same chunk count once.
#[derive(Clone, Debug, Default)]
pub struct Refusals {
    counts: BTreeMap<TenantId, BTreeMap<&'static str, u64>>,
    /// Chunks that still have no memory. They are recorded because a waiting VM requests the same chunk repeatedly.
    /// Their number is limited by the number of guest chunks.
    open: BTreeSet<(TenantId, u64)>,
}

impl Refusals {
    /// Records that a chunk, given as its VM and its index in the VM's memory, was denied memory.
    pub fn refused(&mut self, chunk: (TenantId, u64), limit: Limit) {
        if self.open.insert(chunk) {
            *self.counts.entry(chunk.0).or_default().entry(limit.name()).or_default() += 1;
        }
    }

    /// Records that a chunk has received memory.
    pub fn placed(&mut self, chunk: (TenantId, u64)) {
        self.open.remove(&chunk);
    }

    /// Removes the open requests of a VM whose guest was restarted.
    pub fn restart(&mut self, vm: TenantId) {
        self.open.retain(|(of, _)| *of != vm);
    }

    /// Removes all records of a VM that was removed.
    pub fn forget(&mut self, vm: TenantId) {
        self.restart(vm);
        self.counts.remove(&vm);
    }

    /// Returns the number of a VM's denied requests, by the name of the limit.
    #[must_use]
    pub fn counts_for(&self, vm: TenantId) -> BTreeMap<&'static str, u64> {
        self.counts.get(&vm).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_chunk_counts_once_until_placed() {
        let mut refusals = Refusals::default();
        let (vm, other) = (TenantId(1), TenantId(2));
        for _ in 0..3 {
            refusals.refused((vm, 7), Limit::Quota(4));
        }
        refusals.refused((vm, 8), Limit::SwapCap(2));
        refusals.refused((other, 7), Limit::Quota(4));
        assert_eq!(refusals.counts_for(vm), BTreeMap::from([("quota", 1), ("swap_cap", 1)]));
        refusals.placed((vm, 7));
        refusals.refused((vm, 7), Limit::HostBudget(9));
        assert_eq!(refusals.counts_for(vm)["host_budget"], 1);
        refusals.restart(vm);
        refusals.refused((vm, 7), Limit::HostBudget(9));
        assert_eq!(refusals.counts_for(vm)["host_budget"], 2);
        refusals.forget(vm);
        assert!(
            refusals.counts_for(vm).is_empty() && refusals.open.len() == 1 && refusals.counts_for(other)["quota"] == 1
        );
    }
}
