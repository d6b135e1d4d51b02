//! Admission to PGRAPH: all, or one VM at a time.
//!
//! Its multiprocessors keep data that a kernel leaves in them, so a host that prevents that residue admits channels of
//! another VM only after it was cleared. A channel without a PGRAPH context always runs.

use crate::card;
use crate::pool::Bound;
use crate::{Channels, Host, RunState, VmId};
use nvspec::fifo::ChannelId;

/// VMs whose channels with a PGRAPH context the card may schedule. The host's own are always included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Gate {
    /// All VMs.
    #[default]
    Open,
    /// One VM, or none.
    Only(Option<VmId>),
}

impl Gate {
    /// Returns true if a channel that wants to run must wait until its VM is admitted. `trusted`: its VM is the host's
    /// own.
    pub(crate) fn bars(self, bound: &Bound, trusted: bool) -> bool {
        self != Self::Open && self != Self::Only(Some(bound.vm)) && !trusted && uses_graphics(bound)
    }
}

impl Channels {
    /// Makes the card schedule only the channels with a PGRAPH context of `vm`, or of none. Running work stays until it
    /// has ended or is [asked to leave](Self::ask_to_leave).
    pub fn admit(&mut self, host: &mut impl Host, vm: Option<VmId>) {
        self.gate = Gate::Only(vm);
        let all: Vec<ChannelId> = self.vms.values().flat_map(|vm| vm.channels.values().copied()).collect();
        for physical in all {
            self.bring_to_gate(host, physical);
        }
    }

    /// Makes the card schedule the channels of all VMs from now on.
    pub fn admit_all(&mut self, host: &mut impl Host) {
        self.gate = Gate::Open;
        let all: Vec<ChannelId> = self.vms.values().flat_map(|vm| vm.channels.values().copied()).collect();
        for physical in all {
            self.bring_to_gate(host, physical);
        }
    }

    /// Returns the VM that is admitted, if only one is.
    #[must_use]
    pub fn admitted(&self) -> Option<VmId> {
        if let Gate::Only(vm) = self.gate { vm } else { None }
    }

    /// Returns a VM's channels that have a PGRAPH context.
    #[must_use]
    pub fn on_graphics(&self, vm: VmId) -> Vec<ChannelId> {
        let record = self.vms.get(&vm);
        let channels = record.into_iter().flat_map(|record| record.channels.values().copied());
        channels.filter(|physical| self.bound(*physical).is_some_and(uses_graphics)).collect()
    }

    /// Returns true if a channel waits until its VM is admitted.
    #[must_use]
    pub fn is_shut_out(&self, physical: ChannelId) -> bool {
        self.bound(physical).is_some_and(|bound| self.is_barred(bound))
    }

    /// Returns true if a channel that wants to run must wait until its VM is admitted.
    pub(crate) fn is_barred(&self, bound: &Bound) -> bool {
        self.gate.bars(bound, self.vms.get(&bound.vm).is_some_and(|vm| vm.trusted))
    }

    /// Starts or stops the scheduling of a channel that wants to run, according to the gate.
    pub(crate) fn bring_to_gate(&self, host: &mut impl Host, physical: ChannelId) {
        let Some(bound) = self.bound(physical).filter(|bound| bound.told == RunState::Running) else {
            return;
        };
        if self.is_barred(bound) {
            card::stop(host, physical);
        } else {
            card::start(host, physical);
        }
    }
}

fn uses_graphics(bound: &Bound) -> bool {
    let [graphics, ..] = bound.contexts;
    graphics.is_some()
}

#[cfg(test)]
#[path = "tests/gate.rs"]
mod tests;
