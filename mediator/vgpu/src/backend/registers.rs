//! Effects of vGPU register accesses on the card: implements `devmodel`'s backend trait.

use super::VmBackend;
use super::channels::BindFailure;
use crate::work::Runlist;
use devmodel::backend::{Aperture, Backend, ChannelState, Denied, EngineStatus, InterruptLine, WriteFailure};
use nvspec::addr::{GuestVramAddr, Place};
use nvspec::falcon::Falcon;
use nvspec::fifo::{CHANNELS, ChannelId, RunlistEntry, VirtualChannelId};
use nvspec::regs::pfifo;

/// Maximum number of runlist entries to read. A longer list must contain duplicate channels.
const RUNLIST_ENTRIES: u32 = CHANNELS * 2;

impl Backend for VmBackend {
    fn vram_read(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied> {
        self.guest_read(address, data)
    }

    fn vram_write(&mut self, address: GuestVramAddr, data: &[u8]) -> Result<(), WriteFailure> {
        self.guest_write(address, data)
    }

    fn firmware_started(&mut self, falcon: Falcon, code: &[u32], data: &[u32]) {
        self.host.offer_firmware(self.vm, falcon, code, data);
    }

    fn aperture_read(&mut self, aperture: Aperture, offset: u64, data: &mut [u8]) -> Result<(), Denied> {
        self.through_aperture_read(aperture, offset, data)
    }

    fn aperture_write(&mut self, aperture: Aperture, offset: u64, data: &[u8]) -> Result<(), WriteFailure> {
        self.through_aperture_write(aperture, offset, data)
    }

    fn bind_aperture(&mut self, aperture: Aperture, instance: Option<Place>) {
        let directory = instance.and_then(|instance| self.memory.grants().directory_of(instance));
        self.memory.bind_aperture(aperture, instance, directory);
        self.refresh(aperture.into());
    }

    fn place_window(&mut self, base: Option<GuestVramAddr>) {
        self.move_window(base);
    }

    fn flush_tlb(&mut self, directory: Option<Place>, _hub_only: bool) {
        // Aperture flushes use the hub form, and channel flushes use either form, so look up the shadow in both cases.
        if let Err(error) = self.flush_spaces(directory) {
            tracing::error!(vm = %self.vm, %error, "cannot execute a guest's TLB flush on the card");
        }
    }

    fn bind_channel(&mut self, channel: VirtualChannelId, instance: Option<Place>) {
        self.unbind(channel);
        let Some(instance) = instance else { return };
        self.quiet = false;
        match self.bind(channel, instance) {
            Ok(()) => self.counts.binds += 1,
            Err(BindFailure::Lacking(guest)) if self.bind_later(channel, instance, &guest) => {}
            Err(error) => self.refuse_bind(channel, instance, &error),
        }
        self.choose_polled();
    }

    fn enable_channel(&mut self, channel: VirtualChannelId, enabled: bool) {
        self.pending.enable(channel, enabled);
        let mut state = self.host.lock();
        self.with_state(&mut state, |channels, card, vm| channels.enable(card, vm, channel, enabled));
        state.feeder().look_at_waits(Some(self.vm));
    }

    fn channel_state(&mut self, channel: VirtualChannelId) -> ChannelState {
        if let Some((enabled, pending)) = self.pending.state(channel) {
            return ChannelState { enabled, pending, ..ChannelState::default() };
        }
        let state = self.with_channels(|channels, card, vm| channels.hardware_state(card, vm, channel));
        ChannelState {
            enabled: state.enabled,
            acquire_pending: state.acquire_pending,
            loaded: state.loaded,
            pending: state.pending,
        }
    }

    fn submit_runlist(&mut self, list: Place, length: u32) {
        let entries = length.min(RUNLIST_ENTRIES) as usize;
        let mut bytes = vec![0; entries * size_of::<RunlistEntry>()];
        if self.fill(list, &mut bytes).is_none() {
            tracing::warn!(vm = %self.vm, %list, "a runlist is outside guest memory and is treated as empty");
            bytes.clear();
        }
        let wanted: Vec<_> = bytes
            .chunks_exact(size_of::<RunlistEntry>())
            .filter_map(|entry| {
                let entry = RunlistEntry::from(u64::from_le_bytes(entry.try_into().ok()?));
                VirtualChannelId::new(entry.channel().into())
            })
            .collect();
        let taken = self.set_runlist(&wanted);
        self.work.set_runlist(if taken { Runlist::Taken } else { Runlist::Awaited });
    }

    fn preempt(&mut self, channel: VirtualChannelId) {
        self.with_channels(|channels, card, vm| channels.preempt(card, vm, channel));
    }

    fn preempting(&mut self, channel: VirtualChannelId) -> bool {
        self.with_channels(|channels, card, vm| channels.preempting(card, vm, channel))
    }

    fn engine_status(&mut self, engine: u32) -> EngineStatus {
        let status = self.host.card().read32(pfifo::ENGINE_STATUS::at(engine));
        let physical = ChannelId(pfifo::ENGINE_STATUS::CHANNEL.get(status) as u8);
        let busy = pfifo::ENGINE_STATUS::BUSY.is_set(status);
        let owner = self.host.lock().channels().by_physical(physical);
        let channel = owner.filter(|(vm, _)| vm.0 == self.vm.0 && busy).map(|(_, channel)| channel);
        EngineStatus { channel, busy: channel.is_some() }
    }

    fn block_engines(&mut self, engines: u32, blocked: bool) {
        // Pause all channels of the VM while any engine is blocked, because a channel's next engine is unknown.
        let paused = self.work.block(engines, blocked) || self.moves_wait();
        self.pause(paused);
    }

    fn reset_engine(&mut self, _engine: u32) {
        // The engine is shared, and the guest needs to restart only its own work. Preempt its channels, and save their
        // state.
        let mut state = self.host.lock();
        self.work.channels().into_iter().for_each(|channel| state.clear_engines(self.vm, channel));
    }

    fn reset_fifo(&mut self) {
        self.unbind_all();
        // The scheduler's registers have their reset values now, so no engine is blocked.
        self.block_engines(u32::MAX, false);
    }

    fn now_ns(&mut self) -> u64 {
        card_manager::time::now_ns(&**self.host.card())
    }

    fn interrupt(&mut self, line: InterruptLine) {
        let interrupts = self.link.interrupts();
        match line {
            InterruptLine::Msi => {
                self.counts.interrupts += 1;
                interrupts.trigger_msi(0);
            }
            InterruptLine::Intx(level) => {
                self.counts.interrupts += u64::from(level);
                interrupts.set_intx_level(level);
            }
        }
    }

    fn bus_master(&mut self, enabled: bool) {
        if enabled == self.memory.grants().bus_master() {
            return;
        }
        if let Err(error) = self.memory.set_bus_master(enabled) {
            tracing::error!(vm = %self.vm, %error, "the card may still access memory of a guest that has disabled bus mastering");
        }
    }
}
