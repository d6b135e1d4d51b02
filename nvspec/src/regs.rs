//! BAR0 registers, block by block.
//!
//! Modules follow the address map: [`host`] (master control, bus, FIFO, timer), [`memory`] (frame buffer, cache,
//! windows), [`board`] (PCI mirror, thermal, clocks, PMU, privileged ring, fuses, and the display registers that
//! drivers probe), [`graph`] (PGRAPH and the copy engines' falcons).

pub mod board;
pub mod graph;
pub mod host;
pub mod memory;
pub mod windows;

pub use board::{pclock, pcounter, pdisp, pfuse, pmu, pmu_queue, pnvio, ppci, privring_hub, ptherm, ptop, pvga};
pub use graph::{ce0, ce1, fecs, fecs_command, gpc_units, gpccs, pgraph, sm_trap};
pub use host::{pbdma, pbus, pfifo, pmc, ptimer};
pub use memory::{ltc, ltc_intr, pbfb, pbfb_bcast, pfb, pflush, pstraps};

use crate::RegInfo;

/// Returns all blocks of all modules, each with its name, start offset, end offset (exclusive) and registers.
pub fn blocks() -> impl Iterator<Item = &'static (&'static str, u32, u32, &'static [RegInfo])> {
    host::BLOCKS.iter().chain(memory::BLOCKS).chain(board::BLOCKS).chain(graph::BLOCKS)
}

/// Returns the block name of the register at `offset`, the register, and its array index. This is for logs and tools:
/// it is too slow for dispatch.
#[must_use]
pub fn lookup(offset: u32) -> Option<(&'static str, &'static RegInfo, u32)> {
    let (block, _, _, info) = blocks().find(|(_, base, end, _)| (*base..*end).contains(&offset))?;
    info.iter().find_map(|reg| {
        let index = offset.checked_sub(reg.offset)?;
        (index % reg.stride < 4 && index / reg.stride < reg.count).then_some((*block, reg, index / reg.stride))
    })
}
