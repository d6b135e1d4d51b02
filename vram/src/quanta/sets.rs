//! Working sets of VMs, and the selection of VMs that must take turns.

use crate::TenantId;
use std::collections::BTreeMap;

/// Working set of an active VM, and the VM's weight for quanta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkingSet {
    /// Number of bytes that the VM uses and may have on the card, which is at most its quota.
    pub bytes: u64,
    /// Number of these bytes that stay on the card during other VMs' quanta, such as the guarantee.
    pub resident: u64,
    /// Weight of the VM's time, to which the length of its quanta is proportional.
    pub weight: u32,
}

impl WorkingSet {
    /// Returns a working set without a resident part, with the default weight.
    #[must_use]
    pub const fn movable(bytes: u64) -> Self {
        Self { bytes, resident: 0, weight: 100 }
    }

    /// Returns the number of bytes that can be evicted for other VMs' quanta.
    fn evictable(self) -> u64 {
        self.bytes.saturating_sub(self.resident)
    }
}

/// Working sets of the active VMs, and the memory available to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WorkingSets {
    /// Number of card bytes available to working sets.
    pub(super) capacity: u64,
    pub(super) by_vm: BTreeMap<TenantId, WorkingSet>,
}

impl WorkingSets {
    /// Returns true if all working sets fit together and leave `margin_permille` of the memory free.
    pub(super) fn fit(&self, margin_permille: u32) -> bool {
        self.sum() * 1000 <= u128::from(self.capacity) * u128::from(1000u32.saturating_sub(margin_permille))
    }

    /// Returns the VMs that must take turns, sorted by number. Omits VMs with a working set that stays entirely on the
    /// card. Unless `all` is true, also omits the VMs with the smallest working sets, as long as they fit on the card
    /// together with the largest remaining working set.
    pub(super) fn members(&self, all: bool) -> Vec<TenantId> {
        let evictable = self.by_vm.iter().map(|(&vm, set)| (set.evictable(), vm)).filter(|(bytes, _)| *bytes > 0);
        let mut sets: Vec<(u64, TenantId)> = evictable.collect();
        sets.sort_unstable();
        let mut aside = 0;
        if let Some(&(largest, _)) = sets.last().filter(|_| !all && !self.fit(0)) {
            let mut left = self.for_turns().saturating_sub(largest);
            let fits = |&&(bytes, _): &&(u64, TenantId)| left.checked_sub(bytes).inspect(|&rest| left = rest).is_some();
            aside = sets.iter().take_while(fits).count();
        }
        let mut members: Vec<TenantId> = sets.split_off(aside).into_iter().map(|(_, vm)| vm).collect();
        members.sort_unstable();
        members
    }

    /// Returns the number of bytes to copy when the turn changes. The part of the next working set that does not fit is
    /// returned to the card, and the same number of bytes is evicted.
    pub(super) fn change_bytes(&self, members: &[TenantId]) -> u128 {
        let largest = members.iter().filter_map(|vm| self.by_vm.get(vm)).map(|set| set.evictable()).max().unwrap_or(0);
        let missing = self.sum().saturating_sub(self.capacity.into());
        2 * u128::from(largest.min(self.for_turns())).min(missing)
    }

    /// Returns the length of a member's quantum, in ns. The lengths of all members have a mean of `mean_ns` and are
    /// proportional to their weights. If one length is outside `bounds`, all lengths are scaled. The upper bound takes
    /// priority.
    pub(super) fn quantum_ns(&self, members: &[TenantId], vm: TenantId, mean_ns: u64, bounds: (u64, u64)) -> u64 {
        let weight = |vm: &TenantId| u128::from(self.by_vm.get(vm).map_or(1, |set| set.weight.max(1)));
        let sum: u128 = members.iter().map(weight).sum();
        let least = members.iter().map(weight).min().unwrap_or(1);
        let most = members.iter().map(weight).max().unwrap_or(1);
        // Time per unit of weight, as a fraction.
        let (mut time, mut unit) = (u128::from(mean_ns) * members.len().max(1) as u128, sum.max(1));
        if time * least < u128::from(bounds.0) * unit {
            (time, unit) = (bounds.0.into(), least);
        }
        if time * most > u128::from(bounds.1) * unit {
            (time, unit) = (bounds.1.into(), most);
        }
        u64::try_from(time * weight(&vm) / unit).unwrap_or(u64::MAX)
    }

    /// Returns the number of card bytes for which VMs take turns.
    fn for_turns(&self) -> u64 {
        let resident = self.by_vm.values().fold(0, |sum: u64, set| sum.saturating_add(set.resident.min(set.bytes)));
        self.capacity.saturating_sub(resident)
    }

    fn sum(&self) -> u128 {
        self.by_vm.values().map(|set| u128::from(set.bytes)).sum()
    }
}
