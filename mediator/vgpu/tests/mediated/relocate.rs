//! Tests relocations of guest memory between the card and host memory while guests use the memory.

use super::oversubscribe::eventually;
use super::{A, B, MIB, usage};
use card_manager::{Division, Relocated, Sharing};
use fastrand::Rng;
use rig::driver::{At, CE0, CE1, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object, pattern};
use rig::{Rig, settings, sharing};
use simgpu::Config;
use std::sync::atomic::{AtomicBool, Ordering};
use vgpu::Settings;
use vram::{Limits, Step, TenantId, To};

/// Size of the card's VRAM in MiB.
const CARD_MIB: u32 = 64;
/// VRAM size of a VM in MiB. All of a VM's VRAM fits on the card, and also in host memory.
const VM_MIB: u64 = 32;

/// Returns settings that disable automatic returns and exchanges between VMs, so that slow tests do not cause further
/// moves.
pub(super) fn still() -> Division {
    let mut division = Division::default();
    division.balance.low_water = u32::MAX;
    division.balance.return_interval_ns = u64::MAX;
    division
}

pub(super) fn rig_of(chunk_bytes: u64, card_mib: u32, host_mib: u64) -> Rig {
    let sharing = Sharing { chunk_bytes, host_bytes: host_mib * MIB, division: still(), ..sharing() };
    Rig::made(&Config { vram_mib: card_mib, ..Config::default() }, &sharing, |card| card)
}

pub(super) fn free_settings(vram_mib: u64) -> Settings {
    let mut settings = settings(vram_mib, 8);
    settings.share.memory = Limits::default();
    settings
}

pub(super) fn driver_of(rig: &Rig, vm: u32, vram_mib: u64) -> Driver {
    let mut guest = rig.guest_with(vm, &free_settings(vram_mib));
    assert!(guest.map_ram(0, MIB, true));
    Driver::new(guest)
}

/// Moves all chunks of a VM to `to`.
pub(super) fn move_all(rig: &Rig, vm: u32, to: To) -> Relocated {
    let chunks = {
        let state = rig.host.lock();
        let bytes = state.vram().chunks.vm_bytes(TenantId(vm)).unwrap();
        (bytes / state.vram().chunks.chunk_bytes()) as u32
    };
    let steps: Vec<_> = (0..chunks).map(|index| Step { vm: TenantId(vm), index, to }).collect();
    rig.host.relocate(TenantId(vm), &steps)
}

pub(super) fn in_host(rig: &Rig) -> u32 {
    rig.usage().0.host.used
}

/// Waits until no move is in progress, and returns the number of host slots in use. A move occupies its destination
/// until it completes, even if its VM is removed in the meantime.
pub(super) fn in_host_at_rest(rig: &Rig) -> u32 {
    eventually("all moves have ended", || rig.host.lock().vram().chunks.moves().count() == 0);
    in_host(rig)
}

fn copy(driver: &mut Driver, channel: &mut Channel, round: u32, pages: u32) {
    let words = match round % 3 {
        0 => [object(M2MF), m2mf_copy(A, B, pages * PAGE as u32)].concat(),
        1 => [object(CE0), ce_copy(A, B, pages)].concat(),
        _ => [object(CE1), ce_copy(A, B, pages)].concat(),
    };
    driver.submit(channel, &words);
}

#[test]
fn evicted_and_returned_memory_is_found_by_gpu_and_cpu() {
    let rig = rig_of(2 * MIB, CARD_MIB, 64);
    let mut driver = driver_of(&rig, 0, VM_MIB);
    let mut channel = driver.channel(1);
    let (from, to) = (driver.buffer(&channel, A, 20, 1), driver.buffer(&channel, B, 20, 2));
    for round in 0..6 {
        let there = if round % 2 == 0 { To::Host } else { To::Card };
        let moved = move_all(&rig, 0, there);
        assert!(moved.moved > 0 && moved.bytes == u64::from(moved.moved) * 2 * MIB, "{moved:?}");
        assert_eq!(in_host(&rig) > 0, round % 2 == 0);
        // Page tables, rings and the instance block have also moved.
        assert!(driver.vram_holds(from, 20, 1 + round));
        copy(&mut driver, &mut channel, round, 20);
        driver.wait(&channel);
        assert!(driver.vram_holds(to, 20, 1 + round), "round {round}");
        let data: Vec<u8> = (0..20).flat_map(|page| pattern(2 + round, page)).collect();
        driver.guest.vram_write(from, &data);
    }
    assert_eq!(driver.guest.counter("faults"), 0);
    let (before, _) = (usage(&rig), move_all(&rig, 0, To::Host));
    driver.guest.remove().unwrap();
    assert_eq!((in_host_at_rest(&rig), usage(&rig).2), (0, 0), "{before:?}");
}

#[test]
fn a_place_that_another_scrubs_meanwhile_is_taken() {
    // There is only enough host memory for one VM, so evicted chunks wait until host slots have been scrubbed.
    let rig = rig_of(2 * MIB, CARD_MIB, 16);
    let mut driver = driver_of(&rig, 0, 16);
    let channel = driver.channel(1);
    driver.buffer(&channel, A, 3000, 1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                rig.host.scrub();
            }
        });
        let moved = |round| move_all(&rig, 0, if round % 2 == 0 { To::Host } else { To::Card }).moved;
        let moved: Vec<u32> = (0..200).map(moved).collect();
        stop.store(true, Ordering::Release);
        assert!(moved[0] > 1 && moved.iter().all(|chunks| *chunks == moved[0]), "{moved:?}");
    });
}

/// Runs work in a VM while its memory moves: copies pages between buffers, and compares each copy with the expected
/// data.
pub(super) fn work(driver: &mut Driver, rounds: u32, dice: &mut Rng) {
    work_until(driver, |round| round >= rounds, dice);
}

/// Same as [`work`], but continues until `enough` returns true for the number of rounds.
pub(super) fn work_until(driver: &mut Driver, enough: impl Fn(u32) -> bool, dice: &mut Rng) {
    const BUFFERS: u64 = 6;
    const PAGES: u64 = 40;
    let mut channels = [driver.channel(1), driver.channel(2)];
    let va = |buffer: u64| A + buffer * 0x10_0000;
    // Seed of the data in each buffer.
    let mut seeds: Vec<u32> = (0..BUFFERS).map(|buffer| 100 + buffer as u32).collect();
    let places: Vec<u64> = (0..BUFFERS)
        .map(|buffer| {
            let at = driver.buffer(&channels[0], va(buffer), PAGES, seeds[buffer as usize]);
            driver.map(channels[1].space, va(buffer), At::Vram(at), PAGES);
            at
        })
        .collect();
    for round in (0..).take_while(|round| !enough(*round)) {
        let (from, to) = (dice.usize(..BUFFERS as usize), dice.usize(..BUFFERS as usize));
        match dice.u64(..4) {
            0 => {
                // Let the CPU fill the target buffer.
                seeds[to] = round + 1000;
                for page in 0..PAGES {
                    driver.guest.vram_write(places[to] + page * PAGE, &pattern(seeds[to], page));
                }
            }
            1 => assert!(driver.vram_holds(places[to], PAGES, seeds[to]), "buffer {to} in round {round}"),
            engine => {
                if from == to {
                    continue;
                }
                let channel = &mut channels[dice.usize(..2)];
                let (from_va, to_va) = (va(from as u64), va(to as u64));
                let words = if engine == 2 {
                    [object(M2MF), m2mf_copy(from_va, to_va, (PAGES * PAGE) as u32)].concat()
                } else {
                    [object(CE0), ce_copy(from_va, to_va, PAGES as u32)].concat()
                };
                driver.submit(channel, &words);
                driver.wait(channel);
                seeds[to] = seeds[from];
            }
        }
    }
    for (buffer, seed) in seeds.iter().enumerate() {
        assert!(driver.vram_holds(places[buffer], PAGES, *seed), "buffer {buffer} at the end");
    }
    assert_eq!((driver.faults.len(), driver.guest.counter("faults")), (0, 0));
}

/// Moves VMs' chunks at random while the VMs work, until all VMs are done.
fn chaos(chunk_bytes: u64, host_mib: u64, seed: u64) {
    let rig = rig_of(chunk_bytes, 96, host_mib);
    let vms = 3u32;
    let drivers: Vec<Driver> = (0..vms).map(|vm| driver_of(&rig, vm, 16)).collect();
    let working = std::sync::atomic::AtomicU32::new(vms);
    let mut moved = 0;
    std::thread::scope(|scope| {
        for (vm, mut driver) in (0u64..).zip(drivers) {
            let working = &working;
            scope.spawn(move || {
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    work(&mut driver, 60, &mut Rng::with_seed(seed ^ vm << 32));
                    driver.guest.remove().expect("the VM can be removed");
                }));
                working.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                done.unwrap_or_else(|error| std::panic::resume_unwind(error));
            });
        }
        let mut dice = Rng::with_seed(seed);
        while working.load(std::sync::atomic::Ordering::SeqCst) != 0 {
            let vm = TenantId(dice.u32(..vms));
            let count = 16 * MIB / chunk_bytes;
            let to = if dice.bool() { To::Host } else { To::Card };
            let first = dice.u64(..count) as u32;
            let steps: Vec<_> = (first..(first + 4).min(count as u32)).map(|index| Step { vm, index, to }).collect();
            moved += rig.host.relocate(vm, &steps).moved;
        }
    });
    assert!(moved > 0, "something moved");
    let left = rig.usage().0;
    assert_eq!((left.host.used, left.vms.len()), (0, 0));
}

#[test]
fn no_byte_is_lost_while_chunks_of_two_mebibytes_move_at_random() {
    chaos(2 * MIB, 64, 1);
}

#[test]
fn no_byte_is_lost_while_the_smallest_chunks_move_at_random() {
    chaos(128 << 10, 64, 2);
}

#[test]
fn no_byte_is_lost_while_host_memory_runs_out() {
    chaos(2 * MIB, 6, 3);
}

#[test]
fn work_that_is_queued_while_memory_moves_is_done_in_full() {
    let rig = rig_of(2 * MIB, CARD_MIB, 64);
    let mut driver = driver_of(&rig, 0, VM_MIB);
    let mut channel = driver.channel(1);
    const BUFFERS: u64 = 8;
    let va = |buffer: u64| A + buffer * 0x10_0000;
    let places: Vec<u64> = (0..BUFFERS).map(|buffer| driver.buffer(&channel, va(buffer), 40, buffer as u32)).collect();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut to = To::Host;
            while !done.load(std::sync::atomic::Ordering::SeqCst) {
                move_all(&rig, 0, to);
                to = if to == To::Host { To::Card } else { To::Host };
            }
        });
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..60u32 {
                // Copy each buffer to the next one in separate submissions, and wait only at the end.
                for buffer in (1..BUFFERS).rev() {
                    let (from, to) = (va(buffer - 1), va(buffer));
                    let words = match (round + buffer as u32) % 3 {
                        0 => [object(M2MF), m2mf_copy(from, to, 40 * PAGE as u32)].concat(),
                        1 => [object(CE0), ce_copy(from, to, 40)].concat(),
                        _ => [object(CE1), ce_copy(from, to, 40)].concat(),
                    };
                    driver.submit(&mut channel, &words);
                }
                driver.wait(&channel);
                assert_eq!(driver.faults, []);
                for page in 0..40 {
                    driver.guest.vram_write(places[0] + page * PAGE, &pattern(100 + round, page));
                }
            }
        }));
        done.store(true, std::sync::atomic::Ordering::SeqCst);
        worked.unwrap_or_else(|error| std::panic::resume_unwind(error));
    });
}

#[test]
fn reused_host_memory_holds_no_data_of_previous_vm() {
    let rig = rig_of(2 * MIB, CARD_MIB, 64);
    let first = driver_of(&rig, 0, VM_MIB);
    for mib in 4..VM_MIB {
        first.guest.vram_write(mib * MIB, &vec![0xee; MIB as usize]);
    }
    assert!(move_all(&rig, 0, To::Host).moved > 10 && move_all(&rig, 0, To::Card).moved > 10);
    rig.host.scrub();
    let second = driver_of(&rig, 1, VM_MIB);
    for mib in (4..VM_MIB).step_by(2) {
        second.guest.vram_write(mib * MIB, &[1; 16]);
    }
    assert!(in_host(&rig) > 4, "the card has no space for both: {:?}", rig.usage().0);
    let mut found = vec![0; 2 * MIB as usize];
    for mib in (4..VM_MIB).step_by(2) {
        second.guest.vram_read(mib * MIB, &mut found);
        assert!(found[..16] == [1; 16] && found[16..].iter().all(|byte| *byte == 0), "at {mib} MiB");
    }
}
