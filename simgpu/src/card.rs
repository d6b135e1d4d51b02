//! The software card's public interface: [`SimGpu`].

use crate::clock::{Clock, TimeModel};
use crate::cx::Copied;
use crate::faults::Fault;
use crate::fifo::FifoCounters;
use crate::gpu::Gpu;
use crate::saved::{NotQuiescent, SavedCard};
use crate::thread::{Shared, Worker};
use ::card::{AccessCounts, Aperture, Card, DmaError, DmaMemory, Identity, InterruptMode};
use nvspec::addr::Iova;
use nvspec::chip::{CLASS_3D_CONTROLLER, Chip, GF100, VENDOR_NVIDIA};
use nvspec::regs::windows::{BAR0_BYTES, pramin};
use saved_state::Invalid;
use simgpu_memory::memory::{Memory, Touches, Vram, VramError};
use simgpu_memory::mmu::{Client, Mmu, TlbCounters};
use std::fs::File;
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

/// Parameters of a new card.
#[derive(Clone, Debug)]
pub struct Config {
    /// Size of VRAM in MiB, from 16 to 6144. VRAM that was never written uses no host memory.
    pub vram_mib: u32,
    /// Size of BAR1, the VRAM aperture, in bytes: a power of two.
    pub bar1_size: u64,
    /// Size of BAR3, the instance-memory aperture, in bytes: a power of two.
    pub bar3_size: u64,
    /// Model of the duration of work. If `None`, work runs as fast as possible.
    pub time: Option<TimeModel>,
    /// Number of threads that execute kernels, at most 64. The default is one per core. With 0, the card's own thread
    /// executes kernels in slices.
    pub compute_workers: Option<usize>,
    /// Faults to inject.
    pub faults: Vec<Fault>,
    /// Set to count the accesses of engines and kernels per memory range ([`Card::access_counts`]).
    pub profile: bool,
    /// Set if the VBIOS scripts have run (POST). Otherwise, the memory controllers stay off, because the model does not
    /// run the scripts.
    pub posted: bool,
    /// Set to back VRAM with a memfd, so that another process can take over the card.
    pub shared: bool,
    /// The emulated chip.
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

    fn vram(&self) -> Result<Vram, VramError> {
        let bytes = u64::from(self.vram_mib) << 20;
        if self.shared { Vram::shared(bytes) } else { Vram::new(bytes) }
    }
}

/// Reason why card creation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// VRAM could not be allocated.
    #[error("the software card has no VRAM")]
    Vram(#[from] VramError),
    /// The size of a BAR is invalid.
    #[error("{name} of {size:#x} bytes is not supported: it must be a power of two from 1 MiB to 64 GiB")]
    BarSize {
        /// Name of the BAR.
        name: &'static str,
        /// Requested size in bytes.
        size: u64,
    },
    /// The saved state is invalid, or belongs to a different card.
    #[error("the saved state of the software card is invalid")]
    Saved(#[from] Invalid),
    /// The card's thread could not be started.
    #[error("the software card's thread could not be started")]
    Thread(#[source] std::io::Error),
}

/// Counters of a card. TLB and copy counters restart at 0 when another process takes over the card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Counters of the channels' work.
    pub fifo: FifoCounters,
    /// Copies and uploads by all engines.
    pub copied: Copied,
    /// Number of interrupts signalled.
    pub interrupts: u64,
    /// Number of accesses to undeclared registers.
    pub undeclared: u64,
    /// Number of bus accesses without a memory target.
    pub lost: u64,
    /// TLB counters of the hub's clients.
    pub hub_tlb: TlbCounters,
    /// TLB counters of the GPCs.
    pub gpc_tlb: TlbCounters,
}

/// A software GF100. All methods may be called from any thread. A separate thread executes the card's work, and sleeps
/// when there is none.
pub struct SimGpu {
    shared: Arc<Shared>,
    memory: Arc<Memory>,
    mmu: Arc<Mmu>,
    identity: Identity,
    // Must be dropped after all other users of `shared`, because dropping it terminates the thread.
    _worker: Option<Worker>,
}

impl std::fmt::Debug for SimGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimGpu").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl SimGpu {
    /// Creates a card in the power-on state.
    ///
    /// # Errors
    /// Returns an [`Error`] if the configuration is invalid or the host lacks resources.
    pub fn new(config: &Config) -> Result<Self, Error> {
        config.check()?;
        Self::without_thread(config, Clock::system(), config.vram()?, None)?.start()
    }

    /// Creates a card from another process's saved state and its VRAM. The card remains halted until [`Self::go_on`] is
    /// called.
    ///
    /// # Errors
    /// Returns an [`Error`] if the configuration or the saved state is invalid, or the host lacks resources.
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

    /// Creates a card whose clock advances only when a test advances it, and which executes work, including kernels,
    /// only on request.
    #[cfg(test)]
    pub(crate) fn for_test(config: &Config) -> Self {
        let config = Config { compute_workers: Some(0), ..config.clone() };
        let vram = config.vram().expect("a card");
        Self::without_thread(&config, Clock::manual(), vram, None).expect("a card")
    }

    /// Creates a card from saved state. Like the card of [`Self::for_test`], it runs only on request.
    #[cfg(test)]
    pub(crate) fn restored_for_test(config: &Config, saved: SavedCard, vram: Vram) -> Result<Self, Error> {
        let config = Config { compute_workers: Some(0), ..config.clone() };
        Self::without_thread(&config, Clock::manual(), vram, Some(saved))
    }

    /// Locks the state. For tests only.
    #[cfg(test)]
    pub(crate) fn gpu(&self) -> parking_lot::MutexGuard<'_, Gpu> {
        self.shared.gpu.lock()
    }

    /// Removes all channels from the engines, and stops all work until [`Self::go_on`] is called. Registers remain
    /// accessible.
    ///
    /// # Errors
    /// Returns [`NotQuiescent`] if an engine cannot be stopped. The card then keeps running. A later call may succeed
    /// once the work in progress has ended.
    pub fn halt(&self) -> Result<(), NotQuiescent> {
        self.shared.gpu.lock().halt()
    }

    /// Resumes the card after a halt.
    pub fn go_on(&self) {
        self.shared.gpu.lock().halted = false;
        self.shared.wake();
    }

    /// Saves the card, excluding its memory. Returns `None` unless the card is halted.
    #[must_use]
    pub fn save(&self) -> Option<SavedCard> {
        self.shared.gpu.lock().save([self.identity.bar1_size, self.identity.bar3_size])
    }

    /// Returns the file that backs VRAM, for another process. Returns `None` unless [`Config::shared`] was set.
    #[must_use]
    pub fn vram_file(&self) -> Option<&File> {
        self.memory.vram.file()
    }

    /// Replaces the time model. If `None`, work runs as fast as possible.
    pub fn set_time_model(&self, time: Option<TimeModel>) {
        self.shared.gpu.lock().cx.time = time;
        self.shared.wake();
    }

    /// Injects a fault. Returns false if too many faults are pending.
    pub fn inject(&self, fault: Fault) -> bool {
        self.shared.gpu.lock().cx.faults.arm(fault)
    }

    /// Removes all pending faults. A hung engine still needs a reset.
    pub fn clear_faults(&self) {
        self.shared.gpu.lock().cx.faults.clear();
    }

    /// If `hold` is true, keeps the engines' writes to host memory in flight until they are flushed
    /// ([`simgpu_memory::memory`]). Otherwise, these writes arrive immediately.
    pub fn hold_posted_writes(&self, hold: bool) {
        self.memory.hold_posted(hold);
    }

    /// Returns the card's counters.
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

    /// Returns the offset of each undeclared register that was accessed, and its number of accesses.
    #[must_use]
    pub fn undeclared_registers(&self) -> Vec<(u32, u64)> {
        self.shared.gpu.lock().cx.undeclared.offsets()
    }

    /// Returns true if the card asserts its interrupt line.
    #[must_use]
    pub fn interrupt_level(&self) -> bool {
        self.shared.gpu.lock().line.level()
    }

    /// Returns the VRAM accesses of engines and kernels since the last call, in order. The card must have
    /// [`Config::profile`] set. The first call starts the recording. The result is deterministic if a single thread
    /// executes kernels.
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

    /// Returns true if the access is within the aperture and the card is present.
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
