//! Tests saving VMs with work in progress as byte streams, and restoring them.

use super::moving::{Traveller, card, use_up};
use super::oversubscribe::eventually;
use super::relocate::{free_settings, move_all, work};
use super::{MIB, usage};
use fastrand::Rng;
use nvspec::regs::ptimer;
use rig::driver::Driver;
use rig::{Guest, Rig};
use std::sync::atomic::{AtomicBool, Ordering};
use vgpu::Settings;
use vram::To;

/// Returns the contents of the first MiB of guest RAM.
pub(crate) fn ram_of(guest: &Guest) -> Vec<u8> {
    let mut all = vec![0; MIB as usize];
    guest.ram_read(0, &mut all);
    all
}

/// Checks that a request fails with an error message that contains `words`.
fn refused<T>(what: Result<T, vm_device::DeviceError>, words: &str) {
    let Err(error) = what else { panic!("the request was not rejected: {words}") };
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn vm_saved_in_mid_work_resumes_on_any_card() {
    let cards = [card(64), card(64)];
    let mut stay = Traveller::new(&cards[0], 0);
    let mut one = Traveller::new(&cards[0], 1);
    for (seed, to, vm) in [(10, 0, 100), (20, 1, 101), (30, 1, 102), (40, 0, 103)] {
        stay.begin(seed + 1);
        one.begin(seed);
        if seed == 30 {
            move_all(&cards[1], one.driver.guest.vm().id().0, To::Host);
        }
        let saved = one.driver.guest.save().unwrap();
        one.driver.guest.restore(&cards[to], vm, &saved).unwrap();
        one.check();
        stay.check();
    }
}

#[test]
fn saving_changes_nothing_and_restore_brings_back_saved_state() {
    let cards = [card(64), card(64)];
    let mut one = Traveller::new(&cards[0], 1);
    use_up(&one.driver);
    one.begin(5);
    let saved = one.driver.guest.save().unwrap();
    let ram = ram_of(&one.driver.guest);
    // The VM continues, and the restore undoes its later changes.
    one.check();
    let places = one.places;
    places.into_iter().for_each(|place| one.driver.guest.vram_write(place, &[0; 4096]));
    one.driver.guest.vram_write(9 * MIB, &[0; 64]);
    // The client must restore its own memory.
    one.driver.guest.ram_write(0, &ram);
    one.driver.guest.restore(&cards[1], 9, &saved).unwrap();
    one.check();
    let mut bytes = [0; 64];
    one.driver.guest.vram_read(9 * MIB, &mut bytes);
    assert_eq!(bytes, [0x5a; 64]);
    eventually("the VM has left the other card", || cards[0].usage().0.vms.is_empty());
}

#[test]
fn unused_memory_is_not_in_saved_file() {
    let cards = [card(64)];
    let mut guest = cards[0].guest_with(1, &free_settings(16));
    let empty = guest.save().unwrap().len();
    assert!(empty < 64 << 10, "{empty}");
    guest.vram_write(5 * MIB, b"here");
    let saved = guest.save().unwrap();
    assert!(saved.len() - empty < 300 << 10, "{} and then {}", empty, saved.len());
    guest.vram_write(5 * MIB, b"gone");
    guest.vram_write(9 * MIB, b"more");
    assert_eq!(guest.restore(&cards[0], 2, &saved).unwrap(), 256 << 10);
    let (mut here, mut more) = ([0; 4], [1; 4]);
    guest.vram_read(5 * MIB, &mut here);
    guest.vram_read(9 * MIB, &mut more);
    assert_eq!((&here, &more), (b"here", &[0; 4]));
}

/// Creates a VM with work in progress and saves it.
fn sample(rig: &Rig) -> (Traveller, Vec<u8>) {
    let mut one = Traveller::new(rig, 1);
    one.begin(3);
    let saved = one.driver.guest.save().unwrap();
    (one, saved)
}

#[test]
fn corrupt_saved_file_is_rejected_and_changes_nothing() {
    let card = card(64);
    let (mut one, saved) = sample(&card);
    let (mut other, other_saved) = {
        let mut other = Traveller::new(&card, 2);
        other.begin(77);
        let saved = other.driver.guest.save().unwrap();
        (other, saved)
    };
    let before = usage(&card);
    let mut vm = 100;
    let mut refuse = |one: &mut Traveller, bytes: &[u8], words: &str| {
        vm += 1;
        refused(one.driver.guest.restore(&card, vm, bytes), words);
    };
    for length in [0, 7, 19, 500, saved.len() / 2, saved.len() - 1] {
        refuse(&mut one, &saved[..length], "truncated");
    }
    for at in (0..20).chain((20..saved.len()).step_by(saved.len() / 40)) {
        let mut bytes = saved.clone();
        bytes[at] ^= 0x10;
        refuse(&mut one, &bytes, "");
    }
    let half = saved.len() / 2;
    refuse(&mut one, &[&saved[..half], &other_saved[half.min(other_saved.len())..]].concat(), "");
    refuse(&mut one, &[&saved[..], b"x"].concat(), "bytes follow");
    refuse(&mut one, b"#!/bin/sh\n", "first bytes differ");
    one.check();
    other.check();
    eventually("no resources of the incomplete VM are left", || usage(&card).0 == before.0);
}

#[test]
fn restore_into_different_vm_or_client_is_rejected_with_cause() {
    let card = card(64);
    let (mut one, saved) = sample(&card);
    let mut larger = card.guest_with(2, &free_settings(32));
    refused(larger.restore(&card, 102, &saved), "`vram_mib` = 16, but this VM has 32");
    let paravirtual = vgpu::PvSettings { table_bytes: 4 << 20, segment_bytes: 0, group: None };
    let knowing = Settings { paravirtual: Some(paravirtual), ..free_settings(16) };
    let mut knowing = card.guest_with(3, &knowing);
    refused(knowing.restore(&card, 103, &saved), "no paravirtual interface");
    let mut other = card.guest_with(4, &free_settings(16));
    refused(other.restore(&card, 104, &saved), "the client no longer lends 0x100000 bytes of RAM at 0x0");
    assert!(other.map_ram(0, MIB, true) && other.map_ram(MIB, MIB, true));
    refused(other.restore(&card, 105, &saved), "the client now lends 0x100000 bytes of RAM at 0x100000");
    assert!(other.unmap_ram(MIB).is_some());
    other.restore(&card, 106, &saved).unwrap();
    one.check();
}

#[test]
fn guest_time_does_not_go_back_after_restore() {
    let card = card(0);
    let mut guest = card.guest_with(1, &free_settings(16));
    let time = |guest: &mut Guest| {
        u64::from(guest.rd(ptimer::TIME_1::OFFSET)) << 32 | u64::from(guest.rd(ptimer::TIME_0::OFFSET))
    };
    let last = time(&mut guest);
    let saved = guest.save().unwrap();
    guest.restore(&card, 7, &saved).unwrap();
    let now = time(&mut guest);
    assert!(now >= last && now - last < 60_000_000_000, "{last} and then {now}");
}

#[test]
fn vm_that_left_card_leaves_no_memory_on_it() {
    let cards = [card(64), card(64)];
    let before = cards.each_ref().map(usage);
    let mut driver = Traveller::new(&cards[0], 1).driver;
    work(&mut driver, 20, &mut Rng::with_seed(1));
    let saved = driver.guest.save().unwrap();
    driver.guest.restore(&cards[1], 5, &saved).unwrap();
    eventually("the VM has left", || usage(&cards[0]) == before[0]);
    work(&mut driver, 20, &mut Rng::with_seed(2));
    driver.guest.remove().unwrap();
    eventually("the VM is gone", || usage(&cards[1]) == before[1]);
}

/// Runs two threads that overwrite the first MiB of guest RAM with random words as fast as possible while `act` runs.
fn attacked(driver: &mut Driver, mut act: impl FnMut(&mut Driver)) {
    let over = AtomicBool::new(false);
    let file = driver.guest.ram_file(0);
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (over, file) = (&over, file.try_clone().unwrap());
            scope.spawn(move || {
                let file = std::fs::File::from(file);
                let mut random = Rng::with_seed(thread);
                while !over.load(Ordering::Relaxed) {
                    let at = random.u64(..MIB / 8) * 8;
                    let _ = std::os::unix::fs::FileExt::write_all_at(&file, &random.u64(..).to_le_bytes(), at);
                }
            });
        }
        act(driver);
        over.store(true, Ordering::Relaxed);
    });
}

/// Overwrites random words of VRAM (rings, page tables, USERD) as the guest's CPU does, until `over` is set. Each write
/// holds the vGPU's own lock.
fn rogue(vm: &vgpu::MediatedVm, over: &AtomicBool, seed: u64) {
    let mut random = Rng::with_seed(seed);
    while !over.load(Ordering::Relaxed) {
        for _ in 0..50 {
            let at = random.u64(..16 * MIB / 4) * 4;
            let word = if random.bool() { random.u32(..) } else { random.u32(..16) };
            let _ = vm.cpu_write(nvspec::addr::GuestVramAddr(at), &word.to_le_bytes());
        }
        std::thread::yield_now();
    }
}

#[test]
fn hostile_guest_during_save_and_move_harms_only_itself() {
    let cards = [card(64), card(64)];
    let mut stay: Vec<Traveller> = cards.iter().map(|card| Traveller::new(card, 0)).collect();
    let mut hostile = Traveller::new(&cards[0], 1);
    let (mut at, mut vm) = (0, 200);
    for round in 0..12 {
        stay.iter_mut().zip(1..).for_each(|(one, of)| one.begin(100 * round + of));
        hostile.begin(100 * round + 50);
        let over = AtomicBool::new(false);
        let shared = hostile.driver.guest.vm();
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (shared, over) = (&shared, &over);
                scope.spawn(move || rogue(shared, over, u64::from(round * 2 + thread)));
            }
            attacked(&mut hostile.driver, |driver| {
                for _ in 0..3 {
                    vm += 1;
                    let to = 1 - at;
                    // Any result is acceptable, because it affects only the VM itself.
                    if round % 2 == 0 {
                        if driver.guest.move_to(&cards[to], vm, vm % 2 == 0).is_ok() {
                            at = to;
                        }
                    } else if let Ok(saved) = driver.guest.save()
                        && driver.guest.restore(&cards[to], vm, &saved).is_ok()
                    {
                        at = to;
                    }
                }
            });
            over.store(true, Ordering::Relaxed);
        });
        stay.iter_mut().for_each(Traveller::check);
        // The VM's channels may have ended, but a reset must make the VM usable again.
        hostile.driver.guest.reset();
        hostile = {
            let Traveller { driver, .. } = hostile;
            driver.guest.remove().unwrap();
            vm += 1;
            at = (round as usize + 1) % 2;
            Traveller::new(&cards[at], vm)
        };
    }
    hostile.begin(7);
    hostile.check();
    assert!(cards.iter().all(|card| card.host.failure().is_none()));
}
