//! The card with everything that the mediator keeps about it, and the VMs that share it.

use super::bring_up::{self, CardInfo};
use super::iova::IovaSpace;
use super::layout::{LAYOUT_BYTES, Layout};
use super::memory::CardMemory;
use super::{GuestEvents, HostError, interrupts};
use card::{Card, InterruptMode};
use channels::Channels;
use nvspec::addr::{GuestVramAddr, VramAddr};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};
use vram::{CardAddr, ChunkTable, Contents, GuestAddr, VmId};

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
    pub(super) vms: BTreeMap<VmId, Weak<dyn GuestEvents>>,
}

/// A card that the mediator owns.
pub struct HostCard {
    card: Arc<dyn Card>,
    info: CardInfo,
    /// A leaf but for nothing: no other lock is taken while it is held.
    state: Mutex<HostState>,
    event: EventFd,
    stop: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl HostCard {
    /// Resets `card`, takes it over and starts its interrupt thread. VRAM is given away in chunks of `chunk_bytes`.
    ///
    /// # Errors
    /// When the card does not come up, or has too little memory.
    pub fn open(card: Arc<dyn Card>, name: &str, chunk_bytes: u64) -> Result<Arc<Self>, HostError> {
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
        let state = HostState {
            vram: CardVram { memory, chunks },
            channels: Channels::new(channels::Layout {
                instances: layout.instances,
                userd: layout.userd,
                runlists: layout.runlists,
            }),
            iova: IovaSpace::default(),
            vms: BTreeMap::new(),
        };
        let io = |error: std::io::Error| HostError::Refused(format!("no event descriptor for the card: {error}"));
        let event = EventFd::new(EFD_CLOEXEC).map_err(io)?;
        card.set_interrupt(InterruptMode::Msi, Some(event.try_clone().map_err(io)?));
        let host = Arc::new(Self {
            card,
            info,
            state: Mutex::new(state),
            event,
            stop: AtomicBool::new(false),
            thread: Mutex::new(None),
        });
        let weak = Arc::downgrade(&host);
        let wait = host.event.try_clone().map_err(io)?;
        let thread = std::thread::Builder::new()
            .name(format!("irq-{name}"))
            .spawn(move || interrupts::serve(&weak, &wait))
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

    /// Gives a VM its share: `vram_bytes` of zeroed VRAM, and up to `channel_cap` physical channels.
    ///
    /// # Errors
    /// When the card has too little memory free.
    pub fn add_vm(
        &self,
        vm: VmId,
        vram_bytes: u64,
        channel_cap: u32,
        events: Weak<dyn GuestEvents>,
    ) -> Result<(), HostError> {
        loop {
            let error = {
                let mut state = self.lock();
                match state.vram.chunks.create_vm(vm, vram_bytes) {
                    Ok(()) => {
                        state.channels.add_vm(channels::VmId(vm.0), channel_cap);
                        state.vms.insert(vm, events);
                        return Ok(());
                    }
                    Err(error) => error,
                }
            };
            match error {
                vram::Error::NeedsScrub { .. } if self.scrub_one()? => {}
                vram::Error::Full { .. } => {
                    let summary = self.lock().vram.chunks.summary();
                    let free = (u64::from(summary.free + summary.to_scrub) * summary.chunk_bytes) >> 20;
                    return Err(HostError::OutOfMemory { wanted: vram_bytes >> 20, free });
                }
                other => return Err(HostError::Refused(other.to_string())),
            }
        }
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
            state.vram.chunks.destroy_vm(vm).map_err(|error| HostError::Refused(error.to_string()))?;
        }
        while self.scrub_one()? {}
        Ok(())
    }

    /// Zeroes the VM's memory, as for a new client. Its channels are quiet already.
    ///
    /// # Errors
    /// When the card does not answer.
    pub fn wipe_vm(&self, vm: VmId) -> Result<(), HostError> {
        let bytes = self.lock().vram.chunks.vm_bytes(vm).unwrap_or(0);
        let chunk = self.lock().vram.chunks.chunk_bytes();
        for at in (0..bytes).step_by(chunk as usize) {
            let mut state = self.lock();
            let len = chunk.min(bytes - at);
            if let Some(address) = state.vram.guest_vram(vm, GuestVramAddr(at), len) {
                state.vram.memory.zero(address, len)?;
            }
        }
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
    /// Where `len` bytes of guest VRAM lie on the card, if they are the VM's and in one piece.
    #[must_use]
    pub fn guest_vram(&self, vm: VmId, address: GuestVramAddr, len: u64) -> Option<VramAddr> {
        self.chunks.translate_range(vm, GuestAddr(address.0), len).map(|CardAddr(address)| VramAddr(address))
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
