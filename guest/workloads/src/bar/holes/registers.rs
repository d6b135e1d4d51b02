//! Holes 6 and 20 to 29: registers that could affect the whole machine.
//!
//! Only a neighboring VM, through the card's other function, can observe a write's effect on the machine.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};

use super::super::layout::{Aperture, PAGE, instance_pointer, reg};
use super::lab::{BRAND, Lab, MARKER, Ran, Verdict, copies, va};
use gdev::mapping::Width;

/// Distance between consecutive writes of the sweep, in bytes. The offset within each stride varies.
const STRIDE: u32 = 0x200;

/// Writes all ones, and then 0, to each register.
fn write_all(lab: &Lab<'_>, verdict: &mut Verdict, registers: impl Iterator<Item = u32>) {
    for register in registers {
        lab.card.write(register, u32::MAX);
        lab.card.write(register, 0);
        verdict.note("a register", false, false);
    }
}

/// Hole 6: microcode, resets, clocks, the PCI mirror, interrupts, and a sample of all registers.
pub fn unclaimed(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let own = lab.take(1);
    lab.card.vram_write(own, MARKER);
    let masks = reg::INTR_MASKS.map(|register| (register, lab.card.read(register)));
    // Write microcode for FECS, GPCCS, both copy engines and the PMU.
    for falcon in [0x409000, 0x41a000, 0x104000, 0x105000, 0x10a000] {
        lab.card.write(falcon + 0x180, 1 << 24);
        for block in 0..4 {
            lab.card.write(falcon + 0x188, block);
            (0..64).for_each(|word| lab.card.write(falcon + 0x184, 0xf4f4_0000 | word));
        }
        lab.card.write(falcon + 0x104, 0);
        lab.card.write(falcon + 0x100, 2);
    }
    for register in [0x200, 0x204, 0x140, 0x640, 0x2100, 0x2140, 0x259c, 0x25a0, 0x2a00] {
        for value in [0, u32::MAX, 0] {
            lab.card.write(register, value);
        }
    }
    write_all(lab, verdict, (0x88000..0x88100).step_by(4));
    write_all(lab, verdict, (0x132000..0x132100).chain(0x137000..0x137200).step_by(4));
    // The sweep skips the window to our own memory.
    let sweep = (0..0x100_0000).step_by(STRIDE as usize).map(|offset| offset + offset / STRIDE * 4 % STRIDE);
    write_all(lab, verdict, sweep.filter(|offset| !(reg::PRAMIN..reg::PRAMIN + 0x10_0000).contains(offset)));
    // Restore the interrupt masks. The card's drivers never write them, so the card would raise no further interrupts.
    masks.into_iter().for_each(|(register, value)| lab.card.write(register, value));
    verdict.check("our memory is intact", lab.card.vram_read(own) == MARKER);
    Ok(())
}

/// Hole 20: TLB flushes of other VMs' directories.
pub fn foreign_flush(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    for at in lab.outside(PAGE) {
        for target in 0..4 {
            lab.card.write(reg::TLB_DIRECTORY, ((at >> 12) << 4) as u32 | target);
            for trigger in [0x8000_0000, 0x8000_0001, 0x8000_0005, 0xffff_fffd] {
                lab.card.write(reg::TLB_TRIGGER, trigger);
            }
            verdict.note("a flush", false, false);
        }
    }
    Ok(())
}

/// Hole 21: the engines' PBDMAs, and the scheduler's enable registers.
pub fn scheduler_masks(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let masks = [0x2200, 0x2204, 0x2208, 0x220c, 0x2210, 0x2218, 0x2224, 0x2310, 0x2628, 0x262c, 0x2a30, 0x2a34];
    for register in masks {
        for value in [0, u32::MAX, 0x11f] {
            lab.card.write(register, value);
        }
        verdict.note("a mask", false, false);
    }
    // Exclude all engines from scheduling, submit work, and re-enable the engines.
    let (from, to) = (lab.take(1), lab.take(1));
    let mut channel = lab.channel(21);
    lab.card.write(0x2224, 0);
    lab.bring_up();
    lab.card.vram_write(from, MARKER);
    lab.map(channel.space, va::A, from, Aperture::Vram, 1);
    lab.map(channel.space, va::B, to, Aperture::Vram, 1);
    lab.flush();
    lab.start(&mut channel);
    lab.card.write(0x2630, u32::MAX);
    let ran = lab.go(&mut channel, &copies(&[(va::A, va::B)]), false);
    verdict.note(&format!("held back: {ran:x?}"), ran == Ran::Nothing, matches!(ran, Ran::Fault(_) | Ran::Error));
    lab.card.write(0x2630, 0);
    let ran = lab.wait(&channel, true);
    verdict.check(&format!("let go: {ran:x?}"), ran == Ran::Done);
    lab.stop(&channel);
    Ok(())
}

/// Hole 22: the graphics engine's contexts, and indirect ways to access them.
pub fn graph_contexts(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    for at in lab.outside(PAGE) {
        for register in [0x409b00, 0x409b04, 0x409500, 0x409a10, 0x409a14, 0x400784, 0x41a800] {
            lab.card.write(register, 0x4000_0000 | instance_pointer(at, 0));
        }
        for index in 0..16 {
            lab.card.write(0x400204, (at >> 8) as u32);
            lab.card.write(0x400200, index);
            lab.card.write(0x40448c, (at >> 8) as u32);
            lab.card.write(0x404488, 0x8000_0000 | index << 14 | 0x9039);
        }
        (0..8).for_each(|index| lab.card.write(0x409800 + 4 * index, u32::MAX));
        verdict.note("contexts", false, false);
    }
    Ok(())
}

/// Hole 23: the clock shared by all VMs. A guest may set only its own view of it.
pub fn timer(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    for value in [0, u32::MAX, 1, 0x1234_5678] {
        for register in [reg::PTIMER_LOW, reg::PTIMER_HIGH, 0x9200, 0x9210, 0x9220, 0x9420, 0x9100, 0x9140] {
            lab.card.write(register, value);
        }
        // Changing our own view is permitted. The attempt ends with a check that the clock advances.
        verdict.note("the time", false, false);
    }
    lab.card.write(0x9140, 0);
    Ok(())
}

/// Hole 24: fuses, and the unit counts derived from them.
pub fn fuses(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let counts = [0x22430, 0x22434, reg::FBP_COUNT, 0x22500, reg::FBP_DISABLED, reg::FBP_MIB];
    let before = counts.map(|register| lab.card.read(register));
    write_all(lab, verdict, (0x21000..0x22000).step_by(16).chain((0x22400..0x22600).step_by(4)));
    counts.into_iter().for_each(|register| lab.card.write(register, 31));
    let after = counts.map(|register| lab.card.read(register));
    verdict.check(&format!("from {before:x?} to {after:x?}"), before == after);
    Ok(())
}

/// Hole 25: the PMU's microcode, DMA and queues.
pub fn pmu(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let own = lab.ram()?.gpa;
    for at in [lab.share, own, 0] {
        lab.ram()?.set(MARKER);
        (0..16).for_each(|index| lab.card.write(0x10a600 + 4 * index, 0x0000_0007));
        for (register, value) in [(0x10a110, (at >> 8) as u32), (0x10a114, 0), (0x10a11c, 0), (0x10a118, 0x620)] {
            lab.card.write(register, value);
        }
        lab.card.write(0x10a480, instance_pointer(at, 0));
        lab.card.write(0x10a1c0, 1 << 24);
        (0..64).for_each(|word| lab.card.write(0x10a1c4, word));
        lab.card.write(0x10a100, 2);
        write_all(lab, verdict, (0x10a4a0..0x10a4e0).step_by(4));
        lab.settle();
        verdict.check("our RAM was written", lab.ram()?.word() == MARKER);
    }
    Ok(())
}

/// Hole 26: the display, whose instance memory and surfaces could be anywhere in VRAM.
pub fn display(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    for at in lab.outside(PAGE) {
        for register in [0x610010, 0x619f04, 0x610490, 0x640000, 0x640084] {
            lab.card.write(register, (at >> 8) as u32 | 9);
        }
    }
    write_all(lab, verdict, (0x610000..0x620000).step_by(0x104).chain((0x640000..0x644000).step_by(0x104)));
    write_all(lab, verdict, 0x6013d4..0x6013d8);
    Ok(())
}

/// Hole 27: interrupts that are repeatedly rearmed, or raised by software.
pub fn msi_rearm(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    for _ in 0..500 {
        lab.card.write(0x88704, u32::MAX);
        lab.card.write(0x8807c, u32::MAX);
        // Raise a fault through the fault injection register.
        lab.card.write(0x2a30, 0x100);
        lab.card.write(0x259c, u32::MAX);
        verdict.note("an interrupt", false, false);
    }
    Ok(())
}

/// Hole 28: accesses of all sizes at unaligned offsets.
pub fn crooked_accesses(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let registers = lab.card.region(0)?;
    let window = reg::PRAMIN as usize;
    let own = lab.take(1);
    lab.card.vram_write(own, MARKER);
    for register in
        [reg::PRAMIN_WINDOW, reg::BAR1_INSTANCE, reg::CHANNEL, reg::RUNLIST, reg::TLB_TRIGGER, reg::PTIMER_LOW]
    {
        for width in Width::ALL {
            for offset in 0..8 {
                registers.store(register as usize + offset, width, u64::MAX);
                registers.load(register as usize + offset, width);
                verdict.note("an access", false, false);
            }
        }
    }
    // Access data across the end of the share and of the window, and at the end of the regions.
    lab.card.write(reg::PRAMIN_WINDOW, (lab.share >> 16) as u32 - 1);
    for (offset, width) in [(0xfffc, Width::Qword), (0xffff, Width::Word), (0xf_fffc, Width::Qword)] {
        registers.store(window + offset, width, BRAND.into());
        let word = (registers.load(window + offset, width) >> 32) as u32;
        verdict.note(&format!("window+{offset:#x}: {word:#x}"), false, offset > 0xf000 && word == BRAND);
    }
    for bar in lab.bars.into_iter().chain([registers]) {
        for (back, width) in [(8, Width::Qword), (4, Width::Dword), (2, Width::Word), (1, Width::Byte)] {
            bar.store(bar.bytes() - back, width, u64::MAX);
            bar.load(bar.bytes() - back, width);
        }
    }
    lab.card.write(reg::PRAMIN_WINDOW, 0);
    verdict.check("our memory is intact", lab.card.vram_read(own) == MARKER);
    Ok(())
}

/// Hole 29: configuration space. Restores the kernel's values. Does not move BARs, because the kernel depends on their
/// addresses.
pub fn pci_configuration(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let config = lab.card.config_path();
    let config = OpenOptions::new().read(true).write(true).open(config).context("configuration space")?;
    let mut before = [0; 256];
    let length = config.read_at(&mut before, 0).context("configuration space")?;
    for (at, _) in before[..length].iter().enumerate() {
        // Skip the command register and the BARs, because the kernel depends on them.
        if (0x04..0x06).contains(&at) || (0x10..0x28).contains(&at) || (0x30..0x34).contains(&at) {
            continue;
        }
        for value in [0xff, 0x00] {
            // A rejection by the kernel counts as a rejection by the device.
            let _ = config.write_at(&[value], at as u64);
        }
        let _ = config.write_at(&before[at..=at], at as u64);
        verdict.note("a byte", false, false);
    }
    // Bus mastering must still be enabled: the device must be able to access our RAM.
    let own = lab.ram()?.gpa;
    let page = lab.take(1);
    lab.card.vram_write(page, MARKER);
    let mut channel = lab.channel(29);
    lab.map(channel.space, va::A, page, Aperture::Vram, 1);
    lab.map(channel.space, va::B, own, Aperture::Coherent, 1);
    lab.flush();
    lab.ram()?.set(0);
    let ran = lab.copy(&mut channel, va::A, va::B);
    verdict.check(&format!("with bus mastering: {ran:x?}"), ran == Ran::Done && lab.ram()?.word() == MARKER);
    let mut identity = [0; 4];
    config.read_exact_at(&mut identity, 0).context("configuration space")?;
    verdict.check("the identity is unchanged", identity == before[..4]);
    Ok(())
}
