//! Initializes a card as its driver does: checks its identity, reads its memory size, and starts units, the scheduler
//! and context switching.
//!
//! Follows the order of nouveau's probe, reduced to the steps that the mediator needs. If a falcon does not report
//! ready with the approved firmware, the card is rejected.

use crate::CardError;
use crate::load::load;
use card::Card;
use firmware::Set;
use nvspec::chip::{self, Chip};
use nvspec::falcon::Falcon;
use nvspec::fifo::engine;
use nvspec::regs::windows::prom;
use nvspec::regs::{ce0, ce1, fecs, pbdma, pbfb, pfb, pfifo, pgraph, pmc, ppci, ptop};
use std::sync::Arc;

/// Maximum number of polls until a falcon reports ready. Startup takes milliseconds, and a poll is a bus read of about
/// a microsecond.
const READY_POLLS: u32 = 2_000_000;

/// Non-stall interrupt bits that are enabled for each engine: bit 0, which channel work sets.
const NON_STALL_NORMAL: u32 = 1;

/// Card properties read during bring-up.
#[derive(Clone, Debug)]
pub struct CardInfo {
    /// The card's chip.
    pub chip: &'static Chip,
    /// Size of VRAM in bytes.
    pub vram_bytes: u64,
    /// Size of a PGRAPH context in bytes.
    pub context_bytes: u32,
    /// Number of PBDMA units.
    pub pbdmas: u32,
    /// The VBIOS image, which guests also see on their vGPUs.
    pub vbios: Arc<[u8]>,
}

/// Resets and initializes `card`. Channels can be bound afterwards, and USERD is at offset 0 of BAR1.
///
/// # Errors
/// Returns an error if the chip is unknown, or does not respond as expected.
pub fn bring_up(card: &dyn Card, firmware: &Set) -> Result<CardInfo, CardError> {
    card.reset();
    let boot0 = card.read32(pmc::BOOT_0::OFFSET);
    let chip = chip::by_boot0(boot0).ok_or(CardError::UnknownChip { boot0 })?;
    let register = ptop::DEVINIT_STATUS::OFFSET;
    let value = card.read32(register);
    if !ptop::DEVINIT_STATUS::DONE.is_set(value) {
        return Err(CardError::NotPosted { register, value });
    }
    card.write32(pmc::INTR_EN_0::OFFSET, 0);
    card.write32(pmc::ENABLE::OFFSET, u32::MAX);
    // Disable the MMU debug mode, which is meant for driver development.
    card.write32(pfb::MMU_DEBUG_CTRL::OFFSET, 0);
    let vram_bytes = memory_size(card)?;
    let pbdmas = start_fifo(card);
    let context_bytes = start_graph(card, firmware)?;
    start_copy(card, firmware, Falcon::Copy0)?;
    start_copy(card, firmware, Falcon::Copy1)?;
    Ok(CardInfo { chip, vram_bytes, context_bytes, pbdmas, vbios: read_vbios(card) })
}

/// Reads the properties of a card that another process has initialized with [`bring_up`], without modifying the card.
/// `context_bytes` is the size of a PGRAPH context, which can be read only during bring-up.
///
/// # Errors
/// Returns an error if the chip is unknown, or does not respond as expected.
pub fn look_at(card: &dyn Card, context_bytes: u32) -> Result<CardInfo, CardError> {
    let boot0 = card.read32(pmc::BOOT_0::OFFSET);
    let chip = chip::by_boot0(boot0).ok_or(CardError::UnknownChip { boot0 })?;
    let vram_bytes = memory_size(card)?;
    let pbdmas = card.read32(pmc::PBDMA_ENABLE::OFFSET).count_ones().min(pbdma::INTR_0::COUNT);
    Ok(CardInfo { chip, vram_bytes, context_bytes, pbdmas, vbios: vbios(card) })
}

/// Makes PROM accessible, and reads the VBIOS image from it. The header contains the image's length in units of 512
/// bytes. Returns an empty image if the header is invalid.
#[must_use]
pub fn read_vbios(card: &dyn Card) -> Arc<[u8]> {
    card.write32(ppci::ROM_CONTROL::OFFSET, 0);
    vbios(card)
}

/// Reads the VBIOS image from PROM, which must be accessible.
fn vbios(card: &dyn Card) -> Arc<[u8]> {
    let header = card.read32(prom::BASE).to_le_bytes();
    let bytes = match header {
        [0x55, 0xaa, blocks, _] => (u32::from(blocks) * 512).min(prom::BYTES),
        _ => 0,
    };
    (0..bytes).step_by(4).flat_map(|offset| card.read32(prom::BASE + offset).to_le_bytes()).collect()
}

/// Enables the card's interrupts.
pub fn enable_interrupts(card: &dyn Card) {
    card.write32(pmc::INTR_MASK_0::OFFSET, u32::MAX);
    card.write32(pmc::INTR_EN_0::OFFSET, pmc::INTR_EN_0::ENABLE.mask());
}

fn memory_size(card: &dyn Card) -> Result<u64, CardError> {
    let partitions = card.read32(ptop::FBP_COUNT::OFFSET).min(pbfb::MEM_AMOUNT::COUNT);
    let disabled = card.read32(ptop::FBP_DISABLED::OFFSET);
    let mib: u64 = (0..partitions)
        .filter(|fbp| disabled & (1 << fbp) == 0)
        .map(|fbp| u64::from(card.read32(pbfb::MEM_AMOUNT::at(fbp))))
        .sum();
    if mib == 0 { Err(CardError::Unresponsive("it reports no memory")) } else { Ok(mib << 20) }
}

fn start_fifo(card: &dyn Card) -> u32 {
    card.write32(pmc::PBDMA_ENABLE::OFFSET, u32::MAX);
    card.write32(pfifo::PBDMA_PRESENT::OFFSET, u32::MAX);
    let pbdmas = card.read32(pmc::PBDMA_ENABLE::OFFSET).count_ones().min(pbdma::INTR_0::COUNT);
    // Assign each engine to its own PBDMA, so that a waiting channel of one engine does not block the other engines.
    let spread = [(engine::GR, 0), (engine::CE0, 2), (engine::CE1, 1)];
    for (engine, unit) in spread {
        let unit = if unit < pbdmas { unit } else { 0 };
        card.write32(pfifo::ENGINE_PBDMA_MASK::at(engine), !(1 << unit));
    }
    for unit in 0..pbdmas {
        card.write32(pbdma::INTR_0::at(unit), u32::MAX);
        card.write32(pbdma::INTR_EN_0::at(unit), u32::MAX);
    }
    card.write32(pfifo::SCHED_EN::OFFSET, pfifo::SCHED_EN::ENABLE.mask());
    card.write32(pfifo::USERD_BASE::OFFSET, pfifo::USERD_BASE::VALID.mask());
    card.write32(pfifo::INTR::OFFSET, u32::MAX);
    card.write32(pfifo::NON_STALL_EN::OFFSET, NON_STALL_NORMAL);
    card.write32(
        pfifo::INTR_EN::OFFSET,
        pfifo::INTR_EN::NON_STALL.mask()
            | pfifo::INTR_EN::RUNLIST.mask()
            | pfifo::INTR_EN::PBDMA.mask()
            | pfifo::INTR_EN::MMU_FAULT.mask()
            | pfifo::INTR_EN::SCHED_ERROR.mask()
            | pfifo::INTR_EN::INTR_0.mask(),
    );
    pbdmas
}

/// Resets and restarts an engine, which loses its work and context. Other engines and memory are unaffected. Ignores
/// engines that the mediator does not start.
///
/// # Errors
/// Returns an error if the engine does not start.
pub fn restart_engine(card: &dyn Card, firmware: &Set, engine: u32) -> Result<(), CardError> {
    let unit = match engine {
        engine::GR => pmc::ENABLE::PGRAPH.mask(),
        engine::CE0 => pmc::ENABLE::CE0.mask(),
        engine::CE1 => pmc::ENABLE::CE1.mask(),
        _ => return Ok(()),
    };
    let enabled = card.read32(pmc::ENABLE::OFFSET);
    card.write32(pmc::ENABLE::OFFSET, enabled & !unit);
    // The read flushes the write, and takes long enough for the unit to reset.
    card.read32(pmc::ENABLE::OFFSET);
    card.write32(pmc::ENABLE::OFFSET, enabled | unit);
    card.read32(pmc::ENABLE::OFFSET);
    match engine {
        engine::GR => start_graph(card, firmware).map(drop),
        engine::CE0 => start_copy(card, firmware, Falcon::Copy0),
        _ => start_copy(card, firmware, Falcon::Copy1),
    }
}

fn start_copy(card: &dyn Card, firmware: &Set, falcon: Falcon) -> Result<(), CardError> {
    load(card, firmware, falcon)?;
    let (itfen, vector, control) = if falcon == Falcon::Copy0 {
        (ce0::ITFEN::OFFSET, ce0::BOOT_VECTOR::OFFSET, ce0::CPU_CONTROL::OFFSET)
    } else {
        (ce1::ITFEN::OFFSET, ce1::BOOT_VECTOR::OFFSET, ce1::CPU_CONTROL::OFFSET)
    };
    card.write32(vector, 0);
    card.write32(control, ce0::CPU_CONTROL::START.mask());
    card.write32(itfen, 3);
    Ok(())
}

fn start_graph(card: &dyn Card, firmware: &Set) -> Result<u32, CardError> {
    card.write32(pgraph::CONTROL::OFFSET, pgraph::CONTROL::FIFO_ACCESS.mask() | pgraph::CONTROL::METHODS.mask());
    card.write32(pgraph::INTR::OFFSET, u32::MAX);
    card.write32(pgraph::INTR_EN::OFFSET, u32::MAX);
    // Stop the front end while the falcons are being loaded.
    card.write32(pmc::ELPG_GATE::OFFSET, 0);
    load(card, firmware, Falcon::Fecs)?;
    load(card, firmware, Falcon::Gpccs)?;
    card.write32(pmc::ELPG_GATE::OFFSET, 1);
    card.write32(fecs::DMA_CONTROL::OFFSET, 0);
    card.write32(fecs::BOOT_VECTOR::OFFSET, 0);
    card.write32(fecs::CPU_CONTROL::OFFSET, fecs::CPU_CONTROL::START.mask());
    let ready = (0..READY_POLLS).any(|_| fecs::MAILBOX::READY.is_set(card.read32(fecs::MAILBOX::at(0))));
    if !ready {
        return Err(CardError::Unresponsive("context switching firmware does not start"));
    }
    Ok(card.read32(fecs::MAILBOX::at(1)))
}
