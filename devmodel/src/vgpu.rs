//! The vGPU: the virtual register file, its events, and what the VMM's accesses do to it.

use crate::access;
use crate::backend::{Aperture, Backend};
use crate::blocks::board::{self, CopyEngine, CopyReg, Pmu};
use crate::blocks::graph::{self, Graph};
use crate::blocks::pbdma::Pbdma;
use crate::blocks::pbus::Pbus;
use crate::blocks::pfifo::Pfifo;
use crate::blocks::pmc::{self, Pmc};
use crate::blocks::ptimer::Ptimer;
use crate::blocks::{At, Cx, memory};
use crate::denied::{Denials, Reason, Site};
use crate::events::{EngineError, MmuFault, PbdmaError};
use crate::interrupt::{Interrupts, Signalling};
use crate::pci::{BadBar, PciConfig, PciEvents, PciIdentity};
use crate::policy::{self, Policy, RangeKind, Register, Target};
use crate::storage::Storage;
use nvspec::addr::GuestVramAddr;
use nvspec::chip::{CLASS_3D_CONTROLLER, Chip, VENDOR_NVIDIA};
use nvspec::fifo::{CHANNELS, engine};
use nvspec::regs::{ce0, ce1, pbus, pgraph, pmc as pmc_regs, windows};
use nvspec::{Access, RegInfo};
use std::sync::Arc;

/// Smallest VRAM that a driver can work with.
pub const MIN_VRAM_BYTES: u64 = 16 << 20;
/// Bytes of address space on a card.
const MAX_VRAM_BYTES: u64 = 1 << nvspec::addr::BUS_BITS;
const MIB: u64 = 1 << 20;

/// What a vGPU is.
#[derive(Clone, Debug)]
pub struct VGpuConfig {
    /// The chip that the guest sees.
    pub chip: &'static Chip,
    /// The PCI function that the guest sees.
    pub pci: PciIdentity,
    /// Bytes of VRAM that the guest sees; a multiple of 1 MiB.
    pub vram_bytes: u64,
    /// Channels that the guest may have bound at one time; the guest always sees 128.
    pub channels: u32,
    /// The VBIOS image that PROM shows.
    pub vbios: Arc<[u8]>,
}

impl VGpuConfig {
    /// A vGPU of `chip` with the usual aperture sizes.
    #[must_use]
    pub fn of_chip(chip: &'static Chip, vram_bytes: u64, vbios: Arc<[u8]>) -> Self {
        let pci = PciIdentity {
            vendor: VENDOR_NVIDIA,
            device: chip.pci_device,
            subsystem_vendor: VENDOR_NVIDIA,
            subsystem: 0x076f,
            revision: chip.pci_revision,
            class: CLASS_3D_CONTROLLER,
            bar0_bytes: windows::BAR0_BYTES,
            bar1_bytes: 128 * MIB,
            bar3_bytes: 64 * MIB,
        };
        Self { chip, pci, vram_bytes, channels: CHANNELS, vbios }
    }

    /// VRAM in MiB.
    #[must_use]
    pub fn vram_mib(&self) -> u32 {
        u32::try_from(self.vram_bytes / MIB).unwrap_or(u32::MAX)
    }
}

/// A description that cannot be a vGPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A BAR's size cannot be expressed.
    #[error(transparent)]
    Bar(#[from] BadBar),
    /// BAR0 does not hold the registers.
    #[error("BAR0 of {0:#x} bytes does not hold the chip's registers, which need {needed:#x}", needed = windows::BAR0_BYTES)]
    SmallBar0(u64),
    /// VRAM size out of range.
    #[error("VRAM of {0:#x} bytes: must be a multiple of 1 MiB from 16 MiB to 1 TiB")]
    Vram(u64),
    /// Channel limit out of range.
    #[error("{0} channels: must be from 1 to {CHANNELS}")]
    Channels(u32),
    /// The VBIOS does not fit.
    #[error("a VBIOS of {0} bytes does not fit into PROM, which has {prom}", prom = windows::prom::BYTES)]
    Vbios(usize),
}

/// The interrupt tree and everything that hangs on it.
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
}

/// Splits a vGPU into its blocks and the context that they work in.
macro_rules! cx {
    ($self:ident, $backend:ident) => {
        Cx { backend: $backend, storage: &mut $self.storage, denials: &mut $self.denials, config: &$self.config }
    };
}

impl VGpu {
    /// A vGPU in its power-on state.
    ///
    /// # Errors
    /// When the description is out of range.
    pub fn new(config: VGpuConfig) -> Result<Self, ConfigError> {
        if !config.vram_bytes.is_multiple_of(MIB) || !(MIN_VRAM_BYTES..=MAX_VRAM_BYTES).contains(&config.vram_bytes) {
            return Err(ConfigError::Vram(config.vram_bytes));
        }
        if !(1..=CHANNELS).contains(&config.channels) {
            return Err(ConfigError::Channels(config.channels));
        }
        if config.vbios.len() as u64 > u64::from(windows::prom::BYTES) {
            return Err(ConfigError::Vbios(config.vbios.len()));
        }
        if config.pci.bar0_bytes < windows::BAR0_BYTES {
            return Err(ConfigError::SmallBar0(config.pci.bar0_bytes));
        }
        let pci = PciConfig::new(&config.pci)?;
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
        })
    }

    /// What the vGPU was made from.
    #[must_use]
    pub fn config(&self) -> &VGpuConfig {
        &self.config
    }

    /// Configuration space.
    #[must_use]
    pub fn pci(&self) -> &PciConfig {
        &self.pci
    }

    /// Accesses that were refused, since the vGPU was made.
    #[must_use]
    pub fn denials(&self) -> &Denials {
        &self.denials
    }

    /// Signals to the guest, since the vGPU was made.
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

    /// Reads BAR0; any size and alignment. Beyond the registers everything reads as ones.
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

    /// Writes BAR0; any size and alignment. A write to a part of a register leaves its other bytes.
    pub fn bar0_write(&mut self, offset: u64, data: &[u8], backend: &mut dyn Backend) {
        if let Some(end) = pramin_end(offset, data.len()) {
            let (inside, outside) = data.split_at_checked(end).unwrap_or((&[], &[]));
            self.pramin_write(offset, inside, backend);
            if outside.is_empty() {
                return;
            }
            return self.bar0_write(u64::from(windows::pramin::END), outside, backend);
        }
        let (mut at, mut rest) = (offset, data);
        while !rest.is_empty() {
            let lane = access::lane(at, rest.len());
            let Some((now, later)) = rest.split_at_checked(lane.count) else { return };
            if let Ok(dword) = u32::try_from(lane.dword) {
                let old = if lane.is_whole() { 0 } else { self.bytes_beside(dword, backend) };
                self.bar0_write32(dword, lane.merge(old, now), backend);
            }
            (at, rest) = (at.saturating_add(lane.count as u64), later);
        }
    }

    /// Reads the register at byte `offset` of BAR0, which is rounded down to a multiple of 4.
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

    /// Writes the register at byte `offset` of BAR0, which is rounded down to a multiple of 4.
    pub fn bar0_write32(&mut self, offset: u32, value: u32, backend: &mut dyn Backend) {
        let offset = offset & !3;
        tracing::trace!(register = %Site::Register(offset), value = %format_args!("{value:#010x}"), "write");
        match policy::find(offset) {
            Target::Register(register, index, policy) => {
                let at = At { offset, index, info: register.info() };
                self.register_write(register, policy, at, value, backend);
                self.evaluate(backend);
            }
            Target::Range(RangeKind::State) => self.storage.set(offset, value),
            // A ROM.
            Target::Range(RangeKind::Prom) => {}
            Target::Range(RangeKind::Pramin) => self.pramin_write(u64::from(offset), &value.to_le_bytes(), backend),
            Target::Nothing => self.denials.write(Site::Register(offset), Reason::Unknown, u64::from(value)),
        }
    }

    /// Reads through a memory BAR. Where nothing is mapped everything reads as ones.
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

    /// Writes through a memory BAR. Where nothing is mapped the write is lost.
    pub fn aperture_write(&mut self, aperture: Aperture, offset: u64, data: &[u8], backend: &mut dyn Backend) {
        let result = match self.inside(aperture, offset, data.len()) {
            true => backend.aperture_write(aperture, offset, data).map_err(|_| Reason::Unmapped),
            false => Err(Reason::Unknown),
        };
        if let Err(reason) = result {
            self.denials.write(site(aperture), reason, offset);
        }
    }

    /// The runlist that the guest submitted is in force.
    pub fn runlist_done(&mut self, backend: &mut dyn Backend) {
        self.pfifo.runlist_done();
        self.evaluate(backend);
    }

    /// A channel of this guest asked for the non-stall interrupt of `engine`.
    pub fn non_stall(&mut self, engine: u32, backend: &mut dyn Backend) {
        self.pfifo.non_stall(engine);
        self.evaluate(backend);
    }

    /// The GPU's MMU refused an access of this guest.
    pub fn mmu_fault(&mut self, fault: MmuFault, backend: &mut dyn Backend) {
        self.pfifo.mmu_fault(fault);
        self.evaluate(backend);
    }

    /// A PBDMA stopped on something of this guest.
    pub fn pbdma_error(&mut self, error: PbdmaError, backend: &mut dyn Backend) {
        self.pbdma.error(error);
        self.evaluate(backend);
    }

    /// The scheduler reports an error; `code` as in `pfifo::SCHED_ERROR_REASON`.
    pub fn sched_error(&mut self, code: u32, backend: &mut dyn Backend) {
        self.pfifo.sched_error(code);
        self.evaluate(backend);
    }

    /// An engine stopped on a method of this guest.
    pub fn engine_error(&mut self, error: EngineError, backend: &mut dyn Backend) {
        match error {
            EngineError::Graph(error) => self.graph.error(error),
            EngineError::Copy { engine, intr, instance } => {
                if let Some(copy) = self.copy.get_mut(engine as usize) {
                    copy.error(intr, instance);
                }
            }
        }
        self.evaluate(backend);
    }

    /// The card's time, in ns, at which [`VGpu::tick`] has something to do.
    #[must_use]
    pub fn alarm_at(&self) -> Option<u64> {
        self.ptimer.alarm_at()
    }

    /// Rings the guest's alarm if its time has come.
    pub fn tick(&mut self, backend: &mut dyn Backend) {
        self.ptimer.tick(backend.now_ns());
        self.evaluate(backend);
    }

    /// The VMM has changed how messages reach the guest (a first event descriptor, INTx unmasked): what is pending is
    /// signalled again.
    pub fn signal_again(&mut self, backend: &mut dyn Backend) {
        self.interrupts.signal_again(backend);
        self.evaluate(backend);
    }

    /// Everything to its power-on state. The counters of refused accesses and signals stay.
    pub fn reset(&mut self, backend: &mut dyn Backend) {
        let Self { config: _, pci, storage, denials: _, interrupts, pmc, pbus, pfifo, pbdma, ptimer, pmu, copy, graph } =
            self;
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
        pfifo.reset();
        pbdma.reset();
        ptimer.reset();
        graph.reset();
        *pmu = Pmu::default();
        *copy = Default::default();
    }

    /// The state in words, for an operator: name and value.
    #[must_use]
    pub fn inspect(&self) -> Vec<(&'static str, String)> {
        let Self { config, pci, storage, denials, interrupts, pmc, pbus, pfifo, pbdma, ptimer, pmu: _, copy: _, graph } =
            self;
        let [window, bar1, bar3] = pbus.registers();
        let (shown, waiting, dropped) = pfifo.faults();
        vec![
            ("chip", config.chip.name.to_owned()),
            ("vram_mib", config.vram_mib().to_string()),
            ("bus_master", pci.bus_master().to_string()),
            ("msi", pci.msi_enabled().to_string()),
            ("msi_armed", interrupts.armed().to_string()),
            ("msi_messages", interrupts.messages.to_string()),
            ("intx_level", interrupts.intx().to_string()),
            ("intx_rises", interrupts.intx_rises.to_string()),
            ("interrupts_pending", format!("{:#010x}", self.pending())),
            ("units_enabled", format!("{:#010x}", pmc.enable())),
            ("pramin_window", format!("{window:#010x}")),
            ("bar1_block", format!("{bar1:#010x}")),
            ("bar3_block", format!("{bar3:#010x}")),
            ("channels_bound", pfifo.bound().to_string()),
            ("channels_enabled", pfifo.enabled().to_string()),
            ("channels_limit", config.channels.to_string()),
            ("runlist_pending", pfifo.runlist_pending().to_string()),
            ("mmu_faults_shown", shown.to_string()),
            ("mmu_faults_waiting", waiting.to_string()),
            ("mmu_faults_dropped", dropped.to_string()),
            ("pbdma_interrupts", format!("{:#x}", pbdma.pending())),
            ("alarm_at_ns", ptimer.alarm_at().map_or_else(|| "none".to_owned(), |at| at.to_string())),
            ("graph_firmware", graph.firmware_running().to_string()),
            ("graph_context", format!("{:#010x}", graph.current())),
            ("register_pages", storage.pages_in_use().to_string()),
            ("denied_accesses", denials.total().to_string()),
        ]
    }

    fn register_read(&mut self, register: Register, policy: Policy, at: At, backend: &mut dyn Backend) -> u32 {
        match policy {
            Policy::Store => return self.storage.read(at.info, at.offset),
            Policy::Deny | Policy::Forward => {
                self.denials.read(Site::Register(at.offset), Reason::Policy);
                return windows::UNCLAIMED;
            }
            Policy::Model | Policy::Translate => {}
        }
        let (pending, pbdma) = match register {
            Register::Pmc(_) => (self.pending(), 0),
            _ => (0, self.pbdma.pending()),
        };
        let mut cx = cx!(self, backend);
        match register {
            Register::Pmc(reg) => self.pmc.read(reg, at, pending, &cx),
            Register::Pbus(reg) => self.pbus.read(reg, at, &cx),
            Register::Pfifo(reg) => self.pfifo.read(reg, at, pbdma, &mut cx),
            Register::Ptimer(reg) => self.ptimer.read(reg, at, &mut cx),
            Register::Ptop(reg) => board::read_ptop(reg, at, &cx),
            Register::Pbdma(reg) => self.pbdma.read(reg, at, &cx),
            Register::Pflush(_) => 0,
            Register::Ppci(reg) => board::read_ppci(reg, at, &self.pci, &cx),
            Register::Pfb(reg) => memory::read_pfb(reg, at, &cx),
            Register::Ce0(reg) => self.copy[0].read(CopyReg::from(reg), at, &cx),
            Register::Ce1(reg) => self.copy[1].read(CopyReg::from(reg), at, &cx),
            Register::Pmu(reg) => self.pmu.read(reg, at, &cx),
            Register::PbfbBcast(_) => cx.config.vram_mib(),
            Register::Pbfb(reg) => memory::read_pbfb(reg, at, &cx),
            Register::PrivringHub(reg) => board::read_privring(reg, at, &cx),
            Register::Ltc(reg) => memory::read_ltc(reg, at, &cx),
            Register::Pgraph(reg) => self.graph.read(reg, at, &cx),
            Register::Fecs(reg) => self.graph.read_fecs(reg, at, &cx),
            Register::Gpccs(reg) => self.graph.read_gpccs(reg, at, &cx),
            Register::GpcUnits(reg) => graph::read_gpc_units(reg, at, &cx),
            Register::Pnvio(_)
            | Register::Ptherm(_)
            | Register::Pfuse(_)
            | Register::Pstraps(_)
            | Register::Pclock(_)
            | Register::LtcIntr(_)
            | Register::Pcounter(_)
            | Register::Pvga(_)
            | Register::Pdisp(_) => cx.plain_read(at),
        }
    }

    fn register_write(&mut self, register: Register, policy: Policy, at: At, value: u32, backend: &mut dyn Backend) {
        match policy {
            Policy::Store => return self.storage.write(at.info, at.offset, value),
            Policy::Deny | Policy::Forward => {
                return self.denials.write(Site::Register(at.offset), Reason::Policy, u64::from(value));
            }
            Policy::Model | Policy::Translate => {}
        }
        let mut cx = cx!(self, backend);
        match register {
            Register::Pmc(reg) => {
                let reset = self.pmc.write(reg, at, value, &mut cx);
                self.reset_units(reset, backend);
            }
            Register::Pbus(reg) => self.pbus.write(reg, at, value, &mut cx),
            Register::Pfifo(reg) => self.pfifo.write(reg, at, value, &mut cx),
            Register::Ptimer(reg) => self.ptimer.write(reg, at, value, &mut cx),
            Register::Pbdma(reg) => self.pbdma.write(reg, at, value, &mut cx),
            Register::Pflush(reg) => memory::write_pflush(reg, value, &mut cx),
            Register::Ppci(reg) => {
                if board::write_ppci(reg, at, value, &mut cx) {
                    self.interrupts.rearm();
                }
            }
            Register::Pfb(reg) => memory::write_pfb(reg, at, value, &mut cx),
            Register::Ce0(reg) => self.copy[0].write(CopyReg::from(reg), at, value, &mut cx),
            Register::Ce1(reg) => self.copy[1].write(CopyReg::from(reg), at, value, &mut cx),
            Register::Pmu(reg) => self.pmu.write(reg, at, value, &mut cx),
            Register::PrivringHub(reg) => board::write_privring(reg, at, value, &mut cx),
            Register::Pgraph(reg) => self.graph.write(reg, at, value, &mut cx),
            Register::Fecs(reg) => self.graph.write_fecs(reg, at, value, &mut cx),
            Register::Gpccs(reg) => self.graph.write_gpccs(reg, at, value, &mut cx),
            // Constants of the description.
            Register::Ptop(_)
            | Register::PbfbBcast(_)
            | Register::Pbfb(_)
            | Register::Ltc(_)
            | Register::GpcUnits(_) => {}
            Register::Pnvio(_)
            | Register::Ptherm(_)
            | Register::Pfuse(_)
            | Register::Pstraps(_)
            | Register::Pclock(_)
            | Register::LtcIntr(_)
            | Register::Pcounter(_)
            | Register::Pvga(_)
            | Register::Pdisp(_) => cx.plain_write(at, value),
        }
    }

    /// Puts units into reset; `units` are bits of PMC's enable register. Only this guest's work is concerned.
    fn reset_units(&mut self, units: u32, backend: &mut dyn Backend) {
        use pmc_regs::ENABLE;
        if ENABLE::PFIFO.is_set(units) {
            self.pfifo.reset();
            self.pbdma.reset();
            self.storage.reset_range(nvspec::regs::pfifo::BASE, nvspec::regs::pfifo::END);
            self.storage.reset_range(nvspec::regs::pbdma::BASE, nvspec::regs::pbdma::END);
            backend.reset_fifo();
        }
        if ENABLE::PGRAPH.is_set(units) {
            self.graph.reset();
            for &(_, base, end) in windows::STATE_RANGES.iter().filter(|(_, base, _)| *base >= pgraph::BASE) {
                self.storage.reset_range(base, end);
            }
            self.storage.reset_range(nvspec::regs::fecs::BASE, nvspec::regs::fecs::END);
            backend.reset_engine(engine::GR);
        }
        if ENABLE::CE0.is_set(units) {
            self.copy[0].reset(ce0::BASE, ce0::END, &mut cx!(self, backend));
            backend.reset_engine(engine::CE0);
        }
        if ENABLE::CE1.is_set(units) {
            self.copy[1].reset(ce1::BASE, ce1::END, &mut cx!(self, backend));
            backend.reset_engine(engine::CE1);
        }
        if ENABLE::PMU.is_set(units) {
            self.pmu.reset(&mut cx!(self, backend));
        }
    }

    /// The interrupt tree: one bit for each unit that asserts.
    fn pending(&self) -> u32 {
        use pmc_regs::INTR_0;
        let level = |on: bool, field: nvspec::Field| if on { field.mask() } else { 0 };
        level(self.pfifo.pending(self.pbdma.pending()), INTR_0::PFIFO)
            | level(self.graph.pending(), INTR_0::PGRAPH)
            | level(self.copy[0].pending(), INTR_0::CE0)
            | level(self.copy[1].pending(), INTR_0::CE1)
            | level(self.ptimer.pending(), INTR_0::PTIMER)
            | level(self.pmu.pending(), INTR_0::PMU)
            | level(Pbus::pending(&self.storage), INTR_0::PBUS)
    }

    fn evaluate(&mut self, backend: &mut dyn Backend) {
        let line = pmc::line(self.pending(), &self.storage);
        let how = Signalling { msi: self.pci.msi_enabled(), intx_disabled: self.pci.intx_disabled() };
        self.interrupts.evaluate(line, how, backend);
        self.pci.set_interrupt_status(line);
    }

    fn pci_changed(&mut self, events: PciEvents, backend: &mut dyn Backend) {
        let PciEvents { bus_master, memory: _, intx_disabled, msi } = events;
        if let Some(enabled) = bus_master {
            backend.bus_master(enabled);
        }
        if msi.is_some() {
            self.interrupts.mode_changed();
        }
        if msi.is_some() || intx_disabled.is_some() {
            self.evaluate(backend);
        }
    }

    fn pramin_read(&mut self, offset: u64, data: &mut [u8], backend: &mut dyn Backend) {
        let result = self
            .window(offset, data.len())
            .and_then(|address| backend.vram_read(address, data).map_err(|_| Reason::OutsideVram));
        if let Err(reason) = result {
            self.denials.read(Site::Register(pbus::PRAMIN_WINDOW::OFFSET), reason);
            data.fill(0xff);
        }
    }

    fn pramin_write(&mut self, offset: u64, data: &[u8], backend: &mut dyn Backend) {
        let result = self
            .window(offset, data.len())
            .and_then(|address| backend.vram_write(address, data).map_err(|_| Reason::OutsideVram));
        if let Err(reason) = result {
            let window = self.pbus.registers()[0];
            self.denials.write(Site::Register(pbus::PRAMIN_WINDOW::OFFSET), reason, u64::from(window));
        }
    }

    fn window(&self, offset: u64, bytes: usize) -> Result<GuestVramAddr, Reason> {
        self.pbus.window(offset, bytes as u64, self.config.vram_bytes)
    }

    /// The bytes of PROM; a ROM reads as ones behind its image.
    fn prom(&self, offset: u32) -> u32 {
        let at = offset.saturating_sub(windows::prom::BASE) as usize;
        let mut word = [0xff; 4];
        for (byte, value) in word.iter_mut().zip(self.config.vbios.iter().skip(at)) {
            *byte = *value;
        }
        u32::from_le_bytes(word)
    }

    /// What stands beside the bytes of a partial write. Only storage keeps it: where writing has an effect, bytes that
    /// were not written have none.
    fn bytes_beside(&mut self, offset: u32, backend: &mut dyn Backend) -> u32 {
        match policy::find(offset) {
            Target::Register(register, _, policy) => match (policy, register.info()) {
                (Policy::Store, RegInfo { access: Access::Rw, .. }) => self.storage.get(offset),
                (Policy::Model | Policy::Translate, RegInfo { access: Access::Rw, count: 1, .. }) => {
                    self.bar0_read32(offset, backend)
                }
                _ => 0,
            },
            Target::Range(RangeKind::State) => self.storage.get(offset),
            _ => 0,
        }
    }

    fn inside(&self, aperture: Aperture, offset: u64, bytes: usize) -> bool {
        let size = match aperture {
            Aperture::Bar1 => self.config.pci.bar1_bytes,
            Aperture::Bar3 => self.config.pci.bar3_bytes,
        };
        offset.checked_add(bytes as u64).is_some_and(|end| end <= size)
    }
}

fn site(aperture: Aperture) -> Site {
    match aperture {
        Aperture::Bar1 => Site::Bar1,
        Aperture::Bar3 => Site::Bar3,
    }
}

/// For an access that begins in the window on VRAM: how many of its bytes are in it.
fn pramin_end(offset: u64, bytes: usize) -> Option<usize> {
    let (base, end) = (u64::from(windows::pramin::BASE), u64::from(windows::pramin::END));
    if !(base..end).contains(&offset) {
        return None;
    }
    let room = usize::try_from(end.saturating_sub(offset)).unwrap_or(usize::MAX);
    Some(room.min(bytes))
}
