//! Tests relocations of guest memory at inconvenient moments.

use super::relocate::{driver_of, free_settings, in_host, in_host_at_rest, move_all, work, work_until};
use super::{A, B, MIB};
use card_manager::{Chaos, Division, Sharing};
use fastrand::Rng;
use rig::driver::{At, CE0, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object, pattern};
use rig::{Rig, read_file, sharing};
use simgpu::Config;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vgpu::Apertures;
use vgpu::Settings;
use vmm_glue::RegionIndex;
use vram::{Limits, TenantId, To};

/// Time limit for each step.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Creates a card whose memory moves once per `chaos.every` submissions.
fn rig_with(chunk_bytes: u64, card_mib: u32, host_mib: u64, chaos: Chaos) -> Rig {
    let division = Division { chaos, ..Division::default() };
    let reserve_bytes = (16 * MIB).max(2 * chunk_bytes);
    let sharing = Sharing { chunk_bytes, reserve_bytes, host_bytes: host_mib * MIB, division, ..sharing() };
    Rig::made(&Config { vram_mib: card_mib, ..Config::default() }, &sharing, |card| card)
}

/// Moves all of a VM's memory to host memory and back repeatedly until `act` returns. Returns the number of chunks
/// moved.
fn while_it_moves(rig: &Rig, vm: u32, act: impl FnOnce()) -> u64 {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let mut moved = 0;
            for there in [To::Host, To::Card].into_iter().cycle() {
                moved += u64::from(move_all(rig, vm, there).moved);
                if stop.load(Ordering::SeqCst) {
                    break;
                }
            }
            moved
        });
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        stop.store(true, Ordering::SeqCst);
        done.unwrap_or_else(|error| std::panic::resume_unwind(error));
        mover.join().expect("the mover does not panic")
    })
}

/// Runs two VMs with a random relocation after each submission.
fn stirred(chunk_bytes: u64, card_mib: u32, host_mib: u64, vm_mib: u64, seed: u64) {
    let rig = rig_with(chunk_bytes, card_mib, host_mib, Chaos { every: 1, seed });
    let drivers = [0, 1].map(|vm| driver_of(&rig, vm, vm_mib));
    let moved = std::thread::scope(|scope| {
        let rig = &rig;
        let working = (0u64..).zip(drivers).map(|(vm, mut driver)| {
            scope.spawn(move || {
                let began = Instant::now();
                let moved = || rig.host.lock().memory().moved(TenantId(vm as u32)).map_or(0, |moved| moved.sum.moved);
                // Moving large chunks takes time, so keep the VM working until some have moved.
                let enough = |round| round >= 40 && (moved() > 0 || began.elapsed() > WAIT_TIMEOUT);
                work_until(&mut driver, enough, &mut Rng::with_seed(seed ^ vm << 32));
                let moved = moved();
                driver.guest.remove().expect("the VM can be removed");
                moved
            })
        });
        working.collect::<Vec<_>>().into_iter().map(|vm| vm.join().expect("the VM's thread does not panic")).min()
    });
    assert!(moved.is_some_and(|moved| moved > 0), "memory of each VM moved");
    // Moves of a removed VM have no effect, but their copies must still end.
    let began = Instant::now();
    while rig.host.lock().vram().chunks.moves().count() != 0 {
        assert!(began.elapsed() < WAIT_TIMEOUT, "a move did not complete");
        std::thread::sleep(Duration::from_millis(2));
    }
    let left = rig.usage().0;
    assert_eq!((left.host.used, left.vms.len()), (0, 0));
}

#[test]
fn bytes_survive_moves_of_smallest_chunks_after_each_submission() {
    stirred(128 << 10, 64, 64, 16, 11);
}

#[test]
fn bytes_survive_moves_of_common_chunks_after_each_submission() {
    stirred(2 * MIB, 64, 64, 16, 12);
}

#[test]
fn bytes_survive_moves_of_largest_chunks_after_each_submission() {
    stirred(64 * MIB, 512, 256, 64, 13);
}

#[test]
fn without_chaos_nothing_moves() {
    let rig = rig_with(2 * MIB, 64, 64, Chaos::default());
    let mut driver = driver_of(&rig, 0, 16);
    work(&mut driver, 20, &mut Rng::with_seed(3));
    assert!(rig.host.lock().memory().moved(TenantId(0)).is_none());
}

#[test]
fn unmapped_ram_is_out_of_reach_while_memory_moves() {
    const GPA: u64 = 64 * MIB;
    const PAGES: u64 = 32;
    let bytes = PAGES * PAGE;
    let rig = rig_with(2 * MIB, 64, 64, Chaos::default());
    let mut driver = driver_of(&rig, 0, 32);
    let mut channel = driver.channel(1);
    let at = driver.buffer(&channel, A, PAGES, 1);
    let moved = while_it_moves(&rig, 0, || {
        for round in 0..12u32 {
            assert!(driver.guest.map_ram(GPA, MIB, true));
            driver.map(channel.space, B, At::Ram(GPA), PAGES);
            driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, PAGES as u32)].concat());
            driver.wait(&channel);
            assert!(driver.ram_holds(GPA, PAGES, 1 + round), "round {round}");
            // Copy other data back, so that the next round cannot pass by accident.
            driver.fill_ram(GPA, PAGES, 2 + round);
            driver.submit(&mut channel, &[object(M2MF), m2mf_copy(B, A, bytes as u32)].concat());
            driver.wait(&channel);
            assert!(driver.vram_holds(at, PAGES, 2 + round), "round {round}");
            // The guest's tables still map this RAM.
            let file = driver.guest.unmap_ram(GPA).expect("the region is mapped");
            assert_eq!(rustix::io::pwrite(&file, &[0x5a; 16], 0), Ok(16));
            if round == 11 {
                driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
                assert_eq!(driver.wait_fault().va & !(PAGE - 1), B);
            }
            let mut found = [0; 16];
            read_file(&file, 0, &mut found);
            assert_eq!(found, [0x5a; 16], "the GPU wrote to RAM that does not belong to the VM");
        }
    });
    assert!(moved > 0);
    assert!(driver.vram_holds(at, PAGES, 13));
}

#[test]
fn mapped_aperture_pages_stay_same_while_their_chunks_move() {
    const BAR1_MAPPED_AT: u64 = 32 << 20;
    const PAGES: u64 = 24;
    let rig = rig_with(2 * MIB, 64, 64, Chaos::default());
    let mut guest = rig.guest_with(0, &Settings { apertures: Apertures::Remapped, ..free_settings(32) });
    assert!(guest.map_ram(0, MIB, true));
    let mut driver = Driver::new(guest);
    let mut channel = driver.channel(1);
    let (from, to) = (driver.buffer(&channel, A, PAGES, 1), driver.buffer(&channel, B, PAGES, 99));
    let file = driver.guest.mapped(RegionIndex::Bar1).expect("a region with a file");
    let space = driver.apertures[0];
    let moved = while_it_moves(&rig, 0, || {
        for round in 0..8u32 {
            let seed = 100 + round;
            driver.map(space, BAR1_MAPPED_AT, At::Vram(from), PAGES);
            for page in 0..PAGES {
                let data = pattern(seed, page);
                assert_eq!(rustix::io::pwrite(&file, &data, BAR1_MAPPED_AT + page * PAGE), Ok(data.len()));
            }
            // The GPU must read the same bytes while the pages are mapped, and after they have been unmapped.
            driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, PAGES as u32)].concat());
            driver.wait(&channel);
            assert!(driver.vram_holds(to, PAGES, seed), "shown in round {round}");
            (0..PAGES).for_each(|page| driver.pte(space, BAR1_MAPPED_AT + page * PAGE, 0, 0));
            driver.flush();
            driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, (PAGES * PAGE) as u32)].concat());
            driver.wait(&channel);
            assert!(driver.vram_holds(from, PAGES, seed) && driver.vram_holds(to, PAGES, seed), "round {round}");
        }
    });
    assert!(moved > 0);
    assert_eq!(driver.guest.counter("faults"), 0);
}

#[test]
fn lowered_host_budget_loses_no_data_and_limits_evictions() {
    let rig = rig_with(2 * MIB, 64, 48, Chaos { every: 2, seed: 5 });
    let mut driver = driver_of(&rig, 0, 32);
    let mut channel = driver.channel(1);
    let buffers: Vec<u64> = (0..12).map(|at| driver.buffer(&channel, A + at * MIB, 250, 40 + at as u32)).collect();
    assert!(move_all(&rig, 0, To::Host).moved > 0);
    for (budget, seed) in [(3, 70), (0, 80), (24, 90)] {
        rig.host.lock().vram_mut().chunks.set_host_budget(budget);
        let most = in_host(&rig).max(budget);
        for (at, buffer) in (0u32..).zip(&buffers) {
            for page in 0..250 {
                driver.guest.vram_write(buffer + page * PAGE, &pattern(seed + at, page));
            }
            let to = A + u64::from((at + 1) % 12) * MIB;
            // Copy the next buffer onto itself, because only the addresses matter.
            driver.submit(&mut channel, &[object(M2MF), m2mf_copy(to, to, 250 * PAGE as u32)].concat());
            driver.wait(&channel);
            assert!(in_host(&rig) <= most, "{} of at most {most}", in_host(&rig));
        }
        move_all(&rig, 0, To::Host);
        for (at, buffer) in (0u32..).zip(&buffers) {
            assert!(driver.vram_holds(*buffer, 250, seed + at), "buffer {at} with budget {budget}");
        }
        assert!(in_host(&rig) <= most);
    }
    assert_eq!(driver.guest.counter("faults"), 0);
    driver.guest.remove().expect("the VM can be removed");
    assert_eq!(in_host_at_rest(&rig), 0);
}

#[test]
fn quotas_that_change_while_memory_is_allocated_lose_nothing() {
    const CHUNKS: u64 = 40;
    let rig = rig_with(2 * MIB, 128, 96, Chaos::default());
    let mut driver = driver_of(&rig, 0, 2 * CHUNKS);
    let channel = driver.channel(1);
    let limit = |quota| {
        rig.host
            .lock()
            .memory_mut()
            .set_limits(TenantId(0), Limits { quota, ..Limits::default() })
            .expect("the limits are valid")
    };
    let account = || rig.usage().0.vms[&TenantId(0)];
    // The driver's own memory has lower addresses.
    let buffers: Vec<u64> = (2..CHUNKS).map(|chunk| 2 * MIB * chunk).collect();
    let done = AtomicBool::new(false);
    let changes = std::thread::scope(|scope| {
        let operator = scope.spawn(|| {
            let (mut dice, mut changes) = (Rng::with_seed(17), 0);
            while !done.load(Ordering::SeqCst) || changes < 20 {
                limit(2 + dice.u64(..CHUNKS) as u32);
                changes += 1;
                std::thread::sleep(Duration::from_micros(300));
            }
            changes
        });
        // Let the CPU or the GPU allocate each chunk, within the current quota.
        let allocated = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut channel = channel;
            let from = driver.buffer(&channel, A, 64, 7);
            for (index, buffer) in (0u32..).zip(&buffers) {
                if index % 2 == 0 {
                    (0..64).for_each(|page| driver.guest.vram_write(buffer + page * PAGE, &pattern(7, page)));
                } else {
                    driver.map(channel.space, B, At::Vram(*buffer), 64);
                    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 64)].concat());
                    driver.wait(&channel);
                }
                assert!(driver.vram_holds(from, 64, 7));
            }
        }));
        done.store(true, Ordering::SeqCst);
        allocated.unwrap_or_else(|error| std::panic::resume_unwind(error));
        operator.join().expect("the operator's thread does not panic")
    });
    assert!(changes >= 20);
    limit(4);
    let began = Instant::now();
    while account().placed > 4 || rig.host.lock().vram().chunks.moves().count() != 0 {
        assert!(began.elapsed() < WAIT_TIMEOUT, "{:?}", account());
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(buffers.iter().all(|buffer| driver.vram_holds(*buffer, 64, 7)));
    let all = account();
    assert!(u64::from(all.placed + all.host) >= buffers.len() as u64 && all.parked == 0, "{all:?}");
    assert_eq!(driver.guest.counter("faults"), 0);
    driver.guest.remove().expect("the VM can be removed");
    assert_eq!(in_host_at_rest(&rig), 0);
}
