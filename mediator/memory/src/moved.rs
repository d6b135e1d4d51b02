//! Planned and completed moves of VMs' memory.

use sched::Histogram;
use std::collections::BTreeSet;
use vram::{GuestVramAddr, Step, TenantId};

/// Result of relocating a VM's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Relocated {
    /// Number of chunks that moved.
    pub moved: u32,
    /// Number of chunks that did not move.
    pub stayed: u32,
    /// Number of chunks that changed only in the accounts, by entering or leaving the reserve.
    pub rebooked: u32,
    /// Number of bytes copied.
    pub bytes: u64,
    /// Time for which the VM's channels were stopped, in ns.
    pub suspended_ns: u64,
    /// Duration of the copies, in ns.
    pub copied_ns: u64,
}

impl Relocated {
    /// Returns true if the relocation changed the accounts.
    #[must_use]
    pub fn has_effect(&self) -> bool {
        self.moved != 0 || self.rebooked != 0
    }
}

/// Guest VRAM ranges that have moved, each with its address and its size in bytes.
pub type Ranges = Vec<(GuestVramAddr, u64)>;

/// Totals of the moves of a VM's memory since the VM was added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Sum of all relocations.
    pub sum: Relocated,
    /// Distribution of the times for which the VM's channels were stopped.
    pub suspensions: Histogram,
}

impl Moved {
    /// Adds a relocation to the totals.
    pub fn add(&mut self, one: &Relocated) {
        self.sum.moved = self.sum.moved.saturating_add(one.moved);
        self.sum.stayed = self.sum.stayed.saturating_add(one.stayed);
        self.sum.bytes += one.bytes;
        self.sum.suspended_ns += one.suspended_ns;
        self.sum.copied_ns += one.copied_ns;
        self.suspensions.add(one.suspended_ns);
    }
}

/// A plan of the balancer.
pub struct Planned {
    /// The moves to execute.
    pub plan: Plan,
    /// VMs that wait for memory that the plan frees.
    pub served: BTreeSet<TenantId>,
}

/// Steps in order of execution, with consecutive steps of the same VM grouped.
pub type Plan = Vec<(TenantId, Vec<Step>)>;
