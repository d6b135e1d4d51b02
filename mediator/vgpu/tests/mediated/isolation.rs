//! Tests accesses by a guest to resources that it does not own.

use super::{A, B, CARD_MIB, MIB, Rig, VM_MIB, card_vram, driver, fill, finds, is_filled, rig};
use nvspec::regs::{pbus, pfb, pfifo, windows::pramin};
use rig::driver::{At, CE0, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object};
use vmm_glue::RegionIndex;
use vram::{TenantId, VramAddr};

const CANARY: u8 = 0xc5;

/// Returns invalid guest table entries for the page at [`B`]: the name, low word and high word of each.
fn bad_entries(rig: &Rig) -> [(&'static str, u32, u32); 8] {
    let share = VM_MIB * MIB;
    let state = rig.host.lock();
    let owned = |at: &u64| state.vram().chunks.owner(VramAddr(*at)).is_some_and(|(vm, _)| vm == TenantId(1));
    let other = (share..u64::from(CARD_MIB) * MIB).step_by(2 << 20).find(owned).expect("VRAM of the other VM");
    let low = |at: u64| (at >> 8) as u32 | 1;
    [
        ("VRAM beyond the share", low(share), 0),
        ("VRAM of the other VM", low(other), 0),
        ("the end of VRAM", low(u64::from(CARD_MIB) * MIB - PAGE), 0),
        ("VRAM far away", 0xffff_fff1, 0),
        ("RAM that was not lent", low(64 * MIB), 5),
        ("RAM at the other VM's I/O address", low(4 * MIB), 5),
        ("RAM far away", 0xffff_fff1, 7),
        ("another card", low(0), 2),
    ]
}

fn attempt(driver: &mut Driver, id: u8, low: u32, high: u32, write: bool) -> (Channel, u64) {
    let mut channel = driver.channel(id);
    let own = driver.buffer(&channel, A, 1, 0x11);
    driver.pte(channel.space, B, low, high);
    driver.flush();
    let (from, to) = if write { (A, B) } else { (B, A) };
    driver.submit(&mut channel, &[object(CE0), ce_copy(from, to, 1)].concat());
    (channel, own)
}

#[test]
fn page_tables_reach_only_memory_of_their_vm() {
    let rig = rig();
    let (mut evil, victim) = (driver(&rig, 0), driver(&rig, 1));
    fill(&victim.guest, CANARY);
    victim.guest.ram_write(0, &vec![CANARY; MIB as usize]);
    let before = evil.guest.counter("shadow_entries_denied");
    for (name, low, high) in bad_entries(&rig) {
        for write in [false, true] {
            let (channel, own) = attempt(&mut evil, 1, low, high, write);
            let fault = evil.wait_fault();
            assert_eq!((fault.instance, fault.va), (channel.instance, B), "{name}");
            assert!(evil.vram_holds(own, 1, 0x11), "nothing was read from {name}");
            evil.unbind(&channel);
            evil.rewind();
        }
    }
    assert!(evil.guest.counter("shadow_entries_denied") > before);
    assert!(is_filled(&victim.guest, CANARY));
    let mut ram = vec![0; MIB as usize];
    victim.guest.ram_read(0, &mut ram);
    assert!(ram.iter().all(|&byte| byte == CANARY));
    assert_eq!(finds(&evil.guest, CANARY), 0);
}

#[test]
fn read_only_ram_is_not_written() {
    let rig = rig();
    let mut guest = rig.guest(0, VM_MIB, 4);
    assert!(guest.map_ram(0, MIB, false));
    let mut driver = Driver::new(guest);
    driver.fill_ram(0, 1, 3);
    let mut channel = driver.channel(1);
    let own = driver.buffer(&channel, A, 1, 1);
    driver.map(channel.space, B, At::Ram(0), 1);
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
    assert_eq!(driver.wait_fault().va, B);
    assert!(driver.ram_holds(0, 1, 3));
    assert!(driver.vram_holds(own, 1, 1));
}

#[test]
fn large_pages_are_checked_to_their_last_byte() {
    let rig = rig();
    let (mut evil, victim) = (driver(&rig, 0), driver(&rig, 1));
    fill(&victim.guest, CANARY);
    // Lend only the first half of this large page of RAM.
    assert!(evil.guest.map_ram(16 * MIB, 0x1_0000, true));
    let mut channel = evil.channel(1);
    let table = evil.vram(64);
    let large = 8 << 20;
    for (index, (low, high)) in
        [(((16 * MIB) >> 8) as u32 | 1, 5), (((VM_MIB * MIB - 0x1_0000) >> 8) as u32 | 1, 0)].into_iter().enumerate()
    {
        evil.guest.poke(table + 8 * (64 + index as u64), low);
        evil.guest.poke(table + 8 * (64 + index as u64) + 4, high);
    }
    let directory = channel.space.directory;
    evil.guest.poke(directory, (table >> 12 << 4) as u32 | 1);
    evil.flush();
    evil.buffer(&channel, A, 1, 1);
    evil.submit(&mut channel, &[object(M2MF), m2mf_copy(A, large + 0x1_0000, PAGE as u32)].concat());
    assert_eq!(evil.wait_fault().va, large + 0x1_0000);
    assert!(is_filled(&victim.guest, CANARY));
}

#[test]
fn windows_end_where_vram_does() {
    let rig = rig();
    let (mut evil, victim) = (driver(&rig, 0), driver(&rig, 1));
    fill(&victim.guest, CANARY);
    for at in [VM_MIB * MIB, (CARD_MIB as u64 - 2) * MIB, (CARD_MIB as u64 - 1) * MIB, 0xff_ffff << 16] {
        assert_eq!(evil.guest.peek(at), u32::MAX, "{at:#x}");
        evil.guest.poke(at, 0x1234_5678);
    }
    // Access memory across the end of the share.
    evil.guest.wr(pbus::PRAMIN_WINDOW::OFFSET, ((VM_MIB * MIB - 0x8_0000) >> 16) as u32);
    let mut word = [0; 8];
    evil.guest.read(RegionIndex::Bar0, u64::from(pramin::BASE) + 0x8_0000 - 4, &mut word);
    evil.guest.write(RegionIndex::Bar0, u64::from(pramin::BASE) + 0x8_0000 - 4, &[0x77; 8]);
    // Point the PRAMIN window at host memory.
    evil.guest.wr(pbus::PRAMIN_WINDOW::OFFSET, 2 << 24);
    evil.guest.wr(pramin::BASE, 0x1234_5678);
    assert!(is_filled(&victim.guest, CANARY));
    assert!(evil.guest.status().denied.iter().any(|denied| denied.writes > 0));
}

#[test]
fn instances_and_runlists_outside_are_not_taken() {
    let rig = rig();
    let (mut evil, mut working) = (driver(&rig, 0), driver(&rig, 1));
    let mut channel = working.channel(5);
    let bound = rig.usage().1;
    for value in [0xc000_0000 | ((VM_MIB * MIB) >> 12) as u32, 0xcfff_ffff, 0xe000_0000 | 0x1_0000, 0xffff_ffff] {
        evil.guest.wr(pfifo::CHANNEL::at(5), value);
        evil.guest.wr(pfifo::CHANNEL_STATE::at(5), 0x001f_0001);
        assert_eq!(rig.usage().1, bound, "{value:#x}");
    }
    for (base, length) in [(((VM_MIB * MIB) >> 12) as u32, 4), (0x0fff_ffff, 128), (0x3000_0000, 1), (0, 0xfffff)] {
        evil.guest.wr(pfifo::RUNLIST_BASE::OFFSET, base);
        evil.guest.wr(pfifo::RUNLIST::OFFSET, 0x01f0_0000 | length);
    }
    // Submit the guest's own runlist, which is empty. The other VM's channel must not be affected.
    evil.submit_runlist();
    // Use instance blocks with an invalid directory, USERD address or ring size.
    for (offset, value) in [(0x200, 0xffff_f000), (0x200, 2), (0x008, 0xffff_f000), (0x04c, 31 << 16)] {
        let channel = evil.prepare(6);
        evil.guest.poke(channel.instance + offset, value);
        evil.bind(&channel);
        evil.submit_runlist();
        evil.guest.poke(channel.userd + nvspec::instance::userd::GP_PUT, 3);
        evil.unbind(&channel);
        evil.rewind();
    }
    evil.guest.wr(pfb::MMU_INVALIDATE_PDB::OFFSET, u32::MAX);
    evil.guest.wr(pfb::MMU_INVALIDATE::OFFSET, 0x8000_0001);

    working.buffer(&channel, A, 1, 1);
    let to = working.buffer(&channel, B, 1, 2);
    working.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    working.wait(&channel);
    assert!(working.vram_holds(to, 1, 1));
    assert_eq!(working.faults, []);
}

#[test]
fn host_structures_are_unchanged_by_guest_with_wild_mappings() {
    // Size of the constant part at the start of the mediator's memory, in bytes: the instance blocks and page
    // directories for the card's apertures.
    const FIXED: usize = 2 * 0x1000 + 2 * 0x1_0000;
    let rig = rig();
    let mut evil = driver(&rig, 0);
    let mut channel = evil.channel(1);
    let mut before = vec![0; FIXED];
    card_vram(&rig, 0, &mut before);
    assert!(before.iter().any(|&byte| byte != 0));
    let own = evil.guest.vram_bytes;
    // Map 128 MiB of the address space to VRAM page by page, including VRAM that does not exist.
    let spare = evil.space();
    for first in (0..0x8000u64).step_by(512) {
        let entries: Vec<u8> = (first..first + 512).flat_map(|page| (((page * PAGE) >> 8) | 1).to_le_bytes()).collect();
        evil.guest.vram_write(spare.table + first * 8, &entries);
    }
    evil.guest.poke(channel.space.directory + 12, ((spare.table >> 12) as u32) << 4 | 1);
    evil.flush();
    let base = 128 << 20;
    evil.buffer(&channel, A, 2, 1);
    evil.submit(&mut channel, &[object(M2MF), m2mf_copy(A, base + own - PAGE, 2 * PAGE as u32)].concat());
    assert_eq!(evil.wait_fault().va, base + own, "the previous page belongs to the VM");
    assert!(evil.vram_holds(own - PAGE, 1, 1));
    let mut after = vec![0; FIXED];
    card_vram(&rig, 0, &mut after);
    assert!(before == after);
}
