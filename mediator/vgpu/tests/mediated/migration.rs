//! Tests VMs whose client migrates their state over vfio-user.

use super::handover::{copy, handover, slow};
use super::moving::{Traveller, card, use_up};
use super::oversubscribe::eventually;
use super::relocate::free_settings;
use super::{A, B, MIB};
use fastrand::Rng;
use nvspec::fifo::VirtualChannelId;
use rig::driver::{At, Channel, Driver};
use rig::{Guest, Rig};
use std::time::Duration;
use vmm_glue::MigrationError;
use vram::TenantId;

/// Number of pages per copy.
const PAGES: u64 = 20;
/// Number of bytes that a client reads or writes per request.
const PART: usize = 70_001;

/// Creates another VM, whose client lends RAM with the same contents as that of `of`.
fn next(rig: &Rig, vm: u32, of: &Guest) -> Guest {
    let mut guest = rig.guest_with(vm, &free_settings(16));
    assert!(guest.map_ram(0, MIB, true));
    let mut ram = vec![0; MIB as usize];
    of.ram_read(0, &mut ram);
    guest.ram_write(0, &ram);
    guest
}

/// Stops a VM and returns its complete state.
pub(crate) fn state_of(guest: &mut Guest) -> Vec<u8> {
    let device = guest.migration();
    device.stop().unwrap();
    device.begin_saving().unwrap();
    let mut all = Vec::new();
    let mut part = vec![0; PART];
    loop {
        let len = device.save(&mut part).unwrap();
        all.extend_from_slice(&part[..len]);
        if len < PART {
            break;
        }
    }
    device.end_saving();
    all
}

/// Loads a state into a VM, which stays stopped.
pub(crate) fn take_in(guest: &mut Guest, state: &[u8]) -> Result<(), MigrationError> {
    let device = guest.migration();
    device.stop()?;
    device.begin_loading()?;
    state.chunks(PART).try_for_each(|part| device.load(part))?;
    device.end_loading()
}

#[test]
fn vm_in_mid_work_continues_on_another_device() {
    let cards = [card(64), card(64)];
    let mut stay = Traveller::new(&cards[0], 0);
    let mut one = Traveller::new(&cards[0], 1);
    for (seed, to, vm) in [(10, 0, 100), (20, 1, 101), (30, 1, 102), (40, 0, 103)] {
        stay.begin(seed + 1);
        one.begin(seed);
        let state = state_of(&mut one.driver.guest);
        let mut there = next(&cards[to], vm, &one.driver.guest);
        take_in(&mut there, &state).unwrap();
        // Other requests must not move the VM before its VMM starts it.
        assert!(there.check_movable().unwrap_err().to_string().contains("its VMM has stopped it"));
        there.migration().start();
        there.check_movable().unwrap();
        let before = std::mem::replace(&mut one.driver.guest, there);
        before.remove().unwrap();
        one.check();
        stay.check();
    }
}

#[test]
fn a_vm_that_has_worked_becomes_another_and_keeps_nothing() {
    let card = card(64);
    let [mut one, mut was] = [1, 2].map(|vm| Traveller::new(&card, vm));
    was.begin(8);
    was.check();
    let mut third = was.driver.channel(3);
    works(&mut was.driver, &mut third, 50);
    use_up(&was.driver);
    one.begin(3);
    let state = state_of(&mut one.driver.guest);
    let mut ram = vec![0; MIB as usize];
    one.driver.guest.ram_read(0, &mut ram);
    let mut there = was.driver.guest;
    there.ram_write(0, &ram);
    take_in(&mut there, &state).unwrap();
    there.migration().start();
    let before = std::mem::replace(&mut one.driver.guest, there);
    before.remove().unwrap();
    one.check();
    // The VM's previous state must no longer exist.
    let kept = card.host.lock().channels().physical(TenantId(2), VirtualChannelId(third.id));
    assert_eq!(kept, None, "a channel of the previous state");
    let mut bytes = [1; 64];
    (6..16).for_each(|mib| {
        one.driver.guest.vram_read(mib * MIB, &mut bytes);
        assert_eq!(bytes, [0; 64], "memory of the previous state, at {mib} MiB");
    });
}

#[test]
fn stopped_device_does_nothing_and_resumes_unchanged() {
    // The work takes some time, so it is not complete when the VM is stopped.
    let mut handover = handover(0);
    handover.config.time = Some(slow());
    let card = handover.rig();
    let mut one = Traveller::new(&card, 1);
    let mut stay = Traveller::new(&card, 2);
    one.begin(3);
    one.driver.guest.migration().stop().unwrap();
    // Work whose doorbells were rung must wait, while other VMs' channels continue.
    let submissions = one.driver.guest.counter("submissions");
    stay.begin(4);
    stay.check();
    assert!(one.driver.guest.check_movable().is_err());
    // Quiescing the card without a handover must not resume the VM.
    let done = || {
        let usage = card.host.lock().scheduler_usage(1);
        usage.time.tenants[&TenantId(1)].engines.values().map(|engine| engine.account.completed).sum::<u64>()
    };
    let (done_before, mut before) = (done(), vec![0; MIB as usize]);
    one.driver.guest.ram_read(0, &mut before);
    drop(card.host.stand_still(Duration::from_secs(60)).unwrap());
    stay.begin(5);
    stay.check();
    let mut after = vec![0; MIB as usize];
    one.driver.guest.ram_read(0, &mut after);
    assert!(before == after && one.driver.guest.counter("submissions") == submissions);
    assert_eq!(done(), done_before, "writes in flight to the card stay on the card");
    one.driver.guest.migration().start();
    one.check();
    assert!(done() > done_before, "the VM's work resumes");
    // The state with work in progress must differ from the state after the work has completed.
    one.begin(6);
    let state = state_of(&mut one.driver.guest);
    let again = {
        one.driver.guest.migration().start();
        one.check();
        state_of(&mut one.driver.guest)
    };
    assert_ne!(state, again);
    one.driver.guest.migration().start();
}

#[test]
fn corrupt_state_fails_device_until_reset() {
    let card = card(64);
    let mut stay = Traveller::new(&card, 0);
    let mut one = Traveller::new(&card, 1);
    one.begin(3);
    let state = state_of(&mut one.driver.guest);
    one.driver.guest.migration().start();
    one.check();
    let mut victim = next(&card, 2, &one.driver.guest);
    let mut dice = Rng::with_seed(7);
    for round in 0..60u32 {
        let mut bytes = state.clone();
        match round % 4 {
            0 => bytes.truncate(dice.usize(..state.len())),
            1 => bytes[dice.usize(..state.len())] ^= 1 << dice.u64(..8),
            2 => bytes.extend([0; 9]),
            _ => {
                let half = dice.usize(..state.len());
                bytes[half..].reverse();
            }
        }
        if bytes == state {
            continue;
        }
        if round % 20 == 0 {
            stay.begin(round);
        }
        assert!(take_in(&mut victim, &bytes).is_err(), "round {round}");
        victim.reset();
        victim.check_movable().unwrap();
    }
    stay.check();
    let placed = || card.usage().0.vms.get(&TenantId(2)).map_or(0, |vm| vm.placed);
    eventually("no resources of the incomplete VM are left", || placed() == 0);
    // After a reset, the device must work normally.
    let mut driver = Driver::new(victim);
    let mut channel: Channel = driver.channel(1);
    works(&mut driver, &mut channel, 9);
    // Disconnecting the client of a VM that a migration keeps stopped must have the same effect as a reset.
    let mut victim = driver.guest;
    victim.migration().stop().unwrap();
    victim.migration().begin_loading().unwrap();
    victim.migration().load(&state[..state.len() / 2]).unwrap();
    victim.reconnect();
    assert!(victim.map_ram(0, MIB, true));
    let mut driver = Driver::new(victim);
    let mut channel = driver.channel(1);
    works(&mut driver, &mut channel, 10);
    one.begin(11);
    one.check();
}

/// Copies pages, and verifies the copies.
fn works(driver: &mut Driver, channel: &mut Channel, seed: u32) {
    driver.buffer(channel, A, PAGES, seed);
    let to = driver.buffer(channel, B, PAGES, 7);
    copy(driver, channel, 0);
    driver.wait(channel);
    assert!(driver.vram_holds(to, PAGES, seed));
}

#[test]
fn ram_writes_of_card_are_reported_until_device_is_stopped() {
    let card = card(0);
    let mut guest = card.guest_with(1, &free_settings(16));
    assert!(guest.map_ram(0, 16 * MIB, true));
    let mut driver = Driver::new(guest);
    let mut channel = driver.channel(1);
    let written = |driver: &mut Driver, mib: std::ops::Range<u64>| {
        let mut all = Vec::new();
        driver.guest.migration().take_written(mib.start * MIB..mib.end * MIB, &mut |at| all.push(at.start / MIB));
        all
    };
    driver.guest.migration().log_writes(true);
    assert!(driver.guest.check_movable().unwrap_err().to_string().contains("logs writes"));
    assert_eq!(written(&mut driver, 0..16), [0u64; 0], "no table refers to RAM");
    driver.buffer(&channel, A, PAGES, 5);
    driver.map(channel.space, B, At::Ram(6 * MIB), PAGES);
    driver.flush();
    copy(&mut driver, &mut channel, 0);
    driver.wait(&channel);
    assert_eq!(written(&mut driver, 0..16), [6]);
    assert_eq!(written(&mut driver, 8..16), [0u64; 0]);
    // While the VM has work, memory that its tables map may be written again at any time.
    assert_eq!(written(&mut driver, 0..16), [6]);
    // The log must include memory that was mapped in the meantime.
    driver.map(channel.space, B, At::Ram(12 * MIB), PAGES);
    driver.flush();
    driver.map(channel.space, B, At::Ram(2 * MIB), PAGES);
    driver.flush();
    assert_eq!(written(&mut driver, 0..16), [2, 6, 12]);
    assert_eq!(written(&mut driver, 0..16), [2]);
    driver.guest.migration().stop().unwrap();
    assert_eq!(written(&mut driver, 0..1), [0u64; 0]);
    assert_eq!(written(&mut driver, 0..3), [2], "a partial query does not clear the log");
    assert_eq!(written(&mut driver, 0..16), [2]);
    assert_eq!(written(&mut driver, 0..16), [0u64; 0], "the VM has no work");
    driver.guest.migration().start();
    assert_eq!(written(&mut driver, 0..16), [2]);
    driver.guest.migration().log_writes(false);
    driver.guest.check_movable().unwrap();
}
