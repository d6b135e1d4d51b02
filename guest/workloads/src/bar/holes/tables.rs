//! Holes 7, 8, 9, 11, 15, 16, 18 and 30: page table targets, stale translations, and context images.

use anyhow::{Result, ensure};

use super::super::layout::{Aperture, LARGE_PAGE, PAGE, page_entry};
use super::lab::{BRAND, Channel, IMAGE_PAGES, Lab, MARKER, Ran, Verdict, copies, va};
use gdev::nouveau::push::{Engine, Push, Rect};

/// Creates a channel with one of our pages at `va::A`. Returns the channel and the page's address.
fn holder(lab: &mut Lab<'_>, id: u32) -> (Channel, u64) {
    let page = lab.take(1);
    let channel = lab.channel(id);
    lab.card.vram_write(page, MARKER);
    lab.map(channel.space, va::A, page, Aperture::Vram, 1);
    (channel, page)
}

/// Reads and writes `va` with a copy engine. Both accesses must fault, and our own page must not change.
fn must_fault(lab: &Lab<'_>, verdict: &mut Verdict, what: &str, channel: &mut Channel, page: u64, va: u64) {
    lab.flush();
    lab.card.vram_write(page, MARKER);
    let ran = lab.copy(channel, va, va::A);
    verdict.must_fault(&format!("reading {what}"), ran, va);
    verdict.check(&format!("reading {what}: data arrived"), lab.card.vram_read(page) == MARKER);
    let ran = lab.copy(channel, va::A, va);
    verdict.must_fault(&format!("writing {what}"), ran, va);
}

/// Hole 7: memory of other cards, memory kinds, and compression tags.
pub fn peer_kind_tag(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let (mut channel, page) = holder(lab, 7);
    for address in [0, lab.share, 1 << 32] {
        lab.raw(channel.space, va::B, page_entry(address, Aperture::Peer));
        must_fault(lab, verdict, &format!("a peer's {address:#x}"), &mut channel, page, va::B);
    }
    let (own, back) = (lab.take(1), lab.take(1));
    lab.map(channel.space, va::C, back, Aperture::Vram, 1);
    for (kind, tag) in [(0xffu32, 0), (0xfe, 0x1_ffff), (0xdb, 1), (0x00, 0x1_ffff), (0x06, 0), (0x17, 0x155)] {
        let [low, high] = page_entry(own, Aperture::Vram);
        // Also set the flag for encrypted memory.
        lab.raw(channel.space, va::B, [low | 8, high | kind << 4 | tag << 12]);
        lab.flush();
        let what = format!("kind {kind:#x}, tag {tag:#x}");
        lab.card.vram_write(back, 0);
        let ran = lab.run(&mut channel, &copies(&[(va::A, va::B), (va::B, va::C)]));
        let good =
            matches!(ran, Ran::Fault(at) if at == va::B) || ran == Ran::Done && lab.card.vram_read(back) == MARKER;
        verdict.note(&format!("{what}: {ran:x?}"), matches!(ran, Ran::Fault(_)), !good);
    }
    Ok(())
}

/// Hole 8: large pages of partly missing RAM.
pub fn large_page_of_ram(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let (mut channel, page) = holder(lab, 8);
    let entry = lab.large(channel.space);
    // First check that the table works, using a large page of our own VRAM.
    let base = lab.share - LARGE_PAGE;
    lab.card.vram_write(base + LARGE_PAGE - PAGE, MARKER);
    lab.set(entry, page_entry(base, Aperture::Vram));
    lab.flush();
    lab.card.vram_write(page, 0);
    let ran = lab.copy(&mut channel, va::LARGE + LARGE_PAGE - PAGE, va::A);
    ensure!(ran == Ran::Done && lab.card.vram_read(page) == MARKER, "a large page of our own: {ran:x?}");
    // Test addresses beyond 512 MiB (the RAM size of all test guests), PCI memory, the APIC, and the end of VRAM.
    for (address, aperture) in [
        (0x2000_0000, Aperture::Coherent),
        (0xb000_0000, Aperture::Noncoherent),
        (0xfee0_0000, Aperture::Coherent),
        (1 << 39, Aperture::Coherent),
        (lab.share - PAGE, Aperture::Vram),
        (lab.share, Aperture::Vram),
    ] {
        lab.set(entry, page_entry(address, aperture));
        must_fault(lab, verdict, &format!("{address:#x} {aperture:?}"), &mut channel, page, va::LARGE + 0x1_f000);
    }
    Ok(())
}

/// Hole 9: pages that are unmapped, with a TLB flush, before and during work.
pub fn stale_dma(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let own = lab.ram()?.gpa;
    let (mut channel, page) = holder(lab, 9);
    for _ in 0..4 {
        lab.ram()?.set(0);
        lab.map(channel.space, va::B, own, Aperture::Coherent, 1);
        lab.flush();
        let ran = lab.copy(&mut channel, va::A, va::B);
        ensure!(ran == Ran::Done && lab.ram()?.word() == MARKER, "our RAM is written while it is mapped: {ran:x?}");
        lab.raw(channel.space, va::B, [0, 0]);
        lab.flush();
        lab.ram()?.set(BRAND);
        must_fault(lab, verdict, "unmapped RAM", &mut channel, page, va::B);
        verdict.check("RAM was written after it was unmapped", lab.ram()?.word() == BRAND);
    }
    // Unmap the page while it is in use.
    lab.map(channel.space, va::B, own, Aperture::Coherent, 1);
    lab.flush();
    lab.start(&mut channel);
    for _ in 0..24 {
        lab.queue(&mut channel, &copies(&[(va::A, va::B); 3]));
    }
    lab.ring(&channel);
    lab.raw(channel.space, va::B, [0, 0]);
    lab.flush();
    lab.ram()?.set(BRAND);
    let ran = lab.wait(&channel, true);
    lab.stop(&channel);
    verdict.note(&format!("unmapped under work: {ran:x?}"), matches!(ran, Ran::Fault(_)), ran == Ran::Nothing);
    verdict.check("RAM was written after it was unmapped under work", lab.ram()?.word() == BRAND);
    Ok(())
}

/// Hole 11: entries for memory that the guest does not have.
pub fn entry_without_ram(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let (mut channel, page) = holder(lab, 11);
    for address in [0x2000_0000, 0xb000_0000, 0xfec0_0000, 0xfee0_0000, 1 << 33, 1 << 39, (1 << 40) - PAGE] {
        for aperture in [Aperture::Coherent, Aperture::Noncoherent] {
            lab.raw(channel.space, va::B, page_entry(address, aperture));
            must_fault(lab, verdict, &format!("{address:#x} {aperture:?}"), &mut channel, page, va::B);
        }
    }
    for address in lab.outside(PAGE) {
        lab.raw(channel.space, va::B, page_entry(address, Aperture::Vram));
        must_fault(lab, verdict, &format!("VRAM at {address:#x}"), &mut channel, page, va::B);
    }
    Ok(())
}

/// Hole 15: tables used as other types of tables, and tables that the card itself rewrites.
pub fn confusion(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let share = lab.share;
    let foreign = page_entry(share, Aperture::Vram);
    let (mut channel, page) = holder(lab, 15);
    // Use the small-page table as a large-page table. An unused small-page entry then becomes a large-page entry.
    let index = 0x60;
    lab.raw(channel.space, index * PAGE, foreign);
    lab.card.vram_write(channel.space.directory, (channel.space.table >> 8) as u32 | 1 | 3 << 2);
    must_fault(lab, verdict, "a small table as a large one", &mut channel, page, index * LARGE_PAGE);
    lab.card.vram_write(channel.space.directory, 0);
    // Use table entries as a directory.
    let fake = lab.take(16);
    (0..512).for_each(|index| lab.set(fake + index * 8, foreign));
    lab.card.vram_write(channel.instance + 0x200, fake as u32);
    let ran = lab.try_run(&mut channel, &Push::default());
    verdict.must_not_run("entries as directory", ran);
    // Use a directory as its own table.
    lab.card.vram_write(channel.instance + 0x200, channel.space.directory as u32);
    lab.set(channel.space.directory, [0, (channel.space.directory >> 8) as u32 | 1]);
    let ran = lab.try_run(&mut channel, &Push::default());
    verdict.must_not_run("a directory as its own table", ran);

    // Write entries for other VMs' memory into our table with a copy engine. Use them immediately, after a flush, and
    // after a rebind.
    let (mut channel, page) = holder(lab, 16);
    let forged = lab.take(1);
    (0..512).for_each(|index| lab.set(forged + index * 8, page_entry(share + index * PAGE, Aperture::Vram)));
    let piece = channel.space.table + 3 * PAGE;
    let first = 3 * 512 * PAGE;
    lab.map(channel.space, va::B, piece, Aperture::Vram, 1);
    lab.map(channel.space, va::C, forged, Aperture::Vram, 1);
    lab.flush();
    let ran = lab.run(&mut channel, &copies(&[(va::C, va::B), (first, va::A)]));
    verdict.must_fault("a forged entry, used immediately", ran, first);
    let entry = lab.card.vram_read(piece);
    verdict.check("the copy engine has written our table", entry == page_entry(share, Aperture::Vram)[0]);
    must_fault(lab, verdict, "a forged entry, flushed", &mut channel, page, first);
    Ok(())
}

/// Hole 16: directories and tables that are repurposed while they are linked.
pub fn reused(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let foreign = page_entry(lab.share, Aperture::Vram);
    for (number, fill) in [[0, 0], foreign, [0x5eed_5eed, 0x5eed_5eed], [u32::MAX; 2]].into_iter().enumerate() {
        let (mut channel, _) = holder(lab, 17 + number as u32);
        let own = lab.take(1);
        lab.map(channel.space, va::B, own, Aperture::Vram, 1);
        lab.flush();
        lab.start(&mut channel);
        let ran = lab.go(&mut channel, &copies(&[(va::A, va::B)]), true);
        verdict.check(&format!("it works before: {ran:x?}"), ran == Ran::Done);
        // Overwrite the table's entries below 4 MiB, except for those of the context image, which is a separate hole.
        let image = va::IMAGE / PAGE..va::IMAGE / PAGE + IMAGE_PAGES;
        for index in (0..1024).filter(|index| !image.contains(index)) {
            lab.set(channel.space.table + index * 8, fill);
        }
        lab.flush();
        let ran = lab.go(&mut channel, &copies(&[(va::A, va::B)]), false);
        verdict.must_not_run(&format!("a table of {fill:x?}"), ran);
        lab.stop(&channel);
        lab.set(channel.space.directory, fill);
        lab.flush();
        let ran = lab.try_run(&mut channel, &Push::default());
        verdict.must_not_run(&format!("a directory of {fill:x?}"), ran);
    }
    Ok(())
}

/// Presumed location of the images that the card uses: base of the mediator's range in an address space, number of
/// bytes per channel, and page numbers within a channel's range.
const IMAGES: (u64, u64, [u64; 3]) = (0xff_f800_0000, 128 << 10, [4, 5, 6]);

/// Hole 30: context images. When PGRAPH's firmware loads a context, it writes the registers listed in the image. Such a
/// write could disable engines or the scheduler, or remove channels. The card uses the mediator's copy of the image,
/// which work must not be able to access.
pub fn context_images(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let registers = [[0x200, 0], [0x2204, 0], [0x2200, 0], [0x40_0500, 0], [0x41_8810, u32::MAX]];
    let channels = (0..16).map(|channel| [0x3000 + 8 * channel, 0]);
    let list: Vec<[u32; 2]> = registers.into_iter().chain(channels).collect();
    let head = [list.len() as u32, ((va::IMAGE + PAGE) >> 8) as u32];
    for round in 0..4 {
        let (mut channel, _) = holder(lab, 30 + round);
        let [.., (_, image, _)] = channel.memory();
        for (at, pair) in (image + PAGE..).step_by(8).zip(&list) {
            lab.set(at, *pair);
        }
        lab.set(image, head);
        let mut push = Push::default();
        push.bind(Engine::M2mf.object());
        push.nop(Engine::M2mf.object().subchannel);
        let ran = lab.run(&mut channel, &push);
        verdict.check(&format!("work continues: {ran:x?}"), ran == Ran::Done);
        verdict.note("the card has accepted the list", false, lab.card.vram_read(image) != head[0]);
        lab.release();
    }
    let (mut channel, page) = holder(lab, 30);
    let (first, span, pages) = IMAGES;
    for index in 0..8 {
        for image in pages {
            let at = first + index * span + image * PAGE;
            must_fault(lab, verdict, &format!("an image at {at:#x}"), &mut channel, page, at);
        }
    }
    Ok(())
}

/// Hole 18: values close to the limits of their ranges.
pub fn overflow(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let (mut channel, page) = holder(lab, 18);
    for address in [(1u64 << 40) - PAGE, (1 << 32) - PAGE, 1 << 32] {
        for aperture in [Aperture::Vram, Aperture::Coherent, Aperture::Noncoherent] {
            // RAM at 4 GiB may belong to this guest.
            if address == 1 << 32 && aperture != Aperture::Vram {
                continue;
            }
            lab.raw(channel.space, va::B, page_entry(address, aperture));
            must_fault(lab, verdict, &format!("{address:#x} {aperture:?}"), &mut channel, page, va::B);
        }
    }
    // Test ring entries at the end of the address space, entries that are too long, and entries of all ones.
    for entry in [
        [0xffff_fffc, 0x0000_04ff],
        [0xffff_fffc, 0x7fff_fcff],
        [va::PUSH as u32, 0x7fff_fc00],
        [0xffff_fffc, u32::MAX],
    ] {
        lab.start(&mut channel);
        lab.entry(&mut channel, entry);
        lab.ring(&channel);
        channel.sequence_skipped();
        let ran = lab.wait(&channel, false);
        verdict.must_not_run(&format!("ring entry {entry:x?}"), ran);
        lab.stop(&channel);
    }
    // Test rings that are larger than their memory, and a ring that extends beyond the end of the address space.
    for (low, high) in [(va::RING as u32, 31 << 16), (va::RING as u32, 0xffff << 16), (0xffff_fff8, 0x0014_00ff)] {
        lab.set(channel.instance + 0x48, [low, high]);
        let ran = lab.try_run(&mut channel, &Push::default());
        // A ring larger than its memory uses only our own memory, so it may run.
        verdict.note(
            &format!("ring {low:#x} {high:#x}: {ran:x?}"),
            ran != Ran::Done,
            high & 0xff != 0 && ran == Ran::Done,
        );
    }
    lab.fill_instance(&channel);
    // Test copies beyond the mapped pages, and beyond the address space.
    let rect = |target: u64, line_bytes: u32, lines: u32| {
        let mut push = Push::default();
        push.bind(Engine::Ce0.object());
        push.copy(
            Engine::Ce0,
            &Rect { source: va::A, target, source_pitch: 0, target_pitch: 0x1000, line_bytes, lines },
        );
        push
    };
    for (target, line, lines) in
        [(va::A, 0x1000, 8000), ((1 << 40) - PAGE, 0x2000, 1), (va::A, 0xffff, 0x1fff), ((1 << 40) - 4, 0x1000, 2)]
    {
        let ran = lab.run(&mut channel, &rect(target, line, lines));
        verdict.must_not_run(&format!("a copy of {lines} times {line:#x} to {target:#x}"), ran);
        lab.card.vram_write(page, MARKER);
    }
    Ok(())
}
