//! Emulates USERD: accepts doorbells and reports progress, in terms of the guest's own indices and addresses.

use crate::card;
use crate::complete::is_worked_for;
use crate::state::{Graphics, Permit, Presence, RequestedState, SavedWords};
use crate::work::record_at;
use crate::{Channels, Doorbell, DoorbellError, GuestMemory, HardwareState, Hindrance, Host, Pause, TenantId};
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::{ChannelId, VirtualChannelId};
use nvspec::instance::{ramfc, userd};
use nvspec::mmu::HOST_VA_BASE;
use nvspec::regs::pfifo;

impl Channels {
    /// Validates a guest's write to GP_PUT, and rereads the guest's engine context pointers. [`Self::pull`] then copies
    /// the work.
    ///
    /// # Errors
    /// Returns a [`DoorbellError`] if the doorbell is rejected.
    pub fn doorbell(
        &mut self,
        card: &mut (impl Host + GuestMemory),
        vm: TenantId,
        channel: VirtualChannelId,
        gp_put: u32,
    ) -> Result<Doorbell, DoorbellError> {
        if self.tell_refused(vm, channel) {
            return Err(DoorbellError::Refused);
        }
        let physical = self.physical(vm, channel).ok_or(DoorbellError::Unbound)?;
        let bound =
            self.bound_mut(physical).filter(|bound| bound.permit != Permit::Ended).ok_or(DoorbellError::Unbound)?;
        if gp_put >= bound.ring.entries {
            return Err(DoorbellError::BeyondRing { gp_put, entries: bound.ring.entries });
        }
        let order = bound.ring.ring(gp_put);
        let serial = bound.serial;
        self.refresh(card, physical);
        Ok(Doorbell { vm, virtual_channel: channel, channel: physical, gp_put, serial, order })
    }

    /// Returns the channel whose USERD contains a guest VRAM address, and the address's byte offset in the USERD. This
    /// function must be called for every trapped access to guest VRAM, on any path. If several channels share the USERD
    /// page, returns the lowest bound channel, or the lowest rejected one if none is bound.
    #[must_use]
    pub fn userd_at(&self, vm: TenantId, address: GuestVramAddr) -> Option<(VirtualChannelId, u64)> {
        let page = address.page();
        let bound = self.bounds_of(vm).find(|bound| bound.userd == page).map(|bound| bound.channel);
        let refused =
            || self.refused_of(vm).find(|(_, refused)| refused.userd == Some(page)).map(|(channel, _)| channel);
        Some((bound.or_else(refused)?, address.0.checked_sub(page.0)?))
    }

    /// Emulates a guest's read of the dword at byte offset `offset` in its USERD. Returns 0 for a channel that is not
    /// bound. GP_PUT reads as the guest wrote it, and GP_GET reads as an index in the guest's ring. While the card
    /// executes one of the host's completion records, GET reads as the end of the guest range before the record.
    pub fn userd_read(&self, host: &mut impl Host, vm: TenantId, channel: VirtualChannelId, offset: u64) -> u32 {
        let physical = self.physical(vm, channel);
        let Some((physical, bound)) = physical.and_then(|physical| Some((physical, self.bound(physical)?))) else {
            return 0;
        };
        let get = |host: &mut _, low, high| {
            let va = card::userd_wide(host, physical, low, high);
            match va.checked_sub(HOST_VA_BASE.0) {
                None => va,
                Some(_) => record_at(bound.span, va).map_or(0, |slot| bound.ring.end_before(slot)),
            }
        };
        match offset & !3 {
            userd::GP_PUT => bound.ring.gp_put,
            userd::GP_GET => {
                let position = bound.ring.position(host.userd_read(physical, userd::GP_GET));
                bound.ring.virtual_get(position)
            }
            userd::GET => low_word(get(host, userd::GET, userd::GET_HI)),
            userd::GET_HI => high_word(get(host, userd::GET, userd::GET_HI)),
            userd::TOP_LEVEL_GET => low_word(get(host, userd::TOP_LEVEL_GET, userd::TOP_LEVEL_GET_HI)),
            userd::TOP_LEVEL_GET_HI => high_word(get(host, userd::TOP_LEVEL_GET, userd::TOP_LEVEL_GET_HI)),
            offset if offset < userd::BYTES => host.userd_read(physical, offset),
            _ => 0,
        }
    }

    /// Returns the dwords that the card would have saved in a guest's instance block, which allow a later bind to
    /// continue at the channel's position. For a bound channel, they are valid after it was disabled and preempted. For
    /// an unbound channel, they are kept until it is bound or unbound again. Returns `None` for a channel that was
    /// never bound.
    ///
    /// All fetched work is treated as completed, so the rest of the current range is lost.
    pub fn saved_words(&self, host: &mut impl Host, vm: TenantId, channel: VirtualChannelId) -> Option<SavedWords> {
        match self.physical(vm, channel) {
            Some(physical) => self.words_of(host, physical),
            None => self.vms.get(&vm)?.saved.get(&channel.0).copied(),
        }
    }

    pub(crate) fn words_of(&self, host: &mut impl Host, physical: ChannelId) -> Option<SavedWords> {
        let ring = &self.bound(physical)?.ring;
        let get = ring.virtual_get(ring.position(host.userd_read(physical, userd::GP_GET)));
        Some([(ramfc::GP_GET, get), (ramfc::GP_FETCH, get), (ramfc::GP_PUT, ring.gp_put)])
    }

    /// Returns true if a physical channel should run, immediately or in its slice. This is the case if its guest has
    /// enabled and listed it, the host has not paused its VM, and the channel has not ended.
    #[must_use]
    pub fn wants(&self, physical: ChannelId) -> bool {
        self.hindrance(physical).is_none()
    }

    /// Returns the reason that prevents a physical channel from running, other than waiting for its slice.
    #[must_use]
    pub fn hindrance(&self, physical: ChannelId) -> Option<Hindrance> {
        let bound = self.bound(physical).filter(|bound| bound.permit != Permit::Ended);
        let Some((bound, vm)) = bound.and_then(|bound| Some((bound, self.vms.get(&bound.vm)?))) else {
            return Some(Hindrance::Ended);
        };
        if let Some(why) = Pause::first(vm.paused) {
            return Some(Hindrance::Paused(why));
        }
        let runs = bound.requested == RequestedState::Enabled && vm.list.contains(&bound.channel.0);
        (!runs).then_some(Hindrance::Guest)
    }

    /// Returns a physical channel's presence on the card. This is independent of the guest's settings, because work
    /// that an engine has started continues even if its channel is stopped or removed from the runlist.
    #[must_use]
    pub fn presence(&self, host: &mut impl Host, physical: ChannelId) -> Presence {
        if is_worked_for(host, physical) {
            return Presence::Works;
        }
        let state = card::state(host, physical);
        if pfifo::CHANNEL_STATE::ACQUIRE_PENDING.is_set(state) {
            Presence::Acquires
        } else if pfifo::CHANNEL_STATE::LOADED.is_set(state) {
            Presence::Works
        } else {
            Presence::Off
        }
    }

    /// Returns true if a physical channel occupies the card while it waits for a semaphore. It may then block the
    /// method unit for other channels.
    #[must_use]
    pub fn holds(&self, host: &mut impl Host, physical: ChannelId) -> bool {
        let both = pfifo::CHANNEL_STATE::ACQUIRE_PENDING.mask() | pfifo::CHANNEL_STATE::LOADED.mask();
        self.wants(physical) && card::state(host, physical) & both == both
    }

    /// Returns the channel that an engine is running, which is not necessarily bound.
    #[must_use]
    pub fn occupant(&self, host: &mut impl Host, unit: u32) -> Option<ChannelId> {
        card::working_for(host, unit)
    }

    /// Returns a value that changes while a physical channel makes progress.
    #[must_use]
    pub fn progress(&self, host: &mut impl Host, physical: ChannelId) -> u64 {
        let (entry, at) = (host.userd_read(physical, userd::GP_GET), host.userd_read(physical, userd::GET));
        u64::from(entry) << 32 | u64::from(at)
    }

    /// Returns one flag each for PGRAPH and the two copy engines: true if a physical channel has a context that it may
    /// use.
    #[must_use]
    pub fn contexts(&self, physical: ChannelId) -> [bool; 3] {
        let Some(bound) = self.bound(physical) else { return [false; 3] };
        let [graphics, ce0, ce1] = bound.contexts.map(|context| context.is_some());
        [graphics && bound.graphics != Graphics::Unused, ce0, ce1]
    }

    /// Returns true if a channel's guest has set a PGRAPH context, even if the channel may not use it at the moment.
    #[must_use]
    pub fn has_graphics(&self, physical: ChannelId) -> bool {
        self.bound(physical).is_some_and(|bound| bound.contexts.first().is_some_and(Option::is_some))
    }

    /// Returns a channel's state on the card, with all fields false if the channel is not bound.
    pub fn hardware_state(&self, host: &mut impl Host, vm: TenantId, channel: VirtualChannelId) -> HardwareState {
        use pfifo::CHANNEL_STATE;
        let physical = self.physical(vm, channel);
        let Some((physical, bound)) = physical.and_then(|physical| Some((physical, self.bound(physical)?))) else {
            return HardwareState::default();
        };
        let state = card::state(host, physical);
        HardwareState {
            enabled: bound.requested == RequestedState::Enabled,
            acquire_pending: CHANNEL_STATE::ACQUIRE_PENDING.is_set(state),
            loaded: CHANNEL_STATE::LOADED.is_set(state),
            pending: CHANNEL_STATE::PENDING.is_set(state)
                || bound.ring.gp_put != bound.ring.next
                || bound.ring.with_card() < bound.ring.records.len(),
        }
    }
}

fn low_word(va: u64) -> u32 {
    let [b0, b1, b2, b3, ..] = va.to_le_bytes();
    u32::from_le_bytes([b0, b1, b2, b3])
}

fn high_word(va: u64) -> u32 {
    low_word(va >> 32)
}

#[cfg(test)]
mod tests;
