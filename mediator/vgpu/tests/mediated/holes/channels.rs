//! Holes 3, 4, 5, 12, 13 and 19: instance blocks, channel numbers, and runlists.

use super::{
    A, B, CE0, CHUNK, EVIL, GOOD, ID, IDLE, LARGE_PAGE, PAGE, RAM, SHARE_BYTES, Scene, card_registers, ce_copy,
    large_table, ltc, object, pattern, pbdma, pbus, pfb, pfifo, vm,
};
use nvspec::fifo::CHANNELS;
use nvspec::instance::ramfc;
use nvspec::regs::{ce0, ce1, fecs, fecs_command};
use vmm_glue::RegionIndex;

/// Returns a value for a channel table register, or for the register of an aperture's instance block, that refers to
/// address `at`.
fn pointer(at: u64, target: u32) -> u32 {
    0xc000_0000 | target << 28 | (at >> 12) as u32 & 0x0fff_ffff
}

#[test]
fn hole_03_instance_blocks_are_not_read_after_activation() {
    let mut scene = Scene::new();
    let neighbour = scene.good.driver.guest.vram_bytes;
    assert_eq!(neighbour, SHARE_BYTES);
    let directory = scene.on_card(GOOD, scene.good.channel.space.directory);
    let ram = scene.bus[1];
    for (what, low, high) in [
        ("the neighbour's directory", directory as u32, 0),
        ("the neighbour's RAM", ram as u32 | 2, (ram >> 32) as u32),
        ("the neighbour's RAM, not snooped", ram as u32 | 3, (ram >> 32) as u32),
        ("no memory", 1, 0),
        ("the end of host memory", 0xffff_f003, 0xff),
        ("the end of VRAM", 0xffff_f000, 0xff),
    ] {
        let mut channel = scene.evil.channel(ID);
        scene.evil.buffer(&channel, A, 1, 3);
        let to = scene.evil.buffer(&channel, B, 1, 4);
        let copy = [object(CE0), ce_copy(A, B, 1)].concat();
        scene.evil.submit(&mut channel, &copy);
        scene.evil.wait(&channel);
        assert!(scene.evil.vram_holds(to, 1, 3));
        let before = scene.card_instance(EVIL, ID).map(|at| scene.card_word64(at + vm::PDB_LO));

        scene.contained(what, |s| {
            let guest = &mut s.evil.guest;
            guest.poke(channel.instance + vm::PDB_LO, low);
            guest.poke(channel.instance + vm::PDB_HI, high);
            // Also overwrite the addresses of USERD and the ring, and the saved state.
            for offset in [ramfc::USERD_LO, ramfc::USERD_HI, ramfc::GP_BASE_HI, ramfc::PB_FETCH_LO, ramfc::PB_FETCH_HI]
            {
                guest.poke(channel.instance + offset, 0xffff_fff3);
            }
            guest.wr(pfb::MMU_INVALIDATE_PDB::OFFSET, low >> 8 | low & 3);
            guest.wr(pfb::MMU_INVALIDATE::OFFSET, 0x8000_0001);
            guest.wr(pfifo::PREEMPT::OFFSET, ID.into());
            guest.wr(pfifo::CHANNEL_STATE::at(ID.into()), 0);
            guest.wr(pfifo::CHANNEL_STATE::at(ID.into()), 0x001f_0001);
            s.evil.list(&[ID]);
            s.evil.flush();
            s.evil.guest.vram_write(to, &pattern(5, 0));
            s.evil.submit(&mut channel, &copy);
            s.evil.wait(&channel);
            assert!(s.evil.vram_holds(to, 1, 3), "{what}: the channel still works in its own address space");
        });
        let after = scene.card_instance(EVIL, ID).map(|at| scene.card_word64(at + vm::PDB_LO));
        assert_eq!(before, after, "{what}: the card's own block");

        // Bind the channel again, so that its block is read again. USERD and the ring are valid now, but the directory
        // is outside guest memory.
        scene.evil.unbind(&channel);
        scene.evil.guest.poke(channel.instance + ramfc::USERD_LO, channel.userd as u32);
        scene.evil.guest.poke(channel.instance + ramfc::USERD_HI, 0);
        scene.evil.guest.poke(channel.instance + ramfc::GP_BASE_HI, 4 << 16);
        scene.denied(&format!("{what}, bound"), |s| s.does_not_run(what, &mut channel));
        scene.fresh();
    }
    scene.finish();
}

#[test]
fn hole_04_guests_cannot_switch_contexts() {
    let mut scene = Scene::new();
    let channel = scene.evil.channel(ID);
    let blocks = [
        scene.card_instance(GOOD, ID).unwrap(),
        scene.on_card(GOOD, scene.good.channel.instance),
        scene.on_card(IDLE, 0),
        channel.instance,
        SHARE_BYTES,
        0xfff_ffff << 12,
    ];
    for at in blocks {
        for target in 0..4 {
            scene.virtual_only(&format!("block {at:#x}, target {target}"), |s| {
                let guest = &mut s.evil.guest;
                for command in [fecs_command::SET_CHANNEL, fecs_command::SAVE_CONTEXT, 3, u32::MAX] {
                    guest.wr(fecs::COMMAND_DATA::OFFSET, pointer(at, target));
                    guest.wr(fecs::COMMAND::OFFSET, command);
                }
                for register in [
                    fecs::CURRENT::OFFSET,
                    fecs::NEXT::OFFSET,
                    fecs::CHANNEL_SWITCH::OFFSET,
                    ce0::CHANNEL_CURRENT::OFFSET,
                    ce0::CHANNEL_NEXT::OFFSET,
                    ce1::CHANNEL_CURRENT::OFFSET,
                    ce1::CHANNEL_NEXT::OFFSET,
                ] {
                    guest.wr(register, pointer(at, target));
                }
                for index in 0..ce0::CHANNEL_COMMAND::COUNT {
                    guest.wr(ce0::CHANNEL_COMMAND::at(index), u32::MAX);
                    guest.wr(ce1::CHANNEL_COMMAND::at(index), u32::MAX);
                }
                guest.wr(fecs::INTR_SET::OFFSET, u32::MAX);
                guest.wr(ce0::INTR_SET::OFFSET, u32::MAX);
                guest.wr(ce1::INTR_SET::OFFSET, u32::MAX);
            });
        }
    }
    scene.finish();
}

#[test]
fn hole_05_target_bits_are_decoded_or_denied() {
    let mut scene = Scene::new();
    let ram = scene.bus[1];
    // Both `ram` and `page` are outside the attacker's memory.
    let page = scene.on_card(IDLE, SHARE_BYTES - PAGE);
    assert!(page >= SHARE_BYTES);
    // Use addresses of other VMs' VRAM, and of host memory that was not lent, for channels, runlists and apertures.
    for (at, target) in [(page, 0), (page, 1), (ram, 2), (ram, 3), (RAM, 2), (0xfff_ffff << 12, 3)] {
        scene.denied(&format!("instance block {at:#x}, target {target}"), |s| {
            s.evil.guest.wr(pfifo::CHANNEL::at(ID.into()), pointer(at, target));
            s.evil.guest.wr(pfifo::CHANNEL_STATE::at(ID.into()), 0x001f_0001);
            s.evil.list(&[ID]);
            assert_eq!(s.card_instance(EVIL, ID), None, "the channel is bound");
            s.evil.guest.wr(pfifo::CHANNEL::at(ID.into()), 0);
        });
        scene.denied(&format!("runlist {at:#x}, target {target}"), |s| {
            s.evil.guest.wr(pfifo::RUNLIST_BASE::OFFSET, target << 28 | (at >> 12) as u32);
            // The first list is one entry too long, and the second one has four entries.
            s.evil.guest.wr(pfifo::RUNLIST::OFFSET, 0x01f0_0081);
            s.evil.guest.wr(pfifo::RUNLIST::OFFSET, 0x01f0_0004);
        });
        for (region, register) in
            [(RegionIndex::Bar1, pbus::BAR1_BLOCK::OFFSET), (RegionIndex::Bar3, pbus::BAR3_BLOCK::OFFSET)]
        {
            scene.denied(&format!("aperture's block {at:#x}, target {target}"), |s| {
                s.evil.guest.wr(register, pointer(at, target));
                let mut word = [0; 4];
                s.evil.guest.read(region, 0x1000, &mut word);
                assert_eq!(word, [0xff; 4]);
                s.evil.guest.write(region, 0x1000, &word);
            });
        }
        scene.denied(&format!("peephole's block {at:#x}, target {target}"), |s| {
            s.evil.guest.wr(pbus::PEEPHOLE_BLOCK::OFFSET, pointer(at, target));
        });
        // These registers contain the addresses to which the hardware writes on flushes and faults, and for compression
        // tags.
        scene.virtual_only(&format!("sinks at {at:#x}"), |s| {
            for register in [
                pfb::NISO_ADDRESS::OFFSET,
                pfb::MMU_DEBUG_WR::OFFSET,
                pfb::MMU_DEBUG_RD::OFFSET,
                pfb::MMU_DEBUG_CTRL::OFFSET,
                ltc::CBC_BASE::OFFSET,
                0x41_88b4,
                0x41_88b8,
            ] {
                s.evil.guest.wr(register, target << 28 | (at >> 8) as u32 & 0x0fff_ffff);
            }
        });
        scene.fresh();
    }
    // Only the USERD address is invalid. The rest of the block is valid.
    for low in [page as u32, ram as u32 | 2, ram as u32 | 3, page as u32 | 1] {
        let mut channel = scene.evil.prepare(ID);
        scene.evil.guest.poke(channel.instance + ramfc::USERD_LO, low);
        let userd = channel.userd;
        scene.contained(&format!("USERD {low:#x}"), |s| {
            s.evil.bind(&channel);
            s.evil.list(&[ID]);
            let put = s.evil.queue_fenced(&mut channel, &[]);
            s.evil.guest.poke(userd + nvspec::instance::userd::GP_PUT, put);
            // The card's USERD must be in a page that no guest owns, regardless of the block's contents.
            if let Some(instance) = s.card_instance(EVIL, ID) {
                let at = s.card_word64(instance + ramfc::USERD_LO);
                let guests = s.blocks_of(&[EVIL, GOOD, IDLE]);
                assert!(at & 3 == 0 && !guests.contains(&(at / CHUNK)), "the card's USERD is at {at:#x}");
            }
        });
        scene.fresh();
    }
    scene.finish();
}

#[test]
fn hole_12_runlists_name_only_the_guests_channels() {
    let mut scene = Scene::new();
    let mut channel = scene.evil.channel(ID);
    let list = scene.evil.vram(1);
    let submit = |s: &mut Scene, base: u32, length: u32| {
        s.evil.guest.wr(pfifo::RUNLIST_BASE::OFFSET, base);
        s.evil.guest.wr(pfifo::RUNLIST::OFFSET, 0x01f0_0000 | length);
    };
    // Use all valid channel numbers, invalid numbers, and the same number repeatedly.
    type Numbers = fn(u32) -> u32;
    let lists: [(&str, Numbers); 4] = [
        ("every channel", |index| index),
        ("channels from 128 on", |index| 128 + index),
        ("numbers of all ones", |_| u32::MAX),
        ("one channel 128 times", |_| ID as u32),
    ];
    for (what, number) in lists {
        for index in 0..CHANNELS {
            scene.evil.guest.poke(list + u64::from(index) * 8, number(index));
            scene.evil.guest.poke(list + u64::from(index) * 8 + 4, u32::MAX);
        }
        for length in [0, 1, CHANNELS] {
            scene.contained(&format!("{what}, {length} entries"), |s| submit(s, (list >> 12) as u32, length));
        }
    }
    // Use invalid lengths and addresses.
    let behind = (SHARE_BYTES >> 12) as u32;
    for (what, base, length) in [
        ("129 entries", (list >> 12) as u32, CHANNELS + 1),
        ("4095 entries", (list >> 12) as u32, 0xfff),
        ("beyond the share", behind, 1),
        ("far beyond the share", 0x0fff_ffff, CHANNELS),
        ("outside all memory", 0x1000_0000, 1),
    ] {
        scene.denied(what, |s| submit(s, base, length));
    }
    // A list in RAM that cannot be read is treated as empty.
    for (what, base, length) in [
        ("in RAM that was not lent", 0x2000_0000 | (RAM >> 12) as u32, 1),
        ("at the end of RAM", 0x3fff_ffff, CHANNELS),
    ] {
        scene.contained(what, |s| submit(s, base, length));
    }
    // The attacker's own channel must run again when it is back on the list.
    scene.evil.list(&[ID]);
    scene.evil.submit(&mut channel, &[]);
    scene.evil.wait(&channel);
    scene.finish();
}

/// Returns the offset of element `index` of a register array, computed from the offsets of its first two elements.
fn behind(first: u32, second: u32, index: u32) -> u32 {
    first + index * (second - first)
}

#[test]
fn hole_13_channel_numbers_end_at_127() {
    let mut scene = Scene::new();
    let instance = scene.evil.prepare(ID).instance;
    let before = card_registers(&scene.rig);
    for id in (CHANNELS..CHANNELS + 8).chain([0x1ff]) {
        scene.denied(&format!("channel {id}"), |s| {
            let at = behind(pfifo::CHANNEL::at(0), pfifo::CHANNEL::at(1), id);
            s.evil.guest.wr(at, pointer(instance, 0));
            s.evil.guest.wr(at + 4, 0x001f_0001);
            assert_ne!(s.evil.guest.rd(at), pointer(instance, 0), "the value was kept");
        });
        scene.denied(&format!("preemption of channel {id}"), |s| s.evil.guest.wr(pfifo::PREEMPT::OFFSET, id));
    }
    scene.denied("preemption of channel 0xfff", |s| s.evil.guest.wr(pfifo::PREEMPT::OFFSET, u32::MAX));
    // Use indices beyond the last PBDMA, and an offset beyond the channel table.
    for (what, offset) in [
        ("PBDMA 3", behind(pbdma::INTR_0::at(0), pbdma::INTR_0::at(1), 3)),
        ("PBDMA 7", behind(pbdma::CHANNEL::at(0), pbdma::CHANNEL::at(1), 7)),
        ("beyond the block of the channel table", 0x4000),
    ] {
        scene.denied(what, |s| {
            s.evil.guest.rd(offset);
            s.evil.guest.wr(offset, u32::MAX);
        });
    }
    // Bind more channels than the VM may have.
    scene.denied("more channels than allowed", |s| {
        for id in 0..CHANNELS {
            s.evil.guest.wr(pfifo::CHANNEL::at(id), pointer(instance, 0));
        }
        assert!(s.rig.usage().1 <= 16 + 2, "{} channels are bound", s.rig.usage().1);
        (0..CHANNELS).for_each(|id| s.evil.guest.wr(pfifo::CHANNEL::at(id), 0));
    });
    let after = card_registers(&scene.rig);
    let enable = nvspec::regs::pmc::ENABLE::OFFSET;
    assert_eq!(before[&enable], after[&enable]);
    scene.finish();
}

#[test]
fn hole_19_channels_without_a_directory_reach_nothing() {
    let mut scene = Scene::new();
    // Try directories without valid entries, and directories that are not entirely in guest memory.
    let zeros = SHARE_BYTES - 32 * PAGE;
    for (what, low) in [
        ("directory at address 0", 0),
        ("directory of zeros", zeros as u32),
        ("directory in RAM", 0x8_0002),
        ("directory in RAM that was not lent", 64 << 20 | 2),
        ("directory outside all memory", 1),
        ("directory that ends beyond the share", (SHARE_BYTES - PAGE) as u32),
    ] {
        let mut channel = scene.evil.prepare(ID);
        scene.evil.guest.poke(channel.instance + vm::PDB_LO, low);
        scene.evil.guest.poke(channel.instance + vm::PDB_HI, 0);
        scene.denied(what, |s| s.does_not_run(what, &mut channel));
        scene.fresh();
    }
    // Try an instance block of zero bytes, and one of 0xff bytes.
    for fill in [0u8, 0xff] {
        let mut channel = scene.evil.prepare(ID);
        scene.evil.guest.vram_write(channel.instance, &[fill; PAGE as usize]);
        scene.contained(&format!("block of {fill:#x}"), |s| {
            s.evil.bind(&channel);
            s.evil.list(&[ID]);
            s.evil.submit(&mut channel, &[]);
        });
        assert!(!scene.evil.is_done(&channel));
        scene.fresh();
    }
    // Try a directory whose only table is for large pages and is in zeroed memory.
    let mut channel = scene.evil.prepare(ID);
    scene.evil.guest.poke(channel.space.directory + 4, 0);
    let table = large_table(&mut scene.evil, &channel);
    assert_ne!(table % LARGE_PAGE, 1);
    scene.denied("an empty table", |s| s.does_not_run("an empty table", &mut channel));
    scene.finish();
}
