//! A VM's use of its card: combines the VM's memory, work, and waits.
//!
//! Modules:
//! - `registers`: effects of the vGPU's registers on the card
//! - `channels`: binds channels from instance blocks, and turns doorbells into work on the card
//! - `aperture`: CPU accesses to guest VRAM through BAR1, BAR3 and PRAMIN
//! - `moves`: moves pages to and from mapped apertures
//! - `waits`: retries binds and work that wait for memory
//! - `operations`: implements requests of a paravirtual guest
//! - `segments`: maps memory that VMs share into address spaces
//! - `saved`: saved state of these parts

mod aperture;
mod channels;
mod moves;
mod operations;
mod registers;
mod saved;
mod segments;
mod waits;

use super::counts::counts;
use super::memory::{MappedWindow, Memory, Remap, View};
use super::pending::Pending;
use super::pv::{Interface, PvSettings};
use super::work::{Runlist, Work};
use super::write_wait::WriteWait;
use ::channels::Channels;
pub(super) use aperture::RungDoorbell;
use card_manager::{CardState, ManagedCard, ManagerError, Ranges};
use devmodel::backend::Aperture;
use devmodel::events::MmuFault;
pub(super) use moves::MOVE_POLL_INTERVAL;
use moves::Stop;
use nvspec::addr::{GuestVramAddr, Place};
use nvspec::fifo::VirtualChannelId;
pub(super) use operations::Done;
pub(super) use saved::{SavedBackend, WaitingDoorbells};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use vm_device::Pace;
use vmm_glue::memory::MemoryTable;
use vmm_glue::{DmaRegion, Link};
use vram::TenantId;

counts! {
    /// Events since the VM was created.
    Counts {
        /// Doorbells rung on channels that are on the card.
        doorbells: "doorbells",
        /// Doorbells whose GP_PUT is beyond the end of the ring.
        doorbells_refused: "doorbells_refused",
        /// TLB flushes by the guest.
        flushes: "tlb_flushes",
        /// Interrupts that the vGPU has raised.
        interrupts: "interrupts",
        /// Channels bound on the card.
        binds: "channel_binds",
        /// Channels whose bind was rejected.
        binds_refused: "channel_binds_refused",
        /// Runlists that the guest submitted.
        runlists: "runlists",
        /// Faults that the guest's work caused.
        faults: "faults",
        /// Submissions passed to the card.
        submissions: "submissions",
        /// GPFIFO entries in these submissions.
        entries: "ring_entries",
        /// Channels killed for making no progress.
        hangs: "hangs",
        /// Binds and submissions that waited for memory.
        memory_waits: "memory_waits",
        /// Failed waits for memory.
        memory_denied: "memory_denied",
        /// Total time that binds and work have waited for memory, excluding current waits, in ns.
        memory_waited_ns: "memory_waited_ns",
        /// Guest CPU writes that waited for memory.
        writes_waited: "memory_writes_waited",
        /// Guest CPU writes that waited for memory and were lost.
        writes_lost: "memory_writes_lost",
        /// BAR0 reads by the guest's CPU.
        register_reads: "register_reads",
        /// BAR0 writes by the guest's CPU.
        register_writes: "register_writes",
        /// BAR1 and BAR3 reads that arrived as messages.
        aperture_reads: "aperture_reads",
        /// BAR1 and BAR3 writes that arrived as messages.
        aperture_writes: "aperture_writes",
        /// Bytes of VRAM that the guest's CPU accessed through messages.
        aperture_bytes: "aperture_bytes",
    }
}

/// Arguments for creating a [`VmBackend`].
pub(super) struct Description {
    pub(super) vm: TenantId,
    pub(super) link: Link,
    /// TLB flush mode of the shadow page tables.
    pub(super) shadow: shadow_pt::Mode,
    /// VRAM size that the guest sees, in bytes.
    pub(super) vram_bytes: u64,
    /// Maximum time that work may wait for memory.
    pub(super) queue_limit: Duration,
}

/// One VM's state on the card.
pub(super) struct VmBackend {
    host: Arc<ManagedCard>,
    vm: TenantId,
    link: Link,
    memory: Memory,
    work: Work,
    /// Binds and work that wait for memory.
    pending: Pending,
    /// State of guest CPU writes that wait for memory.
    writes: WriteWait,
    /// Work that must leave the card before pages under apertures can move.
    stop: Option<Stop>,
    /// Budget for moving pages under mapped apertures.
    pace: Pace,
    /// Faults to report to the guest after the access that caused them.
    faults: Vec<MmuFault>,
    /// Set if the VM has neither channels nor shadow page tables on the card, so its chunks may be assigned to other
    /// VMs.
    quiet: bool,
    /// Doorbell that the current access rang.
    doorbell: Option<RungDoorbell>,
    counts: Counts,
    /// The paravirtual interface, if the operator offers it.
    pv: Option<Box<Interface>>,
}

impl VmBackend {
    pub(super) fn new(host: Arc<ManagedCard>, description: Description, pv: Option<Box<Interface>>) -> Self {
        let Description { vm, link, shadow, vram_bytes, queue_limit } = description;
        let mut memory = Memory::new(Arc::clone(&host), vm, link.clone(), shadow, vram_bytes);
        if let Some(pv) = &pv {
            memory.grants_mut().keep_tables(pv.table_bytes());
        }
        Self {
            host,
            vm,
            link,
            memory,
            work: Work::default(),
            pending: Pending::new(vm, queue_limit),
            writes: WriteWait::new(queue_limit),
            stop: None,
            pace: Pace::default(),
            faults: Vec::new(),
            quiet: true,
            doorbell: None,
            counts: Counts::default(),
            pv,
        }
    }

    /// Returns the VM's card.
    pub(super) fn host(&self) -> &Arc<ManagedCard> {
        &self.host
    }

    /// Returns the VM's number on the card.
    pub(super) fn vm(&self) -> TenantId {
        self.vm
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn work(&self) -> &Work {
        &self.work
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Returns true if the VM has neither channels nor shadow page tables on the card.
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Records the guest's PRAMIN base. Does not move pages.
    pub(super) fn set_window(&mut self, base: Option<GuestVramAddr>) {
        self.memory.place_window(base);
    }

    /// Returns the apertures that the VMM maps.
    pub(super) fn remap(&self) -> &Remap {
        self.memory.grants().remap()
    }

    /// Like [`Self::remap`], but mutable.
    pub(super) fn remap_mut(&mut self) -> &mut Remap {
        self.memory.grants_mut().remap_mut()
    }

    /// Returns the paravirtual interface.
    pub(super) fn pv(&self) -> Option<&Interface> {
        self.pv.as_deref()
    }

    /// Like [`Self::pv`], but mutable.
    pub(super) fn pv_mut(&mut self) -> Option<&mut Interface> {
        self.pv.as_deref_mut()
    }

    /// Returns the guest's RAM, or `None` while the device may not access it.
    pub(super) fn ram_now(&self) -> Option<Arc<MemoryTable>> {
        self.memory.grants().ram_now()
    }

    /// Counts an aperture read that arrived as a message.
    pub(super) fn count_aperture_read(&mut self, aperture: Aperture, offset: u64, bytes: usize) {
        self.counts.aperture_reads += 1;
        self.count_message(aperture, offset, bytes);
    }

    /// Counts an aperture write that arrived as a message.
    pub(super) fn count_aperture_write(&mut self, aperture: Aperture, offset: u64, bytes: usize) {
        self.counts.aperture_writes += 1;
        self.count_message(aperture, offset, bytes);
    }

    /// Counts a PRAMIN access that arrived as a message. Register accesses are counted separately.
    pub(super) fn count_window(&mut self, offset: u64, bytes: usize) {
        self.remap_mut().count_message(MappedWindow::Pramin, offset);
        self.count_bytes(bytes);
    }

    fn count_message(&mut self, aperture: Aperture, offset: u64, bytes: usize) {
        self.remap_mut().count_message(aperture.into(), offset);
        self.count_bytes(bytes);
    }

    /// Counts a register read.
    pub(super) fn count_register_read(&mut self) {
        self.counts.register_reads += 1;
    }

    /// Counts a register write.
    pub(super) fn count_register_write(&mut self) {
        self.counts.register_writes += 1;
    }

    /// Counts bytes of VRAM accessed through messages.
    fn count_bytes(&mut self, bytes: usize) {
        self.counts.aperture_bytes += bytes as u64;
    }

    /// Counts a channel that was killed for making no progress.
    pub(super) fn count_hang(&mut self) {
        self.counts.hangs += 1;
    }

    /// Counts a fault that the guest caused.
    pub(super) fn count_fault(&mut self) {
        self.counts.faults += 1;
    }

    /// Returns and clears the faults to report to the guest.
    pub(super) fn take_faults(&mut self) -> Vec<MmuFault> {
        std::mem::take(&mut self.faults)
    }

    /// Records that the runlist is in effect, if its state is `seen`. Returns true in this case; the caller must then
    /// notify the vGPU.
    pub(super) fn runlist_ends(&mut self, seen: Runlist) -> bool {
        self.work.runlist_ends(seen)
    }

    /// Returns true if the channel is on the card, or if its bind waits for memory.
    pub(super) fn is_bound(&self, channel: VirtualChannelId) -> bool {
        self.work.bound(channel).is_some() || self.pending.is_bind(channel)
    }

    /// Returns true if a channel's bind waits for memory.
    pub(super) fn awaits_bind(&self, channel: VirtualChannelId) -> bool {
        self.pending.is_bind(channel)
    }

    /// Calls `each` with the card's channels and the VM's view of the card.
    fn with_channels<T>(&self, each: impl FnOnce(&mut Channels, &mut View<'_>, TenantId) -> T) -> T {
        self.with_state(&mut self.host.lock(), each)
    }

    /// Same as [`Self::with_channels`], with the card's state already locked.
    fn with_state<T>(
        &self,
        state: &mut CardState,
        each: impl FnOnce(&mut Channels, &mut View<'_>, TenantId) -> T,
    ) -> T {
        let (vram, channels) = state.parts();
        each(channels, &mut View::new(vram, self.memory.grants()), self.vm)
    }

    /// Reads guest memory at its current location. USERD pages are read like other memory.
    pub(super) fn fill(&self, place: Place, data: &mut [u8]) -> Option<()> {
        self.with_channels(|_, view, _| view.fill(place, data))
    }

    /// Pauses or resumes all of the VM's channels.
    fn pause(&mut self, paused: bool) {
        let mut state = self.host.lock();
        self.with_state(&mut state, |channels, card, vm| channels.pause(card, vm, ::channels::Pause::Guest, paused));
        state.feeder().look_at_waits(Some(self.vm));
    }

    /// Removes all state of the guest driver from the card: channels, address spaces, and apertures. Keeps the VM's
    /// memory.
    pub(super) fn quiesce(&mut self) {
        devmodel::backend::Backend::reset_fifo(self);
        self.faults.clear();
        self.doorbell = None;
        self.quiet = self.memory.clear();
        self.forget_homes();
        self.memory.bind_aperture(Aperture::Bar1, None, None);
        self.memory.bind_aperture(Aperture::Bar3, None, None);
        self.work.set_runlist(Runlist::InForce);
    }

    /// Finishes [`Self::quiesce`] after the remaining channels have left the card.
    pub(super) fn end_quiesce(&mut self) {
        self.channels_left();
        self.quiet = self.memory.clear();
    }

    /// Makes all memory that the client lends accessible to the card, and unmaps all other memory.
    pub(super) fn lend_all(&mut self) -> Result<(), ManagerError> {
        let lent = self.link.memory().snapshot();
        self.memory.lend_all(&lent)
    }

    /// Makes guest memory that the VMM lends accessible to the card.
    pub(super) fn lend(&mut self, region: &DmaRegion) -> Result<(), ManagerError> {
        self.memory.lend(region)
    }

    /// Revokes the card's access to guest memory that the VMM withdraws.
    pub(super) fn withdraw(&mut self, gpa: u64, size: u64) {
        self.memory.withdraw(gpa, size);
    }

    /// Withdraws the memory region at `gpa`, which the VMM does not share.
    pub(super) fn withdraw_unshared(&mut self, gpa: u64) {
        self.memory.withdraw_unshared(gpa);
    }

    /// Withdraws all memory of a disconnected client.
    pub(super) fn forget_ram(&mut self) {
        self.memory.forget_ram();
    }

    /// Moves the VM's memory by calling `commit`, in one critical section of the card's lock.
    pub(super) fn relocate(&mut self, commit: &mut dyn FnMut(&mut CardState) -> Ranges) -> Result<(), ManagerError> {
        let host = Arc::clone(&self.host);
        let state = &mut *host.lock();
        let ranges = commit(state)
            .into_iter()
            .map(|(at, bytes)| shadow_pt::GuestRange::Vram(nvspec::addr::GuestVramAddr(at.0), bytes));
        let relocated = self.memory.relocated(state, &ranges.collect::<Vec<_>>());
        if relocated.is_err() {
            // Quarantine the vacated chunks before another thread can acquire the card's lock and allocate them.
            state.quarantine_left();
        }
        relocated
    }

    /// Updates the shadows of a directory, or of all address spaces if `None`, and the apertures from the guest's
    /// tables. Afterwards, neither the card's page tables nor its TLBs contain revoked permissions.
    pub(super) fn flush_spaces(&mut self, directory: Option<Place>) -> Result<(), ManagerError> {
        self.counts.flushes += 1;
        self.memory.flush_apertures();
        self.refresh_flushed(directory);
        self.memory.flush(directory)
    }

    /// Permits only these channels to run, and only if they are enabled. Returns true if the change has already taken
    /// effect; otherwise [`GuestEvent::Runlist`](card_manager::GuestEvent::Runlist) reports it later.
    pub(super) fn set_runlist(&mut self, channels: &[VirtualChannelId]) -> bool {
        self.counts.runlists += 1;
        self.pending.list(channels);
        let mut state = self.host.lock();
        let submitted = self.with_state(&mut state, |all, card, vm| all.submit_runlist(card, vm, channels));
        state.feeder().look_at_waits(Some(self.vm));
        submitted.taken
    }

    /// Removes all channels from the card.
    fn unbind_all(&mut self) {
        for channel in self.work.channels() {
            self.unbind(channel);
        }
    }

    /// Undoes the arrival of a VM that could not resume: removes the VM's remaining channels from the card, and
    /// restores the setting for kept page tables.
    pub(super) fn forget_arrival(&mut self, pv: Option<&PvSettings>) {
        let strays: Vec<VirtualChannelId> = {
            let state = self.host.lock();
            let all = (0u8..).take(nvspec::fifo::CHANNELS as usize).map(VirtualChannelId);
            all.filter(|channel| state.channels().physical(self.vm, *channel).is_some()).collect()
        };
        strays.into_iter().for_each(|channel| self.take_off(channel));
        if let Some(pv) = pv {
            self.memory.grants_mut().keep_tables(pv.table_bytes);
        }
    }

    /// Starts, restarts or stops logging writes to guest RAM by the card's work.
    pub(super) fn log_ram(&mut self, on: bool) {
        self.memory.log_ram(on);
    }

    /// Returns the ranges of guest RAM within `range` that the card's work may have written since the last call.
    /// `goes_on` is true if the work keeps running.
    pub(super) fn take_written(&mut self, range: Range<u64>, goes_on: bool) -> Vec<Range<u64>> {
        self.memory.take_written(range, goes_on)
    }
}
