//! A card, all of the mediator's state for it, and the VMs that share it.
//!
//! Modules: `state` (queries and changes from other modules), `scheduling` (the scheduler's view of the card),
//! `interrupts` (the card's interrupt tree, and the affected VMs), `interrupt_thread` (one wake-up of the interrupt
//! thread), `recovery` (channels that faulted or must leave the card), `mover` (the thread that moves memory), `moving`
//! (moves a VM to another card), `relocate` (relocates one VM's chunks), `sharing` (memory shared by two cards during a
//! move), `standstill` (the quiesced card), `saved` (saves and hands over the card), `reopen` (restores the card in the
//! next process), `failure` (inconsistent state after a panic), `scrubber` (clears PGRAPH between tenants), `zeroing`
//! (zeroes free memory).

mod failure;
pub(crate) mod interrupt_thread;
mod interrupts;
mod mover;
mod moving;
mod recovery;
mod relocate;
mod reopen;
mod saved;
mod scheduling;
mod scrubber;
mod sharing;
mod standstill;
mod state;
mod zeroing;

use crate::ManagerError;
use crate::alarm::TimerAlarm;
use crate::tenants::{GuestAlarms, GuestEvent};
use crate::work::Work;
use crate::work::schedule::Schedule;
use crate::work::time::{self, Clock};
use bringup::layout::Layout;
use bringup::memory::CardMemory;
use bringup::start::{self, CardInfo};
use bringup::{CardError, golden};
use card::{Card, InterruptMode};
use card_memory::balance::{Divider, Division};
use card_memory::iova::{IovaSpace, RamShare};
use card_memory::pinned::PinnedPool;
use card_memory::shortage::Shortage;
use card_memory::{COPIER, CardVram, Memory, Ranges, SCRUB_PIECE, Wakeup, found};
use channels::Channels;
use failure::StateGuard;
use firmware::{Inbox, Set};
use locks::{Mutex, rank};
pub use moving::{Departing, Halted, Suspended};
use nvspec::addr::{SMALL_PAGE, VramAddr};
use nvspec::chip::Chip;
use nvspec::falcon::Falcon;
pub use reopen::{Handed, Reopened};
pub use saved::SavedHost;
use sched::VgpuParams;
use scrubber::{SCRUBBER, Scrubber};
pub use standstill::Standstill;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};
use vram::{ChunkTable, Contents, GuestVramAddr, Limits, ScrubWork, TenantId};

/// A VM that receives events.
pub trait GuestEvents: Send + Sync {
    /// Delivers a card event to the VM. Called from the card's interrupt thread, without the card's lock.
    fn deliver(&self, event: GuestEvent);

    /// Relocates the VM's memory. Calls `commit` once, with the VM's lock and the card's lock held. `commit` returns
    /// the guest VRAM ranges that have moved. When this function returns, the card uses their new locations. The caller
    /// must not hold any lock.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    fn relocated(&self, commit: &mut dyn FnMut(&mut CardState) -> Ranges) -> Result<(), ManagerError>;

    /// Rebuilds the VM's address spaces after the card was taken over from another owner. When this function returns,
    /// they match the guest's page tables, so the VM's work may run. Called without the card's lock.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    fn taken_over(&self) -> Result<(), ManagerError> {
        Ok(())
    }

    /// Disconnects the VM's client because the card has failed. Called without any lock held.
    fn card_failed(&self) {}
}

/// State of one card and of the VMs that share it. Accessed through [`ManagedCard::lock`].
pub struct CardState {
    memory: Memory,
    work: Work,
    clock: Clock,
    vms: BTreeMap<TenantId, Weak<dyn GuestEvents>>,
    /// VMs that were removed while one of their channels was still on the card. A VM's memory is freed once its
    /// channels have left.
    removed: BTreeSet<TenantId>,
    /// Alarms of the guests' PTIMERs.
    guest_alarms: GuestAlarms,
    /// Clears PGRAPH between VMs, or `None` if this is not configured.
    scrubber: Option<Scrubber>,
    /// Firmware of the card's falcons.
    firmware: Set,
    /// Set while the card is quiesced or being quiesced.
    still: bool,
    /// Virtual machines that are paused individually.
    held: BTreeSet<TenantId>,
}

/// Settings of a shared card.
#[derive(Clone, Copy, Debug)]
pub struct Sharing {
    /// Size of a chunk in bytes, the unit in which VRAM is allocated.
    pub chunk_bytes: u64,
    /// Size of the VRAM reserved for the mediator's own tables, in bytes.
    pub reserve_bytes: u64,
    /// Size of the host memory for chunks that do not fit on the card, in bytes.
    pub host_bytes: u64,
    /// Settings for dividing the card's memory.
    pub division: Division,
    /// Settings for dividing the card's time.
    pub scheduler: sched::Config,
    /// Set to clear residual data of one VM's kernels from PGRAPH before another VM's kernels run.
    pub clear: bool,
    /// Set to zero memory between owners with the copy engines, for cards whose memory is slow to access from the CPU.
    pub engines_zero: bool,
    /// Set to keep the host memory for chunks in an unnamed file, so that another process can take over the card.
    pub shared: bool,
}

/// A VM's share of a card.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Size of the VRAM that the guest sees, in bytes.
    pub vram_bytes: u64,
    /// Limits of the VM's memory.
    pub memory: Limits,
    /// Maximum number of physical channels that the VM may use.
    pub channels: u32,
    /// Maximum time that a channel may occupy an engine without progress, or `None` for no limit.
    pub hang_limit: Option<Duration>,
    /// Share of the card's time.
    pub time: VgpuParams,
    /// Limits of the RAM that the VM may lend.
    pub ram: RamShare,
}

/// A card that the mediator owns.
pub struct ManagedCard {
    card: Arc<dyn Card>,
    info: CardInfo,
    layout: channels::Layout,
    /// VRAM address and size in bytes of the chunks that contain the fixed structures.
    own: (VramAddr, u64),
    /// Set if the copy engines zero memory between owners.
    engines_zero: bool,
    state: Mutex<rank::Card, CardState>,
    event: EventFd,
    stop: AtomicBool,
    /// Reason why the card has failed.
    failure: OnceLock<String>,
    /// Set once a thread has begun to remove all work from the failed card.
    shut_out: AtomicBool,
    wakeup: Arc<Wakeup>,
    /// Held by the thread that moves memory, so that only one VM at a time is suspended for moves.
    moving: Mutex<rank::Moving, ()>,
    threads: Mutex<rank::Threads, Vec<JoinHandle<()>>>,
    /// Receives the firmware that guests load into their falcons.
    inbox: OnceLock<Inbox>,
    /// Set from takeover to handover, while this process may reset the card.
    owned: AtomicBool,
}

/// Components for assembling a card.
struct Parts {
    card: Arc<dyn Card>,
    info: CardInfo,
    layout: Layout,
    own: (VramAddr, u64),
    memory: Memory,
    work: Work,
    clock: Clock,
    firmware: Set,
    engines_zero: bool,
    timers: Timers,
}

/// Event and timers that wake a card's interrupt thread.
struct Timers {
    event: EventFd,
    guest_alarm: TimerAlarm,
    waits: Waits,
}

/// File descriptors that a card's interrupt thread polls.
struct Waits {
    event: EventFd,
    timer: OwnedFd,
    guest_timer: OwnedFd,
}

impl Timers {
    /// Creates the event and the timers, including the alarm of the card's scheduler.
    fn new() -> Result<(Self, TimerAlarm), ManagerError> {
        let event = EventFd::new(EFD_CLOEXEC).map_err(no_descriptor)?;
        let another = || event.try_clone().map_err(no_descriptor);
        let (alarm, guest_alarm) = (TimerAlarm::new(another()?)?, TimerAlarm::new(another()?)?);
        let timer = alarm.timer_fd().map_err(no_descriptor)?;
        let guest_timer = guest_alarm.timer_fd().map_err(no_descriptor)?;
        let waits = Waits { event: another()?, timer, guest_timer };
        Ok((Self { event, guest_alarm, waits }, alarm))
    }
}

fn no_descriptor(error: std::io::Error) -> ManagerError {
    ManagerError::host("cannot create an event descriptor or thread for the card", error)
}

impl ManagedCard {
    /// Resets `card`, initializes it with `firmware`, and starts its threads.
    ///
    /// # Errors
    /// Returns an error if the card's initialization fails, or if the card has too little memory.
    pub fn open(card: Arc<dyn Card>, name: &str, sharing: &Sharing, firmware: Set) -> Result<Arc<Self>, ManagerError> {
        let Sharing { chunk_bytes, reserve_bytes, host_bytes, division, scheduler, clear, engines_zero, shared } =
            *sharing;
        let info = start::bring_up(&*card, &firmware)?;
        time::set(&*card);
        let mut chunks = ChunkTable::new(info.vram_bytes, chunk_bytes, Contents::Unknown)?;
        // Scrub a few chunks first for the mediator itself, because scrubbing the others requires the mediator's
        // structures.
        let graph_image = u64::from(info.context_bytes);
        let needed = Layout::needed(graph_image)?;
        let count = needed.div_ceil(chunk_bytes);
        let own: Vec<_> = (0..count).map_while(|_| chunks.take_scrub_work()).collect();
        let available = own.len() as u64 * chunk_bytes;
        let first = own.first().and_then(|work: &ScrubWork| work.place.card());
        let first = first.ok_or(CardError::TooSmall { needed, available })?;
        let layout = Layout::new(VramAddr(first.0), available, graph_image)?;
        let mut memory = CardMemory::take_over(Arc::clone(&card), layout, info.vram_bytes)?;
        memory.zero(layout.userd, available - layout.bootstrap_bytes())?;
        let golden = golden::make(&*card, &mut memory, &layout)?;
        own.iter().for_each(|work| chunks.scrubbed(work.place));
        let reserved = chunks.reserve_mediator(count as u32, 1)?;
        assert_eq!(chunks.address(reserved), first, "the first scrubbed chunks are the ones reserved");
        chunks.set_aside(u32::try_from(reserve_bytes.div_ceil(chunk_bytes)).unwrap_or(u32::MAX))?;
        let (timers, alarm) = Timers::new()?;
        let mut iova = IovaSpace::without(&card.unmappable());
        let slots = u32::try_from(host_bytes / chunk_bytes).unwrap_or(u32::MAX);
        let pinned = PinnedPool::new(Arc::clone(&card), &mut iova, slots, chunk_bytes, shared)?;
        chunks.set_host_budget(slots);
        let barrier = iova.allocate(SMALL_PAGE, 0).ok_or(ManagerError::OutOfIova { len: SMALL_PAGE })?;
        card.map_dma(barrier.0, found(SMALL_PAGE as usize)?)?;
        memory.set_barrier_page(barrier);
        let vram = CardVram::new(memory, pinned, chunks);
        let channels = Channels::new(layout.channels(), &golden);
        let (host, waits) = Self::assembled(Parts {
            card,
            info,
            layout,
            own: (VramAddr(first.0), available),
            memory: Memory::new(vram, iova, barrier, Divider::new(&division, chunk_bytes)),
            work: Work::new(channels, Schedule::new(scheduler, alarm)?),
            clock: Clock::new(),
            firmware,
            engines_zero,
            timers,
        });
        host.owned.store(true, Ordering::Release);
        {
            let mut state = host.lock();
            state.bind_own(clear, engines_zero, host.info.chip)?;
            state.memory_mut().set_division(&division)?;
        }
        host.start(name, waits)?;
        Ok(host)
    }

    /// Creates a card without VMs, and returns it with the event sources of its interrupt thread. Starts no threads.
    fn assembled(parts: Parts) -> (Arc<Self>, Waits) {
        let Parts { card, info, layout, own, memory, work, clock, firmware, engines_zero, timers } = parts;
        let Timers { event, guest_alarm, waits } = timers;
        let state = CardState {
            memory,
            work,
            clock,
            scrubber: None,
            firmware,
            vms: BTreeMap::new(),
            removed: BTreeSet::new(),
            guest_alarms: GuestAlarms::new(guest_alarm),
            still: false,
            held: BTreeSet::new(),
        };
        let wakeup = Arc::clone(&state.vram().wakeup);
        let host = Self {
            card,
            info,
            layout: layout.channels(),
            own,
            engines_zero,
            state: Mutex::new(state),
            event,
            stop: AtomicBool::new(false),
            failure: OnceLock::new(),
            shut_out: AtomicBool::new(false),
            wakeup,
            moving: Mutex::new(()),
            threads: Mutex::default(),
            inbox: OnceLock::new(),
            owned: AtomicBool::new(false),
        };
        (Arc::new(host), waits)
    }

    /// Starts the card's threads, and enables the card's interrupts.
    fn start(self: &Arc<Self>, name: &str, waits: Waits) -> Result<(), ManagerError> {
        self.card.set_interrupt(InterruptMode::Msi, Some(self.event.try_clone().map_err(no_descriptor)?));
        let weak = Arc::downgrade(self);
        let thread = std::thread::Builder::new()
            .name(format!("irq-{name}"))
            .spawn(move || {
                interrupts::run_first();
                let Waits { event, timer, guest_timer } = waits;
                failure::watched(&weak, "irq", || interrupts::serve(&weak, &event, &timer, &guest_timer));
            })
            .map_err(no_descriptor)?;
        self.threads.lock().push(thread);
        let (weak, wakeup) = (Arc::downgrade(self), Arc::clone(&self.wakeup));
        let thread = std::thread::Builder::new()
            .name(format!("mem-{name}"))
            .spawn(move || failure::watched(&weak, "mem", || mover::serve(&weak, &wakeup)))
            .map_err(no_descriptor)?;
        self.threads.lock().push(thread);
        start::enable_interrupts(&*self.card);
        Ok(())
    }

    /// Returns the underlying card.
    #[must_use]
    pub fn card(&self) -> &Arc<dyn Card> {
        &self.card
    }

    /// Forwards the firmware that guests load into their falcons to `inbox` from now on.
    pub fn collect_firmware(&self, inbox: Inbox) {
        let _later = self.inbox.set(inbox);
    }

    /// Adds firmware that a guest has started on one of its vGPU's falcons to the firmware inbox, if there is one.
    pub fn offer_firmware(&self, vm: TenantId, falcon: Falcon, code: &[u32], data: &[u32]) {
        if let Some(inbox) = self.inbox.get() {
            inbox.offer(vm.0, falcon, code, data);
        }
    }

    /// Returns the properties of the card that were read during bring-up.
    #[must_use]
    pub fn info(&self) -> &CardInfo {
        &self.info
    }

    /// Returns the VRAM addresses of the channels' structures.
    #[must_use]
    pub fn layout(&self) -> &channels::Layout {
        &self.layout
    }

    /// Locks the card's state. The lock must not be held across calls into a VM or waits.
    ///
    /// # Panics
    /// Panics if the card has [failed](Self::failure).
    #[track_caller]
    pub fn lock(&self) -> StateGuard<'_> {
        StateGuard::new(self, self.state.lock())
    }

    /// Returns statistics on the hold times of the card's lock.
    #[must_use]
    pub fn lock_holds(&self) -> locks::Holds {
        self.state.holds()
    }

    /// Returns the VMs, even if the card has failed. Reads nothing else from the card's state, which may then be
    /// inconsistent.
    pub(crate) fn tenants(&self) -> Vec<Arc<dyn GuestEvents>> {
        self.state.lock().vms.values().filter_map(Weak::upgrade).collect()
    }

    /// Returns true for the first caller, which must remove all work from the failed card.
    pub(crate) fn begin_shutting_out(&self) -> bool {
        !self.shut_out.swap(true, Ordering::AcqRel)
    }

    /// Wakes the card's threads, so that they check whether they must exit.
    pub(crate) fn wake_threads(&self) {
        if let Err(error) = self.event.write(1) {
            tracing::error!(%error, "cannot wake the card's interrupt thread");
        }
        self.wakeup.ring();
    }

    /// Returns the number of physical channels that the mediator itself uses, which are not available to VMs.
    #[must_use]
    pub fn own_channels(&self) -> u32 {
        let state = self.lock();
        [COPIER, SCRUBBER].iter().map(|vm| state.channels().in_use(*vm)).sum()
    }

    /// Returns the number of physical channels that VMs have bound.
    #[must_use]
    pub fn channels_in_use(&self) -> u32 {
        let state = self.lock();
        state.vms.keys().map(|vm| state.channels().in_use(*vm)).sum()
    }

    /// Prevents memory from moving while the guard exists.
    #[cfg(any(test, feature = "test-rig"))]
    pub fn hold_moves(&self) -> locks::Guard<'_, rank::Moving, ()> {
        self.moving.lock()
    }

    /// Returns the number of chunk pieces that the copy engines have moved.
    #[cfg(any(test, feature = "test-rig"))]
    pub fn pieces_moved(&self) -> u64 {
        self.lock().memory.copier().map_or(0, card_memory::Copier::pieces)
    }

    /// Returns true while memory is being freed for a guarantee.
    #[cfg(any(test, feature = "test-rig"))]
    pub fn makes_room(&self) -> bool {
        self.lock().memory.makes_room()
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Returns true if the card was handed over to another process.
    pub(crate) fn is_given_away(&self) -> bool {
        self.stopping() && !self.owned.load(Ordering::Acquire)
    }

    /// Returns true if the card's threads must exit.
    pub(crate) fn over(&self) -> bool {
        self.stopping() || self.failure().is_some()
    }

    /// Makes the balancer plan again after a move that it did not plan.
    pub fn look_again(&self) {
        self.wakeup.ring();
    }

    /// Allocates a share of the card to a VM. The VM's VRAM is placed in zeroed card chunks on first use.
    ///
    /// # Errors
    /// Returns an error if the card has too little free memory for the reserved part of the share.
    pub fn add_vm(&self, vm: TenantId, share: &Share, events: Weak<dyn GuestEvents>) -> Result<(), ManagerError> {
        let made = self.make_room(|state| state.vram_mut().chunks.create_vm(vm, share.vram_bytes, share.memory));
        let mut state = self.lock();
        let chunk_bytes = state.vram().chunks.chunk_bytes();
        made.map_err(|error| match error {
            vram::Error::Promise { .. } => ManagerError::OutOfMemory(Shortage::from_error(&error, chunk_bytes)),
            error => ManagerError::Chunks(error),
        })?;
        if let Err(error) = state.set_ram(vm, share.ram) {
            state.memory_mut().iova_mut().dismiss(vm);
            state.memory.destroy_vm(vm)?;
            return Err(ManagerError::OutOfMemory(error));
        }
        state.channels_mut().add_vm(vm, share.channels);
        state.keep_still(vm);
        let limit = share.hang_limit.map(|limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
        state.channels_mut().set_hang_limit(vm, limit);
        state.vms.insert(vm, events);
        state.set_clock();
        state.feeder().schedule_vm(vm, share.time);
        drop(state);
        self.admit(vm);
        // Wake the mover, because forced quanta start once a second VM exists.
        self.wakeup.ring();
        Ok(())
    }

    /// Reclaims a VM's channels and memory, and scrubs the memory.
    ///
    /// # Errors
    /// Returns an error if the card does not respond, or if a channel does not leave the card. In the latter case, the
    /// VM's memory is not reused until the channel has left, because the channel may still access the memory. Waits for
    /// such a channel for a limited time, without holding a lock.
    pub fn remove_vm(&self, vm: TenantId) -> Result<(), ManagerError> {
        {
            let mut state = self.lock();
            state.quiesce(vm);
            state.vms.remove(&vm);
            state.held.remove(&vm);
            state.arm_guest_alarm(vm, None);
            state.work.noise_mut().forget(vm);
            state.memory.dismiss(vm);
        }
        self.wait_departed(vm);
        {
            let mut state = self.lock();
            if state.channels().has_stuck(vm) {
                state.removed.insert(vm);
                return Err(ManagerError::ChannelStays);
            }
            state.memory.destroy_vm(vm)?;
        }
        self.scrub_left()?;
        self.wakeup.ring();
        Ok(())
    }

    /// Wipes the VM's memory for a new client. If `quiet` is false, the card may be using the memory, so the memory is
    /// zeroed in place. Otherwise, the chunks are freed and scrubbed.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn wipe_vm(&self, vm: TenantId, quiet: bool) -> Result<(), ManagerError> {
        if !quiet {
            let bytes = self.lock().vram().chunks.vm_bytes(vm).unwrap_or(0);
            // Wipe the memory in small steps, because other threads wait for the card's lock.
            let piece = self.lock().vram().chunks.chunk_bytes().min(SCRUB_PIECE);
            for at in (0..bytes).step_by(piece as usize) {
                self.lock().vram_mut().guest_zero(vm, GuestVramAddr(at), piece.min(bytes - at))?;
            }
            return Ok(());
        }
        {
            let mut state = self.lock();
            state.vram_mut().chunks.unplace_all(vm);
            state.vram_mut().refusals.restart(vm);
        }
        self.scrub_left()?;
        self.wakeup.ring();
        Ok(())
    }

    /// Stops the card's threads. Resets the card, unless it belongs to another process.
    pub fn close(&self) {
        self.end_threads();
        if self.owned.load(Ordering::Acquire) {
            self.card.set_interrupt(InterruptMode::Msi, None);
            self.card.reset();
        }
    }

    fn end_threads(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake_threads();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                tracing::error!(name, "a thread of the card panicked");
            }
        }
    }
}

impl CardState {
    /// Binds the mediator's own channels: those that move memory (if host memory exists, or if the copy engines zero
    /// memory), and the one that clears PGRAPH (if configured).
    fn bind_own(&mut self, clear: bool, zeroes: bool, chip: &Chip) -> Result<(), ManagerError> {
        let Self { memory, work, scrubber, .. } = self;
        memory.start_copier(work.channels_mut(), zeroes)?;
        let (vram, own) = memory.vram_and_own();
        *scrubber = clear.then(|| Scrubber::new(vram, work.channels_mut(), own, chip)).transpose()?;
        Ok(())
    }
}

impl Drop for ManagedCard {
    fn drop(&mut self) {
        self.close();
    }
}
