//! Memory of guests that moves between the card and host memory while they use it.

use super::super::rig::driver::{CE0, CE1, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object};
use super::super::rig::{Rig, settings, sharing};
use super::{A, B, MIB, usage};
use crate::host::{Relocated, Sharing};
use crate::vgpu::Settings;
use simgpu::Config;
use vram::{Limits, To, VmId};

/// MiB of the card.
const CARD_MIB: u32 = 64;
/// MiB of a VM, all of which may lie anywhere.
const VM_MIB: u64 = 32;

fn rig_of(chunk_bytes: u64, card_mib: u32, host_mib: u64) -> Rig {
    let sharing = Sharing { chunk_bytes, host_bytes: host_mib * MIB, ..sharing() };
    Rig::made(&Config { vram_mib: card_mib, ..Config::default() }, &sharing, |card| card)
}

fn free_settings(vram_mib: u64) -> Settings {
    let mut settings = settings(vram_mib, 8);
    settings.share.memory = Limits::default();
    settings
}

fn driver_of(rig: &Rig, vm: u32, vram_mib: u64) -> Driver {
    let mut guest = rig.guest_with(vm, &free_settings(vram_mib));
    assert!(guest.map_ram(0, MIB, true));
    Driver::new(guest)
}

/// Moves all chunks of a VM that are elsewhere.
fn move_all(rig: &Rig, vm: u32, to: To) -> Relocated {
    let chunks = {
        let state = rig.host.lock();
        let bytes = state.vram.chunks.vm_bytes(VmId(vm)).unwrap();
        (bytes / state.vram.chunks.chunk_bytes()) as u32
    };
    let steps: Vec<_> = (0..chunks).map(|index| (index, to)).collect();
    rig.host.relocate(VmId(vm), &steps)
}

fn in_host(rig: &Rig) -> u32 {
    rig.usage().0.host.used
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
fn everything_that_a_guest_has_moves_and_the_gpu_and_the_cpu_find_it() {
    let rig = rig_of(2 * MIB, CARD_MIB, 64);
    let mut driver = driver_of(&rig, 0, VM_MIB);
    let mut channel = driver.channel(1);
    let (from, to) = (driver.buffer(&channel, A, 20, 1), driver.buffer(&channel, B, 20, 2));
    for round in 0..6 {
        let there = if round % 2 == 0 { To::Host } else { To::Card };
        let moved = move_all(&rig, 0, there);
        assert!(moved.moved > 0 && moved.bytes == u64::from(moved.moved) * 2 * MIB, "{moved:?}");
        assert_eq!(in_host(&rig) > 0, round % 2 == 0);
        // Page tables, rings and the instance block are elsewhere, too.
        assert!(driver.vram_holds(from, 20, 1 + round));
        copy(&mut driver, &mut channel, round, 20);
        driver.wait(&channel);
        assert!(driver.vram_holds(to, 20, 1 + round), "round {round}");
        let data: Vec<u8> = (0..20).flat_map(|page| super::super::rig::driver::pattern(2 + round, page)).collect();
        driver.guest.vram_write(from, &data);
    }
    assert_eq!(driver.guest.counter("faults"), 0);
    let (before, _) = (usage(&rig), move_all(&rig, 0, To::Host));
    driver.guest.remove().unwrap();
    let after = usage(&rig);
    assert_eq!((after.2, in_host(&rig)), (0, 0), "{before:?}");
}
