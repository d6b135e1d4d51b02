//! PFB, the L2 cache and the flush registers: the size of the guest's memory, and TLB flushes.

use super::{At, Cx};
use crate::denied::Reason;
use nvspec::mmu::PD_BYTES;
use nvspec::regs::pfb::{MMU_CTRL, MMU_INVALIDATE, MMU_INVALIDATE_PDB};
use nvspec::regs::pflush::BAR_FLUSH;
use nvspec::regs::{ltc, pbfb, pfb, pflush};

pub(crate) fn read_pfb(reg: pfb::Reg, at: At, cx: &Cx) -> u32 {
    match reg {
        pfb::Reg::PARTITIONS | pfb::Reg::MMU_CTRL => at.info.reset,
        _ => cx.plain_read(at),
    }
}

pub(crate) fn write_pfb(reg: pfb::Reg, at: At, value: u32, cx: &mut Cx) {
    match reg {
        pfb::Reg::MMU_CTRL => {
            // 64 KiB large pages would change the format of all page tables.
            if MMU_CTRL::LARGE_PAGE_64K.is_set(value) {
                cx.deny_write(at, Reason::Unsupported, value);
            }
        }
        pfb::Reg::MMU_INVALIDATE => invalidate(at, value, cx),
        pfb::Reg::PARTITIONS => {}
        _ => cx.plain_write(at, value),
    }
}

fn invalidate(at: At, value: u32, cx: &mut Cx) {
    cx.storage.set(at.offset, value & !MMU_INVALIDATE::TRIGGER.mask());
    if !MMU_INVALIDATE::TRIGGER.is_set(value) {
        return;
    }
    let hub_only = MMU_INVALIDATE::HUB_ONLY.is_set(value);
    if MMU_INVALIDATE::ALL_PDB.is_set(value) {
        cx.backend.flush_tlb(None, hub_only);
        return;
    }
    let pdb = cx.storage.get(pfb::MMU_INVALIDATE_PDB::OFFSET);
    let address = u64::from(MMU_INVALIDATE_PDB::ADDRESS.get(pdb)) << 12;
    // The guest's directory may be shorter than the maximum, so only its first page must be within the guest's VRAM.
    let bytes = PD_BYTES.min(nvspec::addr::SMALL_PAGE);
    if let Some(directory) = cx.place(at, pdb, MMU_INVALIDATE_PDB::TARGET.get(pdb), address, bytes) {
        cx.backend.flush_tlb(Some(directory), hub_only);
    }
}

/// Writes a flush register. The flush completes before the write returns, so the registers always read as idle.
pub(crate) fn write_pflush(reg: pflush::Reg, value: u32, cx: &mut Cx) {
    if reg == pflush::Reg::BAR_FLUSH && BAR_FLUSH::TRIGGER.is_set(value) {
        cx.backend.flush_apertures();
    }
}

/// Returns the size of a memory partition in MiB. The first partition contains all of the guest's VRAM.
pub(crate) fn read_pbfb(_: pbfb::Reg, at: At, cx: &Cx) -> u32 {
    if at.index == 0 { cx.config.vram_mib() } else { 0 }
}

pub(crate) fn read_ltc(reg: ltc::Reg, at: At, cx: &Cx) -> u32 {
    match reg {
        ltc::Reg::CBC_PARAM => ltc::CBC_PARAM::SLICES.encode(cx.config.chip.ltc_slices),
        ltc::Reg::CBC_CLEAR => 0,
        _ => cx.plain_read(at),
    }
}
