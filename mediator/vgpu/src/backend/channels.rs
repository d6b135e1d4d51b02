//! Guest channels: binds a channel on the card from an instance block, and submits the work of a doorbell.

use super::VmBackend;
use crate::work::Bound;
use ::channels::{Bind, Doorbell, DoorbellError, GuestInstance, InstanceError, PullError, RingFault};
use card_manager::{CardState, ManagerError};
use devmodel::events::MmuFault;
use nvspec::addr::{GpuVa, Place, VramAddr};
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::INSTANCE_BYTES;
use nvspec::mmu::{Rights, fault};
use shadow_pt::HostPage;
use std::sync::Arc;

/// Reason why a channel is not bound.
#[derive(Debug, thiserror::Error)]
pub(super) enum BindFailure {
    /// The card has no memory for the channel's page tables. Contains the parsed instance block.
    #[error("the card has no memory for its page tables")]
    Lacking(Box<GuestInstance>),
    /// The instance block is outside guest memory.
    #[error("its instance block at {0} is outside guest memory")]
    Unreadable(Place),
    /// The instance block is invalid.
    #[error(transparent)]
    Instance(#[from] InstanceError),
    /// The card rejected the bind.
    #[error(transparent)]
    Refused(ManagerError),
}

impl VmBackend {
    /// Submits the work up to a GP_PUT that the guest has written, or records the GP_PUT while the channel's bind waits
    /// for memory.
    pub(crate) fn ring(&mut self, channel: VirtualChannelId, gp_put: u32) {
        if self.pending.ring(channel, gp_put) {
            return;
        }
        // Acquire the card's lock only once per doorbell, because other threads need it too.
        let host = Arc::clone(&self.host);
        let mut state = host.lock();
        let checked = self.with_state(&mut state, |channels, card, vm| channels.doorbell(card, vm, channel, gp_put));
        let doorbell = match checked {
            Ok(doorbell) => doorbell,
            Err(DoorbellError::Unbound) => return,
            Err(DoorbellError::Refused) => {
                drop(state);
                return self.fault(channel, GpuVa(0), fault::PDE);
            }
            Err(error) => {
                self.counts.doorbells_refused += 1;
                tracing::warn!(vm = %self.vm, ?channel, %error, "rejected a doorbell");
                return;
            }
        };
        self.counts.doorbells += 1;
        let fault = self.pull(&mut state, doorbell);
        drop(state);
        self.end_of_pull(channel, fault);
    }

    /// Updates the channel's address space, and then submits the channel's new work, which starts in the VM's time
    /// slice.
    pub(crate) fn submit(&mut self, doorbell: Doorbell) {
        let host = Arc::clone(&self.host);
        let fault = self.pull(&mut host.lock(), doorbell);
        self.end_of_pull(doorbell.virtual_channel, fault);
    }

    /// Same as [`Self::submit`], with the card's state already locked. Returns a fault if an entry of the ring is
    /// unreadable or invalid.
    fn pull(&mut self, state: &mut CardState, doorbell: Doorbell) -> Option<RingFault> {
        let channel = doorbell.virtual_channel;
        let Bound { space, .. } = self.work.bound(channel)?;
        if state.vram_mut().was_short(self.vm) {
            // Memory that was denied earlier may be available now.
            self.memory.granted();
        }
        if let Err(error) = self.memory.prepare(state, space) {
            tracing::error!(vm = %self.vm, ?channel, %error, "cannot submit a channel's work to the card");
            return None;
        }
        if state.vram().is_short(self.vm) && self.may_wait(state, doorbell) {
            return None;
        }
        self.wait_ends(state, channel);
        let (objects, bindings) = self.work.objects(channel)?;
        let (pulled, needs) = self.memory.pull(state, space, doorbell, objects, bindings);
        let (pulled, fault) = match pulled {
            Ok(pulled) => (pulled, None),
            Err(PullError { pulled, fault }) => (pulled, Some(fault)),
        };
        if let Some(submission) = pulled.submission {
            state.worked(self.vm);
            state.feeder().arrived(self.vm, doorbell.channel, submission, pulled.words, needs);
        }
        self.counts.submissions += u64::from(pulled.submission.is_some());
        self.counts.entries += u64::from(pulled.taken);
        fault
    }

    /// Handles the result of a pull, which may have stopped at an unreadable or invalid entry.
    fn end_of_pull(&mut self, channel: VirtualChannelId, fault: Option<RingFault>) {
        match fault {
            None => {}
            Some(RingFault::Unmapped { va }) => self.fault(channel, va, fault::PTE),
            Some(error) => {
                tracing::warn!(vm = %self.vm, ?channel, %error, "invalid GPFIFO entry in a channel's ring");
                self.fault(channel, GpuVa(0), fault::PTE);
            }
        }
    }

    /// Removes a faulted channel from the card, and reports the fault as the card's host unit would.
    fn fault(&mut self, channel: VirtualChannelId, va: GpuVa, reason: u32) {
        let instance = self.work.instance(channel);
        tracing::warn!(vm = %self.vm, ?channel, %va, reason, "cannot read a channel's ring");
        self.take_off(channel);
        self.counts.faults += 1;
        self.faults.push(MmuFault {
            unit: fault::unit::FIFO,
            instance,
            va,
            reason,
            client: fault::hub_client::FIFO,
            hub: true,
            write: false,
            gpc: 0,
        });
    }

    /// Binds a channel on the card.
    pub(super) fn bind(&mut self, channel: VirtualChannelId, instance: Place) -> Result<(), BindFailure> {
        let mut block = [0; INSTANCE_BYTES as usize];
        self.fill(instance, &mut block).ok_or(BindFailure::Unreadable(instance))?;
        let mut guest = GuestInstance::parse(&block)?;
        if let Some(directory) = self.memory.grants().directory_of(instance) {
            guest.directory = directory;
        }
        let bound = self.memory.open(guest.directory).and_then(|space| self.bind_in(channel, instance, &guest, space));
        if bound.is_err() {
            // The shadow may have been created only for this channel.
            self.memory.collect();
        }
        bound.map_err(|error| match error {
            ManagerError::Lacking => BindFailure::Lacking(Box::new(guest)),
            error => BindFailure::Refused(error),
        })
    }

    fn bind_in(
        &mut self,
        channel: VirtualChannelId,
        instance: Place,
        guest: &GuestInstance,
        space: shadow_pt::SpaceId,
    ) -> Result<(), ManagerError> {
        let directory = self.memory.directory(space).ok_or(ManagerError::SpaceGone)?;
        let bind = Bind { instance, guest, directory };
        let physical = self
            .with_channels(|channels, card, vm| channels.bind(card, vm, channel, bind))
            .map_err(ManagerError::Bind)?;
        let span = self.host.lock().channels().span(physical).unwrap_or(physical.into());
        let bound = Bound { space, physical, span };
        let pages = own_pages(self.host.layout(), bound);
        if let Err(error) = self.memory.map_host(space, &pages) {
            // The channel has executed no work, so it has no state to save.
            let _ = self.host.lock().end_channel(self.vm, channel);
            return Err(error);
        }
        self.work.enlist(channel, instance, Some(guest.userd.0));
        self.work.set_bound(channel, bound);
        Ok(())
    }

    /// Rejects a bind, so that the channel's first work faults.
    pub(super) fn refuse_bind(&mut self, channel: VirtualChannelId, instance: Place, error: &BindFailure) {
        self.counts.binds_refused += 1;
        tracing::warn!(vm = %self.vm, ?channel, %error, "cannot bind a channel; its first work will fault");
        self.refuse(channel, instance);
    }

    /// Records a channel that is not on the card, so that its first doorbell causes a fault.
    pub(super) fn refuse(&mut self, channel: VirtualChannelId, instance: Place) {
        let mut block = [0; INSTANCE_BYTES as usize];
        let read = self.fill(instance, &mut block);
        let userd = read.and_then(|()| GuestInstance::parse(&block).ok()).map(|guest| guest.userd);
        self.host.lock().channels_mut().refuse(self.vm, channel, instance, userd);
        self.work.enlist(channel, instance, userd.map(|userd| userd.0));
    }

    /// Removes a channel from the card. Saves the indices of its ring in the instance block, as the card does.
    pub(super) fn unbind(&mut self, channel: VirtualChannelId) {
        if self.work.instance(channel).is_none() {
            return;
        }
        let host = Arc::clone(&self.host);
        self.wait_ends(&mut host.lock(), channel);
        self.take_off(channel);
        let Some(instance) = self.work.delist(channel) else { return };
        self.save(channel, instance);
        self.memory.collect();
    }

    /// Ends a channel that the card's interrupt thread has retired, and returns its instance block. Returns `None` if
    /// the guest has already unbound the channel, because another channel may have the same number now.
    pub(crate) fn end_retired(&mut self, channel: VirtualChannelId) -> Option<Place> {
        let retired = self.host.lock().channels().is_retired(self.vm, channel);
        retired.then(|| self.take_off(channel))?;
        self.work.instance(channel)
    }

    /// Removes a channel from the card, and its work area from the channel's address space, so that the channel number
    /// can be reused. While the channel has not left its engines, its work area remains ([`Self::channels_left`]).
    pub(super) fn take_off(&mut self, channel: VirtualChannelId) {
        self.detach_channel(channel);
        let bound = self.work.take_bound(channel);
        let retired = {
            let mut state = self.host.lock();
            let retired = state.retire_channel(self.vm, channel);
            if retired.is_err() {
                // Strand the channel in the critical section in which its retirement failed. Otherwise, the card
                // manager's tick could detect that the channel has left while the channel is still recorded as bound,
                // and would not notify the VM.
                state.channels_mut().strand(self.vm, channel);
                let _ = state.end_channel(self.vm, channel);
            }
            retired
        };
        match (bound, retired) {
            (Some(bound), Err(_)) => self.work.depart(bound),
            (bound, Ok(())) => {
                let unmapped = bound.is_none_or(|bound| self.unmap_own(bound));
                let mut state = self.host.lock();
                if !unmapped {
                    state.channels_mut().strand(self.vm, channel);
                }
                let _ = state.end_channel(self.vm, channel);
            }
            (None, Err(_)) => {}
        }
    }

    /// Unmaps the work areas of channels that have left the card, and frees the channels' numbers.
    pub(crate) fn channels_left(&mut self) {
        let left = self.host.lock().take_left(self.vm);
        for physical in left {
            let bound = self.work.departed(physical);
            if bound.is_none_or(|bound| self.unmap_own(bound)) {
                self.host.lock().free_left(physical);
            }
        }
        self.memory.collect();
    }

    /// Unmaps the work area of a channel that has left the card. Returns true if the work area is no longer accessible.
    fn unmap_own(&mut self, bound: Bound) -> bool {
        let pages = own_pages(self.host.layout(), bound);
        let unmapped = self.memory.unmap_host(bound.space, &pages);
        if let Err(error) = &unmapped {
            tracing::error!(vm = %self.vm, channel = bound.physical.0, %error,
                "the card may still access a channel's ring; the channel's number and the VM's memory stay unusable \
                 until the card is reset");
        }
        unmapped.is_ok()
    }

    /// Writes the indices of the ring into the guest's instance block.
    pub(super) fn save(&mut self, channel: VirtualChannelId, instance: Place) {
        let words = self.with_channels(|channels, card, vm| channels.saved_words(card, vm, channel));
        for (offset, value) in words.into_iter().flatten() {
            let Some(Place::Vram(at)) = instance.checked_add(offset) else { continue };
            // The block belonged to the guest when it bound the channel, and guest VRAM never shrinks.
            if self.guest_write(at, &value.to_le_bytes()).is_err() {
                tracing::debug!(?channel, "cannot save a channel's state");
            }
        }
    }
}

/// Returns the mediator's pages that a channel's address space must map.
pub(super) fn own_pages(layout: &::channels::Layout, bound: Bound) -> Vec<(HostPage, VramAddr, Rights)> {
    let Bound { physical, span, .. } = bound;
    let pages = layout.work_pages(physical, span).into_iter().chain(layout.image_pages(physical, span));
    pages.map(|(index, at, rights)| (HostPage::Own(index), at, rights)).collect()
}
