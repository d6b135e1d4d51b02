//! VMs that wait for card memory, the mediator's own needs, and the number of the mover's scans.
//!
//! A wait is limited not by time, but by the number of scans in which the mover finds no memory to move for the VM. If
//! a busy host delays the scans, it also delays the end of the wait.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vram::TenantId;

/// Number of chunks to keep free for the mediator's own structures, in addition to known needs of VMs. A guest's next
/// channel or page table must not have to wait because other guests' memory fills the card.
pub(crate) const RESERVED_CHUNKS: u32 = 2;
/// Interval between the mover's scans while a VM waits. Scans that follow sooner are not counted.
pub const SCAN_INTERVAL: Duration = Duration::from_millis(50);
/// Size of a VM's first page tables in bytes, for two address spaces.
pub const FIRST_BYTES: u64 = 1 << 20;
/// Maximum number of chunks that one VM's page tables may wait for, which is the limit of a pool.
const MAX_TABLE_CHUNKS_PER_VM: u32 = 1 << 10;

/// Counters of the mover's scans for a waiting VM. They never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looks {
    /// Number of scans that moved memory for the VM.
    pub useful: u64,
    /// Number of scans that found no memory to move for the VM.
    pub vain: u64,
}

impl Looks {
    /// Returns the number of unsuccessful scans that `limit` permits: at least one if memory on this card can move
    /// (`moves`).
    fn max_unsuccessful(limit: Duration, moves: bool) -> u64 {
        let looks = limit.as_nanos().div_ceil(SCAN_INTERVAL.as_nanos());
        u64::try_from(looks).unwrap_or(u64::MAX).max(u64::from(moves))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    looks: Looks,
    /// Time at which an unsuccessful scan was last counted, in ns.
    vain_ns: Option<u64>,
}

/// VMs' waits for card memory, and the mediator's own needs.
#[derive(Debug, Default)]
pub struct Wants {
    /// Number of unused chunks reserved for each VM's first page tables.
    first: BTreeMap<TenantId, u32>,
    /// Number of chunks that each VM's page tables wait for.
    tables: BTreeMap<TenantId, u32>,
    /// VMs whose work waits for card memory.
    waiting: BTreeSet<TenantId>,
    seen: BTreeMap<TenantId, Seen>,
}

impl Wants {
    /// Admits a VM whose first page tables need `chunks` chunks.
    pub fn admit(&mut self, vm: TenantId, chunks: u32) {
        self.first.insert(vm, chunks);
    }

    /// Removes all records of a VM that was removed.
    pub fn forget(&mut self, vm: TenantId) {
        self.first.remove(&vm);
        self.set_waits(vm, false);
        self.seen.remove(&vm);
    }

    /// Records that a VM's page tables wait for `chunks` chunks.
    pub(crate) fn lack(&mut self, vm: TenantId, chunks: u32) {
        self.tables.insert(vm, chunks.min(MAX_TABLE_CHUNKS_PER_VM));
    }

    /// Records that a VM's page tables have received the memory that they waited for.
    pub fn found(&mut self, vm: TenantId) {
        self.tables.remove(&vm);
    }

    /// Records that a VM's page tables occupy `held` chunks. Its first page tables need `first` chunks in total.
    pub fn hold(&mut self, vm: TenantId, held: u32, first: u32) {
        if let Some(left) = self.first.get_mut(&vm) {
            *left = first.saturating_sub(held);
        }
    }

    /// Records whether the VM's work waits for card memory. If not, also ends the wait of the VM's page tables.
    pub fn set_waits(&mut self, vm: TenantId, waits: bool) {
        if waits {
            self.waiting.insert(vm);
        } else {
            self.waiting.remove(&vm);
            self.tables.remove(&vm);
        }
    }

    /// Returns the number of card chunks that the mediator must keep free.
    pub fn chunks(&self) -> u32 {
        self.first.values().chain(self.tables.values()).fold(RESERVED_CHUNKS, |sum, chunks| sum.saturating_add(*chunks))
    }

    /// Returns the VMs whose work or page tables wait for card memory.
    pub fn vms(&self) -> impl Iterator<Item = TenantId> + '_ {
        self.waiting.iter().chain(self.tables.keys()).copied()
    }

    /// Returns the VMs whose page tables wait for card memory.
    pub fn of_tables(&self) -> impl Iterator<Item = TenantId> + '_ {
        self.tables.keys().copied()
    }

    /// Counts a scan at `now_ns` for a VM that waited during the whole scan. `useful` is true if the scan moved memory
    /// for the VM.
    pub fn looked(&mut self, vm: TenantId, useful: bool, now_ns: u64) {
        let seen = self.seen.entry(vm).or_default();
        let apart = u64::try_from(SCAN_INTERVAL.as_nanos()).unwrap_or(u64::MAX);
        if useful {
            seen.looks.useful += 1;
        } else if seen.vain_ns.is_none_or(|at| now_ns.saturating_sub(at) >= apart) {
            seen.looks.vain += 1;
            seen.vain_ns = Some(now_ns);
        }
    }

    /// Returns the counters of the mover's scans for a VM.
    pub fn looks(&self, vm: TenantId) -> Looks {
        self.seen.get(&vm).map(|seen| seen.looks).unwrap_or_default()
    }

    /// Returns true if the number of failed scans since `since` has reached the maximum for `limit`.
    pub fn is_vain(&self, vm: TenantId, since: Looks, limit: Duration, moves: bool) -> bool {
        self.looks(vm).vain.saturating_sub(since.vain) >= Looks::max_unsuccessful(limit, moves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: TenantId = TenantId(3);
    const MS: u64 = 1_000_000;

    #[test]
    fn wait_expires_after_failed_scans_not_by_clock() {
        let mut wants = Wants::default();
        let limit = Duration::from_millis(120);
        let since = wants.looks(VM);
        assert!(!wants.is_vain(VM, since, limit, true));
        // A late scan counts only once, and so do several scans in quick succession.
        for at in [1_000_000, 1_000_001, 1_000_049] {
            wants.looked(VM, false, at * MS);
        }
        assert_eq!(wants.looks(VM), Looks { useful: 0, vain: 1 });
        wants.looked(VM, true, 1_000_060 * MS);
        wants.looked(VM, false, 1_000_070 * MS);
        assert!(!wants.is_vain(VM, since, limit, true));
        wants.looked(VM, false, 1_000_120 * MS);
        assert!(wants.is_vain(VM, since, limit, true), "{:?}", wants.looks(VM));
        // A wait with a limit of zero needs one scan if memory can move.
        let now = wants.looks(VM);
        assert!(wants.is_vain(VM, now, Duration::ZERO, false) && !wants.is_vain(VM, now, Duration::ZERO, true));
    }

    #[test]
    fn wanted_chunks_add_new_vms_and_waits_to_constant_reserve() {
        let mut wants = Wants::default();
        wants.admit(VM, 2);
        wants.admit(TenantId(4), 1);
        wants.lack(VM, 3);
        assert_eq!((wants.chunks(), wants.vms().collect::<Vec<_>>()), (RESERVED_CHUNKS + 6, vec![VM]));
        wants.found(VM);
        wants.hold(VM, 1, 2);
        assert_eq!(wants.chunks(), RESERVED_CHUNKS + 2);
        wants.hold(VM, 4, 2);
        wants.forget(TenantId(4));
        assert_eq!(wants.chunks(), RESERVED_CHUNKS);
    }
}
