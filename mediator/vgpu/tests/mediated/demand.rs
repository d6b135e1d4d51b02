//! Tests resources that are allocated on demand, and the errors that a guest receives when none are left.

use super::oversubscribe::eventually;
use super::{A, B, MIB, Rig, VM_MIB, driver, rig, usage};
use card_manager::Share;
use nvspec::mmu::fault::unit;
use nvspec::regs::pfifo;
use rig::driver::{At, Driver, M2MF, PAGE, m2mf_copy, object};
use rig::settings;
use shadow_pt::Mode;
use simgpu::{EngineId, Fault, FaultKind};
use std::time::Duration;
use vgpu::Settings;

/// Copies a VRAM page to another page, on a separate channel.
fn copies(driver: &mut Driver, id: u8, seed: u32) {
    let mut channel = driver.channel(id);
    driver.buffer(&channel, A, 1, seed);
    let to = driver.buffer(&channel, B, 1, seed + 1);
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
    driver.wait(&channel);
    assert!(driver.vram_holds(to, 1, seed));
}

#[test]
fn vram_has_no_chunk_before_first_use() {
    let rig = rig();
    let mut guest = rig.guest(0, VM_MIB, 4);
    assert_eq!(usage(&rig).2, 0);
    // Neither reads nor writes that contain only zeros allocate memory.
    let mut data = vec![1; MIB as usize];
    guest.vram_read(3 * MIB, &mut data);
    assert!(data.iter().all(|byte| *byte == 0));
    guest.vram_write(3 * MIB, &data);
    assert_eq!(usage(&rig).2, 0);
    guest.poke(3 * MIB, 7);
    assert_eq!((usage(&rig).2, guest.peek(3 * MIB)), (1, 7));
    guest.reconnect();
    assert_eq!((usage(&rig).2, guest.peek(3 * MIB)), (0, 0));
}

#[test]
fn chunks_are_zeroed_before_anybody_needs_them() {
    let rig = rig();
    let mut guest = rig.guest(0, VM_MIB, 4);
    let zeroed = || rig.host.lock().vram().chunks.zeroed();
    eventually("chunks that are zeroed", || zeroed().0 >= 8);
    // Only a few chunks are zeroed at first, because zeroing allocates host memory on the software card.
    let (before, left) = zeroed();
    assert!(before < 16 && left > 0, "{before} are zeroed, {left} are not");
    // More chunks are zeroed when the zeroed ones are in use.
    (0..6).for_each(|chunk| guest.poke(chunk * 2 * MIB, 7));
    eventually("more chunks that are zeroed", || zeroed().0 >= 8 || zeroed().1 == 0);
}

#[test]
fn memory_in_page_table_is_backed_when_gpu_uses_it() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 5);
    let before = usage(&rig).2;
    // Use an address far above the memory that the driver has used so far.
    let to = driver.guest.vram_bytes - PAGE;
    driver.map(channel.space, B, At::Vram(to), 1);
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
    driver.wait(&channel);
    assert_eq!(usage(&rig).2, before + 1);
    assert!(driver.vram_holds(to, 1, 5));
}

#[test]
fn overcommitted_guest_faults_on_missing_memory_and_continues() {
    let rig = Rig::new(64);
    let share = Share {
        vram_bytes: 48 * MIB,
        memory: vram::Limits::UNRESERVED,
        channels: 4,
        hang_limit: None,
        time: sched::VgpuParams::default(),
        ram: Default::default(),
    };
    let settings = Settings { share, shadow: Mode::default(), ..rig::settings(0, 0) };
    let first = rig.guest_with(0, &settings);
    let mut second = rig.guest_with(1, &settings);
    assert!(second.map_ram(0, MIB, true));
    let mut driver = Driver::new(second);
    copies(&mut driver, 1, 3);
    // Let the first VM take all remaining memory.
    let ones = vec![0xff; MIB as usize];
    for mib in 0..48 {
        first.vram_try_write(mib * MIB, &ones);
    }
    let mut channel = driver.channel(2);
    driver.buffer(&channel, A, 1, 9);
    let to = driver.guest.vram_bytes - PAGE;
    driver.map(channel.space, B, At::Vram(to), 1);
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
    assert_eq!(driver.wait_fault().va, B);
    // The second VM's own memory still works, and the VM can allocate memory that the first VM frees.
    copies(&mut driver, 3, 11);
    first.remove().unwrap();
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 12);
    driver.map(channel.space, B, At::Vram(to), 1);
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
    driver.wait(&channel);
    assert!(driver.vram_holds(to, 1, 12));
}

#[test]
fn channel_beyond_the_limit_faults_at_its_first_work() {
    let rig = rig();
    let mut guest = rig.guest(0, VM_MIB, 2);
    assert!(guest.map_ram(0, MIB, true));
    let mut driver = Driver::new(guest);
    let mut good = driver.channel(1);
    driver.channel(2);
    let mut refused = driver.channel(3);
    driver.submit(&mut refused, &[]);
    let fault = driver.wait_fault();
    assert_eq!((fault.unit, fault.instance), (unit::FIFO, refused.instance));
    assert_eq!(driver.guest.counter("channel_binds_refused"), 1);
    // The rejected channel faults once, and the other channels still work.
    driver.submit(&mut refused, &[]);
    driver.submit(&mut good, &[]);
    driver.wait(&good);
    assert_eq!(driver.faults, []);
}

#[test]
fn bus_mastering_off_keeps_the_gpu_from_ram_and_on_lets_it() {
    const RAM_VA: u64 = 0x500_0000;
    let rig = rig();
    let mut driver = driver(&rig, 0);
    driver.fill_ram(0x8000, 1, 2);
    for on in [true, false, true] {
        let command = if on { 6u16 } else { 2 };
        driver.guest.write(vmm_glue::RegionIndex::Config, 4, &command.to_le_bytes());
        let mut channel = driver.channel(1);
        driver.buffer(&channel, A, 1, 7);
        driver.map(channel.space, RAM_VA, At::Ram(0x8000), 1);
        driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, RAM_VA, PAGE as u32)].concat());
        if on {
            driver.wait(&channel);
            assert!(driver.ram_holds(0x8000, 1, 7));
            driver.fill_ram(0x8000, 1, 2);
        } else {
            // Poll instead of waiting for an interrupt, because an MSI is a memory write, which needs bus mastering.
            let mut tries = 0..1_000_000;
            while driver.guest.rd(pfifo::MMU_FAULT_ID::OFFSET) == 0 {
                assert!(tries.next().is_some());
                std::thread::yield_now();
            }
            driver.service();
            assert_eq!(driver.faults.remove(0).va, RAM_VA);
            assert!(driver.ram_holds(0x8000, 1, 2));
        }
        driver.unbind(&channel);
    }
}

#[test]
fn bus_mastering_toggle_writes_only_directory_entries() {
    const RAM_VA: u64 = 0x500_0000;
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 7);
    driver.map(channel.space, RAM_VA, At::Ram(0x8000), 128);
    let work = [object(M2MF), m2mf_copy(A, RAM_VA + 127 * PAGE, PAGE as u32)].concat();
    driver.submit(&mut channel, &work);
    driver.wait(&channel);
    assert!(driver.ram_holds(0x8000 + 127 * PAGE, 1, 7));
    let written = driver.guest.counter("shadow_entries_written");
    for command in [2u16, 6] {
        driver.guest.write(vmm_glue::RegionIndex::Config, 4, &command.to_le_bytes());
    }
    assert_eq!(driver.guest.counter("shadow_entries_written") - written, 2, "table entries were written");
    driver.fill_ram(0x8000 + 127 * PAGE, 1, 2);
    driver.submit(&mut channel, &work);
    driver.wait(&channel);
    assert!(driver.ram_holds(0x8000 + 127 * PAGE, 1, 7));
    // Without bus mastering, RAM that was mapped earlier must also be inaccessible.
    driver.guest.write(vmm_glue::RegionIndex::Config, 4, &2u16.to_le_bytes());
    driver.fill_ram(0x8000 + 127 * PAGE, 1, 2);
    driver.submit(&mut channel, &work);
    let mut tries = 0..1_000_000;
    while driver.guest.rd(pfifo::MMU_FAULT_ID::OFFSET) == 0 {
        assert!(tries.next().is_some());
        std::thread::yield_now();
    }
    assert!(driver.ram_holds(0x8000 + 127 * PAGE, 1, 2));
}

#[test]
fn work_that_never_ends_costs_only_its_channel() {
    let rig = rig();
    let limits = settings(VM_MIB, 4);
    let share = Share { hang_limit: Some(Duration::from_millis(200)), ..limits.share };
    let mut guest = rig.guest_with(0, &Settings { share, ..limits });
    assert!(guest.map_ram(0, MIB, true));
    let mut driver = Driver::new(guest);
    let mut other = driver.channel(2);
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 1);
    driver.buffer(&channel, B, 1, 2);
    let copy = [object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat();
    // This copy makes the card clear PGRAPH for the VM before the fault is injected.
    driver.submit(&mut channel, &copy);
    driver.wait(&channel);
    assert!(rig.card.inject(Fault { engine: EngineId::Graph, kind: FaultKind::Hang, after: 0, count: 1 }));
    driver.submit(&mut channel, &copy);
    // Wait until a register that drivers read shows the scheduler error. The channel is still on the engine.
    driver.guest.wait_msi();
    while !pfifo::INTR::SCHED_ERROR.is_set(driver.guest.rd(pfifo::INTR::OFFSET)) {
        driver.service();
        driver.guest.wait_msi();
    }
    let status = driver.guest.rd(pfifo::ENGINE_STATUS::at(0));
    assert!(pfifo::ENGINE_STATUS::SWITCHING.is_set(status));
    assert_eq!(pfifo::ENGINE_STATUS::CHANNEL.get(status), 1);
    assert_eq!(driver.guest.counter("hangs"), 1);
    driver.service();
    driver.submit(&mut other, &[]);
    driver.wait(&other);
    driver.unbind(&channel);
    copies(&mut driver, 1, 40);
}

#[test]
fn each_shadow_mode_shows_gpu_the_guest_mapping() {
    for (number, mode) in Mode::ALL.into_iter().enumerate() {
        let rig = rig();
        let mut guest = rig.guest_with(0, &Settings { shadow: mode, ..settings(VM_MIB, 4) });
        assert!(guest.map_ram(0, MIB, true));
        let mut driver = Driver::new(guest);
        let seed = 100 * number as u32;
        copies(&mut driver, 1, seed);
        let mut channel = driver.channel(2);
        for round in 0..5 {
            driver.buffer(&channel, A, 1, seed + round);
            let to = driver.buffer(&channel, B, 1, 7);
            driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
            driver.wait(&channel);
            assert!(driver.vram_holds(to, 1, seed + round), "{mode:?}, round {round}");
        }
        // The next work must not be able to access pages that were unmapped and flushed.
        driver.pte(channel.space, B, 0, 0);
        driver.flush();
        driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
        assert_eq!(driver.wait_fault().va, B, "{mode:?}");
    }
}
