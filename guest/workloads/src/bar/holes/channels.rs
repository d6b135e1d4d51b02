//! Holes 3, 4, 5, 12, 13 and 19: instance blocks, channel numbers, and runlists.

use anyhow::Result;

use super::super::layout::{Aperture, CHANNELS, PAGE, instance_pointer, reg};
use super::lab::{BRAND, Channel, Lab, MARKER, Ran, Verdict, copies, va};
use gdev::mapping::Width;
use gdev::nouveau::push::Push;

/// Creates a channel that maps a page with [`MARKER`] at `va::A` and an empty page at `va::B`. Returns the channel and
/// the address of the second page.
fn worker(lab: &mut Lab<'_>, id: u32) -> (Channel, u64) {
    let (from, to) = (lab.take(1), lab.take(1));
    let channel = lab.channel(id);
    lab.card.vram_write(from, MARKER);
    lab.map(channel.space, va::A, from, Aperture::Vram, 1);
    lab.map(channel.space, va::B, to, Aperture::Vram, 1);
    lab.flush();
    (channel, to)
}

/// Hole 3: an instance block is rewritten after it was activated.
pub fn instance_rewritten(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let (mut channel, to) = worker(lab, 1);
    // This is another of our own address spaces. It maps `va::C`, which the channel's address space does not map.
    let other = lab.space();
    let page = lab.take(1);
    lab.card.vram_write(page, BRAND);
    for at in (0..4).map(|page| va::PUSH + page * PAGE).chain([va::RING, va::FENCE, va::B]) {
        lab.map(other, at, page, Aperture::Vram, 1);
    }
    lab.map(other, va::C, page, Aperture::Vram, 1);
    let directories: Vec<(u64, u32)> = lab
        .outside(PAGE)
        .into_iter()
        .map(|at| (at, 0))
        .chain([(other.directory, 0), (other.directory, 2), (1 << 39, 2), (1 << 39, 3), (0, 1)])
        .collect();
    for (at, target) in directories {
        let what = format!("directory {at:#x}, target {target}");
        lab.start(&mut channel);
        verdict
            .check(&format!("{what}: activated"), lab.go(&mut channel, &copies(&[(va::A, va::B)]), true) == Ran::Done);
        lab.set(channel.instance + 0x200, [at as u32 | target, (at >> 32) as u32]);
        lab.card.write(reg::TLB_DIRECTORY, ((at >> 12) << 4) as u32 | target);
        lab.card.write(reg::TLB_TRIGGER, 0x8000_0001);
        lab.card.write(reg::PREEMPT, channel.id);
        lab.card.write(reg::CHANNEL_STATE + 8 * channel.id, 0);
        lab.card.write(reg::CHANNEL_STATE + 8 * channel.id, 0x001f_0001);
        lab.list(&channel);
        lab.flush();
        lab.card.vram_write(to, 0);
        let ran = lab.go(&mut channel, &copies(&[(va::A, va::B)]), true);
        let own = ran == Ran::Done && lab.card.vram_read(to) == MARKER;
        verdict.note(&format!("{what}: {ran:x?}, not in its own address space"), false, !own);
        let ran = lab.go(&mut channel, &copies(&[(va::C, va::B)]), true);
        verdict.must_fault(&format!("{what}: memory of the other address space"), ran, va::C);
        lab.stop(&channel);
        lab.fill_instance(&channel);
    }
    Ok(())
}

/// Hole 4: instance addresses are written directly to FECS and the copy engines.
pub fn unknown_instances(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let (hidden, to) = worker(lab, 2);
    let mut addresses = lab.outside(PAGE);
    addresses.push(hidden.instance);
    for at in addresses {
        for target in 0..4 {
            let pointer = 0x4000_0000 | instance_pointer(at, target);
            for command in [1, 2, 3] {
                lab.card.write(reg::FECS_DATA, pointer);
                lab.card.write(reg::FECS_COMMAND, command);
            }
            for register in reg::FECS_CHANNELS.into_iter().chain([0x104050, 0x104054, 0x105050, 0x105054]) {
                lab.card.write(register, pointer);
            }
            for register in [0x409000, 0x104000, 0x105000, 0x104058, 0x105058] {
                lab.card.write(register, u32::MAX);
            }
            let gained = lab.card.vram_read(to) != 0;
            verdict.note(&format!("{at:#x}, target {target}: a channel ran"), false, gained);
        }
    }
    Ok(())
}

/// Hole 5: target bits in all table entries and address registers.
pub fn pointer_target_bits(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let own = lab.ram()?.gpa;
    let mut channel = lab.channel(3);
    for (at, target) in
        [(own, 2), (own, 3), (lab.share, 0), (lab.share, 1), (1 << 29, 2), (1 << 39, 3), (0xfee0_0000, 2)]
    {
        let what = format!("{at:#x}, target {target}");
        lab.ram()?.set(MARKER);
        // Test the entry in the channel table.
        lab.card.write(reg::CHANNEL + 8 * channel.id, 0x4000_0000 | instance_pointer(at, target));
        lab.card.write(reg::CHANNEL_STATE + 8 * channel.id, 0x001f_0001);
        lab.list(&channel);
        let ran = lab.go(&mut channel, &Push::default(), false);
        verdict.must_not_run(&format!("instance {what}"), ran);
        lab.stop(&channel);
        // Test the runlist.
        lab.card.write(reg::RUNLIST, target << 28 | (at >> 12) as u32);
        lab.card.write(reg::RUNLIST_SUBMIT, 0x01f0_0004);
        lab.card.write(reg::RUNLIST_SUBMIT, 0x01f0_0000);
        // Test USERD in an otherwise valid block. The card's writes to USERD must not reach our page.
        lab.card.vram_write(channel.instance + 8, at as u32 & !0xfff | target);
        lab.card.vram_write(channel.instance + 12, (at >> 32) as u32);
        lab.start(&mut channel);
        lab.go(&mut channel, &Push::default(), false);
        lab.stop(&channel);
        lab.fill_instance(&channel);
        // Test the registers that contain the target addresses of faults, flushes and tags.
        for register in reg::GPC_MMU_SINKS.into_iter().chain([reg::SYSMEM_FLUSH, reg::TAG_BASE, 0x100cc8, 0x100ccc]) {
            lab.card.write(register, target << 28 | (at >> 8) as u32 & 0x0fff_ffff);
        }
        lab.card.write(reg::BAR_FLUSH, 1);
        lab.card.write(0x070004, 1);
        lab.card.write(reg::PEEPHOLE_INSTANCE, instance_pointer(at, target));
        lab.card.write(reg::PEEPHOLE[2], BRAND);
        lab.settle();
        verdict.note(&format!("sinks and USERD {what}: our RAM was written"), false, lab.ram()?.word() != MARKER);
        // Test BAR3's instance block.
        lab.card.write(reg::BAR3_INSTANCE, instance_pointer(at, target));
        lab.flush();
        let word = lab.bars[1].load(0x1000, Width::Dword) as u32;
        verdict.note(&format!("BAR3 {what}: {word:#x}"), word == u32::MAX, lab.tells(word));
        lab.card.write(reg::BAR3_INSTANCE, 0);
    }
    Ok(())
}

/// Hole 12: runlists with other VMs' channels, with nonexistent channels, without an end, or outside memory.
pub fn runlist_entries(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let (mut channel, _) = worker(lab, 4);
    let list = lab.take(1);
    lab.start(&mut channel);
    for number in [|index| index, |index| index + CHANNELS, |_| u32::MAX, |_| 4] as [fn(u32) -> u32; 4] {
        (0..CHANNELS).for_each(|index| lab.set(list + u64::from(index) * 8, [number(index), u32::MAX]));
        for length in [0, 1, CHANNELS, CHANNELS + 1, 0xfff] {
            lab.card.write(reg::RUNLIST, (list >> 12) as u32);
            lab.card.write(reg::RUNLIST_SUBMIT, 0x01f0_0000 | length);
            verdict.note("a list", false, false);
        }
    }
    for (base, length) in
        [(lab.share >> 12, 1), (0x0fff_ffff, 128), (0x1000_0000, 1), (0x2008_0000, 1), (0x3fff_ffff, 128)]
    {
        lab.card.write(reg::RUNLIST, base as u32);
        lab.card.write(reg::RUNLIST_SUBMIT, 0x01f0_0000 | length);
        verdict.note("a list elsewhere", false, false);
    }
    lab.list(&channel);
    let ran = lab.go(&mut channel, &copies(&[(va::A, va::B)]), true);
    verdict.check(&format!("our own channel runs again: {ran:x?}"), ran == Ran::Done);
    lab.stop(&channel);
    Ok(())
}

/// Hole 13: channel numbers of 128 and above.
pub fn channel_numbers(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let (channel, to) = worker(lab, 5);
    let pointer = 0x4000_0000 | instance_pointer(channel.instance, 0);
    for id in [128, 129, 200, 255, 256, 511] {
        let register = reg::CHANNEL + 8 * id;
        lab.card.write(register, pointer);
        lab.card.write(register + 4, 0x001f_0001);
        let kept = lab.card.read(register);
        verdict.note(&format!("channel {id}: {kept:#x}"), kept != pointer, kept == pointer);
        lab.card.write(reg::PREEMPT, id);
        lab.card.write(reg::PREEMPT, id | 0x10_0000);
    }
    lab.card.write(reg::PREEMPT, u32::MAX);
    // Test nonexistent PBDMAs, engines and fault units.
    for register in [0x046108, 0x04e120, 0x002658, 0x0025c0, 0x002a48, 0x004000] {
        let before = lab.card.read(register);
        lab.card.write(register, BRAND);
        let after = lab.card.read(register);
        verdict.note(&format!("{register:#x}: {before:#x}, then {after:#x}"), true, after == BRAND);
    }
    verdict.check("nothing ran", lab.card.vram_read(to) == 0);
    Ok(())
}

/// Hole 19: channels without a page directory.
pub fn no_directory(lab: &mut Lab<'_>, verdict: &mut Verdict) -> Result<()> {
    let own = lab.ram()?.gpa;
    let zeros = lab.take(16);
    let mut channel = lab.channel(6);
    for (what, directory) in [
        ("none", [0, 0]),
        ("one of zeros", [zeros as u32, 0]),
        ("one in our RAM", [own as u32 | 2, (own >> 32) as u32]),
        ("one in RAM that is not ours", [2, 0x80]),
        ("one in no memory", [1, 0]),
        ("one beyond the share", [lab.share as u32, (lab.share >> 32) as u32]),
        ("one across the end of the share", [(lab.share - PAGE) as u32, ((lab.share - PAGE) >> 32) as u32]),
        ("all ones", [u32::MAX; 2]),
    ] {
        lab.set(channel.instance + 0x200, directory);
        let ran = lab.try_run(&mut channel, &Push::default());
        verdict.must_not_run(what, ran);
    }
    Ok(())
}
