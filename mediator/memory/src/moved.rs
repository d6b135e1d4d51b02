//! Moves of VMs' memory, planned and done.

use sched::Histogram;
use std::collections::BTreeSet;
use vram::{GuestAddr, Step, VmId};

/// Outcome of a move of a VM's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Relocated {
    /// Chunks that lie elsewhere now.
    pub moved: u32,
    /// Chunks that stay where they were.
    pub stayed: u32,
    /// Chunks that count elsewhere and lie where they were: they went into the reserve, or came out of it.
    pub rebooked: u32,
    /// Bytes that were copied.
    pub bytes: u64,
    /// Time for which the VM's channels did not run, in ns.
    pub suspended_ns: u64,
    /// Time that the copies took, in ns.
    pub copied_ns: u64,
}

impl Relocated {
    /// Returns whether the accounts differ from before.
    #[must_use]
    pub fn has_effect(&self) -> bool {
        self.moved != 0 || self.rebooked != 0
    }
}

/// Ranges of guest VRAM that lie elsewhere than before.
pub type Ranges = Vec<(GuestAddr, u64)>;

/// Moves of a VM's memory since it was added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// The sum of it all.
    pub sum: Relocated,
    /// Times for which its channels did not run.
    pub suspensions: Histogram,
}

impl Moved {
    /// Counts one relocation more.
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
    /// Moves that are to be made.
    pub plan: Plan,
    /// VMs that waited for what it will free.
    pub served: BTreeSet<VmId>,
    /// VMs of which the channels are to wait, or to go on.
    pub holds: Holds,
}

/// VMs to keep from running (or to let run again), as another one's turn begins.
pub(crate) type Holds = Vec<(VmId, bool)>;

/// Steps in the order in which they are to be done, those of one VM together that follow one another.
pub type Plan = Vec<(VmId, Vec<Step>)>;
