//! USERD: doorbells in, progress out.

use crate::pool::{Channels, LINGER};
use crate::{Doorbell, DoorbellError, GuestMemory, HardwareState, Host, VmId};
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::{ChannelId, VirtualChannelId, engine};
use nvspec::instance::userd;
use nvspec::regs::pfifo;
use std::collections::BTreeSet;

impl Channels {
    /// Checks a guest's write of GP_PUT, and takes over engine context pointers that it has set. Ring it by
    /// [`Self::ring`].
    ///
    /// # Errors
    /// See [`DoorbellError`].
    pub fn doorbell(
        &mut self,
        host: &mut impl Host,
        guest: &mut impl GuestMemory,
        vm: VmId,
        channel: VirtualChannelId,
        gp_put: u32,
    ) -> Result<Doorbell, DoorbellError> {
        let physical = self.physical(vm, channel).ok_or(DoorbellError::Unbound)?;
        let bound = self.bound_mut(physical).ok_or(DoorbellError::Unbound)?;
        if gp_put >= bound.gp_entries {
            return Err(DoorbellError::BeyondRing { gp_put, entries: bound.gp_entries });
        }
        bound.gp_put = gp_put;
        let serial = bound.serial;
        self.refresh(host, guest, physical);
        Ok(Doorbell { vm, virtual_channel: channel, channel: physical, gp_put, serial })
    }

    /// Gives the work to the card. `false` when the channel was unbound since the doorbell was checked.
    pub fn ring(&mut self, host: &mut impl Host, doorbell: Doorbell) -> bool {
        match self.bound_mut(doorbell.channel) {
            Some(bound) if bound.serial == doorbell.serial => {
                bound.active = LINGER;
                host.userd_write(doorbell.channel, userd::GP_PUT, doorbell.gp_put);
                true
            }
            _ => false,
        }
    }

    /// Which channel's USERD lies at a guest VRAM address, and the byte offset in it: for every trapped access to guest
    /// VRAM, however the guest got there. Of channels with the same page the lowest answers.
    #[must_use]
    pub fn userd_at(&self, vm: VmId, address: GuestVramAddr) -> Option<(VirtualChannelId, u64)> {
        let bound = self.bounds_of(vm).find(|bound| bound.userd == address.page())?;
        Some((bound.channel, address.0.checked_sub(bound.userd.0)?))
    }

    /// A guest's read of its USERD: the word at byte `offset` of the host's, 0 for a channel that is not bound. GP_PUT
    /// reads as the guest has written it, rung or not.
    pub fn userd_read(&self, host: &mut impl Host, vm: VmId, channel: VirtualChannelId, offset: u64) -> u32 {
        let physical = self.physical(vm, channel);
        let Some((physical, bound)) = physical.and_then(|physical| Some((physical, self.bound(physical)?))) else {
            return 0;
        };
        let offset = offset & !3;
        match offset {
            userd::GP_PUT => bound.gp_put,
            offset if offset < userd::BYTES => host.userd_read(physical, offset),
            _ => 0,
        }
    }

    /// What the card says about a channel; all false when it is not bound.
    pub fn hardware_state(&self, host: &mut impl Host, vm: VmId, channel: VirtualChannelId) -> HardwareState {
        use pfifo::CHANNEL_STATE;
        let physical = self.physical(vm, channel);
        let Some((physical, bound)) = physical.and_then(|physical| Some((physical, self.bound(physical)?))) else {
            return HardwareState::default();
        };
        let state = host.read32(CHANNEL_STATE::at(physical.0.into()));
        HardwareState {
            enabled: bound.enabled,
            acquire_pending: CHANNEL_STATE::ACQUIRE_PENDING.is_set(state),
            loaded: CHANNEL_STATE::LOADED.is_set(state),
            pending: CHANNEL_STATE::PENDING.is_set(state),
        }
    }

    /// VMs with a channel that is busy or has advanced since the last call: who gets a non-stall interrupt.
    ///
    /// A VM whose work has raised the interrupt is always among them; one that had none since its last doorbell came to
    /// rest is not. Channels at rest cost nothing.
    pub fn progressed(&mut self, host: &mut impl Host) -> BTreeSet<VmId> {
        let candidates: Vec<ChannelId> = self
            .vms
            .values()
            .flat_map(|vm| vm.channels.values().copied())
            .filter(|physical| self.bound(*physical).is_some_and(|bound| bound.active > 0))
            .collect();
        let on_engines = if candidates.is_empty() { BTreeSet::new() } else { on_engines(host) };
        let mut vms = BTreeSet::new();
        for physical in candidates {
            let seen = (host.userd_read(physical, userd::GP_GET), host.userd_read(physical, userd::GET));
            let Some(bound) = self.bound_mut(physical) else { continue };
            vms.insert(bound.vm);
            let busy = seen != bound.seen
                || seen.0 != bound.gp_put
                || on_engines.contains(&physical.0)
                || waits(host, physical);
            bound.seen = seen;
            bound.active = if busy { LINGER } else { bound.active.saturating_sub(1) };
        }
        vms
    }
}

/// Physical channels that an engine works for now.
fn on_engines(host: &mut impl Host) -> BTreeSet<u8> {
    (0..engine::COUNT)
        .filter_map(|unit| {
            let status = host.read32(pfifo::ENGINE_STATUS::at(unit));
            let channel = pfifo::ENGINE_STATUS::CHANNEL.get(status);
            pfifo::ENGINE_STATUS::BUSY.is_set(status).then(|| u8::try_from(channel).ok()).flatten()
        })
        .collect()
}

/// Whether the card says that a channel has something left to do.
fn waits(host: &mut impl Host, physical: ChannelId) -> bool {
    let state = host.read32(pfifo::CHANNEL_STATE::at(physical.0.into()));
    pfifo::CHANNEL_STATE::PENDING.is_set(state) || pfifo::CHANNEL_STATE::ACQUIRE_PENDING.is_set(state)
}

#[cfg(test)]
#[path = "tests/submit.rs"]
mod tests;
