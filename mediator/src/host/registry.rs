//! The card with everything that the mediator keeps about it, and the VMs that share it.

use super::alarm::TimerAlarm;
use super::bring_up::{self, CardInfo};
use super::iova::IovaSpace;
use super::layout::{LAYOUT_BYTES, Layout};
use super::memory::CardMemory;
use super::schedule::Schedule;
use super::{Feeder, GuestEvents, HostError, interrupts};
use card::{Card, InterruptMode};
use channels::Channels;
use nvspec::addr::{GuestVramAddr, VramAddr};
use parking_lot::{Mutex, MutexGuard};
use sched::VgpuParams;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};
use vram::{CardAddr, ChunkTable, Contents, GuestAddr, Lookup, VmId};

/// The card's VRAM: the way into it, and who owns which chunk of it.
pub struct CardVram {
    /// The way into VRAM.
    pub memory: CardMemory,
    /// Who owns which chunk.
    pub chunks: ChunkTable,
}

/// What one card holds and who shares it. Reached through [`HostCard::lock`].
pub struct HostState {
    /// VRAM.
    pub vram: CardVram,
    /// Physical channels.
    pub channels: Channels,
    /// I/O virtual addresses.
    pub iova: IovaSpace,
    /// Whose turn it is.
    pub schedule: Schedule,
    pub(super) vms: BTreeMap<VmId, Weak<dyn GuestEvents>>,
    began: Instant,
    /// By how many ns the card's clock is ahead of the host's.
    pub(super) ahead_ns: i64,
}

impl HostState {
    /// Nanoseconds since the card was taken over, by the host's clock.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// What a VM may have of a card.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Bytes of VRAM that its guest sees.
    pub vram_bytes: u64,
    /// Whether all of that is kept for it, so that no use of it is ever refused.
    pub reserved: bool,
    /// Physical channels at a time.
    pub channels: u32,
    /// How long a channel may hold an engine without progress; `None` for ever.
    pub hang_limit: Option<Duration>,
    /// What it may have of the card's time.
    pub time: VgpuParams,
}

/// A card that the mediator owns.
pub struct HostCard {
    card: Arc<dyn Card>,
    info: CardInfo,
    layout: channels::Layout,
    /// A leaf but for nothing: no other lock is taken while it is held.
    state: Mutex<HostState>,
    event: EventFd,
    stop: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl HostCard {
    /// Resets `card`, takes it over and starts its interrupt thread. VRAM is given away in chunks of `chunk_bytes`;
    /// `reserve_bytes` of it are kept for the mediator's own tables. Its time is shared as `scheduler` says.
    ///
    /// # Errors
    /// When the card does not come up, or has too little memory.
    pub fn open(
        card: Arc<dyn Card>,
        name: &str,
        chunk_bytes: u64,
        reserve_bytes: u64,
        scheduler: sched::Config,
    ) -> Result<Arc<Self>, HostError> {
        let info = bring_up::bring_up(&*card)?;
        let refused = |error: vram::Error| HostError::Refused(error.to_string());
        let mut chunks = ChunkTable::new(info.vram_bytes, chunk_bytes, Contents::Unknown).map_err(refused)?;
        // The first chunks to scrub become the mediator's own: the way to scrub any other begins in them.
        let count = LAYOUT_BYTES.div_ceil(chunk_bytes);
        let own: Vec<_> = (0..count).map_while(|_| chunks.take_scrub_work()).collect();
        let available = own.len() as u64 * chunk_bytes;
        let first = own.first().ok_or(HostError::TooSmall { needed: LAYOUT_BYTES, available })?;
        let layout = Layout::new(VramAddr(first.address.0), available)?;
        let mut memory = CardMemory::take_over(Arc::clone(&card), layout, info.vram_bytes)?;
        memory.zero(layout.userd, available - layout.bootstrap_bytes())?;
        let first = first.chunk;
        own.iter().for_each(|work| chunks.scrubbed(work.chunk));
        let reserved = chunks.reserve_mediator(count as u32, 1).map_err(refused)?;
        assert_eq!(reserved, first, "the only scrubbed chunks are those just scrubbed");
        chunks.set_aside(u32::try_from(reserve_bytes.div_ceil(chunk_bytes)).unwrap_or(u32::MAX)).map_err(refused)?;
        let io = |error: std::io::Error| HostError::Refused(format!("no event descriptor for the card: {error}"));
        let event = EventFd::new(EFD_CLOEXEC).map_err(io)?;
        let alarm = TimerAlarm::new(event.try_clone().map_err(io)?)?;
        let timer = alarm.timer_fd().map_err(io)?;
        let state = HostState {
            vram: CardVram { memory, chunks },
            channels: Channels::new(layout.channels()),
            iova: IovaSpace::default(),
            schedule: Schedule::new(scheduler, alarm).map_err(|error| HostError::Refused(error.to_string()))?,
            vms: BTreeMap::new(),
            began: Instant::now(),
            ahead_ns: 0,
        };
        card.set_interrupt(InterruptMode::Msi, Some(event.try_clone().map_err(io)?));
        let host = Arc::new(Self {
            card,
            info,
            layout: layout.channels(),
            state: Mutex::new(state),
            event,
            stop: AtomicBool::new(false),
            thread: Mutex::new(None),
        });
        let weak = Arc::downgrade(&host);
        let wait = host.event.try_clone().map_err(io)?;
        let thread = std::thread::Builder::new()
            .name(format!("irq-{name}"))
            .spawn(move || interrupts::serve(&weak, &wait, &timer))
            .map_err(io)?;
        *host.thread.lock() = Some(thread);
        bring_up::enable_interrupts(&*host.card);
        Ok(host)
    }

    /// The card itself.
    #[must_use]
    pub fn card(&self) -> &Arc<dyn Card> {
        &self.card
    }

    /// What bring-up found.
    #[must_use]
    pub fn info(&self) -> &CardInfo {
        &self.info
    }

    /// Where the channels' structures lie on the card.
    #[must_use]
    pub fn layout(&self) -> &channels::Layout {
        &self.layout
    }

    /// The card's state. Not to be held across calls into a VM.
    pub fn lock(&self) -> MutexGuard<'_, HostState> {
        self.state.lock()
    }

    /// Physical channels that VMs have bound.
    #[must_use]
    pub fn channels_in_use(&self) -> u32 {
        let state = self.lock();
        state.vms.keys().map(|vm| state.channels.in_use(channels::VmId(vm.0))).sum()
    }

    pub(super) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Gives a VM its share. Its VRAM gets places on the card, zeroed, as it is used.
    ///
    /// # Errors
    /// When the card has too little memory free for what is reserved.
    pub fn add_vm(&self, vm: VmId, share: &Share, events: Weak<dyn GuestEvents>) -> Result<(), HostError> {
        let mut state = self.lock();
        match state.vram.chunks.create_vm(vm, share.vram_bytes, share.reserved) {
            Ok(()) => {}
            Err(vram::Error::Full { .. }) => {
                let summary = state.vram.chunks.summary();
                let free = (u64::from(summary.spare()) * summary.chunk_bytes) >> 20;
                return Err(HostError::OutOfMemory { wanted: share.vram_bytes >> 20, free });
            }
            Err(other) => return Err(HostError::Refused(other.to_string())),
        }
        state.channels.add_vm(channels::VmId(vm.0), share.channels);
        let limit = share.hang_limit.map(|limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
        state.channels.set_hang_limit(channels::VmId(vm.0), limit);
        state.vms.insert(vm, events);
        state.set_clock();
        state.schedule_vm(vm, share.time);
        Ok(())
    }

    /// Takes a VM's channels and memory back, and scrubs the memory.
    ///
    /// # Errors
    /// When the card does not answer. If it does not let go of a channel, the VM's memory stays out of use: the channel
    /// may still reach it.
    pub fn remove_vm(&self, vm: VmId) -> Result<(), HostError> {
        {
            let mut state = self.lock();
            let quiet = state.quiesce(vm);
            state.vms.remove(&vm);
            quiet.map_err(|stuck| HostError::Refused(format!("{stuck}; the VM's memory stays out of use")))?;
            if state.channels.has_stuck(channels::VmId(vm.0)) {
                let what =
                    "the card holds on to a channel of the VM; the VM's memory stays out of use until it is reset";
                return Err(HostError::Refused(what.to_owned()));
            }
            state.vram.chunks.destroy_vm(vm).map_err(|error| HostError::Refused(error.to_string()))?;
        }
        while self.scrub_one()? {}
        Ok(())
    }

    /// Forgets all that the VM's memory held, as for a new client. `quiet`: nothing on the card uses it; else it stays the
    /// VM's where it is, and is zeroed there.
    ///
    /// # Errors
    /// When the card does not answer.
    pub fn wipe_vm(&self, vm: VmId, quiet: bool) -> Result<(), HostError> {
        if !quiet {
            let bytes = self.lock().vram.chunks.vm_bytes(vm).unwrap_or(0);
            let chunk = self.lock().vram.chunks.chunk_bytes();
            for at in (0..bytes).step_by(chunk as usize) {
                let mut state = self.lock();
                if let Some(run) = state.vram.chunks.translate(vm, GuestAddr(at)) {
                    state.vram.memory.zero(VramAddr(run.address.0), chunk.min(run.bytes))?;
                }
            }
            return Ok(());
        }
        self.lock().vram.chunks.unplace_all(vm);
        while self.scrub_one()? {}
        Ok(())
    }

    /// Scrubs one chunk that waits for it; false when none does. The card's lock is held for one chunk only.
    fn scrub_one(&self) -> Result<bool, HostError> {
        self.lock().vram.scrub_one()
    }

    /// Ends the interrupt thread and quiets the card.
    pub fn close(&self) {
        self.stop.store(true, Ordering::Release);
        if let Err(error) = self.event.write(1) {
            tracing::error!(%error, "the card's interrupt thread cannot be woken");
        }
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id())
            && thread.join().is_err()
        {
            tracing::error!("the card's interrupt thread had panicked");
        }
        self.card.set_interrupt(InterruptMode::Msi, None);
        self.card.reset();
    }
}

impl Drop for HostCard {
    fn drop(&mut self) {
        self.close();
    }
}

impl CardVram {
    /// Where `len` bytes of guest VRAM lie on the card, if they are the VM's and in one piece. What has no place yet gets
    /// one. `None` also when the card has none left.
    pub fn place(&mut self, vm: VmId, address: GuestVramAddr, len: u64) -> Option<VramAddr> {
        let address = GuestAddr(address.0);
        if self.chunks.lookup(vm, address, len) == Lookup::Outside {
            return None;
        }
        for (piece, _) in self.chunks.pieces(address, len) {
            self.place_chunk(vm, piece)?;
        }
        self.chunks.translate_range(vm, address, len).map(|CardAddr(at)| VramAddr(at))
    }

    /// Gives the chunk of `address` a place, zeroed.
    fn place_chunk(&mut self, vm: VmId, address: GuestAddr) -> Option<VramAddr> {
        loop {
            match self.chunks.place(vm, address) {
                Ok(placed) => return Some(VramAddr(placed.address.0)),
                // Ends: each turn makes one of the chunks that wait a free one.
                Err(vram::Error::NeedsScrub { .. }) if self.scrub_one().ok()? => {}
                Err(error) => {
                    tracing::warn!(%vm, %address, %error, "guest memory gets no place on the card");
                    return None;
                }
            }
        }
    }

    /// Reads guest VRAM, whatever chunks it spans. What was never used reads as zeros, and stays without a place.
    pub fn guest_read(&mut self, vm: VmId, address: GuestVramAddr, data: &mut [u8]) -> Option<()> {
        let mut rest = data;
        for (piece, len) in self.chunks.pieces(GuestAddr(address.0), rest.len() as u64) {
            let (data, more) = std::mem::take(&mut rest).split_at_mut(len as usize);
            match self.chunks.lookup(vm, piece, len) {
                Lookup::Placed(CardAddr(place)) => failed(self.memory.read(VramAddr(place), data))?,
                Lookup::Unplaced => data.fill(0),
                Lookup::Split | Lookup::Outside => return None,
            }
            rest = more;
        }
        rest.is_empty().then_some(())
    }

    /// Writes guest VRAM, whatever chunks it spans. Zeros need no place where there is none.
    pub fn guest_write(&mut self, vm: VmId, address: GuestVramAddr, data: &[u8]) -> Option<()> {
        let mut rest = data;
        for (piece, len) in self.chunks.pieces(GuestAddr(address.0), rest.len() as u64) {
            let (data, more) = rest.split_at(len as usize);
            let place = match self.chunks.lookup(vm, piece, len) {
                Lookup::Placed(CardAddr(place)) => Some(VramAddr(place)),
                Lookup::Unplaced if data.iter().all(|byte| *byte == 0) => None,
                Lookup::Unplaced => Some(self.place_chunk(vm, piece)?),
                Lookup::Split | Lookup::Outside => return None,
            };
            if let Some(place) = place {
                failed(self.memory.write(place, data))?;
            }
            rest = more;
        }
        rest.is_empty().then_some(())
    }

    /// Scrubs one chunk that waits for it; false when none does.
    ///
    /// # Errors
    /// When the card does not answer.
    pub fn scrub_one(&mut self) -> Result<bool, HostError> {
        let Some(work) = self.chunks.take_scrub_work() else { return Ok(false) };
        self.memory.zero(VramAddr(work.address.0), work.bytes)?;
        self.chunks.scrubbed(work.chunk);
        Ok(true)
    }
}

/// An access of a guest that the card has failed at is lost; the card's state is not.
fn failed(result: Result<(), HostError>) -> Option<()> {
    result.inspect_err(|error| tracing::error!(%error, "the card failed at an access of a guest")).ok()
}
