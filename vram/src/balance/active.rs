//! Active VMs and their working sets.

use super::Balancer;
use super::plan::Round;
use crate::quanta::WorkingSet;
use crate::{ChunkTable, TenantId};
use std::collections::BTreeMap;

/// VMs that have submitted work or requested memory in the last
/// [`Config::idle_after_ns`](super::Config::idle_after_ns).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActiveVms {
    /// Working sets of the active VMs.
    pub sets: BTreeMap<TenantId, WorkingSet>,
    /// Time since each VM last had work, in ns. VMs with work have no entry.
    pub idle: BTreeMap<TenantId, u64>,
}

impl Balancer {
    /// Returns the active VMs and their working sets, for the thrash detector. `weight` returns a VM's time weight.
    ///
    /// A working set is the memory that a VM uses, up to its quota. The part within the VM's guarantee is always
    /// resident. If a VM's quota is below its use and at most its fair share, the VM already has its maximum. A quantum
    /// would not help such a VM, so its whole working set counts as resident.
    #[must_use]
    pub fn active_vms(&self, table: &ChunkTable, now_ns: u64, weight: impl Fn(TenantId) -> u32) -> ActiveVms {
        let bytes = table.chunk_bytes();
        let round = Round::new(table, 0);
        let idles = |vm| self.has_rested(vm, now_ns);
        let shares = self.shares_of(&round, table.for_vms(), None, idles);
        let mut active = ActiveVms::default();
        for (at, (vm, account)) in table.vms().enumerate() {
            let Some(&last) = self.active.get(&vm).filter(|_| !self.has_rested(vm, now_ns)) else { continue };
            let used = account.placed + account.parked + account.host;
            let chunks = used.min(account.limits.quota);
            let is_satisfied = used > chunks && shares.floor(at) >= chunks;
            let resident = if is_satisfied { chunks } else { chunks.min(account.guarantee) };
            let [set, resident] = [chunks, resident].map(|chunks| u64::from(chunks) * bytes);
            active.sets.insert(vm, WorkingSet { bytes: set, resident, weight: weight(vm) });
            let since = now_ns.saturating_sub(last);
            if since > 0 {
                active.idle.insert(vm, since);
            }
        }
        active
    }
}
