//! Holes 1, 2, 10, 14 and 17: the CPU's windows to memory.

use anyhow::Result;

use super::super::layout::{Aperture, PAGE, instance_pointer, page_entry, reg};
use super::lab::{BRAND, Lab, MARKER, Space, UNUSED, Verdict};
use gdev::mapping::Width;

/// An aperture offset outside USERD.
const OFFSET: u64 = 0x40_0000;

/// Reads a dword through PRAMIN before and after a write, and records whether any data was visible.
fn look(lab: &Lab<'_>, verdict: &mut Verdict, what: &str, register: u32) {
    let before = lab.card.read(register);
    lab.card.write(register, BRAND);
    let after = lab.card.read(register);
    let gained = lab.tells(before) || lab.tells(after);
    verdict.note(&format!("{what}: {before:#x}, then {after:#x}"), before == u32::MAX && after == u32::MAX, gained);
}

/// Hole 1: the PRAMIN window beyond VRAM.
pub fn pramin_beyond_vram(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let own = lab.take(1);
    lab.card.vram_write(own, MARKER);
    verdict.check("the window on our own memory", lab.card.vram_read(own) == MARKER);
    for address in lab.outside(1 << 16) {
        lab.card.write(reg::PRAMIN_WINDOW, (address >> 16) as u32);
        for offset in [0, 0x3f84, 0xf_fffc] {
            look(lab, verdict, &format!("{address:#x}+{offset:#x}"), reg::PRAMIN + offset);
        }
    }
    // Read beyond the end of the share without moving the window, and beyond 40 bits, where addresses would wrap to 0.
    for base in [lab.share - 0x1_0000, (1 << 40) - 0x1_0000] {
        lab.card.write(reg::PRAMIN_WINDOW, (base >> 16) as u32);
        for offset in [0x1_0000, 0x8_0000, 0xf_fffc] {
            look(lab, verdict, &format!("{base:#x}+{offset:#x}"), reg::PRAMIN + offset);
        }
    }
    Ok(())
}

/// Hole 2: the PRAMIN window to host memory.
pub fn pramin_target_bits(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let own = lab.ram()?.gpa;
    for address in [own, 0, 1 << 20, 0xfee0_0000, 1 << 32, 1 << 39] {
        for target in 1..4 {
            lab.ram()?.set(MARKER);
            lab.card.write(reg::PRAMIN_WINDOW, (address >> 16) as u32 & 0x00ff_ffff | target << 24);
            let what = format!("{address:#x}, target {target}");
            look(lab, verdict, &what, reg::PRAMIN + (address & 0xffff) as u32);
            verdict.check(&format!("{what}: our RAM was written"), lab.ram()?.word() == MARKER);
        }
    }
    Ok(())
}

/// Assigns separate address spaces to BAR1 and BAR3.
fn apertures(lab: &mut Lab<'_>) -> [(usize, Space, u64); 2] {
    [(0, reg::BAR1_INSTANCE), (1, reg::BAR3_INSTANCE)].map(|(bar, register)| {
        let (space, instance) = (lab.space(), lab.take(1));
        lab.join(instance, space);
        lab.card.write(register, instance_pointer(instance, 0));
        lab.flush();
        (bar, space, instance)
    })
}

fn peek(lab: &Lab<'_>, bar: usize, offset: u64) -> u32 {
    lab.bars[bar].load(offset as usize, Width::Dword) as u32
}

fn poke(lab: &Lab<'_>, bar: usize, offset: u64, value: u32) {
    lab.bars[bar].store(offset as usize, Width::Dword, value.into());
}

/// Reads an offset at which no data may be visible, before and after a write.
fn look_through(lab: &Lab<'_>, verdict: &mut Verdict, what: &str, bar: usize, offset: u64) {
    let before = peek(lab, bar, offset);
    poke(lab, bar, offset, BRAND);
    let after = peek(lab, bar, offset);
    let what = format!("BAR{} {what}: {before:#x}, then {after:#x}", 2 * bar + 1);
    verdict.note(&what, before == u32::MAX && after == u32::MAX, lab.tells(before) || lab.tells(after));
}

/// Hole 10: entries for RAM. They must access RAM instead of VRAM, and only our own RAM.
pub fn aperture_ram_entry(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let own = lab.ram()?.gpa;
    for (bar, space, _) in apertures(lab) {
        lab.ram()?.set(MARKER);
        lab.map(space, OFFSET, own, Aperture::Coherent, 1);
        lab.flush();
        // If our share contains the same VRAM address, the VRAM there must not change.
        let same = (own < lab.share).then(|| lab.card.vram_read(own));
        verdict.check("our RAM is seen", peek(lab, bar, OFFSET) == MARKER);
        poke(lab, bar, OFFSET, BRAND);
        lab.settle();
        verdict.check("our RAM is written", lab.ram()?.word() == BRAND);
        verdict.check("VRAM is not", same == (own < lab.share).then(|| lab.card.vram_read(own)));
        for address in [1 << 29, 0xb000_0000, 0xfee0_0000, 1 << 33, 1 << 39, (1 << 40) - PAGE] {
            for aperture in [Aperture::Coherent, Aperture::Noncoherent, Aperture::Peer] {
                lab.raw(space, OFFSET, page_entry(address, aperture));
                lab.flush();
                look_through(lab, verdict, &format!("{address:#x} {aperture:?}"), bar, OFFSET);
            }
        }
        for address in lab.outside(PAGE) {
            lab.raw(space, OFFSET, page_entry(address, Aperture::Vram));
            lab.flush();
            look_through(lab, verdict, &format!("VRAM at {address:#x}"), bar, OFFSET);
        }
    }
    Ok(())
}

/// Hole 14: offsets and indices beyond the limit, the table, or the memory.
pub fn aperture_indexes(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let share = lab.share;
    for (bar, space, instance) in apertures(lab) {
        let own = lab.take(1);
        lab.card.vram_write(own, MARKER);
        lab.map(space, OFFSET, own, Aperture::Vram, 2);
        lab.flush();
        verdict.check("our own page is seen", peek(lab, bar, OFFSET) == MARKER);
        let end = lab.bars[bar].bytes() as u64;
        look_through(lab, verdict, "the last page of the region", bar, end - 4);
        for limit in [OFFSET - 1, 0, 1 << 63 | (OFFSET - 1)] {
            lab.set(instance + 0x208, [limit as u32, (limit >> 32) as u32]);
            lab.flush();
            look_through(lab, verdict, &format!("limit {limit:#x}"), bar, OFFSET);
        }
        lab.join(instance, space);
        lab.flush();
        // The size code in the directory entry limits the table to 16 MiB. Memory after the table must not be used as
        // entries.
        if end > 0x100_0000 {
            lab.set(space.table + 0x100_0000 / PAGE * 8, page_entry(own, Aperture::Vram));
            look_through(lab, verdict, "beyond a shortened table", bar, 0x100_0000);
        }
        // Test tables that extend beyond the share. The accessed page's entry is outside the share.
        for (table, offset) in [(share - PAGE, 512 * PAGE), (share, 0), ((1 << 40) - PAGE, 512 * PAGE)] {
            lab.card.vram_write(space.directory + 4, (table >> 8) as u32 | 1);
            lab.flush();
            look_through(lab, verdict, &format!("table at {table:#x}"), bar, offset);
        }
    }
    Ok(())
}

/// Hole 17: data of other tenants in VRAM that we have never used, and in a new channel's USERD.
pub fn residue(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let mut told = None;
    for _ in 0..4096 {
        let at = (UNUSED + lab.random.below(lab.share - UNUSED)) & !3;
        let word = lab.card.vram_read(at);
        if lab.tells(word) {
            told = Some((at, word));
        }
    }
    verdict.note(&format!("VRAM holds {told:x?}"), false, told.is_some());
    let mut channel = lab.channel(77);
    lab.start(&mut channel);
    for offset in (0..PAGE).step_by(4) {
        let word = lab.card.vram_read(channel.userd + offset);
        if word != 0 {
            verdict.note(&format!("USERD+{offset:#x} holds {word:#x}"), false, true);
        }
    }
    lab.stop(&channel);
    verdict.note("USERD", false, false);
    Ok(())
}
