//! Tests the mediator's own memory needs on a card that is full of guest memory. The mediator must find memory or wait.

use super::oversubscribe::{driver_with, fast, rig_with};
use super::{A, B, MIB};
use rig::driver::{At, Channel, Driver, M2MF, PAGE, m2mf_copy, object};
use vram::{Limits, OnFull, Step, TenantId, To};

/// Number of VMs that bind channels on the full card.
const VMS: u32 = 10;
/// Number of address spaces per VM.
const SPACES: u8 = 8;

/// Fills two buffers, and submits a copy from one to the other without waiting. Returns the target's address.
fn begin_copy(driver: &mut Driver, channel: &mut Channel, seed: u32) -> u64 {
    driver.buffer(channel, A, 2, seed);
    let to = driver.buffer(channel, B, 2, seed + 1);
    driver.submit(channel, &[object(M2MF), m2mf_copy(A, B, 2 * PAGE as u32)].concat());
    to
}

#[test]
fn vms_binding_on_full_card_with_stopped_mover_do_not_fault() {
    let rig = rig_with(64, 256, fast());
    let greedy = driver_with(&rig, 0, 96, Limits::default());
    let mut others: Vec<Driver> = (1..=VMS).map(|vm| driver_with(&rig, vm, 16, Limits::default())).collect();
    let stopped = rig.host.hold_moves();
    let ones = vec![0xff; MIB as usize];
    for mib in 4..96 {
        greedy.guest.vram_write(mib * MIB, &ones);
    }
    let mut begun = Vec::new();
    for (vm, driver) in (1..).zip(&mut others) {
        for id in 1..=SPACES {
            let seed = 100 * vm + u32::from(id);
            let mut channel = driver.channel(id);
            let to = begin_copy(driver, &mut channel, seed);
            begun.push((vm, channel, to, seed));
        }
    }
    drop(stopped);
    for (vm, channel, to, seed) in begun {
        let driver = &mut others[vm as usize - 1];
        driver.wait(&channel);
        assert!(driver.vram_holds(to, 2, seed), "VM {vm}, channel {}", channel.id);
    }
    let waits: u64 = others.iter().map(|driver| driver.guest.counter("memory_waits")).sum();
    assert!(waits > 0, "the mediator's own memory is not enough for so many VMs");
    for driver in &others {
        let counts = ["faults", "channel_binds_refused", "memory_denied"].map(|name| driver.guest.counter(name));
        assert_eq!((counts, driver.faults.len()), ([0; 3], 0));
    }
}

#[test]
fn waiting_work_is_not_lost_when_other_work_of_vm_runs() {
    let rig = rig_with(48, 0, fast());
    let queue = Limits { on_full: OnFull::Queue, ..Limits::default() };
    let [first, mut second] = [0, 1].map(|vm| driver_with(&rig, vm, 44, queue));
    let mut goes_on = second.channel(1);
    let mut waits = second.channel(2);
    begin_copy(&mut second, &mut goes_on, 1);
    second.wait(&goes_on);
    second.buffer(&waits, A, 2, 5);
    let ones = vec![0xff; MIB as usize];
    for mib in 4..44 {
        first.guest.vram_try_write(mib * MIB, &ones);
    }
    let to = 40 * MIB;
    second.map(waits.space, B, At::Vram(to), 2);
    let copy = [object(M2MF), m2mf_copy(A, B, 2 * PAGE as u32)].concat();
    second.submit(&mut waits, &copy);
    assert_eq!(second.guest.counter("memory_waits"), 1);
    second.submit(&mut goes_on, &copy);
    second.wait(&goes_on);
    first.guest.remove().unwrap();
    second.wait(&waits);
    assert!(second.vram_holds(to, 2, 5) && second.faults.is_empty());
}

#[test]
fn memory_of_a_removed_vm_is_not_copied() {
    let rig = rig_with(48, 64, fast());
    let driver = driver_with(&rig, 0, 32, Limits::default());
    driver.guest.vram_write(8 * MIB, &[1; 16]);
    let steps = [Step { vm: TenantId(0), index: 4, to: To::Host }];
    drop(driver);
    let done = rig.host.relocate(TenantId(0), &steps);
    assert_eq!((done.moved, done.stayed, done.copied_ns), (0, 1, 0));
    // Requests of the removed VM no longer count, so other VMs receive card memory or host memory.
    assert!(rig.host.lock().vram().chunks.is_frozen(TenantId(0)));
    let mut other = driver_with(&rig, 1, 64, Limits::default());
    let mut channel = other.channel(1);
    for mib in (4..60).step_by(2) {
        other.guest.vram_write(mib * MIB, &[2; 16]);
    }
    let to = begin_copy(&mut other, &mut channel, 3);
    other.wait(&channel);
    assert!(other.vram_holds(to, 2, 3) && !rig.in_host(0, 8 * MIB));
}
