//! The software card as everyone else sees it: [`SimGpu`].

use crate::clock::{Clock, TimeModel};
use crate::cx::Copied;
use crate::faults::Fault;
use crate::fifo::FifoCounters;
use crate::gpu::Gpu;
use crate::memory::{Memory, Touches, Vram, VramError};
use crate::mmu::{Client, Mmu, TlbCounters};
use crate::saved::{SavedCard, Unrest};
use crate::thread::{Shared, Worker};
use ::card::{AccessCounts, Aperture, Card, DmaError, DmaMemory, Identity, InterruptMode};
use nvspec::addr::Iova;
use nvspec::chip::{CLASS_3D_CONTROLLER, Chip, GF100, VENDOR_NVIDIA};
use nvspec::regs::windows::{BAR0_BYTES, pramin};
use saved_state::Invalid;
use std::fs::File;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

/// Description of a card that is to be made.
#[derive(Clone, Debug)]
pub struct Config {
    /// MiB of VRAM, 16 to 6144. What is never touched costs nothing.
    pub vram_mib: u32,
    /// Bytes of BAR1, the VRAM aperture: a power of two.
    pub bar1_size: u64,
    /// Bytes of BAR3, the instance-memory aperture: a power of two.
    pub bar3_size: u64,
    /// Time that work takes; `None` for as fast as possible.
    pub time: Option<TimeModel>,
    /// Threads that execute kernels, at most 64: as many as the machine has cores without. With 0 the card's own thread
    /// does, a little at a time.
    pub compute_workers: Option<usize>,
    /// Faults to inject.
    pub faults: Vec<Fault>,
    /// Count how often engines and kernels touch which part of memory ([`Card::access_counts`]).
    pub profile: bool,
    /// The VBIOS scripts have run (POST). Without, the memory controllers are off, for good: the scripts are not executed.
    pub posted: bool,
    /// VRAM lies in a file without a name, so that another process can go on with the card.
    pub shared: bool,
    /// The chip.
    pub chip: &'static Chip,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            vram_mib: 256,
            bar1_size: 128 << 20,
            bar3_size: 64 << 20,
            time: None,
            compute_workers: None,
            faults: Vec::new(),
            profile: false,
            posted: true,
            shared: false,
            chip: &GF100,
        }
    }
}

impl Config {
    fn check(&self) -> Result<(), Error> {
        for (name, size) in [("BAR1", self.bar1_size), ("BAR3", self.bar3_size)] {
            if !size.is_power_of_two() || !(1 << 20..=64 << 30).contains(&size) {
                return Err(Error::BarSize { name, size });
            }
        }
        Ok(())
    }

    /// New memory for it.
    fn vram(&self) -> Result<Vram, VramError> {
        let bytes = u64::from(self.vram_mib) << 20;
        if self.shared { Vram::shared(bytes) } else { Vram::new(bytes) }
    }
}

/// Why there is no card.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No memory for it.
    #[error("the software card has no VRAM")]
    Vram(#[from] VramError),
    /// A BAR of that size cannot be.
    #[error("{name} of {size:#x} bytes is not possible: it must be a power of two from 1 MiB to 64 GiB")]
    BarSize {
        /// Name of the BAR.
        name: &'static str,
        /// Bytes wanted.
        size: u64,
    },
    /// The saved state is of no card, or of another.
    #[error("the saved software card is refused")]
    Saved(#[from] Invalid),
    /// No thread for it.
    #[error("the software card's thread could not be started")]
    Thread(#[source] std::io::Error),
}

/// Counters of what a card has done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Work of channels.
    pub fifo: FifoCounters,
    /// Copies.
    pub copied: Copied,
    /// Interrupts signalled.
    pub interrupts: u64,
    /// Accesses to registers that are not declared.
    pub undeclared: u64,
    /// Accesses on the memory bus that nothing answered.
    pub lost: u64,
    /// Translations behind the hub.
    pub hub_tlb: TlbCounters,
    /// Translations of shaders.
    pub gpc_tlb: TlbCounters,
}

/// A software GF100. All methods may be called from any thread; the card's own work is done on a thread of its own,
/// which sleeps while there is none.
pub struct SimGpu {
    shared: Arc<Shared>,
    memory: Arc<Memory>,
    mmu: Arc<Mmu>,
    identity: Identity,
    // Dropped last of all users of `shared`: it ends the thread.
    _worker: Option<Worker>,
}

impl std::fmt::Debug for SimGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimGpu").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl SimGpu {
    /// A card as it is after power-on.
    ///
    /// # Errors
    /// [`Error`].
    pub fn new(config: &Config) -> Result<Self, Error> {
        config.check()?;
        Self::without_thread(config, Clock::system(), config.vram()?, None)?.start()
    }

    /// The card that another process has saved, with the memory that it was saved with. It is halted until [`Self::go_on`].
    ///
    /// # Errors
    /// [`Error`].
    pub fn restored(config: &Config, saved: SavedCard, vram: Vram) -> Result<Self, Error> {
        config.check()?;
        Self::without_thread(config, Clock::system(), vram, Some(saved))?.start()
    }

    fn start(mut self) -> Result<Self, Error> {
        self._worker = Some(Worker::start(&self.shared).map_err(Error::Thread)?);
        Ok(self)
    }

    fn without_thread(config: &Config, clock: Clock, vram: Vram, saved: Option<SavedCard>) -> Result<Self, Error> {
        let mut gpu = Gpu::new(config, clock, vram);
        if let Some(saved) = saved {
            gpu.restore(saved, config)?;
        }
        let identity = Identity {
            vendor: VENDOR_NVIDIA,
            device: config.chip.pci_device,
            subsystem_vendor: VENDOR_NVIDIA,
            subsystem: config.chip.pci_device,
            revision: config.chip.pci_revision,
            class: CLASS_3D_CONTROLLER,
            bar0_size: BAR0_BYTES,
            bar1_size: config.bar1_size,
            bar3_size: config.bar3_size,
        };
        let (memory, mmu) = (Arc::clone(&gpu.cx.memory), Arc::clone(&gpu.cx.mmu));
        let shared = Arc::new(Shared::new(gpu));
        Ok(Self { shared, memory, mmu, identity, _worker: None })
    }

    /// A card whose clock stands until it is advanced, and that does nothing until it is told to: kernels too.
    #[cfg(test)]
    pub(crate) fn for_test(config: &Config) -> Self {
        let config = Config { compute_workers: Some(0), ..config.clone() };
        let vram = config.vram().expect("a card");
        Self::without_thread(&config, Clock::manual(), vram, None).expect("a card")
    }

    /// As [`Self::for_test`], of a card that was saved.
    #[cfg(test)]
    pub(crate) fn restored_for_test(config: &Config, saved: SavedCard, vram: Vram) -> Result<Self, Error> {
        let config = Config { compute_workers: Some(0), ..config.clone() };
        Self::without_thread(&config, Clock::manual(), vram, Some(saved))
    }

    /// The state, for tests.
    #[cfg(test)]
    pub(crate) fn gpu(&self) -> parking_lot::MutexGuard<'_, Gpu> {
        self.shared.gpu.lock()
    }

    /// Takes all channels off the engines, and does nothing by itself until [`Self::go_on`]. Registers and memory answer.
    ///
    /// # Errors
    /// [`Unrest`]: it goes on. What works may have ended when asked again.
    pub fn halt(&self) -> Result<(), Unrest> {
        self.shared.gpu.lock().halt()
    }

    /// Ends a halt.
    pub fn go_on(&self) {
        self.shared.gpu.lock().halted = false;
        self.shared.wake();
    }

    /// Writes the card down, but for its memory; `None` unless it is halted.
    #[must_use]
    pub fn save(&self) -> Option<SavedCard> {
        self.shared.gpu.lock().save([self.identity.bar1_size, self.identity.bar3_size])
    }

    /// The file that VRAM lies in, for another process; `None` unless [`Config::shared`] was set.
    #[must_use]
    pub fn vram_file(&self) -> Option<&File> {
        self.memory.vram.file()
    }

    /// Changes how long work takes from now on; `None` for as fast as possible.
    pub fn set_time_model(&self, time: Option<TimeModel>) {
        self.shared.gpu.lock().cx.time = time;
        self.shared.wake();
    }

    /// Injects a fault. Returns whether there was room for it.
    pub fn inject(&self, fault: Fault) -> bool {
        self.shared.gpu.lock().cx.faults.arm(fault)
    }

    /// Injects no more faults. An engine that hangs hangs until it is reset.
    pub fn clear_faults(&self) {
        self.shared.gpu.lock().cx.faults.clear();
    }

    /// Has the writes of engines to host memory stay under way, as long as nothing pushes them on ([`memory`](crate::memory)).
    /// Without, they arrive at once.
    pub fn hold_posted_writes(&self, hold: bool) {
        self.memory.hold_posted(hold);
    }

    /// Returns what the card has done so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let gpu = self.shared.gpu.lock();
        Counters {
            fifo: gpu.fifo.counters,
            copied: gpu.cx.copied,
            interrupts: gpu.line.signals(),
            undeclared: gpu.cx.undeclared.total(),
            lost: self.memory.lost(),
            hub_tlb: self.mmu.counters(Client::Hub),
            gpc_tlb: self.mmu.counters(Client::Gpc),
        }
    }

    /// Offsets of registers that are not declared but were accessed, and how often.
    #[must_use]
    pub fn undeclared_registers(&self) -> Vec<(u32, u64)> {
        self.shared.gpu.lock().cx.undeclared.offsets()
    }

    /// Returns whether the card drives its interrupt line.
    #[must_use]
    pub fn interrupt_level(&self) -> bool {
        self.shared.gpu.lock().line.level()
    }

    /// Returns what engines and kernels touched of VRAM since the last call, in order, on a card with [`Config::profile`]; the first
    /// call begins. With one thread that executes kernels it is the same each time.
    #[must_use]
    pub fn take_touches(&self) -> Vec<Touches> {
        self.memory.take_touches()
    }

    fn bar_size(&self, aperture: Aperture) -> u64 {
        match aperture {
            Aperture::Bar1 => self.identity.bar1_size,
            Aperture::Bar3 => self.identity.bar3_size,
        }
    }

    /// Returns whether an access of an aperture is answered: it is within it, and the card is there.
    fn within(&self, aperture: Aperture, offset: u64, len: usize) -> bool {
        let within = offset.checked_add(len as u64).is_some_and(|end| end <= self.bar_size(aperture));
        within && !self.shared.apertures.is_gone()
    }
}

impl Card for SimGpu {
    fn identity(&self) -> Identity {
        self.identity
    }

    fn read32(&self, offset: u32) -> u32 {
        if !offset.is_multiple_of(4) || u64::from(offset) >= BAR0_BYTES || self.shared.apertures.is_gone() {
            return u32::MAX;
        }
        if (pramin::BASE..pramin::END).contains(&offset) {
            return self.shared.apertures.pramin_read(offset, &self.memory);
        }
        self.shared.gpu.lock().read32(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        if !offset.is_multiple_of(4) || u64::from(offset) >= BAR0_BYTES || self.shared.apertures.is_gone() {
            return;
        }
        if (pramin::BASE..pramin::END).contains(&offset) {
            if self.shared.apertures.pramin_write(offset, value, &self.memory, &self.shared.doorbells) {
                self.shared.wake();
            }
            return;
        }
        self.shared.gpu.lock().write32(offset, value);
        if crate::gpu::concerns_scheduler(offset) {
            self.shared.wake();
        }
    }

    fn aperture_read(&self, aperture: Aperture, offset: u64, data: &mut [u8]) {
        if !self.within(aperture, offset, data.len()) {
            data.fill(0xff);
            return;
        }
        if let Err(fault) = self.shared.apertures.read(aperture, offset, data, &self.memory, &self.mmu) {
            self.shared.gpu.lock().aperture_fault(aperture, fault);
        }
    }

    fn aperture_write(&self, aperture: Aperture, offset: u64, data: &[u8]) {
        if !self.within(aperture, offset, data.len()) {
            return;
        }
        let Shared { apertures, doorbells, .. } = &*self.shared;
        match apertures.write(aperture, offset, data, &self.memory, &self.mmu, doorbells) {
            Ok(true) => self.shared.wake(),
            Ok(false) => {}
            Err(fault) => self.shared.gpu.lock().aperture_fault(aperture, fault),
        }
    }

    fn map_dma(&self, iova: u64, memory: DmaMemory) -> Result<(), DmaError> {
        self.memory.sysmem.map(Iova(iova), memory)
    }

    fn unmap_dma(&self, iova: u64, len: u64) -> Result<(), DmaError> {
        self.memory.sysmem.unmap(Iova(iova), len)
    }

    fn set_interrupt(&self, mode: InterruptMode, event: Option<EventFd>) {
        self.shared.gpu.lock().line.connect(mode, event);
    }

    fn unmask_intx(&self) {
        self.shared.gpu.lock().line.unmask();
    }

    fn reset(&self) {
        self.shared.gpu.lock().reset();
        self.shared.wake();
    }

    fn takes_any_image(&self) -> bool {
        true
    }

    fn access_counts(&self, reset: bool) -> Option<AccessCounts> {
        self.memory.access_counts(reset)
    }
}
