//! The function as the server of the VMM calls it.
//!
//! Each access is answered here at once: QEMU stops the whole VM until it has the answer. Commands are executed by the
//! thread of `executor`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use locks::{Mutex, rank};
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::{AccessError, Ack, Device, DmaRegion, IrqCounts, Link, MapError, MmapArea, RegionIndex, RegionInfo};

use crate::core::Limits;
use crate::executor::Executor;
use crate::pci::{CONFIG_BYTES, Config};
use crate::registers::{BAR0_BYTES, Effect, Registers, VECTORS};
use crate::shared::{CudaFunction, Shared, State};
use crate::window::Window;
use crate::worker::Launcher;

/// Minimum size of the window in bytes. SeaBIOS places a smaller one below 4 GiB, where Linux maps it uncached.
pub const MIN_WINDOW_BYTES: u64 = 1 << 30;
/// Maximum size of the window in bytes.
const MAX_WINDOW_BYTES: u64 = 1 << 40;

/// Reason that a function cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The window has another size than a BAR can have.
    #[error("a window of {0:#x} bytes, expected a power of two from 1 GiB to 1 TiB")]
    Window(u64),
    /// The host refuses memory, a descriptor or a thread.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Interrupts of the function.
#[must_use]
pub fn irqs() -> IrqCounts {
    IrqCounts { msix: VECTORS.into(), ..IrqCounts::default() }
}

/// The function.
pub struct CudaDevice {
    pci: Config,
    link: Link,
    shared: Arc<Shared>,
    window_bytes: u64,
    executor: Mutex<rank::Threads, Option<JoinHandle<()>>>,
}

impl CudaDevice {
    /// Creates the function of the VM `name` behind `link`, whose programs `launcher` starts workers for.
    ///
    /// # Errors
    /// If the window's size is invalid, or the host refuses its memory, a descriptor or a thread.
    pub fn build(
        name: &str,
        limits: Limits,
        link: &Link,
        launcher: Box<dyn Launcher>,
    ) -> Result<(Self, CudaFunction), BuildError> {
        let bytes = limits.window_bytes;
        if !bytes.is_power_of_two() || !(MIN_WINDOW_BYTES..=MAX_WINDOW_BYTES).contains(&bytes) {
            return Err(BuildError::Window(bytes));
        }
        let window = Arc::new(Window::new(bytes)?);
        let shared = Arc::new(Shared::new(State::new(Arc::clone(&window)))?);
        let executor = Executor::new(limits, Arc::clone(&shared), link.clone(), window, launcher);
        let span = tracing::info_span!(parent: None, "vm", name);
        let thread = std::thread::Builder::new().name(format!("cuda-{name}"));
        let thread = thread.spawn(move || span.in_scope(|| executor.run()))?;
        let function = CudaFunction(Arc::clone(&shared));
        let device = Self {
            pci: Config::new(bytes),
            link: link.clone(),
            shared,
            window_bytes: bytes,
            executor: Mutex::new(Some(thread)),
        };
        Ok((device, function))
    }

    fn registers<T>(&self, access: impl FnOnce(&mut Registers) -> T) -> T {
        access(&mut self.shared.state.lock().registers)
    }

    /// Begins a reset. The queue is not used any longer when this returns; the rest follows.
    fn begin_reset(&self) {
        let mut state = self.shared.state.lock();
        state.registers.begin_reset();
        state.drop_queue();
        drop(state);
        self.shared.wake.wake();
    }

    fn set_bus_master(&self, is_master: bool) {
        let was_master = {
            let mut state = self.shared.state.lock();
            std::mem::replace(&mut state.is_bus_master, is_master)
        };
        if is_master && !was_master {
            self.link.check_shared();
            self.shared.wake.wake();
        }
    }
}

impl Device for CudaDevice {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        let window = self.shared.state.lock().window.clone();
        RegionIndex::ALL.map(|region| match region {
            RegionIndex::Bar0 => RegionInfo::read_write(BAR0_BYTES),
            RegionIndex::Bar4 => {
                let info = RegionInfo::read_write(self.window_bytes);
                let Some(window) = &window else { return info };
                let area = MmapArea { offset: 0, size: window.bytes() };
                info.clone().with_mappable(Arc::clone(window.file()), vec![area]).unwrap_or_else(|error| {
                    tracing::error!(%error, "the window cannot be mapped by the VMM");
                    info
                })
            }
            RegionIndex::Config => RegionInfo::read_write(CONFIG_BYTES as u64),
            _ => RegionInfo::default(),
        })
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        match region {
            RegionIndex::Config => self.pci.read(offset, data),
            RegionIndex::Bar0 => self.registers(|registers| registers.read(offset, data)),
            RegionIndex::Bar4 => {
                let window = self.shared.state.lock().window.clone();
                match window {
                    Some(window) => window.read(offset, data),
                    None => data.fill(0xff),
                }
            }
            _ => return Err(AccessError::Denied),
        }
        Ok(())
    }

    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        match region {
            RegionIndex::Config => {
                self.pci.write(offset, data);
                self.set_bus_master(self.pci.is_bus_master());
            }
            RegionIndex::Bar0 => match self.registers(|registers| registers.write(offset, data)) {
                Effect::None => {}
                Effect::Kick => {
                    self.shared.kicks.fetch_add(1, Ordering::Relaxed);
                    self.shared.wake.wake();
                }
                Effect::Reset => self.begin_reset(),
            },
            RegionIndex::Bar4 => {
                let window = self.shared.state.lock().window.clone();
                if let Some(window) = window {
                    window.write(offset, data);
                }
            }
            _ => return Err(AccessError::Denied),
        }
        Ok(Ack::Done)
    }

    fn dma_map(&mut self, _region: &DmaRegion) -> Result<(), MapError> {
        // The executor takes a snapshot of the memory for each use of the queue. QEMU also maps the window itself,
        // without a file: such memory is never found.
        Ok(())
    }

    fn dma_unmap(&mut self, _gpa: u64, _size: u64) {
        // The executor holds this lock while it uses guest memory, with a snapshot that it took under the lock.
        drop(self.shared.state.lock());
    }

    fn reset(&mut self) {
        self.pci.reset();
        self.set_bus_master(false);
        self.begin_reset();
    }

    fn disconnected(&mut self) {
        self.reset();
        // The client may keep its mappings, so the next one gets other memory.
        let window = Window::new(self.window_bytes);
        let window = window.inspect_err(|error| tracing::error!(%error, "the next VMM of this VM has no window"));
        self.shared.state.lock().window = window.ok().map(Arc::new);
        self.shared.wake.wake();
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.shared.stop();
        if self.executor.lock().take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that executes commands for CUDA programs had panicked");
        }
    }
}
