//! Tests valid work, and faults caused by the guest itself.

use super::{A, B, driver, rig};
use nvspec::instance::userd;
use rig::driver::{At, CE0, CE1, M2MF, PAGE, ce_copy, m2mf_copy, object};
use vmm_glue::RegionIndex;

#[test]
fn copies_between_vram_and_ram_carry_their_bytes() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    let vram = driver.buffer(&channel, A, 4, 1);
    driver.map(channel.space, B, At::Ram(0x1_0000), 4);
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, 4 * PAGE as u32)].concat());
    driver.wait(&channel);
    assert!(driver.ram_holds(0x1_0000, 4, 1), "M2MF, VRAM to RAM");

    driver.fill_ram(0x2_0000, 3, 2);
    driver.map(channel.space, B, At::Ram(0x2_0000), 3);
    driver.submit(&mut channel, &[object(CE0), ce_copy(B, A, 3)].concat());
    driver.wait(&channel);
    assert!(driver.vram_holds(vram, 3, 2), "CE0, RAM to VRAM");

    let to = driver.buffer(&channel, B, 3, 3);
    driver.submit(&mut channel, &[object(CE1), ce_copy(A, B, 3)].concat());
    driver.wait(&channel);
    assert!(driver.vram_holds(to, 3, 2), "CE1, VRAM to VRAM");
    assert_eq!(driver.guest.counter("faults"), 0);
}

#[test]
fn two_vms_side_by_side_get_their_own_bytes() {
    let rig = rig();
    let mut drivers = [driver(&rig, 0), driver(&rig, 1)];
    // Both drivers use the same channel numbers and addresses.
    let mut channels = drivers.each_mut().map(|driver| driver.channel(3));
    let mut targets = [0; 2];
    for (index, driver) in drivers.iter_mut().enumerate() {
        driver.buffer(&channels[index], A, 8, 10 + index as u32);
        targets[index] = driver.buffer(&channels[index], B, 8, 99);
        driver.map(channels[index].space, 0x300_0000, At::Ram(0), 8);
    }
    for round in 0..5u32 {
        for index in 0..2 {
            let (driver, channel) = (&mut drivers[index], &mut channels[index]);
            let engine = if round % 2 == 0 { CE0 } else { CE1 };
            let copies = [object(engine), ce_copy(A, B, 8), object(M2MF), m2mf_copy(B, 0x300_0000, 8 * PAGE as u32)];
            driver.submit(channel, &copies.concat());
        }
        for index in 0..2 {
            let (driver, seed) = (&mut drivers[index], 10 + index as u32);
            driver.wait(&channels[index]);
            assert!(driver.vram_holds(targets[index], 8, seed), "VM {index}, round {round}");
            assert!(driver.ram_holds(0, 8, seed), "VM {index}, round {round}");
            driver.fill_ram(0, 8, 77);
        }
    }
}

#[test]
fn fault_is_reported_to_its_vm_and_other_vm_continues() {
    let rig = rig();
    let (mut bad, mut good) = (driver(&rig, 0), driver(&rig, 1));
    let (mut channel, mut other) = (bad.channel(1), good.channel(1));
    bad.buffer(&channel, A, 1, 1);
    bad.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    let fault = bad.wait_fault();
    assert_eq!((fault.instance, fault.va), (channel.instance, B));

    good.buffer(&other, A, 1, 5);
    let to = good.buffer(&other, B, 1, 6);
    good.submit(&mut other, &[object(CE0), ce_copy(A, B, 1)].concat());
    good.wait(&other);
    assert!(good.vram_holds(to, 1, 5), "the engine continues");
    assert_eq!(good.faults, []);
    assert_eq!((bad.guest.counter("faults"), good.guest.counter("faults")), (1, 0));

    // A new channel with the faulted one's number must work.
    bad.unbind(&channel);
    let mut channel = bad.channel(1);
    bad.buffer(&channel, A, 1, 7);
    let to = bad.buffer(&channel, B, 1, 8);
    bad.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    bad.wait(&channel);
    assert!(bad.vram_holds(to, 1, 7));
}

#[test]
fn every_alias_of_userd_rings() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(2);
    let offset = 2 * PAGE + userd::GP_PUT;
    for (round, way) in ["BAR1", "BAR3", "PRAMIN", "bytes through BAR1"].into_iter().enumerate() {
        let to = driver.buffer(&channel, B, 1, 50);
        driver.buffer(&channel, A, 1, round as u32);
        let put = driver.queue_fenced(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
        match way {
            "BAR1" => driver.guest.write(RegionIndex::Bar1, offset, &put.to_le_bytes()),
            "BAR3" => driver.guest.write(RegionIndex::Bar3, offset, &put.to_le_bytes()),
            "PRAMIN" => driver.guest.poke(channel.userd + userd::GP_PUT, put),
            _ => (0..4).for_each(|byte| {
                driver.guest.write(RegionIndex::Bar1, offset + byte, &put.to_le_bytes()[byte as usize..][..1]);
            }),
        }
        driver.wait(&channel);
        assert!(driver.vram_holds(to, 1, round as u32), "{way}");
    }
    assert_eq!(driver.guest.counter("doorbells"), 4);
    assert_eq!(driver.guest.peek(channel.userd + userd::GP_GET), 4, "the guest observes progress through PRAMIN");
}
