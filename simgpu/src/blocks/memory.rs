//! The flush registers, PFB, the memory controllers and the L2 cache. The model caches only translations, but writes to
//! host memory may be in flight.

use crate::cx::Cx;
use nvspec::addr::{GpuVa, Iova, Target};
use nvspec::mmu::BARRIER_SHIFT;
use nvspec::regs::{ltc, pbfb, pbfb_bcast, pfb, pflush, ptop};
use simgpu_memory::memory::BusAddr;
use simgpu_memory::mmu::Flush;

pub(crate) fn read_flush(reg: pflush::Reg) -> u32 {
    match reg {
        // The operation completes immediately.
        pflush::Reg::BAR_FLUSH | pflush::Reg::L2_FLUSH | pflush::Reg::L2_INVALIDATE => 0,
    }
}

pub(crate) fn write_flush(reg: pflush::Reg, offset: u32, value: u32, cx: &mut Cx) {
    cx.storage.write(reg.info(), offset, value);
    match reg {
        pflush::Reg::BAR_FLUSH if pflush::BAR_FLUSH::TRIGGER.is_set(value) => {
            // GUESS: the barrier is a write to the flush page after all earlier writes. Without a flush page, it has no
            // effect.
            let page = u64::from(cx.storage.peek(pfb::NISO_ADDRESS::OFFSET)) << BARRIER_SHIFT;
            if cx.memory.sysmem.is_writable(Iova(page)) {
                cx.memory.push_posted();
            }
        }
        pflush::Reg::BAR_FLUSH | pflush::Reg::L2_FLUSH | pflush::Reg::L2_INVALIDATE => {}
    }
}

pub(crate) fn read_pfb(reg: pfb::Reg, offset: u32, cx: &Cx) -> u32 {
    use pfb::Reg;
    match reg {
        Reg::INTR
        | Reg::CONFIG
        | Reg::MEM_TYPE
        | Reg::PARTITIONS
        | Reg::NISO_ADDRESS
        | Reg::MMU_CTRL
        | Reg::MMU_INVALIDATE_VA
        | Reg::MMU_INVALIDATE_PDB
        | Reg::MMU_INVALIDATE
        | Reg::MMU_DEBUG_WR
        | Reg::MMU_DEBUG_RD
        | Reg::MMU_DEBUG_CTRL => cx.storage.read(reg.info(), offset),
    }
}

pub(crate) fn write_pfb(reg: pfb::Reg, offset: u32, value: u32, cx: &mut Cx) {
    use pfb::Reg;
    match reg {
        Reg::MMU_CTRL => {
            // The queue is never full, and all queued flushes are complete.
            let state = pfb::MMU_CTRL::FLUSH_SLOTS_FREE.mask() | pfb::MMU_CTRL::FLUSH_DONE.mask();
            cx.storage.poke(offset, (value & !state) | (cx.storage.peek(offset) & state));
        }
        Reg::MMU_INVALIDATE => {
            cx.storage.poke(offset, pfb::MMU_INVALIDATE::TRIGGER.with(value, 0));
            if pfb::MMU_INVALIDATE::TRIGGER.is_set(value) {
                flush(value, cx);
            }
        }
        Reg::INTR
        | Reg::CONFIG
        | Reg::MEM_TYPE
        | Reg::PARTITIONS
        | Reg::NISO_ADDRESS
        | Reg::MMU_INVALIDATE_VA
        | Reg::MMU_INVALIDATE_PDB
        | Reg::MMU_DEBUG_WR
        | Reg::MMU_DEBUG_RD
        | Reg::MMU_DEBUG_CTRL => cx.storage.write(reg.info(), offset, value),
    }
}

fn flush(trigger: u32, cx: &Cx) {
    let directory = cx.storage.peek(pfb::MMU_INVALIDATE_PDB::OFFSET);
    let target = Target::from_bits(pfb::MMU_INVALIDATE_PDB::TARGET.get(directory));
    let address = u64::from(pfb::MMU_INVALIDATE_PDB::ADDRESS.get(directory)) << 12;
    // GUESS: the virtual address has the same encoding as the page directory address.
    let page = u64::from(cx.storage.peek(pfb::MMU_INVALIDATE_VA::OFFSET) >> 4) << 12;
    let all_directories = pfb::MMU_INVALIDATE::ALL_PDB.is_set(trigger);
    let all_pages = pfb::MMU_INVALIDATE::ALL_VA.is_set(trigger);
    cx.mmu.flush(Flush {
        // No channel can have used a page directory with a reserved target, so flushing all directories is also
        // correct.
        directory: if all_directories { None } else { BusAddr::from_target(target, address) },
        page: (!all_pages).then_some(GpuVa(page)),
        hub_only: pfb::MMU_INVALIDATE::HUB_ONLY.is_set(trigger),
    });
}

pub(crate) fn read_ltc(reg: ltc::Reg, offset: u32, cx: &Cx) -> u32 {
    use ltc::Reg;
    match reg {
        Reg::CBC_PARAM => ltc::CBC_PARAM::SLICES.encode(cx.chip.ltc_slices),
        Reg::CBC_CLEAR_START
        | Reg::CBC_CLEAR_END
        | Reg::CBC_CLEAR
        | Reg::CBC_BASE
        | Reg::CBC_SIZE
        | Reg::CONTROL
        | Reg::INTR_CONTROL
        | Reg::ZBC_INDEX
        | Reg::ZBC_COLOR
        | Reg::ZBC_DEPTH
        | Reg::ZBC_STENCIL => cx.storage.read(reg.info(), offset),
    }
}

/// Resets the memory controllers: one partition contains all memory. Before POST, the controllers are off. Drivers
/// detect this by reading the last register that the VBIOS scripts write.
pub(crate) fn reset(cx: &mut Cx) {
    let mib = (cx.memory.vram.size() >> 20) as u32;
    if mib == 0 {
        cx.storage.poke(ptop::DEVINIT_STATUS::OFFSET, 0);
    }
    cx.storage.poke(pbfb::MEM_AMOUNT::at(0), mib);
    cx.storage.poke(pbfb_bcast::MEM_AMOUNT::OFFSET, mib);
}
