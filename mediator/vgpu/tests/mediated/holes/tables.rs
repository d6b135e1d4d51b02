//! Holes 7, 8, 11, 15, 16 and 18: page table entries, misplaced tables, and values close to their limits.

use super::{
    A, B, C, CE0, EVIL, ID, LARGE_PAGE, M2MF, MIB, PAGE, RAM, SHARE_BYTES, Scene, Size, ce_copy, entry, large_table,
    m2mf_copy, object, pattern,
};
use super::{At, stops, wait_stopped};
use nvspec::fifo::GpEntry;
use nvspec::instance::ramfc;
use nvspec::mmu::Pte;
use nvspec::regs::pfifo;
use rig::driver::RING_ENTRIES;

#[test]
fn hole_07_peers_kinds_and_tags_are_not_passed_on() {
    let mut scene = Scene::new();
    let page = scene.on_card(super::IDLE, super::SECRET_AT);
    for (what, at) in [("another card's first page", 0), ("the neighbour's page as a peer's", page)] {
        for write in [false, true] {
            scene.denied(what, |s| s.faults_at(what, entry(at, 1), Size::Small, 0, write));
            scene.denied(what, |s| s.faults_at(what, entry(at & !(LARGE_PAGE - 1), 1), Size::Large, 0, write));
        }
    }
    // Use entries of all kinds, with compression tags and encryption, for the guest's own VRAM and RAM pages.
    // `check_shadows` checks the entries that reach the card.
    let mut channel = scene.evil.channel(ID);
    let own = scene.evil.vram(256);
    for aperture in [0, 2, 3] {
        scene.denied("kinds and tags", |s| {
            for kind in 0..=u8::MAX {
                let at = u64::from(kind) * PAGE;
                let base = if aperture == 0 { own } else { 0 };
                let raw = Pte::from(entry(base + at % RAM, aperture)).with_kind(kind).with_comp_tag(0x1_ffff);
                let raw = u64::from(raw.with_encrypted(true)) | 0xe << 60 | 1 << 35;
                s.evil.pte(channel.space, C + at, raw as u32, (raw >> 32) as u32);
            }
            s.evil.flush();
            s.evil.submit(&mut channel, &[]);
            s.evil.wait(&channel);
        });
    }
    scene.finish();
}

#[test]
fn hole_08_large_pages_are_checked_in_all_their_parts() {
    let mut scene = Scene::new();
    // A large page of the guest's own VRAM must work up to its last 4 KiB.
    let channel = scene.evil.channel(ID);
    let table = large_table(&mut scene.evil, &channel);
    let whole = 8 * MIB;
    scene.evil.guest.poke(table + C / LARGE_PAGE * 8, entry(whole, 0) as u32);
    scene.evil.guest.poke(table + C / LARGE_PAGE * 8 + 4, 0);
    let mut channel = channel;
    scene.evil.guest.vram_write(whole + 31 * PAGE, &pattern(8, 0));
    let to = scene.evil.buffer(&channel, B, 1, 9);
    scene.evil.flush();
    scene.evil.submit(&mut channel, &[object(M2MF), m2mf_copy(C + 31 * PAGE, B, PAGE as u32)].concat());
    scene.evil.wait(&channel);
    assert!(scene.evil.vram_holds(to, 1, 8), "the last part of a large page of VRAM");
    scene.fresh();

    for (what, regions) in [
        ("only the first part exists", vec![(16 * MIB, PAGE)]),
        ("all parts except the last exist", vec![(16 * MIB, LARGE_PAGE - PAGE)]),
        ("all parts except the first exist", vec![(16 * MIB + PAGE, LARGE_PAGE - PAGE)]),
        ("a hole in the middle", vec![(16 * MIB, 0x1_0000), (16 * MIB + 0x1_1000, 0xf000)]),
        ("no part exists", vec![]),
    ] {
        regions.iter().for_each(|&(gpa, size)| assert!(scene.evil.guest.map_ram(gpa, size, true)));
        let lent = |at: u64| regions.iter().any(|&(gpa, size)| (gpa..gpa + size).contains(&(16 * MIB + at)));
        for offset in (0..LARGE_PAGE).step_by(PAGE as usize).filter(|&offset| !lent(offset)) {
            for aperture in [2, 3] {
                let entry = entry(16 * MIB, aperture);
                scene.denied(what, |s| s.faults_at(what, entry, Size::Large, offset, offset % 2 == 0));
            }
            // If the whole page is missing, one aperture is enough, because both behave alike.
            if regions.is_empty() {
                break;
            }
        }
        scene.fresh();
    }
    // Try addresses without RAM, and pages that straddle the end of the VM's share.
    for (what, at) in scene.foreign_ram() {
        let at = at & !(LARGE_PAGE - 1);
        if at >= RAM {
            scene.denied(what, |s| s.faults_at(what, entry(at, 2), Size::Large, 0x1_f000, true));
        }
    }
    for offset in [PAGE, LARGE_PAGE / 2, LARGE_PAGE - PAGE] {
        let what = format!("a large page from {offset:#x} before the end of VRAM");
        scene.denied(&what, |s| s.faults_at(&what, entry(SHARE_BYTES - offset, 0), Size::Large, offset, true));
    }
    scene.finish();
}

#[test]
fn hole_11_entries_for_missing_memory_fault() {
    let mut scene = Scene::new();
    for (what, at) in scene.foreign_ram() {
        for (aperture, write) in [(2, false), (3, true)] {
            scene.denied(what, |s| s.faults_at(what, entry(at, aperture), Size::Small, 0, write));
        }
    }
    for (what, at) in scene.outside() {
        scene.denied(what, |s| s.faults_at(what, entry(at, 0), Size::Small, 0, true));
        scene.denied(what, |s| s.faults_at(what, entry(at, 0), Size::Small, 0, false));
    }
    // A ROM is readable but not writable.
    let rom = 32 * MIB;
    assert!(scene.evil.guest.map_ram(rom, PAGE, false));
    scene.evil.fill_ram(rom, 1, 5);
    scene.denied("a ROM", |s| s.faults_at("a ROM", entry(rom, 2), Size::Small, 0, true));
    assert!(scene.evil.ram_holds(rom, 1, 5), "the page was written");
    // Entries cannot express RAM addresses beyond 40 bits. RAM at such addresses must not be reached through the low 40
    // bits.
    for high in [1 << 40, 1 << 52] {
        let gpa = high + 48 * MIB;
        if scene.evil.guest.map_ram(gpa, PAGE, true) {
            scene.evil.fill_ram(gpa, 1, 6);
        }
        scene.denied("beyond 40 bits", |s| s.faults_at("beyond", entry(48 * MIB, 2), Size::Small, 0, true));
        if scene.evil.guest.ram_at(gpa).is_some() {
            assert!(scene.evil.ram_holds(gpa, 1, 6), "the page was written");
        }
    }
    scene.finish();
}

#[test]
fn hole_15_tables_are_read_as_the_gpu_walk_reads_them() {
    let mut scene = Scene::new();
    let foreign = scene.on_card(super::IDLE, super::SECRET_AT);
    // Use a directory as its own table, first for small pages and then for large pages. Its first entry is a pointer to
    // the directory as a table, and at the same time a page entry.
    for half in [0, 4] {
        let mut channel = scene.evil.prepare(ID);
        let directory = channel.space.directory;
        scene.evil.guest.poke(directory, 0);
        scene.evil.guest.poke(directory + 4, 0);
        scene.evil.guest.poke(directory + half, ((directory >> 12) << 4) as u32 | 1);
        scene.denied("a directory as its own table", |s| s.does_not_run("its own table", &mut channel));
        scene.fresh();
    }
    // Use a page of entries as a directory. Each page entry then acts as the address of a large-page table.
    for at in [foreign, SHARE_BYTES, 0x1_0000] {
        let mut channel = scene.evil.prepare(ID);
        let entries: Vec<u8> = (0..PAGE / 8).flat_map(|_| entry(at, 0).to_le_bytes()).collect();
        let fake = scene.evil.vram(16);
        scene.evil.guest.vram_write(fake, &entries);
        scene.evil.guest.poke(channel.instance + nvspec::instance::vm::PDB_LO, fake as u32);
        scene.denied("entries as directory", |s| s.does_not_run("entries as directory", &mut channel));
        scene.fresh();
    }
    // Use a small-page table as a large-page table.
    let mut channel = scene.evil.channel(ID);
    let space = channel.space;
    scene.evil.buffer(&channel, A, 1, 15);
    scene.denied("a small-page table as a large-page table", |s| {
        let raw = entry(SHARE_BYTES - PAGE, 0);
        s.evil.pte(space, C, raw as u32, 0);
        s.evil.guest.poke(space.directory, ((space.table >> 12) << 4) as u32 | 1);
        s.evil.flush();
        // This address is in the first large page, so the small-page table's first entry is read as its entry.
        let va = C / PAGE * LARGE_PAGE % (128 * MIB);
        s.evil.submit(&mut channel, &[object(CE0), ce_copy(A, va + PAGE, 1)].concat());
        assert_eq!(s.evil.wait_fault().instance, channel.instance);
    });
    scene.fresh();

    // Let a copy engine rewrite the channel's own table. The mediator cannot observe such writes.
    for (what, at, aperture) in [("VRAM of the neighbour", foreign, 0), ("its RAM", scene.bus[1], 2)] {
        let mut channel = scene.evil.channel(ID);
        let space = channel.space;
        let (page, own) = (space.table + (C >> 12) * 8 / PAGE * PAGE, scene.evil.buffer(&channel, A, 1, 16));
        let first = (page - space.table) / 8 * PAGE;
        scene.evil.map(space, B, At::Vram(page), 1);
        let forged = scene.evil.vram(1);
        let entries: Vec<u8> = (0..PAGE / 8).flat_map(|i| entry(at + i * PAGE, aperture).to_le_bytes()).collect();
        scene.evil.guest.vram_write(forged, &entries);
        scene.evil.map(space, C + 8 * MIB, At::Vram(forged), 1);
        scene.contained(what, |s| {
            s.evil.submit(&mut channel, &[object(CE0), ce_copy(C + 8 * MIB, B, 1)].concat());
            s.evil.wait(&channel);
        });
        let mut written = vec![0; PAGE as usize];
        scene.evil.guest.vram_read(page, &mut written);
        assert!(written == entries, "the guest's own table was written");
        // Use a forged entry after a flush, and then, on another channel, in the submission that writes it. The access
        // must fault in both cases.
        scene.denied(&format!("{what}, used"), |s| {
            s.evil.flush();
            s.evil.submit(&mut channel, &[object(CE0), ce_copy(first, A, 1)].concat());
            assert_eq!(s.evil.wait_fault().va, first);
        });
        assert!(scene.evil.vram_holds(own, 1, 16), "{what} was read");
        scene.fresh();

        let mut channel = scene.evil.channel(ID);
        let page = channel.space.table + (C >> 12) * 8 / PAGE * PAGE;
        let forged = scene.evil.vram(1);
        scene.evil.guest.vram_write(forged, &entries);
        scene.evil.buffer(&channel, A, 1, 17);
        scene.evil.map(channel.space, B, At::Vram(page), 1);
        scene.evil.map(channel.space, C + 8 * MIB, At::Vram(forged), 1);
        scene.denied(&format!("{what}, immediately"), |s| {
            let words = [object(CE0), ce_copy(C + 8 * MIB, B, 1), ce_copy(A, first, 1)];
            s.evil.submit(&mut channel, &words.concat());
            assert_eq!(s.evil.wait_fault().va, first);
        });
        scene.fresh();
    }
    scene.finish();
}

#[test]
fn hole_16_tables_that_are_used_otherwise_map_nothing_new() {
    let mut scene = Scene::new();
    let foreign = scene.on_card(super::IDLE, super::SECRET_AT);
    // While the channel runs, fill its directory or its table with zeros, with entries for the neighbour's memory, or
    // with random bytes.
    let noise = pattern(0x5eed, 3);
    let fills: [(&str, Vec<u8>); 3] = [
        ("zeros", vec![0; PAGE as usize]),
        ("entries for the neighbour", (0..512).flat_map(|_| entry(foreign, 0).to_le_bytes()).collect()),
        ("noise", noise),
    ];
    for (what, fill) in fills {
        for whole in [false, true] {
            let mut channel = scene.evil.channel(ID);
            scene.evil.buffer(&channel, A, 32, 1);
            scene.evil.buffer(&channel, B, 32, 2);
            let copy = [object(CE0), ce_copy(A, B, 32)].concat();
            for _ in 0..8 {
                scene.evil.queue(&mut channel, &copy);
            }
            scene.evil.submit(&mut channel, &copy);
            scene.denied(what, |s| {
                let (at, pages) = if whole { (channel.space.directory, 16) } else { (channel.space.table, 64) };
                (0..pages).for_each(|page| s.evil.guest.vram_write(at + page * PAGE, &fill));
                // Work in progress may complete or fault, because its tables are no longer valid after the flush.
                let before = stops(&s.evil.guest);
                s.evil.flush();
                s.evil.submit(&mut channel, &copy);
                wait_stopped(&mut s.evil, before, what);
            });
            scene.fresh();
        }
    }
    // Map the channel's own directory as a buffer, which a copy engine then overwrites.
    let mut channel = scene.evil.channel(ID);
    scene.evil.map(channel.space, B, At::Vram(channel.space.directory), 16);
    scene.evil.buffer(&channel, A, 16, 0xabcd);
    scene.contained("the directory as a copy's target", |s| {
        s.evil.submit(&mut channel, &[object(CE0), ce_copy(A, B, 16)].concat());
        while !s.evil.is_done(&channel) && s.evil.faults.is_empty() {
            s.evil.guest.wait_msi();
            s.evil.service();
        }
    });
    scene.denied("after a flush", |s| {
        let before = stops(&s.evil.guest);
        s.evil.flush();
        s.evil.submit(&mut channel, &[]);
        wait_stopped(&mut s.evil, before, "after a flush");
    });
    // Use the directory of one channel as a table of another one while both are in the runlist.
    scene.fresh();
    let first = scene.evil.channel(ID);
    let mut second = scene.evil.prepare(ID + 1);
    scene.evil.guest.poke(second.space.directory + 4, ((first.space.directory >> 12) << 4) as u32 | 1);
    scene.contained("one channel's directory as the other's table", |s| {
        s.evil.bind(&second);
        s.evil.list(&[ID, ID + 1]);
        s.evil.submit(&mut second, &[]);
    });
    scene.finish();
}

#[test]
fn hole_18_numbers_at_the_end_do_not_wrap() {
    let mut scene = Scene::new();
    // The first two pages end exactly at 2^40, the end of the 40-bit range.
    for (what, at, size) in [
        ("the last small page", (1u64 << 40) - PAGE, Size::Small),
        ("the last large page", (1 << 40) - LARGE_PAGE, Size::Large),
        ("the last small page below 2^32", (1 << 32) - PAGE, Size::Small),
        ("a large page at 2^32", 1 << 32, Size::Large),
    ] {
        for aperture in [0, 2, 3] {
            scene.denied(what, |s| s.faults_at(what, entry(at, aperture), size, 0, true));
        }
    }
    // Use ring entries whose ranges are unmapped, wrap around, or have the maximum length.
    let top = (1u64 << 40) - 4;
    let range = |at: u64, dwords: u32| u64::from(GpEntry::new().with_address_dwords(at >> 2).with_dwords(dwords));
    for (what, raw) in [
        ("the last dword", range(top, 1)),
        ("beyond the last dword", range(top, 0x1f_ffff)),
        ("the maximum length", range(0x7000_0000, 0x1f_ffff)),
        ("all ones but the control bit", !3),
    ] {
        let mut channel = scene.evil.channel(ID);
        scene.denied(what, |s| {
            let put = s.evil.queue_entry(&mut channel, raw);
            s.evil.ring(&channel, put);
            assert_eq!(s.evil.wait_fault().instance, channel.instance, "{what}");
        });
        scene.fresh();
    }
    // Control entries and entries of all ones must have no effect, or cause an error only for the attacker.
    for raw in [1, 3, u64::MAX, 0] {
        let mut channel = scene.evil.channel(ID);
        scene.contained(&format!("ring entry {raw:#x}"), |s| {
            let put = s.evil.queue_entry(&mut channel, raw);
            s.evil.ring(&channel, put);
        });
        scene.fresh();
    }
    // Try rings of many sizes at a mapped address and at the end of the address space.
    for log2 in [20u32, 21, 28, 31, 32, 63, 0xffff] {
        for (low, high) in [(rig::driver::RING_VA as u32, 0), (0xffff_fff8, 0xff)] {
            let mut channel = scene.evil.prepare(ID);
            scene.evil.guest.poke(channel.instance + ramfc::GP_BASE_LO, low);
            scene.evil.guest.poke(channel.instance + ramfc::GP_BASE_HI, log2 << 16 | high);
            scene.contained(&format!("a ring of 2^{log2} entries at {low:#x}"), |s| {
                s.evil.bind(&channel);
                s.evil.list(&[ID]);
                s.evil.submit(&mut channel, &[]);
                s.evil.ring(&channel, u32::MAX);
                s.evil.ring(&channel, 1 << 31);
            });
            scene.fresh();
        }
    }
    // Write doorbells with values beyond the end of the ring.
    let channel = scene.evil.channel(ID);
    for put in [RING_ENTRIES, RING_ENTRIES + 1, 1 << 20, u32::MAX] {
        scene.denied(&format!("GP_PUT {put:#x}"), |s| s.evil.ring(&channel, put));
    }
    scene.fresh();
    // Copy beyond the mapped range, beyond the address space, and with the maximum number of lines.
    let page = PAGE as u32;
    for (what, words) in [
        ("a copy of 4 GiB less one", m2mf_copy(A, B, u32::MAX)),
        ("a copy to the end of the address space", m2mf_copy(A, top & !0xfff, 2 * page)),
        ("a copy beyond the address space", m2mf_copy(A, u64::from(u32::MAX) << 8, page)),
        ("an endless number of lines", ce_copy(A, B, u32::MAX)),
        ("lines by a copy engine beyond the address space", ce_copy(A, top & !0xfff, 2)),
    ] {
        let mut channel = scene.evil.channel(ID);
        scene.evil.buffer(&channel, A, 1, 1);
        scene.evil.buffer(&channel, B, 1, 2);
        scene.contained(what, |s| {
            let words = [object(M2MF), object(CE0), words].concat();
            let before = stops(&s.evil.guest);
            let put = s.evil.queue(&mut channel, &words);
            s.evil.ring(&channel, put);
            // The engine must fault or report invalid data.
            wait_stopped(&mut s.evil, before, what);
        });
        scene.fresh();
    }
    // Submit runlists of the maximum length that the register can express, and of one more entry than there are
    // channels.
    for length in [0xfff, 0x81] {
        scene.denied(&format!("a runlist of {length:#x}"), |s| {
            s.evil.guest.wr(pfifo::RUNLIST_BASE::OFFSET, 0x0fff_ffff);
            s.evil.guest.wr(pfifo::RUNLIST::OFFSET, 0x01f0_0000 | length);
        });
    }
    assert_eq!(scene.card_instance(EVIL, ID), None);
    scene.finish();
}
