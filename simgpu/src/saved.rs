//! Saved state of a quiescent card. Its memory is handed over separately.
//!
//! [`SimGpu::halt`] preempts every channel, which saves the state of all channels to their contexts in memory. The card
//! then does no work. The saved state contains the registers, the channel table, and other state that is not in memory.
//! It does not contain TLB entries, host memory mappings, or the interrupt event, which the card's next user sets up
//! again.

use crate::Config;
use crate::aperture::Apertures;
use crate::clock::SavedClock;
use crate::cx::Undeclared;
use crate::falcon::{SavedCode, SavedMemory};
use crate::faults::Faults;
use crate::fifo::SavedFifo;
use crate::gpu::Gpu;
use crate::interrupt::SavedLine;
use crate::storage::Storage;
use card::Aperture;
use nvspec::regs::pbus;
use saved_state::{Invalid, first_version};
use serde::{Deserialize, Serialize};

/// Maximum number of register writes that loaded contexts list and FECS has not performed yet.
const CONTEXT_WRITES_MAX: usize = 1024;

/// Saved state of a software card, excluding its memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedCard {
    boot0: u32,
    pub(crate) vram_bytes: u64,
    bars: [u64; 2],
    /// All nonzero dwords as pairs of BAR0 offset and value, in ascending order.
    pub(crate) storage: Vec<(u32, u32)>,
    pub(crate) fifo: SavedFifo,
    line: SavedLine,
    /// Data memories of the PMU, FECS, GPCCS and the copy engines.
    pub(crate) falcons: [SavedMemory; 5],
    /// Code memories of FECS, GPCCS and the copy engines.
    codes: [SavedCode; 4],
    pub(crate) clock: SavedClock,
    faults: Faults,
    undeclared: Undeclared,
    lost: u64,
    pub(crate) context_writes: Vec<(u32, u32)>,
}

first_version!(SavedCard, "simgpu");

/// Reason why a card is not quiescent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotQuiescent {
    /// An engine is busy and cannot be interrupted. Its work may have ended when the caller retries.
    #[error("an engine of the software card is busy with channel {0:?}")]
    Working(Option<u8>),
    /// An engine has stopped on a fault or hangs, and must be reset first.
    #[error("engine {0} of the software card has stopped: reset it")]
    Stopped(u32),
}

impl Gpu {
    /// Removes all channels from the PBDMAs and engines, and stops the card's own work.
    pub(crate) fn halt(&mut self) -> Result<(), NotQuiescent> {
        self.fifo.clear_out(&mut self.cx)?;
        self.cx.memory.push_posted();
        self.halted = true;
        Ok(())
    }

    /// Saves the card, or returns `None` if it is not halted. `bars` are the sizes of BAR1 and BAR3, in bytes.
    pub(crate) fn save(&self, bars: [u64; 2]) -> Option<SavedCard> {
        let Self { cx, fifo, line, alarm: _, pmu, graph_falcons, copy_falcons, rom: _, halted } = self;
        let crate::cx::Cx {
            chip,
            storage,
            memory,
            // Not saved: the TLBs are only caches.
            mmu: _,
            // Not saved: derived from registers.
            apertures: _,
            // Not saved: derived from the channels.
            doorbells: _,
            clock,
            // Not saved: the time model is a setting.
            time: _,
            faults,
            undeclared,
            // Not saved: this counter is specific to the process.
            copied: _,
            context_writes,
        } = cx;
        let ([fecs, gpccs], [fecs_code, gpccs_code]) = graph_falcons.save();
        let ([first, second], [first_code, second_code]) = copy_falcons.save();
        halted.then(|| SavedCard {
            boot0: chip.boot0,
            vram_bytes: memory.vram.size(),
            bars,
            storage: storage.save(),
            fifo: fifo.save(),
            line: line.save(),
            falcons: [pmu.save(), fecs, gpccs, first, second],
            codes: [fecs_code, gpccs_code, first_code, second_code],
            clock: clock.save(),
            faults: faults.clone(),
            undeclared: undeclared.clone(),
            lost: memory.lost(),
            context_writes: context_writes.clone(),
        })
    }

    /// Restores the state to a new card, which remains halted.
    pub(crate) fn restore(&mut self, saved: SavedCard, config: &Config) -> Result<(), Invalid> {
        let SavedCard {
            boot0,
            vram_bytes,
            bars,
            storage,
            fifo,
            line,
            falcons: [pmu, fecs, gpccs, first, second],
            codes: [fecs_code, gpccs_code, first_code, second_code],
            clock,
            faults,
            undeclared,
            lost,
            context_writes,
        } = saved;
        let own = (config.chip.boot0, self.cx.memory.vram.size(), [config.bar1_size, config.bar3_size]);
        Invalid::unless((boot0, vram_bytes, bars) == own, || {
            format!("the state belongs to a different card: {:x?}, and this one is {own:x?}", (boot0, vram_bytes, bars))
        })?;
        Invalid::unless(context_writes.len() <= CONTEXT_WRITES_MAX, || "contexts list too many registers".into())?;
        faults.check()?;
        undeclared.check()?;
        let cx = &mut self.cx;
        cx.storage = Storage::restored(&storage)?;
        cx.clock.restore(&clock);
        self.fifo.restore(fifo, cx)?;
        self.line.restore(&line)?;
        self.pmu.restore(pmu)?;
        self.graph_falcons.restore([fecs, gpccs], [fecs_code, gpccs_code])?;
        self.copy_falcons.restore([first, second], [first_code, second_code])?;
        (cx.faults, cx.undeclared, cx.context_writes) = (faults, undeclared, context_writes);
        cx.memory.set_lost(lost);
        place_windows(&cx.apertures, &cx.storage, &cx.memory);
        self.halted = true;
        Ok(())
    }
}

/// Sets the window mappings from the registers.
fn place_windows(apertures: &Apertures, storage: &Storage, memory: &simgpu_memory::memory::Memory) {
    apertures.place_pramin(storage.peek(pbus::PRAMIN_WINDOW::OFFSET));
    apertures.bind(Aperture::Bar1, storage.peek(pbus::BAR1_BLOCK::OFFSET), memory);
    apertures.bind(Aperture::Bar3, storage.peek(pbus::BAR3_BLOCK::OFFSET), memory);
}
