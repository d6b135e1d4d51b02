//! Tests mediated VMs on a software card. Each VM runs a small driver.

mod accesses;
mod alarm;
mod candidates;
mod chaos;
mod copies;
mod demand;
mod doorbell;
mod failing;
mod fuzz_seeds;
mod handover;
mod holes;
mod isolation;
mod lifecycle;
mod migration;
mod moving;
mod noise;
mod oversubscribe;
mod panics;
mod paravirtual;
mod posted;
mod pressure;
mod relocate;
mod remap;
mod residue;
mod saving;
mod schedule;
mod standstill;
mod stuck;
mod xen;
mod zeroing;

use nvspec::addr::VramAddr;
use rig::driver::Driver;
use rig::{Guest, Rig};

/// Size of the card's VRAM in MiB: the minimum that a driver needs.
const CARD_MIB: u32 = 64;
const VM_MIB: u64 = 16;
const MIB: u64 = 1 << 20;
/// Virtual address of the first buffer.
const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;

fn rig() -> Rig {
    Rig::new(CARD_MIB)
}

fn driver(rig: &Rig, vm: u32) -> Driver {
    let mut guest = rig.guest(vm, VM_MIB, 16);
    assert!(guest.map_ram(0, MIB, true));
    Driver::new(guest)
}

/// Fills all of a VM's VRAM.
fn fill(guest: &Guest, byte: u8) {
    let data = vec![byte; MIB as usize];
    (0..guest.vram_bytes / MIB).for_each(|mib| guest.vram_write(mib * MIB, &data));
}

/// Returns true if all of a VM's VRAM contains `byte`.
fn is_filled(guest: &Guest, byte: u8) -> bool {
    let mut data = vec![0; MIB as usize];
    (0..guest.vram_bytes / MIB).all(|mib| {
        guest.vram_read(mib * MIB, &mut data);
        data.iter().all(|&found| found == byte)
    })
}

/// Returns the number of aligned 64-byte runs in a VM's VRAM that contain only `byte`.
fn finds(guest: &Guest, byte: u8) -> usize {
    let mut data = vec![0; MIB as usize];
    let in_mib = |mib| {
        guest.vram_read(mib * MIB, &mut data);
        data.chunks_exact(64).filter(|run| run.iter().all(|&found| found == byte)).count()
    };
    (0..guest.vram_bytes / MIB).map(in_mib).sum()
}

/// Returns five counts: free chunks (scrubbed or not), the mediator's chunks, VMs' chunks, channels, and I/O address
/// ranges.
fn usage(rig: &Rig) -> (u32, u32, u32, u32, usize) {
    let (chunks, channels, iova) = rig.usage();
    (chunks.free + chunks.to_scrub, chunks.mediator, chunks.vms.values().map(|vm| vm.placed).sum(), channels, iova)
}

/// Reads the card's VRAM, regardless of its owner.
fn card_vram(rig: &Rig, at: u64, data: &mut [u8]) {
    rig.host.lock().vram_mut().memory.read(VramAddr(at), data).unwrap();
}
