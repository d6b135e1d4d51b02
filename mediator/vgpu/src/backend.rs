//! What the vGPU's registers mean for the card: the implementation of `devmodel`'s seam.

use super::channels::Unbound;
use super::named::Objects;
use super::patience::Patience;
use super::pending::Pending;
use super::pv::Interface;
use super::ram::RamMap;
use super::remap::{Remap, Slot, Stop};
use super::spaces::{Owned, Spaces, Tables};
use channels::Channels;
use devmodel::backend::{Aperture, Backend, ChannelState, Denied, EngineStatus, InterruptLine, Unwritten};
use devmodel::events::MmuFault;
use nvspec::falcon::Falcon;
use nvspec::addr::{GuestVramAddr, Place, VramAddr};
use nvspec::fifo::{CHANNELS, ChannelId, RunlistEntry, VirtualChannelId};
use nvspec::regs::pfifo;
use owner::{CardVram, Feeder, HostCard, HostError, HostState};
use shadow_pt::{ApertureTlb, Mode, SpaceId};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use vmm_glue::{DmaRegion, Link};
use vram::VmId;

/// Entries of a guest's runlist that are read; more name channels twice.
const RUNLIST_ENTRIES: u32 = CHANNELS * 2;

/// Events since the VM was created.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) doorbells: u64,
    pub(super) doorbells_refused: u64,
    pub(super) flushes: u64,
    pub(super) interrupts: u64,
    pub(super) binds: u64,
    pub(super) binds_refused: u64,
    pub(super) runlists: u64,
    pub(super) faults: u64,
    pub(super) submissions: u64,
    pub(super) entries: u64,
    pub(super) hangs: u64,
    pub(super) memory_waits: u64,
    pub(super) memory_denied: u64,
    /// How long work has waited for memory that waits no more, in ns.
    pub(super) memory_waited_ns: u64,
    pub(super) writes_waited: u64,
    pub(super) writes_lost: u64,
    /// Bytes that its CPU has read or written of VRAM by messages.
    pub(super) aperture_bytes: u64,
}

/// A channel of the guest that is on the card.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    /// Its address space.
    pub(super) space: SpaceId,
    /// Its number on the card.
    pub(super) physical: ChannelId,
}

/// One VM's side of the card.
pub(super) struct VmBackend {
    pub(super) host: Arc<HostCard>,
    pub(super) vm: VmId,
    pub(super) link: Link,
    pub(super) ram: RamMap,
    pub(super) spaces: Spaces,
    pub(super) bar1: ApertureTlb,
    pub(super) bar3: ApertureTlb,
    /// What of its VRAM lives under apertures that the VMM maps.
    pub(super) remap: Remap,
    /// Work that leaves the card for pages under apertures to move.
    pub(super) stop: Option<Stop>,
    /// Bytes of its VRAM.
    pub(super) vram_bytes: u64,
    /// Guest VRAM pages in which a bound channel has its USERD.
    pub(super) userd: HashMap<u64, VirtualChannelId>,
    /// Bytes of GP_PUT that have come in so far, by channel.
    pub(super) doorbells: HashMap<VirtualChannelId, [u8; 4]>,
    /// Channels whose USERD lives under a mapped aperture, and where.
    pub(super) polled: BTreeMap<VirtualChannelId, Slot>,
    /// What their GP_PUT was when it was looked at last.
    pub(super) rung: BTreeMap<VirtualChannelId, u32>,
    /// Channels that are bound.
    pub(super) bound: BTreeMap<VirtualChannelId, Bound>,
    /// Channels that are off the guest's list and have not left the card: their address spaces, by their number there.
    pub(super) departing: BTreeMap<ChannelId, SpaceId>,
    /// Instance blocks of channels that the guest has bound, whether or not they are on the card.
    pub(super) instances: BTreeMap<VirtualChannelId, Place>,
    /// What their subchannels have, as far as anybody looked.
    pub(super) objects: BTreeMap<VirtualChannelId, Objects>,
    /// What waits for memory.
    pub(super) pending: Pending,
    /// How long it may where none is found.
    pub(super) queue_limit: Duration,
    /// What its CPU's writes wait for.
    pub(super) patience: Patience,
    /// Faults that the guest is told of after the access that brought them about.
    pub(super) faults: Vec<MmuFault>,
    pub(super) bus_master: bool,
    /// Engines that the guest holds back, one bit each.
    pub(super) blocked: u32,
    /// Nothing of the VM's is on the card any more: what it had may be given to others.
    pub(super) quiet: bool,
    /// A runlist was submitted and is in force; the vGPU is told after the access that did it.
    pub(super) runlist_done: bool,
    /// A runlist was submitted and is not in force yet.
    pub(super) runlist_waits: bool,
    pub(super) counts: Counts,
    /// What a guest that knows us may use, if the operator offers it.
    pub(super) pv: Option<Box<Interface>>,
}

impl VmBackend {
    pub(super) fn new(host: Arc<HostCard>, vm: VmId, link: Link, mode: Mode, vram_bytes: u64) -> Self {
        Self {
            host,
            vm,
            link,
            ram: RamMap::default(),
            spaces: Spaces::new(vm, mode),
            bar1: ApertureTlb::new(),
            bar3: ApertureTlb::new(),
            remap: Remap::default(),
            stop: None,
            vram_bytes,
            userd: HashMap::new(),
            doorbells: HashMap::new(),
            polled: BTreeMap::new(),
            rung: BTreeMap::new(),
            bound: BTreeMap::new(),
            departing: BTreeMap::new(),
            instances: BTreeMap::new(),
            objects: BTreeMap::new(),
            pending: Pending::default(),
            queue_limit: Duration::ZERO,
            patience: Patience::default(),
            faults: Vec::new(),
            bus_master: false,
            blocked: 0,
            quiet: true,
            runlist_done: false,
            runlist_waits: false,
            counts: Counts::default(),
            pv: None,
        }
    }

    /// Returns where an aperture offset leads, by the guest's tables.
    pub(super) fn translate(&mut self, aperture: Aperture, offset: u64, write: bool) -> Option<Place> {
        let tlb = match aperture {
            Aperture::Bar1 => &mut self.bar1,
            Aperture::Bar3 => &mut self.bar3,
        };
        // The card's lock is for the guest's tables, which are read where the TLB does not have the page.
        let mapping = match tlb.cached(offset) {
            Some(mapping) => mapping,
            None => self.with_aperture(aperture, |tlb, guest, _| tlb.translate(offset, guest).ok())?,
        };
        (mapping.writable || !write).then_some(mapping.place)
    }

    /// Calls `each` with the card's channels, the card, and this VM's memory.
    pub(super) fn with_channels<T>(
        &mut self,
        each: impl FnOnce(&mut Channels, &mut CardAccess<'_, '_>, &mut Tables<'_, '_, '_>, channels::VmId) -> T,
    ) -> T {
        let host = Arc::clone(&self.host);
        self.with_state(&mut host.lock(), each)
    }

    /// As [`Self::with_channels`], with the card's state.
    pub(super) fn with_state<T>(
        &self,
        state: &mut HostState,
        each: impl FnOnce(&mut Channels, &mut CardAccess<'_, '_>, &mut Tables<'_, '_, '_>, channels::VmId) -> T,
    ) -> T {
        let Self { vm, link, ram, remap, bus_master, pv, .. } = self;
        let tables = pv.as_deref().map(|pv| &pv.tables);
        let owned = Owned { vm: *vm, ram, link, bus_master: *bus_master, remap, tables };
        let HostState { vram, channels, .. } = state;
        let state = RefCell::new(vram);
        let mut guest = Tables { state: &state, owned: &owned };
        each(channels, &mut CardAccess(&state), &mut guest, *vm)
    }

    /// Keeps all channels from being scheduled, or lets them again.
    pub(super) fn pause(&mut self, paused: bool) {
        self.with_channels(|channels, card, _, vm| channels.pause(card, vm, ::channels::Pause::Guest, paused));
        self.host.lock().look_at_waits(Some(self.vm));
    }

    /// Takes everything of the guest's driver off the card: channels, address spaces, apertures. Its memory stays.
    pub(super) fn quiesce(&mut self) {
        self.reset_fifo();
        self.faults.clear();
        self.quiet = self.spaces.clear(&self.host);
        self.forget_homes();
        self.bar1.bind(None, None);
        self.bar3.bind(None, None);
        (self.runlist_done, self.runlist_waits) = (false, false);
    }

    /// Ends what [`Self::quiesce`] has begun, once the channels have left the card that had not yet.
    pub(super) fn end_quiesce(&mut self) {
        self.channels_left();
        self.quiet = self.spaces.clear(&self.host);
    }

    /// The VMM lends guest memory.
    pub(super) fn lend(&mut self, region: &DmaRegion) -> Result<(), HostError> {
        self.ram.map(&self.host, self.vm, region)?;
        // Entries that named this memory before it was there (or while it was moved) are good now.
        self.spaces.granted();
        Ok(())
    }

    /// The VMM takes guest memory back. When this returns, the card cannot reach it.
    pub(super) fn withdraw(&mut self, gpa: u64, size: u64) {
        // The grant goes first, so that nothing is translated to it any more.
        let lent = self.ram.take(gpa);
        let flushed = self.spaces.withdraw_ram(&self.host, gpa, size);
        // What was translated before has arrived then: late, it would be lost, or written to what has its addresses next.
        let flushed = flushed.and_then(|()| Ok(self.host.lock().vram.memory.barrier()?));
        if let Err(error) = &flushed {
            tracing::error!(vm = %self.vm, %error, "the card may keep translations of memory that was taken back");
        }
        if let Some(lent) = lent {
            lent.give_back(&self.host, self.vm, flushed.is_err());
        }
    }

    /// A region turned out not to be the guest's memory.
    pub(super) fn withdraw_unshared(&mut self, gpa: u64) {
        if let Some(size) = self.ram.size_at(gpa) {
            self.withdraw(gpa, size);
        }
    }

    /// The client is gone: nothing of its memory is left for the card.
    pub(super) fn forget_ram(&mut self) {
        while let Some((gpa, size)) = self.ram.first() {
            self.withdraw(gpa, size);
        }
        self.bus_master = false;
    }

    /// Brings the shadows of a directory (of all address spaces, for `None`) and the apertures up to what the guest's tables
    /// say. What lost a permission is on the card, and out of its TLBs, when this returns.
    pub(super) fn flush_spaces(&mut self, directory: Option<Place>) -> Result<(), HostError> {
        self.counts.flushes += 1;
        self.bar1.flush();
        self.bar3.flush();
        self.refresh_flushed(directory);
        let Self { host, vm, link, ram, spaces, remap, bus_master, pv, .. } = self;
        let tables = pv.as_deref().map(|pv| &pv.tables);
        let owned = Owned { vm: *vm, ram, link, bus_master: *bus_master, remap, tables };
        spaces.flush(host, &owned, directory)
    }

    /// These channels may run, as far as they are enabled, and no others. Whether that is in force; if not,
    /// [`GuestEvent::Runlist`](owner::GuestEvent::Runlist) says when it is.
    pub(super) fn set_runlist(&mut self, channels: &[VirtualChannelId]) -> bool {
        self.counts.runlists += 1;
        self.pending.list(channels);
        let done = self.with_channels(|all, card, guest, vm| all.submit_runlist(card, guest, vm, channels)).taken;
        self.host.lock().look_at_waits(Some(self.vm));
        done
    }

    /// Takes all channels off the card.
    pub(super) fn unbind_all(&mut self) {
        for channel in self.instances.keys().copied().collect::<Vec<_>>() {
            self.unbind(channel);
        }
    }
}

impl Backend for VmBackend {
    fn vram_read(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied> {
        self.guest_read(address, data)
    }

    fn vram_write(&mut self, address: GuestVramAddr, data: &[u8]) -> Result<(), Unwritten> {
        self.guest_write(address, data)
    }

    fn firmware_started(&mut self, falcon: Falcon, code: &[u32], data: &[u32]) {
        self.host.offer_firmware(self.vm, falcon, code, data);
    }

    fn aperture_read(&mut self, aperture: Aperture, offset: u64, data: &mut [u8]) -> Result<(), Denied> {
        self.through_aperture_read(aperture, offset, data)
    }

    fn aperture_write(&mut self, aperture: Aperture, offset: u64, data: &[u8]) -> Result<(), Unwritten> {
        self.through_aperture_write(aperture, offset, data)
    }

    fn bind_aperture(&mut self, aperture: Aperture, instance: Option<Place>) {
        let directory = instance.and_then(|instance| self.pv.as_ref()?.directory_of(instance));
        match aperture {
            Aperture::Bar1 => self.bar1.bind(instance, directory),
            Aperture::Bar3 => self.bar3.bind(instance, directory),
        }
        self.refresh(aperture);
    }

    fn flush_tlb(&mut self, directory: Option<Place>, _hub_only: bool) {
        // Apertures are flushed by the hub's form, channels by either: the shadow is looked up in both cases.
        if let Err(error) = self.flush_spaces(directory) {
            tracing::error!(vm = %self.vm, %error, "a guest's TLB flush did not reach the card");
        }
    }

    fn bind_channel(&mut self, channel: VirtualChannelId, instance: Option<Place>) {
        self.unbind(channel);
        let Some(instance) = instance else { return };
        self.quiet = false;
        match self.bind(channel, instance) {
            Ok(()) => self.counts.binds += 1,
            Err(Unbound::Lacking(guest)) if self.bind_later(channel, instance, &guest) => {}
            Err(error) => self.refuse_bind(channel, instance, &error),
        }
        self.choose_polled();
    }

    fn enable_channel(&mut self, channel: VirtualChannelId, enabled: bool) {
        self.pending.enable(channel, enabled);
        self.with_channels(|channels, card, guest, vm| channels.enable(card, guest, vm, channel, enabled));
        self.host.lock().look_at_waits(Some(self.vm));
    }

    fn channel_state(&mut self, channel: VirtualChannelId) -> ChannelState {
        if let Some((enabled, pending)) = self.pending.state(channel) {
            return ChannelState { enabled, pending, ..ChannelState::default() };
        }
        let state = self.with_channels(|channels, card, _, vm| channels.hardware_state(card, vm, channel));
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
        let read = self.with_channels(|_, _, guest, _| guest.fill(list, &mut bytes));
        if read.is_none() {
            tracing::warn!(vm = %self.vm, %list, "a runlist is not the guest's memory; it counts as empty");
            bytes.clear();
        }
        let wanted: Vec<_> = bytes
            .chunks_exact(size_of::<RunlistEntry>())
            .filter_map(|entry| {
                let entry = RunlistEntry::from(u64::from_le_bytes(entry.try_into().ok()?));
                VirtualChannelId::new(entry.channel().into())
            })
            .collect();
        self.runlist_done = self.set_runlist(&wanted);
        self.runlist_waits = !self.runlist_done;
    }

    fn preempt(&mut self, channel: VirtualChannelId) {
        self.with_channels(|channels, card, guest, vm| channels.preempt(card, guest, vm, channel));
    }

    fn preempting(&mut self, channel: VirtualChannelId) -> bool {
        self.with_channels(|channels, card, _, vm| channels.preempting(card, vm, channel))
    }

    fn engine_status(&mut self, engine: u32) -> EngineStatus {
        let status = self.host.card().read32(pfifo::ENGINE_STATUS::at(engine));
        let physical = ChannelId(pfifo::ENGINE_STATUS::CHANNEL.get(status) as u8);
        let busy = pfifo::ENGINE_STATUS::BUSY.is_set(status);
        let owner = self.host.lock().channels.by_physical(physical);
        let channel = owner.filter(|(vm, _)| vm.0 == self.vm.0 && busy).map(|(_, channel)| channel);
        EngineStatus { channel, busy: channel.is_some() }
    }

    fn block_engines(&mut self, engines: u32, blocked: bool) {
        if blocked {
            self.blocked |= engines;
        } else {
            self.blocked &= !engines;
        }
        // All of the VM's channels wait while any engine is held back: which engine a channel is about to use is not known.
        let paused = self.blocked != 0 || self.moves_wait();
        self.pause(paused);
    }

    fn reset_engine(&mut self, _engine: u32) {
        // The engine is shared. What the guest means is that its own work there ends, and begins anew: its channels
        // leave the engines, and what they had saved is in their own memory.
        let mut state = self.host.lock();
        self.instances.keys().for_each(|channel| state.clear_engines(self.vm, *channel));
    }

    fn reset_fifo(&mut self) {
        self.unbind_all();
        // The scheduler's registers are as after power-on: nothing is held back.
        self.block_engines(u32::MAX, false);
    }

    fn now_ns(&mut self) -> u64 {
        owner::time::now_ns(&**self.host.card())
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
        if enabled == self.bus_master {
            return;
        }
        self.bus_master = enabled;
        if enabled {
            self.link.check_shared();
            self.spaces.granted();
        }
        // As often as a guest likes: the tables that map its RAM are unlinked, their entries stay.
        if let Err(error) = self.spaces.bar_ram(&self.host, !enabled) {
            tracing::error!(vm = %self.vm, %error, "the card may go on accessing the memory of a guest that forbade it");
        }
    }
}

/// The card, for `channels`, while the guest's memory is readable beside it.
pub(super) struct CardAccess<'a, 'b>(pub(super) &'a RefCell<&'b mut CardVram>);

impl channels::Host for CardAccess<'_, '_> {
    fn read32(&mut self, offset: u32) -> u32 {
        self.0.borrow_mut().memory.read32(offset)
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.0.borrow_mut().memory.write32(offset, value);
    }

    fn vram_read(&mut self, address: VramAddr, data: &mut [u8]) {
        self.0.borrow_mut().memory.vram_read(address, data);
    }

    fn vram_write(&mut self, address: VramAddr, data: &[u8]) {
        self.0.borrow_mut().memory.vram_write(address, data);
    }

    fn vram_flush(&mut self) {
        self.0.borrow_mut().memory.vram_flush();
    }

    fn userd_read(&mut self, channel: ChannelId, offset: u64) -> u32 {
        self.0.borrow_mut().memory.userd_read(channel, offset)
    }

    fn userd_write(&mut self, channel: ChannelId, offset: u64, value: u32) {
        self.0.borrow_mut().memory.userd_write(channel, offset, value);
    }
}
