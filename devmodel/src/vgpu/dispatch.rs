//! Dispatches accesses to register blocks, and forwards the blocks' interrupts to the interrupt line.

use super::VGpu;
use crate::backend::{Aperture, Backend, NoMemory, WriteFailure};
use crate::blocks::board::{self, CopyReg};
use crate::blocks::graph;
use crate::blocks::pbus::Pbus;
use crate::blocks::pmc;
use crate::blocks::{At, Cx, memory};
use crate::denied::{Reason, Site};
use crate::interrupt::Signalling;
use crate::pci::PciEvents;
use crate::policy::{self, Policy, RangeKind, Register, Target};
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::engine;
use nvspec::regs::{ce0, ce1, pbus, pgraph, pmc as pmc_regs, windows};
use nvspec::{Access, RegInfo};

/// Splits a vGPU into its register blocks and their context.
macro_rules! cx {
    ($self:ident, $backend:ident) => {
        Cx { backend: $backend, storage: &mut $self.storage, denials: &mut $self.denials, config: &$self.config }
    };
}

impl VGpu {
    pub(super) fn register_read(
        &mut self,
        register: Register,
        policy: Policy,
        at: At,
        backend: &mut dyn Backend,
    ) -> u32 {
        match policy {
            Policy::Store => return self.storage.read(at.info, at.offset),
            Policy::Deny => {
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

    pub(super) fn register_write(
        &mut self,
        register: Register,
        policy: Policy,
        at: At,
        value: u32,
        backend: &mut dyn Backend,
    ) {
        match policy {
            Policy::Store => return self.storage.write(at.info, at.offset, value),
            Policy::Deny => {
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
            // These registers are constant, and depend only on the configuration.
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

    /// Resets the units in `units`, which has the format of PMC's enable register. Affects only this guest's work.
    pub(super) fn reset_units(&mut self, units: u32, backend: &mut dyn Backend) {
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
            self.pfifo.engine_reset(engine::GR);
            backend.reset_engine(engine::GR);
        }
        if ENABLE::CE0.is_set(units) {
            self.copy[0].reset(ce0::BASE, ce0::END, &mut cx!(self, backend));
            self.pfifo.engine_reset(engine::CE0);
            backend.reset_engine(engine::CE0);
        }
        if ENABLE::CE1.is_set(units) {
            self.copy[1].reset(ce1::BASE, ce1::END, &mut cx!(self, backend));
            self.pfifo.engine_reset(engine::CE1);
            backend.reset_engine(engine::CE1);
        }
        if ENABLE::PMU.is_set(units) {
            self.pmu.reset(&mut cx!(self, backend));
        }
    }

    /// Returns the mask of units with a pending interrupt.
    pub(super) fn pending(&self) -> u32 {
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

    pub(super) fn evaluate(&mut self, backend: &mut dyn Backend) {
        let line = pmc::line(self.pending(), &self.storage) || self.beside;
        let how = Signalling { msi: self.pci.msi_enabled(), intx_disabled: self.pci.intx_disabled() };
        self.interrupts.evaluate(line, how, backend);
        self.pci.set_interrupt_status(line);
    }

    pub(super) fn pci_changed(&mut self, events: PciEvents, backend: &mut dyn Backend) {
        // A vGPU does not support function-level resets, because the VMM sends reset requests instead.
        let PciEvents { bus_master, memory: _, intx_disabled, msi, reset: _ } = events;
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

    pub(super) fn pramin_read(&mut self, offset: u64, data: &mut [u8], backend: &mut dyn Backend) {
        let result = self
            .window(offset, data.len())
            .and_then(|address| backend.vram_read(address, data).map_err(|_| Reason::OutsideVram));
        if let Err(reason) = result {
            self.denials.read(Site::Register(pbus::PRAMIN_WINDOW::OFFSET), reason);
            data.fill(0xff);
        }
    }

    pub(super) fn pramin_write(&mut self, offset: u64, data: &[u8], backend: &mut dyn Backend) -> Result<(), NoMemory> {
        let result = match self.window(offset, data.len()).map(|address| backend.vram_write(address, data)) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(WriteFailure::NoMemory(lacks))) => return Err(lacks),
            Ok(Err(WriteFailure::Denied(_))) => Err(Reason::OutsideVram),
            Err(reason) => Err(reason),
        };
        if let Err(reason) = result {
            let window = self.pbus.registers()[0];
            self.denials.write(Site::Register(pbus::PRAMIN_WINDOW::OFFSET), reason, u64::from(window));
        }
        Ok(())
    }

    pub(super) fn window(&self, offset: u64, bytes: usize) -> Result<GuestVramAddr, Reason> {
        self.pbus.window(offset, bytes as u64, self.config.vram_bytes)
    }

    /// Returns a dword of PROM. Bytes beyond the end of the image read as 0xff.
    pub(super) fn prom(&self, offset: u32) -> u32 {
        let at = offset.saturating_sub(windows::prom::BASE) as usize;
        let mut word = [0xff; 4];
        for (byte, value) in word.iter_mut().zip(self.config.vbios.iter().skip(at)) {
            *byte = *value;
        }
        u32::from_le_bytes(word)
    }

    /// Returns the register's value, which supplies the bytes that a partial write does not cover. Returns 0 if writing
    /// these bytes could have side effects.
    pub(super) fn bytes_beside(&mut self, offset: u32, backend: &mut dyn Backend) -> u32 {
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

    pub(super) fn inside(&self, aperture: Aperture, offset: u64, bytes: usize) -> bool {
        let size = match aperture {
            Aperture::Bar1 => self.config.pci.bar1_bytes,
            Aperture::Bar3 => self.config.pci.bar3_bytes,
        };
        offset.checked_add(bytes as u64).is_some_and(|end| end <= size)
    }
}
