//! A vGPU: its initialization, memory, channel numbers and interrupts. All contexts of the process share it.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use nvspec::regs::{ce0, ce1, fecs, gpc_units, pbdma, pbfb, pbus, pfb, pfifo, pgraph, pmc, ppci, ptop};
use pv::guest::Ops;
use vmm_glue::client::wait_event;

use super::bus::{Bus, Connection, cannot_open};
use super::paravirtual::Paravirtual;
use super::ranges::{PAGE_BYTES, Ranges};
use super::space::{Physical, Space};
use crate::{Error, Place, Result};

/// First VRAM address that may be used. Lower addresses may belong to firmware.
const FIRST_VRAM_ADDRESS: u64 = 0x10_0000;
/// Number of channels. Channel 0 is not used.
const CHANNELS: u8 = 128;
/// First guest-physical address for RAM.
const FIRST_RAM_ADDRESS: u64 = 0x1_0000_0000;
/// End of the guest-physical addresses for RAM.
const END_RAM_ADDRESS: u64 = 1 << 40;
/// Maximum number of faults of a unit that are handled per call. A unit reports the next fault once the previous one
/// has been acknowledged.
const FAULTS_AT_ONCE: u32 = 64;
/// Time limit for retrying the connection to a busy vGPU. The daemon resets the vGPU after its last client disconnects.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between two attempts to connect to a busy vGPU.
const BUSY_INTERVAL: Duration = Duration::from_millis(20);
/// Number of register polls after which the device is considered unresponsive.
const MAX_POLLS: u32 = 2_000;
/// Interval between register polls.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Size of a runlist entry (channel number and type) in bytes.
const RUNLIST_ENTRY_BYTES: u64 = 8;
const RUNLIST_ENTRY_CHANNEL: u32 = 4;

/// Open devices and their sockets. All contexts of a process share one connection per device.
static OPEN: Mutex<Vec<(PathBuf, Weak<Device>)>> = Mutex::new(Vec::new());

/// A vGPU that this process drives.
#[derive(Debug)]
pub(super) struct Device {
    /// Eventfd of the device's interrupt.
    msi: OwnedFd,
    /// Number of multiprocessors.
    multiprocessors: u32,
    vram_bytes: u64,
    /// Held while a channel is removed, because the preemption register holds only one channel.
    removal: Mutex<()>,
    state: Mutex<State>,
}

/// Resources of a vGPU.
struct Size {
    /// Size of VRAM in bytes.
    vram_bytes: u64,
    /// Number of multiprocessors.
    multiprocessors: u32,
}

/// The lock-protected state of a device.
#[derive(Debug)]
pub(super) struct State {
    /// Access to the device's registers and memory.
    pub(super) bus: Box<dyn Bus>,
    /// Free VRAM.
    pub(super) vram: Ranges,
    /// Low-water mark of free VRAM in bytes.
    least_free_vram_bytes: u64,
    /// Free guest-physical addresses for RAM.
    pub(super) ram: Ranges,
    /// The paravirtual interface, set up on first use.
    paravirtual: Option<Paravirtual>,
    /// USERD address of channel 0.
    userd: u64,
    runlist: u64,
    /// Channels on the runlist, with the addresses of their instance blocks.
    channels: HashMap<u8, u64>,
    /// Channels that are being removed.
    leaving: HashSet<u8>,
    /// Lost channels, which execute no more work, and the reason for each.
    lost: HashMap<u8, String>,
    /// Set if a channel did not leave its engine. Its work may still access memory freed by its context.
    is_stuck: bool,
}

impl Device {
    /// Connects to a vGPU and initializes it, or returns the device if this process has already opened it.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be opened, or if the device does not behave like a GF100.
    pub(super) fn open(socket: &Path) -> Result<Arc<Self>> {
        let start = Instant::now();
        loop {
            if let Some(device) = Self::find(socket) {
                return Ok(device);
            }
            if let Some((bus, msi)) = Connection::connect(socket)? {
                let device = Self::start(Box::new(bus), msi)?;
                lock(&OPEN).push((socket.to_owned(), Arc::downgrade(&device)));
                return Ok(device);
            }
            // Another thread of this process may be the client.
            if start.elapsed() >= BUSY_TIMEOUT {
                return Err(cannot_open(socket, "the vGPU has another client".into()));
            }
            std::thread::sleep(BUSY_INTERVAL);
        }
    }

    /// Initializes a vGPU. Its interrupt signals the eventfd `msi`.
    ///
    /// # Errors
    /// Returns an error if the device does not behave like a GF100.
    pub(super) fn start(bus: Box<dyn Bus>, msi: OwnedFd) -> Result<Arc<Self>> {
        let (state, Size { vram_bytes, multiprocessors }) = State::new(bus)?;
        let (removal, state) = (Mutex::new(()), Mutex::new(state));
        Ok(Arc::new(Self { msi, multiprocessors, vram_bytes, removal, state }))
    }

    /// Returns the device if this process has opened it.
    fn find(socket: &Path) -> Option<Arc<Self>> {
        let mut open = lock(&OPEN);
        open.retain(|(_, device)| device.strong_count() > 0);
        open.iter().find(|(path, _)| path == socket).and_then(|(_, device)| device.upgrade())
    }

    /// Returns the number of multiprocessors.
    pub(super) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Returns the size of VRAM in bytes.
    pub(super) fn vram_bytes(&self) -> u64 {
        self.vram_bytes
    }

    /// Returns the peak VRAM usage in bytes.
    pub(super) fn peak_vram_bytes(&self) -> u64 {
        self.vram_bytes - FIRST_VRAM_ADDRESS - self.lock().least_free_vram_bytes
    }

    /// Locks the device.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Waits until the last submitted runlist is in effect, for at most [`MAX_POLLS`] polls.
    ///
    /// # Errors
    /// Returns an error if the daemon is lost, or if the runlist is still pending after [`MAX_POLLS`] polls.
    pub(super) fn wait_for_runlist(&self) -> Result<()> {
        let is_in_use = |state: &mut State| {
            let status = state.bus.read32(pfifo::RUNLIST_STATUS::OFFSET)?;
            Ok(!pfifo::RUNLIST_STATUS::PENDING.is_set(status))
        };
        let what = "the vGPU does not accept a runlist: see the daemon's log";
        if self.poll(is_in_use)? { Ok(()) } else { Err(Error::Lost(what.to_owned())) }
    }

    /// Removes a channel from the runlist, waits until it has left its engine, and unbinds it. Returns false if the
    /// channel does not leave its engine. The channel's memory must then not be reused.
    ///
    /// # Errors
    /// Returns an error if the daemon is lost.
    pub(super) fn unbind(&self, id: u8) -> Result<bool> {
        let _removal = lock(&self.removal);
        {
            let mut state = self.lock();
            // The number remains in use until the channel is unbound.
            state.channels.remove(&id);
            state.leaving.insert(id);
            state.submit_runlist()?;
            state.bus.write32(pfifo::PREEMPT::OFFSET, pfifo::PREEMPT::CHANNEL.encode(id.into()))?;
        }
        let has_left = self.poll(|state| {
            let preempt = state.bus.read32(pfifo::PREEMPT::OFFSET)?;
            Ok(!pfifo::PREEMPT::PENDING.is_set(preempt))
        })?;
        let mut state = self.lock();
        state.bus.write32(pfifo::CHANNEL::at(id.into()), 0)?;
        state.leaving.remove(&id);
        state.lost.remove(&id);
        state.is_stuck |= !has_left;
        Ok(has_left)
    }

    /// Calls `ask` until it returns true, releasing the device's lock between calls. Returns false after [`MAX_POLLS`]
    /// calls.
    fn poll(&self, mut ask: impl FnMut(&mut State) -> Result<bool>) -> Result<bool> {
        for _ in 0..MAX_POLLS {
            if ask(&mut self.lock())? {
                return Ok(true);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(false)
    }

    /// Waits up to `limit` for an interrupt, and handles it.
    ///
    /// # Errors
    /// Returns an error if the daemon is lost.
    pub(super) fn wait_for_interrupt(&self, limit: Duration) -> Result<()> {
        match wait_event(&self.msi, limit) {
            Ok(_) => self.lock().handle_interrupts(),
            // Another thread may have consumed the event. If the daemon has exited, this read fails.
            Err(_) => self.lock().bus.read32(pmc::INTR_0::OFFSET).map(drop),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Initializes the vGPU.
    fn new(mut bus: Box<dyn Bus>) -> Result<(Self, Size)> {
        let wrong = |why: String| Error::Open {
            device: "the vGPU".into(),
            why,
            remedy: "see the daemon's log for rejected accesses",
        };
        let partitions = bus.read32(ptop::FBP_COUNT::OFFSET)?.min(pbfb::MEM_AMOUNT::COUNT);
        let disabled = bus.read32(ptop::PART_DISABLED::OFFSET)?;
        let mut vram_bytes = 0;
        for partition in (0..partitions).filter(|partition| disabled >> partition & 1 == 0) {
            vram_bytes += u64::from(bus.read32(pbfb::MEM_AMOUNT::at(partition))?) << 20;
        }
        if vram_bytes <= FIRST_VRAM_ADDRESS {
            return Err(wrong(format!("its registers report {vram_bytes} bytes of VRAM")));
        }
        let mut state = Self {
            bus,
            vram: Ranges::new(FIRST_VRAM_ADDRESS, vram_bytes),
            least_free_vram_bytes: vram_bytes - FIRST_VRAM_ADDRESS,
            ram: Ranges::new(FIRST_RAM_ADDRESS, END_RAM_ADDRESS),
            paravirtual: None,
            userd: 0,
            runlist: 0,
            channels: HashMap::new(),
            leaving: HashSet::new(),
            lost: HashMap::new(),
            is_stuck: false,
        };
        state.userd = state.take_vram(u64::from(CHANNELS) * PAGE_BYTES)?;
        state.runlist = state.take_vram(u64::from(CHANNELS) * RUNLIST_ENTRY_BYTES)?;
        state.map_userd()?;
        for (register, value) in [
            (pmc::ENABLE::OFFSET, u32::MAX),
            (pmc::INTR_MASK_0::OFFSET, u32::MAX),
            (pmc::INTR_EN_0::OFFSET, 1),
            (pmc::PBDMA_ENABLE::OFFSET, u32::MAX),
            (pfifo::SCHED_EN::OFFSET, 1),
            (pfifo::USERD_BASE::OFFSET, pfifo::USERD_BASE::VALID.mask()),
            (pfifo::INTR_EN::OFFSET, u32::MAX),
            (pfifo::NON_STALL_EN::OFFSET, 1),
            (pgraph::INTR_EN::OFFSET, u32::MAX),
            (fecs::CPU_CONTROL::OFFSET, fecs::CPU_CONTROL::START.mask()),
            (ce0::CPU_CONTROL::OFFSET, ce0::CPU_CONTROL::START.mask()),
            (ce1::CPU_CONTROL::OFFSET, ce1::CPU_CONTROL::START.mask()),
        ] {
            state.bus.write32(register, value)?;
        }
        let clusters = fecs::UNITS::GPCS.get(state.bus.read32(fecs::UNITS::OFFSET)?);
        let mut multiprocessors = 0;
        for cluster in 0..clusters.min(gpc_units::TPC_COUNT::COUNT) {
            let units = state.bus.read32(gpc_units::TPC_COUNT::at(cluster))?;
            multiprocessors += gpc_units::TPC_COUNT::TPCS.get(units);
        }
        if multiprocessors == 0 {
            return Err(wrong("its registers report no multiprocessors".into()));
        }
        Ok((state, Size { vram_bytes, multiprocessors }))
    }

    /// Maps USERD in BAR1, one page per channel.
    fn map_userd(&mut self) -> Result<()> {
        let instance = self.take_vram(PAGE_BYTES)?;
        self.bus.zero_vram(instance, PAGE_BYTES)?;
        let mut space = Space::new_at(self, 0)?;
        space.assign(self, instance)?;
        let (userd, bytes) = (self.userd, u64::from(CHANNELS) * PAGE_BYTES);
        self.bus.zero_vram(userd, bytes)?;
        space.map(self, Physical::Vram(userd), bytes)?;
        let block = pbus::BAR1_BLOCK::VALID.mask() | pbus::BAR1_BLOCK::ADDRESS.encode((instance >> 12) as u32);
        self.bus.write32(pbus::BAR1_BLOCK::OFFSET, block)
    }

    /// Allocates whole pages of VRAM with undefined contents.
    ///
    /// # Errors
    /// Returns an error if not enough VRAM is available, or if a channel did not leave its engine.
    pub(super) fn take_vram(&mut self, bytes: u64) -> Result<u64> {
        if self.is_stuck {
            let why = "a channel of the vGPU did not stop: drop all contexts of the device, and open it again";
            return Err(Error::Lost(why.into()));
        }
        let at = self.vram.take(bytes).ok_or_else(|| Error::Allocation {
            place: Place::Vram,
            bytes,
            why: format!("{} bytes of the vGPU's VRAM are free, possibly fragmented", self.vram.free_bytes()),
        })?;
        self.least_free_vram_bytes = self.least_free_vram_bytes.min(self.vram.free_bytes());
        Ok(at)
    }

    /// Executes an operation of the paravirtual interface. Returns the value in its reply. `label` describes the
    /// operation in errors.
    ///
    /// # Errors
    /// Returns an error if the device does not support segments, if the mediator rejects the operation, or if the
    /// daemon is lost.
    pub(super) fn call(&mut self, ops: &Ops, label: &str) -> Result<u64> {
        let mut paravirtual = match self.paravirtual.take() {
            Some(paravirtual) => paravirtual,
            None => Paravirtual::new(self)?,
        };
        let answer = paravirtual.call(&mut *self.bus, ops, label);
        self.paravirtual = Some(paravirtual);
        answer
    }

    /// Returns true if the device supports segments. Sets up the paravirtual interface.
    pub(super) fn has_segments(&mut self) -> bool {
        if self.paravirtual.is_none() {
            self.paravirtual = Paravirtual::new(self).ok();
        }
        self.paravirtual.is_some()
    }

    /// Flushes all TLBs.
    pub(super) fn flush_translations(&mut self) -> Result<()> {
        self.bus.write32(pfb::MMU_INVALIDATE_PDB::OFFSET, 0)?;
        let all = pfb::MMU_INVALIDATE::TRIGGER.mask()
            | pfb::MMU_INVALIDATE::ALL_PDB.mask()
            | pfb::MMU_INVALIDATE::ALL_VA.mask();
        self.bus.write32(pfb::MMU_INVALIDATE::OFFSET, all)
    }

    /// Returns the lowest free channel number.
    pub(super) fn free_channel(&self) -> Option<u8> {
        (1..CHANNELS).find(|id| !self.channels.contains_key(id) && !self.leaving.contains(id))
    }

    /// Returns the VRAM address of a channel's USERD.
    pub(super) fn userd(&self, id: u8) -> u64 {
        self.userd + u64::from(id) * PAGE_BYTES
    }

    /// Binds a channel to its instance block, and adds it to the runlist. If the mediator rejects the channel, the
    /// channel's first work faults.
    ///
    /// # Errors
    /// Returns an error if the daemon is lost.
    pub(super) fn bind(&mut self, id: u8, instance: u64) -> Result<()> {
        let index = u32::from(id);
        let block = pfifo::CHANNEL::VALID.mask()
            | pfifo::CHANNEL::POLL_USERD.mask()
            | pfifo::CHANNEL::ADDRESS.encode((instance >> 12) as u32);
        self.bus.write32(pfifo::CHANNEL::at(index), block)?;
        let state = pfifo::CHANNEL_STATE::ENGINES.mask() | pfifo::CHANNEL_STATE::ENABLED.mask();
        self.bus.write32(pfifo::CHANNEL_STATE::at(index), state)?;
        self.lost.remove(&id);
        self.channels.insert(id, instance);
        self.submit_runlist()
    }

    /// Submits a runlist of all channels. [`Device::wait_for_runlist`] waits until it is in effect.
    fn submit_runlist(&mut self) -> Result<()> {
        let mut ids: Vec<u8> = self.channels.keys().copied().collect();
        ids.sort_unstable();
        let words = ids.iter().flat_map(|id| [u32::from(*id), RUNLIST_ENTRY_CHANNEL]);
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        self.bus.write_vram(self.runlist, &bytes)?;
        let address = pfifo::RUNLIST_BASE::ADDRESS.encode((self.runlist >> 12) as u32);
        self.bus.write32(pfifo::RUNLIST_BASE::OFFSET, address)?;
        let length = pfifo::RUNLIST::ENGINES.mask() | pfifo::RUNLIST::LENGTH.encode(ids.len() as u32);
        self.bus.write32(pfifo::RUNLIST::OFFSET, length)
    }

    /// Rings a channel's doorbell.
    pub(super) fn ring(&mut self, id: u8, put: u32) -> Result<()> {
        self.bus.write_bar1(u64::from(id) * PAGE_BYTES + nvspec::instance::userd::GP_PUT, put)
    }

    /// Returns the reason why a channel was lost, if it was.
    pub(super) fn why_lost(&self, id: u8) -> Option<&str> {
        self.lost.get(&id).map(String::as_str)
    }

    /// Handles pending interrupts, and rearms the MSI.
    fn handle_interrupts(&mut self) -> Result<()> {
        let pending = self.bus.read32(pfifo::INTR::OFFSET)?;
        if pfifo::INTR::MMU_FAULT.is_set(pending) {
            self.handle_faults()?;
        }
        if pfifo::INTR::NON_STALL.is_set(pending) {
            for engine in 0..pfifo::NON_STALL_INTR::COUNT {
                self.bus.write32(pfifo::NON_STALL_INTR::at(engine), u32::MAX)?;
            }
        }
        if pfifo::INTR::PBDMA.is_set(pending) {
            self.handle_pbdma_errors()?;
        }
        if pfifo::INTR::SCHED_ERROR.is_set(pending) {
            self.handle_hangs()?;
        }
        let graph = self.bus.read32(pgraph::INTR::OFFSET)?;
        if graph != 0 {
            self.handle_graph_errors(graph)?;
        }
        self.bus.write32(pfifo::RUNLIST_INTR::OFFSET, u32::MAX)?;
        self.bus.write32(pfifo::INTR::OFFSET, pending)?;
        self.bus.write32(ppci::MSI_REARM::OFFSET, ppci::MSI_REARM::REARM.mask())
    }

    fn handle_faults(&mut self) -> Result<()> {
        for _ in 0..FAULTS_AT_ONCE {
            let units = self.bus.read32(pfifo::MMU_FAULT_ID::OFFSET)?;
            if units == 0 {
                break;
            }
            for unit in (0..pfifo::FAULT_INST::COUNT).filter(|unit| units >> unit & 1 == 1) {
                let low = self.bus.read32(pfifo::FAULT_VA_LO::at(unit))?;
                let high = self.bus.read32(pfifo::FAULT_VA_HI::at(unit))?;
                let instance = u64::from(self.bus.read32(pfifo::FAULT_INST::at(unit))?) << 12;
                let address = u64::from(high) << 32 | u64::from(low);
                self.lose_instance(instance, &format!("an access of address {address:#x}, which is not mapped"));
            }
            self.bus.write32(pfifo::MMU_FAULT_ID::OFFSET, units)?;
        }
        Ok(())
    }

    fn handle_pbdma_errors(&mut self) -> Result<()> {
        for unit in 0..pbdma::INTR_0::COUNT {
            let errors = self.bus.read32(pbdma::INTR_0::at(unit))?;
            if errors != 0 {
                let id = pbdma::CHANNEL::CHANNEL.get(self.bus.read32(pbdma::CHANNEL::at(unit))?);
                self.lose(id as u8, format!("the PBDMA rejected its commands ({errors:#x})"));
                self.bus.write32(pbdma::INTR_0::at(unit), errors)?;
            }
        }
        Ok(())
    }

    /// Marks hung channels as lost, and unbinds them, because the mediator reports them until they are unbound.
    fn handle_hangs(&mut self) -> Result<()> {
        for engine in 0..pfifo::ENGINE_STATUS::COUNT {
            let status = self.bus.read32(pfifo::ENGINE_STATUS::at(engine))?;
            if pfifo::ENGINE_STATUS::SWITCHING.is_set(status) {
                let id = pfifo::ENGINE_STATUS::CHANNEL.get(status) as u8;
                self.lose(id, "its work ran for longer than the VM's limit".into());
                self.bus.write32(pfifo::CHANNEL::at(id.into()), 0)?;
            }
        }
        Ok(())
    }

    fn handle_graph_errors(&mut self, pending: u32) -> Result<()> {
        let current = self.bus.read32(fecs::CURRENT::OFFSET)?;
        let trap = self.bus.read32(pgraph::TRAP::OFFSET)?;
        let instance = u64::from(fecs::CURRENT::ADDRESS.get(current)) << 12;
        self.lose_instance(instance, &format!("PGRAPH reports an error ({pending:#x}, trap {trap:#x})"));
        self.bus.write32(pgraph::TRAP::OFFSET, trap)?;
        self.bus.write32(pgraph::INTR::OFFSET, pending)?;
        self.bus.write32(pgraph::CONTROL::OFFSET, pgraph::CONTROL::FIFO_ACCESS.mask() | pgraph::CONTROL::METHODS.mask())
    }

    fn lose_instance(&mut self, instance: u64, why: &str) {
        let found = self.channels.iter().find(|(_, block)| **block == instance).map(|(id, _)| *id);
        if let Some(id) = found {
            self.lose(id, why.to_owned());
        }
    }

    /// Records why a channel was lost, unless a reason has already been recorded.
    fn lose(&mut self, id: u8, why: String) {
        if self.channels.contains_key(&id) {
            self.lost.entry(id).or_insert(why);
        }
    }
}
