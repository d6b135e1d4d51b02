//! Tests that the copy engines zero memory between owners.

use super::relocate::{driver_of, free_settings, move_all, still};
use super::{A, MIB};
use card_manager::Sharing;
use rig::driver::PAGE;
use rig::{Guest, Rig, sharing};
use simgpu::{ComputeTiming, Config, EngineId, EngineTiming, Fault, FaultKind, TimeModel};
use vram::To;

const CARD_MIB: u32 = 64;

fn rig_with(host_mib: u64, time: Option<TimeModel>) -> Rig {
    let division = still();
    let sharing =
        Sharing { chunk_bytes: 2 * MIB, host_bytes: host_mib * MIB, division, engines_zero: true, ..sharing() };
    Rig::made(&Config { vram_mib: CARD_MIB, time, ..Config::default() }, &sharing, |card| card)
}

fn zeroed_by_engines(rig: &Rig) -> u64 {
    rig.host.lock().vram().zeroed_by_engines()
}

/// Writes one byte to each page of a VM's VRAM. Returns the number of the first page that contains any other nonzero
/// byte.
fn first_that_is_not_zero(guest: &Guest) -> Option<u64> {
    (0..guest.vram_bytes / PAGE).find(|page| {
        guest.vram_write(page * PAGE, &[1]);
        let mut found = vec![0; PAGE as usize - 1];
        guest.vram_read(page * PAGE + 1, &mut found);
        found.iter().any(|byte| *byte != 0)
    })
}

#[test]
fn next_vm_finds_nothing_where_engines_have_zeroed() {
    // Without host memory, the mediator's channels are used only for zeroing.
    let rig = rig_with(0, None);
    for round in 0..4 {
        let before = zeroed_by_engines(&rig);
        let mut driver = driver_of(&rig, round, 32);
        let channel = driver.channel(1);
        let buffer = driver.buffer(&channel, A, 2000, 1);
        assert!(driver.vram_holds(buffer, 2000, 1));
        driver.guest.remove().unwrap();
        rig.host.scrub();
        assert!(zeroed_by_engines(&rig) > before, "round {round}");
        let next = rig.guest_with(100 + round, &free_settings(32));
        assert_eq!(first_that_is_not_zero(&next), None, "round {round}: a page contains data");
        next.remove().unwrap();
    }
}

#[test]
fn places_of_chunks_that_move_are_zeroed_by_engines() {
    let rig = rig_with(64, None);
    let mut driver = driver_of(&rig, 0, 16);
    let channel = driver.channel(1);
    let buffer = driver.buffer(&channel, A, 2000, 1);
    for there in [To::Host, To::Card, To::Host, To::Card] {
        assert!(move_all(&rig, 0, there).moved > 0);
        let before = zeroed_by_engines(&rig);
        rig.host.scrub();
        assert_eq!(zeroed_by_engines(&rig) > before, there == To::Host, "the chunks have left the card");
        assert!(driver.vram_holds(buffer, 2000, 1));
    }
}

#[test]
fn chunks_that_engines_fail_to_zero_are_zeroed_by_cpu() {
    let rig = rig_with(0, None);
    let first = rig.guest_with(0, &free_settings(40));
    assert_eq!(first_that_is_not_zero(&first), None);
    (0..first.vram_bytes / PAGE).for_each(|page| first.vram_write(page * PAGE + 8, &[7]));
    rig.host.scrub();
    for engine in [EngineId::Copy0, EngineId::Copy1] {
        assert!(rig.card.inject(Fault { engine, kind: FaultKind::Hang, after: 0, count: 1 }));
    }
    first.remove().unwrap();
    rig.host.scrub();
    assert_eq!(rig.usage().0.to_scrub, 0);
    let next = rig.guest_with(1, &free_settings(40));
    assert_eq!(first_that_is_not_zero(&next), None);
    next.remove().unwrap();
    // The mediator retries the engines, which then zero memory again.
    let before = zeroed_by_engines(&rig);
    for vm in 2..40 {
        let guest = rig.guest_with(vm, &free_settings(16));
        assert_eq!(first_that_is_not_zero(&guest), None);
        guest.remove().unwrap();
        rig.host.scrub();
    }
    assert!(zeroed_by_engines(&rig) > before);
}

#[test]
fn vm_needing_chunk_being_zeroed_gets_it_afterwards() {
    // Make the zeroing of each chunk take several milliseconds.
    let copy = EngineTiming { bytes_per_second: 400 * MIB, launch_ns: 0 };
    let (graph, compute) = (EngineTiming { bytes_per_second: 0, launch_ns: 0 }, ComputeTiming::default());
    let rig = rig_with(0, Some(TimeModel { graph, compute, copy, switch_ns: 0, bus_bytes_per_second: 0 }));
    for round in 0..3 {
        let guest = rig.guest_with(2 * round, &free_settings(40));
        let all: Vec<u64> = (0..guest.vram_bytes / MIB).collect();
        for mib in &all {
            guest.vram_write(mib * MIB, &[7; PAGE as usize]);
        }
        guest.remove().unwrap();
        let next = rig.guest_with(2 * round + 1, &free_settings(40));
        std::thread::scope(|scope| {
            scope.spawn(|| rig.host.scrub());
            // The VM uses all chunks, including those that have not been zeroed yet.
            for mib in &all {
                assert!(next.vram_try_write(mib * MIB + 8, &[9; 8]), "round {round}: MiB {mib}");
            }
        });
        rig.host.scrub();
        for mib in &all {
            let mut found = [0; 24];
            next.vram_read(mib * MIB, &mut found);
            let expected: Vec<u8> = [0, 9, 0].iter().flat_map(|byte| [*byte; 8]).collect();
            assert_eq!(found[..], expected, "round {round}: MiB {mib}");
        }
        next.remove().unwrap();
    }
}
