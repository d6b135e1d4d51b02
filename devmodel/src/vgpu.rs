//! The vGPU: virtual registers, events, and the effects of accesses.

#[macro_use]
mod dispatch;
#[cfg(test)]
mod inspect;
mod saved;

pub use saved::SavedVGpu;

use crate::access;
use crate::backend::{Aperture, Backend, NoMemory, WriteFailure};
use crate::blocks::board::{CopyEngine, Pmu};
use crate::blocks::graph::Graph;
use crate::blocks::pbdma::Pbdma;
use crate::blocks::pbus::Pbus;
use crate::blocks::pfifo::Pfifo;
use crate::blocks::pmc::Pmc;
use crate::blocks::ptimer::Ptimer;
use crate::blocks::{At, Cx};
use crate::config::{ConfigError, VGpuConfig};
use crate::denied::{Denials, Reason, Site};
use crate::events::{EngineError, MmuFault, PbdmaError};
use crate::interrupt::Interrupts;
use crate::pci::PciConfig;
use crate::policy::{self, RangeKind, Target};
use crate::storage::Storage;
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::VirtualChannelId;
use nvspec::regs::{ce0, ce1, sm_trap, windows};

/// A VM's GPU: its registers and the state of its register blocks.
#[derive(Clone, Debug)]
pub struct VGpu {
    config: VGpuConfig,
    pci: PciConfig,
    storage: Storage,
    denials: Denials,
    interrupts: Interrupts,
    pmc: Pmc,
    pbus: Pbus,
    pfifo: Pfifo,
    pbdma: Pbdma,
    ptimer: Ptimer,
    pmu: Pmu,
    copy: [CopyEngine; 2],
    graph: Graph,
    /// Interrupt level of the mediator's paravirtual interface, which is combined with the chip's interrupts.
    beside: bool,
}

impl VGpu {
    /// Creates a vGPU in its initial state.
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid.
    pub fn new(config: VGpuConfig) -> Result<Self, ConfigError> {
        config.check()?;
        let mut pci = PciConfig::new(&config.pci)?;
        if !config.vendor_capability.is_empty() {
            pci.add_vendor_capability(&config.vendor_capability)?;
        }
        Ok(Self {
            config,
            pci,
            storage: Storage::default(),
            denials: Denials::default(),
            interrupts: Interrupts::default(),
            pmc: Pmc::default(),
            pbus: Pbus::default(),
            pfifo: Pfifo::default(),
            pbdma: Pbdma::default(),
            ptimer: Ptimer::default(),
            pmu: Pmu::default(),
            copy: Default::default(),
            graph: Graph::default(),
            beside: false,
        })
    }

    /// Returns the vGPU's configuration.
    #[must_use]
    pub fn config(&self) -> &VGpuConfig {
        &self.config
    }

    /// Returns the vGPU's configuration space.
    #[must_use]
    pub fn pci(&self) -> &PciConfig {
        &self.pci
    }

    /// Returns the counts of denied accesses since the vGPU was created.
    #[must_use]
    pub fn denials(&self) -> &Denials {
        &self.denials
    }

    /// Returns the interrupt line, with its counters since the vGPU was created.
    #[must_use]
    pub fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    /// Reads configuration space.
    pub fn config_read(&self, offset: u64, data: &mut [u8]) {
        self.pci.read(offset, data);
    }

    /// Writes configuration space.
    pub fn config_write(&mut self, offset: u64, data: &[u8], backend: &mut dyn Backend) {
        let events = self.pci.write(offset, data);
        self.pci_changed(events, backend);
    }

    /// Reads BAR0 with any size and alignment. Bytes beyond the end of the registers read as 0xff.
    pub fn bar0_read(&mut self, offset: u64, data: &mut [u8], backend: &mut dyn Backend) {
        if let Some(end) = pramin_end(offset, data.len()) {
            let (inside, outside) = data.split_at_mut_checked(end).unwrap_or((&mut [], &mut []));
            self.pramin_read(offset, inside, backend);
            if outside.is_empty() {
                return;
            }
            return self.bar0_read(u64::from(windows::pramin::END), outside, backend);
        }
        let (mut at, mut rest) = (offset, data);
        while !rest.is_empty() {
            let lane = access::lane(at, rest.len());
            let value = match u32::try_from(lane.dword) {
                Ok(dword) => self.bar0_read32(dword, backend),
                Err(_) => u32::MAX,
            };
            let Some((now, later)) = rest.split_at_mut_checked(lane.count) else { return };
            lane.extract(value, now);
            (at, rest) = (at.saturating_add(lane.count as u64), later);
        }
    }

    /// Writes BAR0 with any size and alignment. A partial write to a register does not modify its other bytes.
    ///
    /// # Errors
    /// Returns [`NoMemory`] if the write starts in the VRAM window and no memory is available for it. No register is
    /// then written, and the write may be retried.
    pub fn bar0_write(&mut self, offset: u64, data: &[u8], backend: &mut dyn Backend) -> Result<(), NoMemory> {
        if let Some(end) = pramin_end(offset, data.len()) {
            let (inside, outside) = data.split_at_checked(end).unwrap_or((&[], &[]));
            self.pramin_write(offset, inside, backend)?;
            if outside.is_empty() {
                return Ok(());
            }
            return self.bar0_write(u64::from(windows::pramin::END), outside, backend);
        }
        let (mut at, mut rest) = (offset, data);
        while !rest.is_empty() {
            let lane = access::lane(at, rest.len());
            let Some((now, later)) = rest.split_at_checked(lane.count) else { return Ok(()) };
            if let Ok(dword) = u32::try_from(lane.dword) {
                let old = if lane.is_whole() { 0 } else { self.bytes_beside(dword, backend) };
                self.bar0_write32(dword, lane.merge(old, now), backend);
            }
            (at, rest) = (at.saturating_add(lane.count as u64), later);
        }
        Ok(())
    }

    /// Reads the register at byte `offset` of BAR0, rounded down to a multiple of 4.
    pub fn bar0_read32(&mut self, offset: u32, backend: &mut dyn Backend) -> u32 {
        let offset = offset & !3;
        let value = match policy::find(offset) {
            Target::Register(register, index, policy) => {
                let at = At { offset, index, info: register.info() };
                self.register_read(register, policy, at, backend)
            }
            Target::Range(RangeKind::State) => self.storage.get(offset),
            Target::Range(RangeKind::Prom) => self.prom(offset),
            Target::Range(RangeKind::Pramin) => {
                let mut word = [0; 4];
                self.pramin_read(u64::from(offset), &mut word, backend);
                u32::from_le_bytes(word)
            }
            Target::Nothing => {
                self.denials.read(Site::Register(offset), Reason::Unknown);
                windows::UNCLAIMED
            }
        };
        tracing::trace!(register = %Site::Register(offset), value = %format_args!("{value:#010x}"), "read");
        value
    }

    /// Writes the register at byte `offset` of BAR0, rounded down to a multiple of 4.
    pub fn bar0_write32(&mut self, offset: u32, value: u32, backend: &mut dyn Backend) {
        let offset = offset & !3;
        tracing::trace!(register = %Site::Register(offset), value = %format_args!("{value:#010x}"), "write");
        match policy::find(offset) {
            Target::Register(register, index, policy) => {
                let at = At { offset, index, info: register.info() };
                self.register_write(register, policy, at, value, backend);
                self.evaluate(backend);
            }
            Target::Range(RangeKind::State) => {
                let written = sm_trap::written(offset, self.storage.get(offset), value);
                self.storage.set(offset, written);
            }
            // PROM is read-only.
            Target::Range(RangeKind::Prom) => {}
            Target::Range(RangeKind::Pramin) => {
                // If no memory is available, the dword is dropped. Callers therefore use this function only for
                // registers, and `bar0_write` otherwise.
                let _lost = self.pramin_write(u64::from(offset), &value.to_le_bytes(), backend);
            }
            Target::Nothing => self.denials.write(Site::Register(offset), Reason::Unknown, u64::from(value)),
        }
    }

    /// Reads through an aperture. If any byte is unmapped, all bytes read as 0xff.
    pub fn aperture_read(&mut self, aperture: Aperture, offset: u64, data: &mut [u8], backend: &mut dyn Backend) {
        let result = match self.inside(aperture, offset, data.len()) {
            true => backend.aperture_read(aperture, offset, data).map_err(|_| Reason::Unmapped),
            false => Err(Reason::Unknown),
        };
        if let Err(reason) = result {
            self.denials.read(site(aperture), reason);
            data.fill(0xff);
        }
    }

    /// Writes through an aperture. A write to an unmapped or read-only address is dropped and counted as denied.
    ///
    /// # Errors
    /// Returns [`NoMemory`] if no memory is available for the write. The write may then be retried.
    pub fn aperture_write(
        &mut self,
        aperture: Aperture,
        offset: u64,
        data: &[u8],
        backend: &mut dyn Backend,
    ) -> Result<(), NoMemory> {
        let result = match self.inside(aperture, offset, data.len()) {
            true => backend.aperture_write(aperture, offset, data),
            false => {
                self.denials.write(site(aperture), Reason::Unknown, offset);
                return Ok(());
            }
        };
        match result {
            Ok(()) => Ok(()),
            Err(WriteFailure::NoMemory(lacks)) => Err(lacks),
            Err(WriteFailure::Denied(_)) => {
                self.denials.write(site(aperture), Reason::Unmapped, offset);
                Ok(())
            }
        }
    }

    /// Reports that the most recently submitted runlist is active.
    pub fn runlist_done(&mut self, backend: &mut dyn Backend) {
        self.pfifo.runlist_done();
        self.evaluate(backend);
    }

    /// Reports a non-stall interrupt of `engine` for a channel of this guest.
    pub fn non_stall(&mut self, engine: u32, backend: &mut dyn Backend) {
        self.pfifo.non_stall(engine);
        self.evaluate(backend);
    }

    /// Reports an access by this guest that the GPU's MMU rejected.
    pub fn mmu_fault(&mut self, fault: MmuFault, backend: &mut dyn Backend) {
        self.pfifo.mmu_fault(fault);
        self.evaluate(backend);
    }

    /// Reports an error in this guest's work that has stopped a PBDMA.
    pub fn pbdma_error(&mut self, error: PbdmaError, backend: &mut dyn Backend) {
        self.pbdma.error(error);
        self.evaluate(backend);
    }

    /// Reports a scheduler error. `code` has the format of `pfifo::SCHED_ERROR_REASON`. Hung context switches are
    /// reported through [`Self::ctxsw_timeout`]. A guest cannot cause any other scheduler error.
    #[cfg(test)]
    pub(crate) fn sched_error(&mut self, code: u32, backend: &mut dyn Backend) {
        self.pfifo.sched_error(code);
        self.evaluate(backend);
    }

    /// Reports a channel of this guest that did not leave an engine, and that the mediator has removed. As on hardware,
    /// the guest receives an interrupt, and the engine's context switch appears incomplete until the guest resets the
    /// engine or unbinds the channel. `engine` is a value of `nvspec::fifo::engine`. The guest sees one hang at a time.
    pub fn ctxsw_timeout(&mut self, engine: u32, channel: VirtualChannelId, backend: &mut dyn Backend) {
        self.pfifo.ctxsw_timeout(engine, channel);
        self.evaluate(backend);
    }

    /// Reports a method of this guest that has stopped an engine.
    pub fn engine_error(&mut self, error: EngineError, backend: &mut dyn Backend) {
        match error {
            EngineError::Graph(error) => self.graph.error(error, &mut cx!(self, backend)),
            EngineError::Copy(error) => {
                let Self { copy: [first, second], storage, .. } = self;
                match error.engine {
                    0 => first.error(&error, ce0::BASE, storage),
                    1 => second.error(&error, ce1::BASE, storage),
                    _ => {}
                }
            }
        }
        self.evaluate(backend);
    }

    /// Returns the card time in ns at which [`VGpu::tick`] must be called, if an alarm is set and its interrupt is
    /// enabled.
    #[must_use]
    pub fn alarm_at(&self) -> Option<u64> {
        self.ptimer.alarm_at()
    }

    /// Returns the VRAM address of the PRAMIN window's start, or `None` if the window is not in VRAM. The window may
    /// extend beyond the end of the guest's VRAM.
    #[must_use]
    pub fn window_base(&self) -> Option<GuestVramAddr> {
        self.pbus.window_base()
    }

    /// Raises the alarm interrupt if the alarm is due.
    pub fn tick(&mut self, backend: &mut dyn Backend) {
        self.ptimer.tick(backend.now_ns());
        self.evaluate(backend);
    }

    /// Resumes a vGPU that was saved at card time `then`. The client and the card's clock may have changed, but the
    /// guest's time must not go back. Pending interrupts are signalled again, because the previous client may not have
    /// delivered them.
    pub fn resumed(&mut self, then: u64, backend: &mut dyn Backend) {
        self.ptimer.advance(then.saturating_sub(backend.now_ns()));
        self.interrupts.forgotten();
        self.tick(backend);
    }

    /// Sets the interrupt level of the mediator's paravirtual interface, which is combined with the chip's interrupts.
    pub fn set_beside(&mut self, asserted: bool, backend: &mut dyn Backend) {
        if asserted != self.beside {
            self.beside = asserted;
            self.evaluate(backend);
        }
    }

    /// Restores the initial state, except for the counters of denied accesses and interrupts.
    pub fn reset(&mut self, backend: &mut dyn Backend) {
        let Self {
            config: _,
            pci,
            storage,
            denials: _,
            interrupts,
            pmc,
            pbus,
            pfifo,
            pbdma,
            ptimer,
            pmu,
            copy,
            graph,
            beside,
        } = self;
        *beside = false;
        backend.reset_fifo();
        backend.bind_aperture(Aperture::Bar1, None);
        backend.bind_aperture(Aperture::Bar3, None);
        interrupts.reset(backend);
        if pci.reset().bus_master == Some(false) {
            backend.bus_master(false);
        }
        storage.reset();
        pmc.reset();
        pbus.reset();
        backend.place_window(pbus.window_base());
        pfifo.reset();
        pbdma.reset();
        ptimer.reset();
        graph.reset();
        *pmu = Pmu::default();
        *copy = Default::default();
    }
}

fn site(aperture: Aperture) -> Site {
    match aperture {
        Aperture::Bar1 => Site::Bar1,
        Aperture::Bar3 => Site::Bar3,
    }
}

/// Returns the number of bytes of an access that are within the VRAM window, if the access starts there.
fn pramin_end(offset: u64, bytes: usize) -> Option<usize> {
    let (base, end) = (u64::from(windows::pramin::BASE), u64::from(windows::pramin::END));
    if !(base..end).contains(&offset) {
        return None;
    }
    let room = usize::try_from(end.saturating_sub(offset)).unwrap_or(usize::MAX);
    Some(room.min(bytes))
}
