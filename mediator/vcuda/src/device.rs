//! The function's interface to the VMM's server.
//!
//! Each access is handled immediately, because QEMU stops the whole VM until the response arrives. The thread of
//! `executor` executes the commands.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use saved_state::Invalid;
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::{AccessError, Ack, Device, DmaRegion, IrqCounts, Link, MapError, MmapArea, RegionIndex, RegionInfo};

use crate::adoption::Adoption;
use crate::core::{Limits, WorkerId};
use crate::executor::Executor;
use crate::function::{CudaFunction, ExecutorThread};
use crate::journal::{Contents, Journal};
use crate::pci::{CONFIG_BYTES, Config};
use crate::registers::{BAR0_BYTES, Effect, NOTIFY, Registers, VECTORS};
use crate::saved::SavedFunction;
use crate::shared::{Shared, State};
use crate::window::Window;
use crate::worker::Launcher;

/// Minimum size of the window in bytes. SeaBIOS places smaller windows below 4 GiB, where Linux maps them uncached.
pub const MIN_WINDOW_BYTES: u64 = 1 << 30;
/// Maximum size of the window in bytes.
const MAX_WINDOW_BYTES: u64 = 1 << 40;

/// Reason why a function cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The window size is invalid for a BAR.
    #[error("a window of {0:#x} bytes, expected a power of two from 1 GiB to 1 TiB")]
    Window(u64),
    /// The state saved by the other daemon is invalid.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The host cannot provide memory, a descriptor or a thread.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Returns the number of the function's interrupt vectors, by type.
#[must_use]
pub fn irqs() -> IrqCounts {
    IrqCounts { msix: VECTORS.into(), ..IrqCounts::default() }
}

/// The CUDA function of a VM.
pub struct CudaDevice {
    pci: Config,
    link: Link,
    shared: Arc<Shared>,
    thread: Arc<ExecutorThread>,
    limits: Limits,
    /// Contents and file of a killed process's journal, until its window is received.
    earlier: Option<(Contents, Arc<OwnedFd>)>,
}

impl CudaDevice {
    /// Creates and starts the function of the VM `name` behind `link`. `launcher` starts the workers for the VM's
    /// programs.
    ///
    /// # Errors
    /// Returns an error if the window size is invalid, or the host cannot provide memory, a descriptor or a thread.
    pub fn build(
        name: &str,
        limits: Limits,
        link: &Link,
        launcher: Box<dyn Launcher>,
    ) -> Result<(Self, CudaFunction), BuildError> {
        let (device, function) = Self::prepare(name, limits, link, launcher)?;
        function.start()?;
        Ok((device, function))
    }

    /// Creates a function from the state and descriptors of a function that another daemon has suspended.
    /// [`CudaFunction::start`] starts the function, and must be called after the other daemon has released it.
    ///
    /// # Errors
    /// Returns the errors of [`Self::build`], and an error if the saved state is invalid.
    pub fn restore(
        name: &str,
        limits: Limits,
        link: &Link,
        launcher: Box<dyn Launcher>,
        saved: SavedFunction,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(Self, CudaFunction), BuildError> {
        let (mut device, function) = Self::prepare(name, limits, link, launcher)?;
        let SavedFunction { config, registers, progress, outstanding, structure, links } = saved;
        let mut descriptors = descriptors.into_iter();
        let window = descriptors.next().ok_or_else(|| Invalid::new("the window was not handed over"))?;
        let window = Arc::new(Window::adopt(Arc::new(window), limits.window_bytes)?);
        Invalid::unless(descriptors.len() == links.len(), || "the workers' connections were not handed over".into())?;
        let links = links.into_iter().zip(descriptors);
        let links = links.map(|(id, fd)| (WorkerId(id), worker_link::Link::new(fd))).collect();
        device.pci.restore(&config)?;
        let contents = Contents { registers, progress, outstanding, structure };
        device.adopt(contents, window, links, None)?;
        Ok((device, function))
    }

    fn prepare(
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
        let state = State::new(Arc::clone(&window), Arc::new(Journal::new()?));
        let shared = Arc::new(Shared::new(state)?);
        let executor = Executor::new(name, limits, Arc::clone(&shared), link.clone(), window, launcher);
        let function = CudaFunction(Arc::new(ExecutorThread::new(Arc::clone(&shared), executor)));
        let thread = Arc::clone(&function.0);
        let mut device = Self { pci: Config::new(bytes), link: link.clone(), shared, thread, limits, earlier: None };
        device.record_config();
        Ok((device, function))
    }

    /// Takes over the state of another process, so that the executor continues with it. `journal` is the journal that
    /// already contains this state, if any.
    fn adopt(
        &mut self,
        contents: Contents,
        window: Arc<Window>,
        links: BTreeMap<WorkerId, worker_link::Link>,
        journal: Option<Journal>,
    ) -> Result<(), Invalid> {
        let registers = Registers::restored(contents.registers.clone())?;
        let mut state = self.shared.state.lock();
        state.drop_queue();
        let is_written = journal.is_some();
        let journal = journal.map_or_else(|| Arc::clone(&state.journal), Arc::new);
        let (limits, kept) = (self.limits, Arc::clone(&journal));
        let adoption = Adoption::new(contents, limits, Arc::clone(&window), kept, is_written, links, state.generation)?;
        (state.registers, state.window, state.journal) = (registers, Some(window), journal);
        state.record_registers();
        state.is_bus_master = self.pci.is_bus_master();
        state.adoption = Some(Box::new(adoption));
        drop(state);
        self.record_config();
        self.shared.wake.wake();
        Ok(())
    }

    fn registers<T>(&self, access: impl FnOnce(&mut Registers) -> T) -> T {
        access(&mut self.shared.state.lock().registers)
    }

    /// Saves the configuration space for another daemon.
    fn record_config(&mut self) {
        self.pci.read(0, &mut self.shared.state.lock().config);
    }

    /// Begins a reset, with `begin` for the registers. When this function returns, the queue is no longer in use. The
    /// executor performs the other steps.
    fn begin_reset(&self, begin: fn(&mut Registers)) {
        let mut state = self.shared.state.lock();
        begin(&mut state.registers);
        state.record_registers();
        state.drop_queue();
        drop(state);
        self.shared.wake.wake();
    }

    fn write_registers(&self, offset: u64, data: &[u8]) -> Effect {
        let mut state = self.shared.state.lock();
        let effect = state.registers.write(offset, data);
        if !NOTIFY.contains(&offset) {
            state.record_registers();
        }
        effect
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
                let info = RegionInfo::read_write(self.limits.window_bytes);
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
                self.record_config();
                self.set_bus_master(self.pci.is_bus_master());
            }
            RegionIndex::Bar0 => match self.write_registers(offset, data) {
                Effect::None => {}
                Effect::Kick => {
                    self.shared.kicks.fetch_add(1, Ordering::Relaxed);
                    self.shared.wake.wake();
                }
                Effect::Reset => self.begin_reset(Registers::begin_reset),
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
        // Nothing to do: the executor takes a snapshot of the memory map for each use of the queue. QEMU also maps the
        // window itself, without a file, but the executor never uses this memory.
        Ok(())
    }

    fn dma_unmap(&mut self, _gpa: u64, _size: u64) {
        // Wait until the executor no longer uses the memory: it holds this lock while it uses a snapshot of the memory
        // map.
        drop(self.shared.state.lock());
    }

    fn reset(&mut self) {
        self.pci.reset();
        self.record_config();
        self.set_bus_master(false);
        self.begin_reset(Registers::begin_function_reset);
    }

    fn take_journal(&mut self, file: Arc<OwnedFd>) -> Result<(), MapError> {
        let contents = Journal::adopt(Arc::clone(&file)).and_then(|journal| journal.contents());
        self.earlier = Some((contents.map_err(|error| MapError(error.to_string()))?, file));
        Ok(())
    }

    fn take_file(&mut self, region: RegionIndex, file: Arc<OwnedFd>) -> Result<(), MapError> {
        let failed = |what: &dyn std::fmt::Display| MapError(what.to_string());
        if region != RegionIndex::Bar4 {
            return Err(failed(&"only the window can be mapped"));
        }
        let (contents, journal) = self.earlier.take().ok_or_else(|| failed(&"its journal is missing"))?;
        let journal = Journal::adopt(journal).map_err(|error| failed(&error))?;
        let window = Window::adopt(file, self.limits.window_bytes).map_err(|error| failed(&error))?;
        let adopted = self.adopt(contents, Arc::new(window), BTreeMap::new(), Some(journal));
        adopted.map_err(|error| failed(&error))
    }

    fn journal(&self) -> Option<Arc<OwnedFd>> {
        Some(Arc::clone(self.shared.state.lock().journal.file()))
    }

    fn is_renewable(&self) -> bool {
        true
    }

    fn disconnected(&mut self) {
        // The client may keep its mappings, so new memory is allocated for the next client. The window must be replaced
        // first, because the reset uses it.
        let window = Window::new(self.limits.window_bytes);
        let window = window.inspect_err(|error| tracing::error!(%error, "the next VMM of this VM has no window"));
        self.shared.state.lock().window = window.ok().map(Arc::new);
        self.reset();
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.thread.end();
    }
}
