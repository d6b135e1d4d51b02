//! Tests RAM that the client unmaps, and clients and VMs that disappear.

use super::{A, B, MIB, VM_MIB, driver, fill, is_filled, rig, usage};
use rig::driver::{At, CE0, Driver, PAGE, ce_copy, object};
use rig::read_file;
use vmm_glue::RegionIndex;

#[test]
fn withdrawn_ram_is_not_written_again() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    for round in 0..20u32 {
        let gpa = 16 * MIB;
        assert!(driver.guest.map_ram(gpa, MIB, true));
        let mut channel = driver.channel(1);
        let copy = [object(CE0), ce_copy(A, B, 64)].concat();
        driver.buffer(&channel, A, 64, round);
        driver.map(channel.space, B, At::Ram(gpa), 64);
        for _ in 0..7 {
            driver.queue(&mut channel, &copy);
        }
        driver.submit(&mut channel, &copy);
        let file = driver.guest.unmap_ram(gpa).unwrap();
        // From now on, only the client writes this memory.
        assert_eq!(rustix::io::pwrite(&file, &vec![0xee; MIB as usize], 0), Ok(MIB as usize));
        let mut later = channel;
        while !driver.is_done(&channel) && driver.faults.is_empty() {
            driver.submit(&mut later, &[]);
            driver.guest.wait_msi();
            driver.service();
        }
        driver.faults.clear();
        let mut found = vec![0; MIB as usize];
        read_file(&file, 0, &mut found);
        assert!(found.iter().all(|&byte| byte == 0xee), "round {round}");
        driver.unbind(&channel);
        driver.rewind();
    }
}

#[test]
fn next_client_finds_nothing_of_the_last() {
    let rig = rig();
    let before = usage(&rig);
    let guest = rig.guest(0, VM_MIB, 16);
    let alone = usage(&rig);
    let mut driver = Driver::new(guest);
    assert!(driver.guest.map_ram(0, MIB, true));
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 1);
    driver.map(channel.space, B, At::Ram(0), 1);
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    driver.wait(&channel);
    fill(&driver.guest, 0x5a);
    driver.guest.reconnect();
    assert!(is_filled(&driver.guest, 0));
    assert_eq!(usage(&rig), alone);
    // The next client can immediately start to work.
    let Driver { mut guest, .. } = driver;
    assert!(guest.map_ram(0, MIB, true));
    let mut driver = Driver::new(guest);
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 2);
    driver.map(channel.space, B, At::Ram(0), 1);
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    driver.wait(&channel);
    assert!(driver.ram_holds(0, 1, 2));
    driver.guest.remove().unwrap();
    assert_eq!(usage(&rig), before);
}

#[test]
fn vms_that_come_and_go_leave_nothing() {
    let rig = rig();
    let before = usage(&rig);
    for round in 0..50 {
        let mut guest = rig.guest(round, VM_MIB, 16);
        assert!(is_filled(&guest, 0), "round {round}");
        assert!(guest.map_ram(0, MIB, true));
        let mut driver = Driver::new(guest);
        let mut channel = driver.channel(round as u8);
        driver.buffer(&channel, A, 2, round);
        driver.map(channel.space, B, At::Ram(PAGE), 2);
        driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 2)].concat());
        // Every other VM is removed while its work is in progress.
        if round % 2 == 0 {
            driver.wait(&channel);
            assert!(driver.ram_holds(PAGE, 2, round));
        }
        fill(&driver.guest, 0xa5);
        driver.guest.remove().unwrap();
        assert_eq!(usage(&rig), before, "round {round}");
    }
}

#[test]
fn channels_that_are_not_bound_leave_no_shadow() {
    let rig = rig();
    let mut driver = Driver::new(rig.guest(0, VM_MIB, 1));
    let first = driver.channel(0);
    let before = usage(&rig);
    // The registers accept binds only up to the limit. They also accept instance blocks that are rejected later.
    for _ in 0..8 {
        let channel = driver.prepare(0);
        driver.guest.poke(channel.instance + nvspec::instance::ramfc::GP_BASE_HI, 31 << 16);
        driver.bind(&channel);
    }
    let _ = first;
    let after = usage(&rig);
    assert_eq!(after.3, 0, "no channel is bound");
    assert!(after.1 <= before.1, "{after:?}");
    assert_eq!(driver.guest.counter("address_spaces"), 0);
}

#[test]
fn accesses_are_counted_by_where_they_go_and_which_way() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let counts = |driver: &Driver| {
        ["register_reads", "register_writes", "aperture_reads", "aperture_writes", "aperture_bytes"]
            .map(|name| driver.guest.counter(name))
    };
    let before = counts(&driver);
    driver.guest.rd(0);
    // Setting the PRAMIN window is one register access, and accessing the word through the window is another one.
    driver.guest.poke(A, 1);
    driver.guest.read(RegionIndex::Bar1, 100 * PAGE, &mut [0; 8]);
    driver.guest.write(RegionIndex::Bar3, 100 * PAGE, &[0; 4]);
    driver.guest.write(RegionIndex::Bar3, 100 * PAGE + 4, &[0; 4]);
    let after = counts(&driver);
    let grown: Vec<u64> = before.iter().zip(after).map(|(before, after)| after - before).collect();
    assert_eq!(grown, [1, 2, 1, 2, 4 + 8 + 8]);
}
