//! The whole card, which maps BAR0 offsets to register blocks and performs the card's own work.

use crate::Config;
use crate::aperture::{ApertureFault, Apertures};
use crate::blocks::{Effect, board, falcon, fecs, memory as memory_blocks, pbus, pfifo, pgraph, pmc, pmu, ptimer};
use crate::clock::Clock;
use crate::cx::{Copied, Cx, Undeclared};
use crate::faults::{EngineId, Faults};
use crate::fifo::fault::{Client, Report, report};
use crate::fifo::userd::Doorbells;
use crate::fifo::{Fifo, Progress};
use crate::interrupt::Line;
use crate::storage::Storage;
use crate::thread::Alarm;
use crate::vbios;
use card::Aperture;
use nvspec::mmu::fault::{hub_client, unit};
use nvspec::regs::windows::{BAR0_BYTES, PGRAPH_RANGES, STATE_RANGES, UNCLAIMED, pramin, prom};
use nvspec::regs::{self, sm_trap};
use simgpu_engines::compute::Compute;
use simgpu_memory::memory::{Memory, Vram};
use simgpu_memory::mmu::Mmu;
use std::sync::Arc;

pub(crate) struct Gpu {
    pub(crate) cx: Cx,
    pub(crate) fifo: Fifo,
    pub(crate) line: Line,
    /// Wakes the thread that performs the card's work.
    pub(crate) alarm: Arc<Alarm>,
    pub(crate) pmu: pmu::Pmu,
    pub(crate) graph_falcons: fecs::GraphFalcons,
    pub(crate) copy_falcons: falcon::CopyFalcons,
    pub(crate) rom: [u8; vbios::IMAGE_BYTES],
    /// Set if the card must not perform any work of its own.
    pub(crate) halted: bool,
}

impl Gpu {
    /// Creates a card in the power-on state.
    pub(crate) fn new(config: &Config, clock: Clock, vram: Vram) -> Self {
        let vram = if config.posted { vram } else { vram.off() };
        let memory = Arc::new(if config.profile { Memory::profiled(vram) } else { Memory::new(vram) });
        let (mmu, alarm) = (Arc::new(Mmu::new()), Arc::new(Alarm::default()));
        let workers = config.compute_workers.unwrap_or_else(|| {
            // Use one thread if the system does not report the number of CPUs.
            std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
        });
        let sms = config.chip.gpcs * config.chip.tpcs_per_gpc;
        let bell = Arc::clone(&alarm);
        let wake = Arc::new(move || bell.wake());
        let compute = Compute::new(Arc::clone(&memory), Arc::clone(&mmu), wake, workers, sms);
        let mut gpu = Self {
            fifo: Fifo::new(config.chip.pbdmas, compute),
            line: Line::default(),
            alarm,
            pmu: pmu::Pmu::new(),
            graph_falcons: fecs::GraphFalcons::new(),
            copy_falcons: falcon::CopyFalcons::new(),
            rom: vbios::build(config.chip),
            halted: false,
            cx: Cx {
                chip: config.chip,
                storage: Storage::new(),
                memory,
                mmu,
                apertures: Arc::new(Apertures::new()),
                doorbells: Arc::new(Doorbells::new(clock.time())),
                clock,
                time: config.time,
                faults: Faults::new(&config.faults),
                undeclared: Undeclared::default(),
                copied: Copied::default(),
                context_writes: Vec::new(),
            },
        };
        memory_blocks::reset(&mut gpu.cx);
        gpu
    }

    /// Restores the power-on state, except for memory contents.
    pub(crate) fn reset(&mut self) {
        let Self { cx, fifo, line, alarm: _, pmu, graph_falcons, copy_falcons, rom: _, halted: _ } = self;
        fifo.reset(cx);
        fifo.slots.iter_mut().for_each(super::fifo::slot::Slot::reset);
        cx.storage.reset();
        cx.context_writes.clear();
        cx.memory.drop_posted();
        cx.apertures.reset();
        cx.mmu.flush(simgpu_memory::mmu::Flush::default());
        cx.clock.reset();
        pmu.reset(cx);
        graph_falcons.reset();
        copy_falcons.reset(0, cx);
        copy_falcons.reset(1, cx);
        memory_blocks::reset(cx);
        line.reset();
    }

    /// Reads a register. `offset` must be a multiple of 4.
    pub(crate) fn read32(&mut self, offset: u32) -> u32 {
        /// Reads a register of a block that only stores values.
        macro_rules! plain {
            ($block:ident) => {
                match regs::$block::decode(offset) {
                    Some((reg, _)) => self.cx.storage.read(reg.info(), offset),
                    None => self.undeclared_read(offset),
                }
            };
        }
        /// Reads a declared register through `$read`.
        macro_rules! block {
            ($block:ident, |$reg:ident, $index:ident| $read:expr) => {
                match regs::$block::decode(offset) {
                    Some(($reg, $index)) => $read,
                    None => self.undeclared_read(offset),
                }
            };
        }
        let cx = &mut self.cx;
        match offset {
            regs::pmc::BASE..=regs::pmc::LAST => {
                let lines = self.lines();
                block!(pmc, |reg, _i| pmc::read(reg, offset, lines, &self.cx))
            }
            regs::pbus::BASE..=regs::pbus::LAST => block!(pbus, |reg, _i| pbus::read(reg, offset, cx)),
            regs::pfifo::BASE..=regs::pfifo::LAST => {
                block!(pfifo, |reg, index| pfifo::read(reg, index, offset, &self.fifo, cx))
            }
            regs::ptimer::BASE..=regs::ptimer::LAST => block!(ptimer, |reg, _i| ptimer::read(reg, offset, cx)),
            regs::pnvio::BASE..=regs::pnvio::LAST => plain!(pnvio),
            regs::ptherm::BASE..=regs::ptherm::LAST => plain!(ptherm),
            regs::pfuse::BASE..=regs::pfuse::LAST => plain!(pfuse),
            regs::ptop::BASE..=regs::ptop::LAST => block!(ptop, |reg, _i| board::read_ptop(reg, offset, cx)),
            regs::pbdma::BASE..=regs::pbdma::LAST => block!(pbdma, |reg, _i| pfifo::read_pbdma(reg, offset, cx)),
            regs::pflush::BASE..=regs::pflush::LAST => block!(pflush, |reg, _i| memory_blocks::read_flush(reg)),
            regs::ppci::BASE..=regs::ppci::LAST => block!(ppci, |reg, index| board::read_ppci(reg, index, offset, cx)),
            regs::pfb::BASE..=regs::pfb::LAST => block!(pfb, |reg, _i| memory_blocks::read_pfb(reg, offset, cx)),
            regs::pstraps::BASE..=regs::pstraps::LAST => plain!(pstraps),
            regs::ce0::BASE..=regs::ce0::LAST => {
                block!(ce0, |reg, _i| self.copy_falcons.read(0, reg, offset, &self.fifo, cx))
            }
            regs::ce1::BASE..=regs::ce1::LAST => {
                match regs::ce0::decode(offset - (regs::ce1::BASE - regs::ce0::BASE)) {
                    Some((reg, _)) => self.copy_falcons.read(1, reg, offset, &self.fifo, cx),
                    None => self.undeclared_read(offset),
                }
            }
            regs::pmu::BASE..=regs::pmu::LAST => block!(pmu, |reg, index| self.pmu.read(reg, index, offset, cx)),
            regs::pbfb_bcast::BASE..=regs::pbfb_bcast::LAST => plain!(pbfb_bcast),
            regs::pbfb::BASE..=regs::pbfb::LAST => plain!(pbfb),
            regs::privring_hub::BASE..=regs::privring_hub::LAST => {
                block!(privring_hub, |reg, _i| board::read_ring(reg, offset, cx))
            }
            regs::pclock::BASE..=regs::pclock::LAST => plain!(pclock),
            regs::ltc_intr::BASE..=regs::ltc_intr::LAST => plain!(ltc_intr),
            regs::ltc::BASE..=regs::ltc::LAST => block!(ltc, |reg, _i| memory_blocks::read_ltc(reg, offset, cx)),
            regs::pcounter::BASE..=regs::pcounter::LAST => plain!(pcounter),
            prom::BASE..prom::END => self.read_rom(offset - prom::BASE),
            regs::pgraph::BASE..=regs::pgraph::LAST => {
                block!(pgraph, |reg, _i| pgraph::read(reg, offset, &self.fifo, cx))
            }
            regs::fecs::BASE..=regs::fecs::LAST => {
                block!(fecs, |reg, _i| self.graph_falcons.read(reg, offset, &self.fifo, cx))
            }
            regs::gpccs::BASE..=regs::gpccs::LAST => {
                block!(gpccs, |reg, _i| self.graph_falcons.read_gpccs(reg, offset, cx))
            }
            regs::gpc_units::BASE..=regs::gpc_units::LAST => {
                block!(gpc_units, |reg, index| board::read_gpc(reg, index, cx))
            }
            regs::pvga::BASE..=regs::pvga::LAST => plain!(pvga),
            regs::pdisp::BASE..=regs::pdisp::LAST => plain!(pdisp),
            pramin::BASE..pramin::END => cx.apertures.pramin_read(offset, &cx.memory),
            _ => self.undeclared_read(offset),
        }
    }

    /// Writes a register. `offset` must be a multiple of 4.
    pub(crate) fn write32(&mut self, offset: u32, value: u32) {
        self.write_register(offset, value);
        self.write_for_contexts();
        if concerns_scheduler(offset) {
            self.fifo.changed(&self.cx);
        }
        self.update_line();
    }

    /// Writes the registers listed in the images of loaded contexts, anywhere in BAR0, as nouveau's FECS program
    /// (`ctx_mmio_exec`) does. Returns true if any register was listed. If these writes load further contexts, the next
    /// call writes the registers listed there.
    fn write_for_contexts(&mut self) -> bool {
        if self.cx.context_writes.is_empty() {
            return false;
        }
        for (register, value) in std::mem::take(&mut self.cx.context_writes) {
            if register % 4 == 0 && u64::from(register) < BAR0_BYTES {
                self.write_register(register, value);
            }
        }
        self.fifo.retry_waiting();
        true
    }

    fn write_register(&mut self, offset: u32, value: u32) {
        macro_rules! plain {
            ($block:ident) => {
                match regs::$block::decode(offset) {
                    Some((reg, _)) => self.cx.storage.write(reg.info(), offset, value),
                    None => self.undeclared_write(offset, value),
                }
            };
        }
        macro_rules! block {
            ($block:ident, |$reg:ident, $index:ident| $write:expr) => {
                match regs::$block::decode(offset) {
                    Some(($reg, $index)) => $write,
                    None => self.undeclared_write(offset, value),
                }
            };
        }
        let cx = &mut self.cx;
        let fifo = &mut self.fifo;
        let mut effect = Effect::None;
        match offset {
            regs::pmc::BASE..=regs::pmc::LAST => {
                fifo.retry_waiting();
                block!(pmc, |reg, _i| effect = pmc::write(reg, offset, value, cx));
            }
            regs::pbus::BASE..=regs::pbus::LAST => block!(pbus, |reg, _i| pbus::write(reg, offset, value, cx)),
            regs::pfifo::BASE..=regs::pfifo::LAST => {
                block!(pfifo, |reg, index| pfifo::write(reg, index, offset, value, fifo, cx))
            }
            regs::ptimer::BASE..=regs::ptimer::LAST => block!(ptimer, |reg, _i| ptimer::write(reg, offset, value, cx)),
            regs::pnvio::BASE..=regs::pnvio::LAST => plain!(pnvio),
            regs::ptherm::BASE..=regs::ptherm::LAST => plain!(ptherm),
            regs::pfuse::BASE..=regs::pfuse::LAST => plain!(pfuse),
            regs::ptop::BASE..=regs::ptop::LAST => plain!(ptop),
            regs::pbdma::BASE..=regs::pbdma::LAST => {
                block!(pbdma, |reg, index| pfifo::write_pbdma(reg, index, offset, value, fifo, cx))
            }
            regs::pflush::BASE..=regs::pflush::LAST => {
                block!(pflush, |reg, _i| memory_blocks::write_flush(reg, offset, value, cx))
            }
            regs::ppci::BASE..=regs::ppci::LAST => {
                block!(ppci, |reg, _i| effect = board::write_ppci(reg, offset, value, cx))
            }
            regs::pfb::BASE..=regs::pfb::LAST => {
                block!(pfb, |reg, _i| memory_blocks::write_pfb(reg, offset, value, cx))
            }
            regs::pstraps::BASE..=regs::pstraps::LAST => plain!(pstraps),
            regs::ce0::BASE..=regs::ce0::LAST => {
                block!(ce0, |reg, _i| self.copy_falcons.write(0, reg, offset, value, fifo, cx))
            }
            regs::ce1::BASE..=regs::ce1::LAST => {
                match regs::ce0::decode(offset - (regs::ce1::BASE - regs::ce0::BASE)) {
                    Some((reg, _)) => self.copy_falcons.write(1, reg, offset, value, fifo, cx),
                    None => self.undeclared_write(offset, value),
                }
            }
            regs::pmu::BASE..=regs::pmu::LAST => {
                block!(pmu, |reg, index| self.pmu.write(reg, index, offset, value, cx))
            }
            regs::pbfb_bcast::BASE..=regs::pbfb_bcast::LAST => plain!(pbfb_bcast),
            regs::pbfb::BASE..=regs::pbfb::LAST => plain!(pbfb),
            regs::privring_hub::BASE..=regs::privring_hub::LAST => plain!(privring_hub),
            regs::pclock::BASE..=regs::pclock::LAST => plain!(pclock),
            regs::ltc_intr::BASE..=regs::ltc_intr::LAST => plain!(ltc_intr),
            regs::ltc::BASE..=regs::ltc::LAST => plain!(ltc),
            regs::pcounter::BASE..=regs::pcounter::LAST => plain!(pcounter),
            prom::BASE..prom::END => {}
            regs::pgraph::BASE..=regs::pgraph::LAST => {
                block!(pgraph, |reg, _i| pgraph::write(reg, offset, value, fifo, cx))
            }
            regs::fecs::BASE..=regs::fecs::LAST => {
                block!(fecs, |reg, index| self.graph_falcons.write(reg, index, offset, value, fifo, cx))
            }
            regs::gpccs::BASE..=regs::gpccs::LAST => {
                block!(gpccs, |reg, _i| self.graph_falcons.write_gpccs(reg, offset, value, cx))
            }
            regs::gpc_units::BASE..=regs::gpc_units::LAST => plain!(gpc_units),
            regs::pvga::BASE..=regs::pvga::LAST => plain!(pvga),
            regs::pdisp::BASE..=regs::pdisp::LAST => plain!(pdisp),
            pramin::BASE..pramin::END => {
                cx.apertures.pramin_write(offset, value, &cx.memory, &cx.doorbells);
            }
            _ => self.undeclared_write(offset, value),
        }
        match effect {
            Effect::None => {}
            Effect::ResetUnits(units) => self.reset_units(units),
            Effect::Rearm => self.line.rearm(),
        }
    }

    /// Performs a small part of the card's own work: alarms, and the channels' work.
    pub(crate) fn step(&mut self) -> Progress {
        if self.halted || self.cx.apertures.is_gone() {
            return Progress::Idle;
        }
        ptimer::step(&mut self.cx);
        let mut progress = self.fifo.step(&mut self.cx);
        if self.write_for_contexts() {
            progress = Progress::Ran;
        }
        if let Some(alarm) = self.cx.clock.alarm() {
            progress = progress.or(Progress::WaitUntil(alarm));
        }
        self.update_line();
        progress
    }

    /// Reports an aperture access fault to the driver.
    pub(crate) fn aperture_fault(&mut self, aperture: Aperture, what: ApertureFault) {
        let unit = match aperture {
            Aperture::Bar1 => unit::BAR1,
            Aperture::Bar3 => unit::BAR3,
        };
        let client = if what.fault.write { hub_client::BAR_WRITE } else { hub_client::BAR_READ };
        report(Report { unit, client: Client::Hub(client), instance: what.instance, fault: what.fault }, &mut self.cx);
        self.update_line();
    }

    fn lines(&self) -> pmc::Lines {
        use regs::pmc::INTR_0 as bits;
        let cx = &self.cx;
        let units = [
            (bits::PBUS, pbus::asserts(cx)),
            (bits::PMU, pmu::Pmu::asserts(cx)),
            (bits::PTIMER, ptimer::asserts(cx)),
            (bits::PGRAPH, pgraph::asserts(cx)),
            (bits::PFIFO, Fifo::asserts(cx)),
            (bits::CE1, falcon::asserts(1, cx)),
            (bits::CE0, falcon::asserts(0, cx)),
        ];
        let pending = units.iter().filter(|(_, asserts)| *asserts).fold(0, |mask, (field, _)| mask | field.mask());
        pmc::Lines { pending }
    }

    fn update_line(&mut self) {
        let level = self.lines().level(&self.cx);
        self.line.set_level(level);
    }

    fn reset_units(&mut self, units: u32) {
        use regs::pmc::ENABLE;
        let cx = &mut self.cx;
        for id in EngineId::ALL {
            if units & self.fifo.slot(id).enable_bit() != 0 {
                self.fifo.reset_engine(id, cx);
            }
        }
        if ENABLE::PGRAPH.is_set(units) {
            for (first, end) in PGRAPH_RANGES {
                cx.storage.reset_range(first, end);
            }
            self.graph_falcons.reset();
        }
        if ENABLE::CE0.is_set(units) {
            self.copy_falcons.reset(0, cx);
        }
        if ENABLE::CE1.is_set(units) {
            self.copy_falcons.reset(1, cx);
        }
        if ENABLE::PMU.is_set(units) {
            self.pmu.reset(cx);
        }
        if ENABLE::PFIFO.is_set(units) {
            self.fifo.reset(cx);
        }
        self.fifo.retry_waiting();
    }

    fn read_rom(&self, offset: u32) -> u32 {
        let at = offset as usize;
        // Beyond the end of the image, the ROM reads as erased flash.
        self.rom.get(at..at + 4).map_or(u32::MAX, |bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn undeclared_read(&mut self, offset: u32) -> u32 {
        if is_state(offset) {
            return self.cx.storage.peek(offset);
        }
        self.cx.undeclared.note(offset, None);
        UNCLAIMED
    }

    fn undeclared_write(&mut self, offset: u32, value: u32) {
        if is_state(offset) {
            let old = self.cx.storage.peek(offset);
            self.cx.storage.poke(offset, sm_trap::written(offset, old, value));
        } else {
            self.cx.undeclared.note(offset, Some(value));
        }
    }

    /// Creates a small card whose clock advances only through [`Gpu::advance`].
    #[cfg(test)]
    pub(crate) fn for_test() -> Self {
        let config = Config { vram_mib: 64, compute_workers: Some(0), ..Config::default() };
        Self::new(&config, Clock::manual(), Vram::new(64 << 20).expect("a small card"))
    }

    #[cfg(test)]
    pub(crate) fn advance(&mut self, ns: u64) {
        self.cx.clock.advance(ns);
    }

    /// Steps until no work can be done at the current time.
    #[cfg(test)]
    pub(crate) fn run_until_idle(&mut self) -> Progress {
        for _ in 0..1_000_000 {
            match self.step() {
                Progress::Ran => {}
                other => return other,
            }
        }
        panic!("the card does not become idle");
    }
}

/// Returns true if `offset` is in a range of storage-only registers.
fn is_state(offset: u32) -> bool {
    STATE_RANGES.iter().any(|(_, first, end)| (*first..*end).contains(&offset))
}

/// Returns true if a write to the register may make channels runnable or set an alarm.
pub(crate) fn concerns_scheduler(offset: u32) -> bool {
    let may = matches!(
        offset,
        regs::pmc::BASE..=regs::pmc::LAST
            | regs::pfifo::BASE..=regs::pfifo::LAST
            | regs::ptimer::BASE..=regs::ptimer::LAST
            | regs::pbdma::BASE..=regs::pbdma::LAST
            | regs::pfb::BASE..=regs::pfb::LAST
            | regs::ce0::BASE..=regs::ce0::LAST
            | regs::ce1::BASE..=regs::ce1::LAST
            | regs::pgraph::BASE..=regs::pgraph::LAST
            | regs::fecs::BASE..=regs::fecs::LAST
    );
    may && !pfifo::acknowledges(offset)
}
