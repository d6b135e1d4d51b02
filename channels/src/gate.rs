//! Admission of either all VMs or one VM at a time to PGRAPH.
//!
//! PGRAPH's multiprocessors retain data from kernels. To protect this residue from other VMs, a host clears it before
//! admitting another VM's channels. A channel without a PGRAPH context needs no admission.

use crate::card;
use crate::image::image_vas;
use crate::instance::context_words;
use crate::pool::Bound;
use crate::state::{Gate, Graphics};
use crate::{Channels, Host, RunState, TenantId};
use nvspec::fifo::ChannelId;
use nvspec::instance::context;

impl Gate {
    /// Returns true if a channel that wants to run must wait until its VM is admitted. `trusted` is true if the VM
    /// belongs to the host.
    pub(crate) fn bars(self, bound: &Bound, trusted: bool) -> bool {
        self != Self::Open && self != Self::Only(Some(bound.vm)) && !trusted && uses_graphics(bound)
    }
}

impl Channels {
    /// Makes the card schedule channels with a PGRAPH context only if they belong to `vm`, or no such channels if `vm`
    /// is `None`. Running work continues until it ends or its channel is [asked to leave](Self::ask_to_leave).
    pub fn admit(&mut self, host: &mut impl Host, vm: Option<TenantId>) {
        self.gate = Gate::Only(vm);
        let own = vm.and_then(|vm| self.vms.get(&vm)).into_iter().flat_map(|vm| vm.channels.values().copied());
        for physical in own.collect::<Vec<_>>() {
            if self.bound(physical).is_some_and(|bound| bound.graphics == Graphics::Withdrawn) {
                self.set_graphics(host, physical, Graphics::Attached);
            }
        }
        let all: Vec<ChannelId> = self.vms.values().flat_map(|vm| vm.channels.values().copied()).collect();
        for physical in all {
            self.bring_to_gate(host, physical);
        }
    }

    /// Makes the card schedule the channels of all VMs.
    pub fn admit_all(&mut self, host: &mut impl Host) {
        self.gate = Gate::Open;
        let all: Vec<ChannelId> = self.vms.values().flat_map(|vm| vm.channels.values().copied()).collect();
        for physical in all {
            self.bring_to_gate(host, physical);
        }
    }

    /// Returns the admitted VM, if only one VM is admitted.
    #[must_use]
    pub fn admitted(&self) -> Option<TenantId> {
        if let Gate::Only(vm) = self.gate { vm } else { None }
    }

    /// Returns a VM's channels with a PGRAPH context.
    #[must_use]
    pub fn on_graphics(&self, vm: TenantId) -> Vec<ChannelId> {
        let record = self.vms.get(&vm);
        let channels = record.into_iter().flat_map(|record| record.channels.values().copied());
        channels.filter(|physical| self.bound(*physical).is_some_and(uses_graphics)).collect()
    }

    /// Returns true if a channel runs without its guest's PGRAPH context.
    #[must_use]
    pub fn only_copies(&self, physical: ChannelId) -> bool {
        self.bound(physical).is_some_and(|bound| bound.graphics == Graphics::Unused)
    }

    /// Makes a channel run without its PGRAPH context from now on, or with it while its VM is admitted. The caller must
    /// know of no work in flight on the channel. This function also checks the card. Returns false if the channel is on
    /// an engine, in which case the caller must retry. Returns true if the channel has no PGRAPH context or is not
    /// bound.
    pub fn set_only_copies(&mut self, host: &mut impl Host, physical: ChannelId, only: bool) -> bool {
        let Some(bound) = self.bound(physical).filter(|bound| bound.contexts.first().is_some_and(Option::is_some))
        else {
            return true;
        };
        if (bound.graphics == Graphics::Unused) == only {
            return true;
        }
        // For a running channel, the card may use a pointer that differs from the one in the block.
        card::stop(host, physical);
        let left = card::kick(host, physical).is_ok();
        if left {
            self.set_graphics(host, physical, if only { Graphics::Unused } else { Graphics::Attached });
        }
        self.bring_to_gate(host, physical);
        left
    }

    /// Withdraws the PGRAPH context of a channel that a copy engine is running, because another VM is about to be
    /// admitted. The channel gets the context back when its own VM is admitted. Cancels the request for the channel to
    /// leave. PGRAPH must already hold another context.
    pub fn withdraw_graphics(&mut self, host: &mut impl Host, physical: ChannelId) {
        if self.bound(physical).is_some_and(|bound| bound.graphics == Graphics::Attached && uses_graphics(bound)) {
            card::stop(host, physical);
            self.preemptions.forget(physical);
            self.set_graphics(host, physical, Graphics::Withdrawn);
        }
    }

    /// Restores the PGRAPH contexts of all channels that are running without them, because the card's next owner does
    /// not support such channels. The card must be quiescent.
    pub fn restore_graphics(&mut self, host: &mut impl Host) {
        let all: Vec<ChannelId> = self.vms.values().flat_map(|vm| vm.channels.values().copied()).collect();
        for physical in all {
            if self.bound(physical).is_some_and(|bound| bound.graphics != Graphics::Attached) {
                self.set_graphics(host, physical, Graphics::Attached);
                self.bring_to_gate(host, physical);
            }
        }
    }

    /// Writes the pointer to a channel's PGRAPH context into the card's block, or clears it.
    pub(crate) fn set_graphics(&mut self, host: &mut impl Host, physical: ChannelId, graphics: Graphics) {
        let at = self.layout.instance(physical).offset(context::GR);
        let Some(bound) = self.bound_mut(physical) else { return };
        bound.graphics = graphics;
        let ([pointer, ..], [image, ..]) = (bound.contexts, image_vas(bound.span));
        let shown = pointer.filter(|_| graphics == Graphics::Attached).map(|_| image);
        host.vram_write(at, &context_words(shown).to_le_bytes());
        host.vram_flush();
    }

    /// Returns true if a channel must not run before its VM is admitted.
    #[must_use]
    pub fn is_shut_out(&self, physical: ChannelId) -> bool {
        self.bound(physical).is_some_and(|bound| self.is_barred(bound))
    }

    /// Returns true if a channel that wants to run must wait until its VM is admitted.
    pub(crate) fn is_barred(&self, bound: &Bound) -> bool {
        self.gate.bars(bound, self.vms.get(&bound.vm).is_some_and(|vm| vm.trusted))
    }

    /// Lets the card schedule a channel that wants to run, or prevents this, according to the gate.
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
    graphics.is_some() && bound.graphics != Graphics::Unused
}

#[cfg(test)]
mod tests;
