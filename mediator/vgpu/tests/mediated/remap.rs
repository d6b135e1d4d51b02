//! Tests apertures that the client maps. The tests act as the guest's CPU, through the client's file.

mod travelled;
mod upgraded;
mod window;

use super::{A, B, CARD_MIB, MIB, Rig, VM_MIB, fill, is_filled, rig, usage};
use card::{Card, DmaError, DmaMemory};
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::userd;
use nvspec::regs::{pbus, pfifo, windows::pramin};
use rig::altered::{Alter, Altered};
use rig::driver::{At, CE0, Channel, Driver, FENCE_VA, M2MF, PAGE, ce_copy, m2mf_copy, object, pattern};
use rig::{Guest, read_file, settings, sharing};
use simgpu::{ComputeTiming, Config, EngineId, EngineTiming, Fault, FaultKind, SimGpu, TimeModel};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use vgpu::Apertures;
use vmm_glue::RegionIndex::{self, Bar0, Bar1, Bar3};

/// Number of pages in the PRAMIN window.
const WINDOW_PAGES: u64 = pramin::BYTES as u64 / PAGE;
/// Offset in the mapped part of BAR1.
const BAR1_MAPPED_AT: u64 = 32 << 20;
/// Offset in BAR3 above the driver's own pages.
const HIGH3: u64 = 8 << 20;

fn guest(rig: &Rig, vm: u32) -> Guest {
    let mut guest = rig.guest_with(vm, &vgpu::Settings { apertures: Apertures::Remapped, ..settings(VM_MIB, 16) });
    assert!(guest.map_ram(0, MIB, true));
    guest
}

fn driver(rig: &Rig, vm: u32) -> Driver {
    Driver::new(guest(rig, vm))
}

/// The file that a client maps for a BAR.
struct Cpu(Arc<OwnedFd>);

impl Cpu {
    fn for_region(guest: &Guest, region: RegionIndex) -> Self {
        Self(guest.mapped(region).expect("a region with a file"))
    }

    fn write(&self, at: u64, data: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.0, data, at), Ok(data.len()));
    }

    fn read(&self, at: u64, len: u64) -> Vec<u8> {
        let mut data = vec![0; len as usize];
        read_file(&self.0, at, &mut data);
        data
    }

    fn is_zero(&self, at: u64, len: u64) -> bool {
        self.read(at, len).iter().all(|byte| *byte == 0)
    }
}

/// Maps guest VRAM in an aperture.
fn show(driver: &mut Driver, aperture: usize, offset: u64, at: u64, pages: u64) {
    driver.map(driver.apertures[aperture], offset, At::Vram(at), pages);
}

fn hide(driver: &mut Driver, aperture: usize, offset: u64, pages: u64) {
    let space = driver.apertures[aperture];
    (0..pages).for_each(|page| driver.pte(space, offset + page * PAGE, 0, 0));
    driver.flush();
}

/// Makes PRAMIN show none of the VM's memory.
fn hide_window(driver: &mut Driver) {
    driver.guest.wr(pbus::PRAMIN_WINDOW::OFFSET, pbus::PRAMIN_WINDOW::BASE.mask());
}

/// Copies pages with the copy engine, and waits for completion.
fn copy(driver: &mut Driver, channel: &mut Channel, from: u64, to: u64, pages: u32) {
    driver.submit(channel, &[object(CE0), ce_copy(from, to, pages)].concat());
    driver.wait(channel);
}

fn pages(seed: u32, count: u64) -> Vec<u8> {
    (0..count).flat_map(|page| pattern(seed, page)).collect()
}

#[test]
fn cpu_writes_through_mapped_aperture_match_gpu_copies() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let mut channel = driver.channel(1);
    let from = driver.buffer(&channel, A, 4, 1);
    let to = driver.buffer(&channel, B, 4, 2);
    show(&mut driver, 0, BAR1_MAPPED_AT, from, 4);
    show(&mut driver, 0, BAR1_MAPPED_AT + 0x10_0000, to, 4);
    assert_eq!(cpu.read(BAR1_MAPPED_AT, 4 * PAGE), pages(1, 4), "the previous contents were moved");
    cpu.write(BAR1_MAPPED_AT, &pages(3, 4));
    copy(&mut driver, &mut channel, A, B, 4);
    assert_eq!(cpu.read(BAR1_MAPPED_AT + 0x10_0000, 4 * PAGE), pages(3, 4));
    // Messages, PRAMIN, and the host must show the same memory.
    let mut word = [0; 8];
    let before = driver.guest.counter("aperture_messages");
    driver.guest.read(Bar1, BAR1_MAPPED_AT + 0x10_0000 + 8, &mut word);
    assert_eq!(word[..], pages(3, 1)[8..16]);
    assert_eq!(driver.guest.counter("aperture_messages"), before + 1);
    driver.guest.poke(to + 4, 0x1234_5678);
    assert_eq!(cpu.read(BAR1_MAPPED_AT + 0x10_0004, 4), 0x1234_5678u32.to_le_bytes());
    assert!(driver.vram_holds(from, 4, 3));
    // Use M2MF to copy the pages under an aperture to RAM.
    driver.map(channel.space, B, At::Ram(0), 4);
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, 4 * PAGE as u32)].concat());
    driver.wait(&channel);
    assert!(driver.ram_holds(0, 4, 3));
    assert_eq!((driver.guest.counter("faults"), driver.guest.counter("aperture_aliases")), (0, 0));
}

#[test]
fn a_mapping_that_goes_gives_its_data_back_to_vram() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let mut channel = driver.channel(1);
    let at = driver.buffer(&channel, A, 3, 1);
    hide_window(&mut driver);
    let before = driver.guest.counter("aperture_pages");
    let entries = (0..3).map(|page| ((at + page * PAGE) >> 8) as u32 | 1);
    let space = driver.apertures[0];
    for (page, entry) in (0..3).zip(entries) {
        driver.pte(space, BAR1_MAPPED_AT + page * PAGE, entry, 0);
    }
    hide_window(&mut driver);
    driver.flush();
    assert_eq!(driver.guest.counter("aperture_pages"), before + 3);
    cpu.write(BAR1_MAPPED_AT, &pages(2, 3));
    // Move the middle page to another slot, and map another page in place of the last one.
    let other = driver.vram(1);
    driver.guest.vram_write(other, &pattern(9, 0));
    let space = driver.apertures[0];
    driver.pte(space, BAR1_MAPPED_AT + PAGE, 0, 0);
    driver.pte(space, BAR1_MAPPED_AT + 2 * PAGE, (other >> 8) as u32 | 1, 0);
    assert!(!cpu.is_zero(BAR1_MAPPED_AT + PAGE, PAGE), "the TLB was not flushed");
    driver.flush();
    assert!(cpu.is_zero(BAR1_MAPPED_AT + PAGE, PAGE));
    assert_eq!(cpu.read(BAR1_MAPPED_AT + 2 * PAGE, PAGE), pattern(9, 0));
    assert!(driver.vram_holds(at, 3, 2));
    let to = driver.buffer(&channel, B, 3, 3);
    copy(&mut driver, &mut channel, A, B, 3);
    assert!(driver.vram_holds(to, 3, 2));
    // Writes by the CPU to unmapped pages are dropped.
    cpu.write(BAR1_MAPPED_AT + PAGE, &pattern(7, 0));
    show(&mut driver, 0, BAR1_MAPPED_AT + PAGE, at + PAGE, 1);
    assert_eq!(cpu.read(BAR1_MAPPED_AT + PAGE, PAGE), pages(2, 2)[PAGE as usize..]);
}

#[test]
fn pages_that_change_places_keep_their_data() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let (cpu, cpu3) = (Cpu::for_region(&driver.guest, Bar1), Cpu::for_region(&driver.guest, Bar3));
    let channel = driver.channel(1);
    let at = driver.buffer(&channel, A, 2, 4);
    show(&mut driver, 0, BAR1_MAPPED_AT, at, 2);
    let space = driver.apertures[0];
    driver.pte(space, BAR1_MAPPED_AT, ((at + PAGE) >> 8) as u32 | 1, 0);
    driver.pte(space, BAR1_MAPPED_AT + PAGE, (at >> 8) as u32 | 1, 0);
    driver.flush();
    let swapped = [&pages(4, 2)[PAGE as usize..], &pattern(4, 0)[..]].concat();
    assert_eq!(cpu.read(BAR1_MAPPED_AT, 2 * PAGE), swapped);
    // Move pages between apertures with a single flush.
    let three = driver.apertures[1];
    (0..2).for_each(|page| driver.pte(space, BAR1_MAPPED_AT + page * PAGE, 0, 0));
    (0..2).for_each(|page| driver.pte(three, HIGH3 + page * PAGE, ((at + page * PAGE) >> 8) as u32 | 1, 0));
    driver.flush();
    assert!(cpu.is_zero(BAR1_MAPPED_AT, 2 * PAGE));
    assert_eq!(cpu3.read(HIGH3, 2 * PAGE), pages(4, 2));
    assert_eq!(driver.guest.counter("aperture_aliases"), 0);
    // Binding another instance block remaps a whole aperture.
    let instance = driver.vram(1);
    let empty = driver.space();
    driver.join(instance, empty);
    driver.guest.wr(nvspec::regs::pbus::BAR3_BLOCK::OFFSET, 0x8000_0000 | (instance >> 12) as u32);
    assert!(cpu3.is_zero(HIGH3, 2 * PAGE));
    assert!(driver.vram_holds(at, 2, 4));
}

#[test]
fn mappings_change_while_the_gpu_works_on_the_pages() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let mut channel = driver.channel(1);
    let from = driver.buffer(&channel, A, 64, 1);
    let to = driver.buffer(&channel, B, 64, 2);
    // Each copy takes a quarter of a second. Only one register write is between the copy's doorbell and the first
    // flush.
    let timing = EngineTiming { bytes_per_second: 1 << 20, launch_ns: 0 };
    rig.card.set_time_model(Some(TimeModel {
        graph: timing,
        copy: timing,
        compute: ComputeTiming::default(),
        switch_ns: 0,
        bus_bytes_per_second: 0,
    }));
    for round in 0..6u32 {
        (0..64).for_each(|page| driver.guest.vram_write(from + page * PAGE, &pattern(10 + round, page)));
        (0..64).for_each(|page| driver.guest.vram_write(to + page * PAGE, &pattern(99, page)));
        let space = driver.apertures[0];
        let entry = |at: u64| (at >> 8) as u32 | 1;
        (0..64).for_each(|page| driver.pte(space, BAR1_MAPPED_AT + page * PAGE, entry(from + page * PAGE), 0));
        (8..24).for_each(|page| driver.pte(space, BAR1_MAPPED_AT + 0xf_8000 + page * PAGE, entry(to + page * PAGE), 0));
        driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 64)].concat());
        driver.flush();
        if round % 2 == 0 {
            hide(&mut driver, 0, BAR1_MAPPED_AT, 64);
        }
        driver.wait(&channel);
        assert!(driver.vram_holds(to, 64, 10 + round), "round {round}");
        assert_eq!(
            cpu.read(BAR1_MAPPED_AT + 0x10_0000, 16 * PAGE),
            pages(10 + round, 24)[8 * PAGE as usize..],
            "round {round}"
        );
        hide(&mut driver, 0, BAR1_MAPPED_AT, 64);
        hide(&mut driver, 0, BAR1_MAPPED_AT + 0x10_0000, 16);
    }
    let stops = driver.guest.counter("aperture_stops");
    assert!(stops >= 1, "no write was in flight");
    assert_eq!((driver.guest.counter("faults"), driver.guest.counter("hangs")), (0, 0));
}

#[test]
fn vm_lock_is_free_while_pages_wait_for_work_to_leave_card() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    let from = driver.buffer(&channel, A, 1, 1);
    driver.buffer(&channel, B, 1, 2);
    let space = driver.apertures[0];
    driver.pte(space, BAR1_MAPPED_AT, (from >> 8) as u32 | 1, 0);
    assert!(rig.card.inject(Fault { engine: EngineId::Copy0, kind: FaultKind::Hang, after: 0, count: 1 }));
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    while !pfifo::ENGINE_STATUS::BUSY.is_set(rig.card.read32(pfifo::ENGINE_STATUS::at(4))) {
        std::thread::yield_now();
    }
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let (vm, over) = (driver.guest.vm(), AtomicBool::new(false));
    let waits = std::thread::scope(|scope| {
        scope.spawn(|| {
            driver.flush();
            over.store(true, Ordering::Relaxed);
        });
        let waits = loop {
            let counters = vm.status().counters;
            if counters["aperture_stops"] == 1 {
                break cpu.is_zero(BAR1_MAPPED_AT, PAGE);
            }
            if over.load(Ordering::Relaxed) {
                break false;
            }
        };
        // End the channel's work, which hangs.
        rig.host.lock().clear_engines(vm.id(), VirtualChannelId(1));
        waits
    });
    assert!(waits, "the VM's lock was held until the pages had moved");
    assert_eq!(cpu.read(BAR1_MAPPED_AT, PAGE), pattern(1, 0));
}

#[test]
fn nothing_that_the_gpu_writes_while_pages_move_is_lost() {
    const PAGES: u64 = 512;
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let mut channel = driver.channel(1);
    let from = driver.buffer(&channel, A, PAGES, 1);
    let to = driver.buffer(&channel, B, PAGES, 2);
    let space = driver.apertures[0];
    // Launches run one after the other, and each takes about as long as moving a few pages.
    let timing = EngineTiming { bytes_per_second: 100 << 20, launch_ns: 0 };
    rig.card.set_time_model(Some(TimeModel {
        graph: timing,
        copy: timing,
        compute: ComputeTiming::default(),
        switch_ns: 0,
        bus_bytes_per_second: 0,
    }));
    for round in 0..4u32 {
        (0..PAGES).for_each(|page| driver.guest.vram_write(from + page * PAGE, &pattern(10 + round, page)));
        (0..PAGES).for_each(|page| driver.guest.vram_write(to + page * PAGE, &pattern(99, page)));
        let entry = |page: u64| if round % 2 == 0 { ((to + page * PAGE) >> 8) as u32 | 1 } else { 0 };
        (0..PAGES).for_each(|page| driver.pte(space, BAR1_MAPPED_AT + page * PAGE, entry(page), 0));
        let launches = (0..PAGES / 16).map(|at| ce_copy(A + at * 16 * PAGE, B + at * 16 * PAGE, 16));
        driver.submit(&mut channel, &[object(CE0), launches.collect::<Vec<_>>().concat()].concat());
        driver.flush();
        driver.wait(&channel);
        assert!(driver.vram_holds(to, PAGES, 10 + round), "round {round}");
        assert_eq!(cpu.is_zero(BAR1_MAPPED_AT, PAGES * PAGE), round % 2 != 0);
    }
    assert_eq!((driver.guest.counter("faults"), driver.guest.counter("hangs")), (0, 0));
}

#[test]
fn page_table_writes_through_mapped_aperture_apply_at_flush() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar3);
    let mut channel = driver.channel(1);
    let [first, second] = [5, 6].map(|seed| {
        let at = driver.vram(1);
        driver.guest.vram_write(at, &pattern(seed, 0));
        at
    });
    let to = driver.buffer(&channel, B, 1, 7);
    driver.map(channel.space, A, At::Vram(first), 1);
    copy(&mut driver, &mut channel, A, B, 1);
    assert!(driver.vram_holds(to, 1, 5));
    // This page of the table contains the entry for A.
    let entry = channel.space.table + (A >> 12) * 8;
    show(&mut driver, 1, HIGH3, entry & !0xfff, 1);
    for (at, seed) in [(second, 6), (first, 5), (second, 6)] {
        cpu.write(HIGH3 + (entry & 0xfff), &((at >> 8) | 1).to_le_bytes());
        driver.flush();
        copy(&mut driver, &mut channel, A, B, 1);
        assert!(driver.vram_holds(to, 1, seed));
    }
    // Removing an entry must also take effect.
    cpu.write(HIGH3 + (entry & 0xfff), &[0; 8]);
    driver.flush();
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    assert_eq!(driver.wait_fault().va, A);
}

#[test]
fn entries_of_the_aperture_itself_can_lie_in_it() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar3);
    let (space, at) = (driver.apertures[1], driver.vram(2));
    driver.guest.vram_write(at, &pages(3, 2));
    let entries = space.table + (HIGH3 >> 12) * 8;
    show(&mut driver, 1, HIGH3 + 0x10_0000, entries & !0xfff, 1);
    cpu.write(HIGH3 + 0x10_0000 + (entries & 0xfff), &((at >> 8) | 1).to_le_bytes());
    driver.flush();
    assert_eq!(cpu.read(HIGH3, PAGE), pattern(3, 0));
    cpu.write(HIGH3 + 0x10_0000 + (entries & 0xfff), &(((at + PAGE) >> 8) | 1).to_le_bytes());
    driver.flush();
    assert_eq!(cpu.read(HIGH3, PAGE), pages(3, 2)[PAGE as usize..]);
    assert!(driver.vram_holds(at, 2, 3));
}

#[test]
fn partly_mapped_large_page_is_one_page_for_gpu() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let mut channel = driver.channel(1);
    // Map 128 KiB of naturally aligned VRAM with a large-page table that coexists with the small-page table.
    let spare = driver.vram(64);
    let large = spare.next_multiple_of(0x2_0000);
    let table = driver.vram(64);
    let va = 0x600_0000u64;
    driver.guest.poke(table + (va >> 17) * 8, (large >> 8) as u32 | 1);
    driver.guest.poke(channel.space.directory, (table >> 12 << 4) as u32 | 1);
    driver.flush();
    driver.guest.vram_write(large, &pages(1, 32));
    let to = driver.buffer(&channel, B, 32, 2);
    let round = |driver: &mut Driver, channel: &mut Channel, seed: u32| {
        copy(driver, channel, va, B, 32);
        assert!(driver.vram_holds(to, 32, seed), "read, seed {seed}");
        (0..32).for_each(|page| driver.guest.vram_write(to + page * PAGE, &pattern(seed + 1, page)));
        copy(driver, channel, B, va, 32);
        assert!(driver.vram_holds(large, 32, seed + 1), "written, seed {seed}");
    };
    round(&mut driver, &mut channel, 1);
    show(&mut driver, 0, BAR1_MAPPED_AT, large + 5 * PAGE, 1);
    round(&mut driver, &mut channel, 2);
    assert_eq!(cpu.read(BAR1_MAPPED_AT, PAGE), pages(3, 6)[5 * PAGE as usize..]);
    show(&mut driver, 0, BAR1_MAPPED_AT + 0x10_0000, large + 8 * PAGE, 20);
    round(&mut driver, &mut channel, 3);
    hide(&mut driver, 0, BAR1_MAPPED_AT, 1);
    round(&mut driver, &mut channel, 4);
    hide(&mut driver, 0, BAR1_MAPPED_AT + 0x10_0000, 20);
    // Map the whole range contiguously, first aligned and then unaligned.
    show(&mut driver, 0, BAR1_MAPPED_AT, large, 32);
    round(&mut driver, &mut channel, 5);
    hide(&mut driver, 0, BAR1_MAPPED_AT, 32);
    show(&mut driver, 0, BAR1_MAPPED_AT + PAGE, large, 32);
    round(&mut driver, &mut channel, 6);
    assert_eq!(cpu.read(BAR1_MAPPED_AT + PAGE, 32 * PAGE), pages(7, 32));
    assert_eq!(driver.guest.counter("faults"), 0);
}

#[test]
fn doorbells_in_mapped_aperture_work_and_progress_is_shown() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let (cpu, cpu3) = (Cpu::for_region(&driver.guest, Bar1), Cpu::for_region(&driver.guest, Bar3));
    let mut channel = driver.channel(2);
    // BAR3 shows USERD at offset 0. The same part of BAR1 is trapped.
    let mut at = (&cpu3, 2 * PAGE);
    for round in 1..6u32 {
        if round == 4 {
            // Move the page, and with it the channel's doorbell, to BAR1.
            hide(&mut driver, 1, 2 * PAGE, 1);
            show(&mut driver, 0, BAR1_MAPPED_AT, channel.userd, 1);
            at = (&cpu, BAR1_MAPPED_AT);
        }
        let (cpu, base) = at;
        driver.buffer(&channel, A, 1, round);
        let to = driver.buffer(&channel, B, 1, 50);
        let put = driver.queue_fenced(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
        cpu.write(base + userd::GP_PUT, &put.to_le_bytes());
        driver.wait(&channel);
        assert!(driver.vram_holds(to, 1, round), "round {round}");
        // A driver reads this value while it waits for free entries in its ring.
        while cpu.read(base + userd::GP_GET, 4) != put.to_le_bytes() {
            std::thread::yield_now();
        }
    }
    // Doorbells in the trapped part also work.
    let to = driver.buffer(&channel, B, 1, 50);
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    driver.wait(&channel);
    assert!(driver.vram_holds(to, 1, 5));
    driver.unbind(&channel);
    cpu.write(BAR1_MAPPED_AT + userd::GP_PUT, &3u32.to_le_bytes());
    assert_eq!(driver.guest.counter("faults"), 0);
}

#[test]
fn a_fence_is_seen_in_the_mapping() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let mut channel = driver.channel(1);
    let fence = driver.vram(1);
    driver.map(channel.space, FENCE_VA + PAGE, At::Vram(fence), 1);
    show(&mut driver, 0, BAR1_MAPPED_AT, fence, 1);
    driver.submit(&mut channel, &rig::driver::release(FENCE_VA + PAGE, 77));
    driver.wait(&channel);
    assert_eq!(cpu.read(BAR1_MAPPED_AT, 4), 77u32.to_le_bytes());
}

#[test]
fn page_shown_twice_reads_zeros_and_counts_as_alias() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let (cpu, cpu3) = (Cpu::for_region(&driver.guest, Bar1), Cpu::for_region(&driver.guest, Bar3));
    let at = driver.vram(1);
    driver.guest.vram_write(at, &pattern(1, 0));
    // A page can be mapped twice if one of the mappings is in the trapped part.
    show(&mut driver, 0, 0x80_0000, at, 1);
    show(&mut driver, 0, BAR1_MAPPED_AT, at, 1);
    let mut word = [0; 4];
    cpu.write(BAR1_MAPPED_AT, &[1, 2, 3, 4]);
    driver.guest.read(Bar1, 0x80_0000, &mut word);
    assert_eq!(word, [1, 2, 3, 4]);
    driver.guest.write(Bar1, 0x80_0000, &[5, 6, 7, 8]);
    assert_eq!(cpu.read(BAR1_MAPPED_AT, 4), [5, 6, 7, 8]);
    assert_eq!(driver.guest.counter("aperture_aliases"), 0);
    // The mapped parts of the apertures can show a page only once.
    show(&mut driver, 1, HIGH3, at, 1);
    show(&mut driver, 0, BAR1_MAPPED_AT + PAGE, at, 1);
    assert_eq!(driver.guest.counter("aperture_aliases"), 2);
    assert!(cpu3.is_zero(HIGH3, PAGE) && cpu.is_zero(BAR1_MAPPED_AT + PAGE, PAGE));
    driver.flush();
    assert_eq!(driver.guest.counter("aperture_aliases"), 2, "no new alias");
    // Removing the first mapping moves the page to the next one.
    hide(&mut driver, 0, BAR1_MAPPED_AT, 1);
    assert_eq!(cpu3.read(HIGH3, 4), [5, 6, 7, 8]);
    assert!(cpu.is_zero(BAR1_MAPPED_AT, PAGE) && cpu.is_zero(BAR1_MAPPED_AT + PAGE, PAGE));
    hide(&mut driver, 1, HIGH3, 1);
    assert_eq!(cpu.read(BAR1_MAPPED_AT + PAGE, 4), [5, 6, 7, 8]);
    // A mapped aperture never shows RAM.
    driver.guest.ram_write(0, &[9; 64]);
    driver.map(driver.apertures[0], BAR1_MAPPED_AT, At::Ram(0), 1);
    assert!(cpu.is_zero(BAR1_MAPPED_AT, PAGE));
    assert_eq!(driver.guest.counter("aperture_aliases"), 3);
    let mut seen = [0; 4];
    driver.guest.read(Bar1, BAR1_MAPPED_AT, &mut seen);
    assert_eq!(seen, [9; 4], "a message reads it");
}

#[test]
fn a_reset_shows_zeros_in_the_same_mapping() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let mut channel = driver.channel(1);
    let at = driver.buffer(&channel, A, 2, 1);
    show(&mut driver, 0, BAR1_MAPPED_AT, at, 2);
    cpu.write(BAR1_MAPPED_AT + 0x100_0000, &[0x55; 64]);
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    driver.guest.reset();
    assert!(cpu.is_zero(0, 64 * MIB));
    assert_eq!(driver.guest.counter("aperture_pages"), WINDOW_PAGES);
    // Use the VM again with the same mapping, as after a guest reboot. A driver clears its memory first, because the
    // instance block still contains the old ring indices.
    fill(&driver.guest, 0);
    driver.bring_up();
    let mut channel = driver.channel(1);
    let from = driver.buffer(&channel, A, 2, 6);
    let to = driver.buffer(&channel, B, 2, 7);
    show(&mut driver, 0, BAR1_MAPPED_AT, from, 2);
    cpu.write(BAR1_MAPPED_AT, &pages(8, 2));
    copy(&mut driver, &mut channel, A, B, 2);
    assert!(driver.vram_holds(to, 2, 8));
}

/// Counts how often memory is mapped for the card.
#[derive(Default)]
struct Mapped(Arc<AtomicUsize>);

impl Alter for Mapped {
    fn map_dma(&self, card: &SimGpu, iova: u64, memory: DmaMemory) -> Result<(), DmaError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        card.map_dma(iova, memory)
    }
}

#[test]
fn a_reset_leaves_the_memory_mapped_for_the_card() {
    // With an emulated IOMMU, mapping takes one call per page. QEMU has timed out a reset that mapped 64 MiB.
    let mapped = Arc::new(AtomicUsize::new(0));
    let counts = Mapped(Arc::clone(&mapped));
    let rig =
        Rig::made(&Config { vram_mib: CARD_MIB, ..Config::default() }, &sharing(), |card| Altered::over(card, counts));
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    cpu.write(BAR1_MAPPED_AT, &pages(1, 2));
    let before = mapped.load(Ordering::SeqCst);
    assert_ne!(before, 0);
    driver.guest.reset();
    assert!(cpu.is_zero(0, 64 * MIB));
    assert_eq!(mapped.load(Ordering::SeqCst), before);
}

#[test]
fn the_next_client_and_the_last_see_nothing_of_each_other() {
    let rig = rig();
    let before = usage(&rig);
    let mut driver = driver(&rig, 0);
    let old = [Cpu::for_region(&driver.guest, Bar1), Cpu::for_region(&driver.guest, Bar3)];
    let channel = driver.channel(1);
    let at = driver.buffer(&channel, A, 2, 1);
    show(&mut driver, 0, BAR1_MAPPED_AT, at, 2);
    let alone = usage(&rig);
    driver.guest.reconnect();
    let new = [Cpu::for_region(&driver.guest, Bar1), Cpu::for_region(&driver.guest, Bar3)];
    assert!(new[0].is_zero(0, 64 * MIB) && new[1].is_zero(0, 16 * MIB));
    assert!(is_filled(&driver.guest, 0));
    assert_eq!(usage(&rig).4, alone.4 - 1, "the RAM is gone, and the apertures have their addresses");
    // The old mapping keeps its contents, regardless of the next client, and the next client does not see writes to the
    // old mapping.
    let Driver { mut guest, .. } = driver;
    assert!(guest.map_ram(0, MIB, true));
    let mut driver = Driver::new(guest);
    let mut channel = driver.channel(1);
    let from = driver.buffer(&channel, A, 2, 3);
    let to = driver.buffer(&channel, B, 2, 4);
    show(&mut driver, 0, BAR1_MAPPED_AT, from, 2);
    old[0].write(BAR1_MAPPED_AT, &pages(66, 2));
    old[1].write(0, &pages(66, 2));
    copy(&mut driver, &mut channel, A, B, 2);
    assert!(driver.vram_holds(to, 2, 3));
    assert_eq!(new[0].read(BAR1_MAPPED_AT, 2 * PAGE), pages(3, 2));
    assert_eq!(old[0].read(BAR1_MAPPED_AT, 2 * PAGE), pages(66, 2));
    driver.guest.remove().unwrap();
    assert_eq!(usage(&rig), before);
}

#[test]
fn vms_that_come_and_go_with_mapped_apertures_leave_nothing() {
    let rig = rig();
    let before = usage(&rig);
    for round in 0..10 {
        let guest = guest(&rig, round);
        assert!(is_filled(&guest, 0), "round {round}");
        let mut driver = Driver::new(guest);
        let mut channel = driver.channel(1);
        let at = driver.buffer(&channel, A, 16, round);
        driver.map(channel.space, B, At::Ram(0), 16);
        show(&mut driver, 0, BAR1_MAPPED_AT, at, 16);
        driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 16)].concat());
        if round % 2 == 0 {
            driver.wait(&channel);
            assert!(driver.ram_holds(0, 16, round));
        }
        fill(&driver.guest, 0xa5);
        driver.guest.remove().unwrap();
        assert_eq!(usage(&rig), before, "round {round}");
    }
}

#[test]
fn pages_under_another_vms_aperture_cannot_be_reached() {
    let rig = rig();
    let (mut evil, mut victim) = (driver(&rig, 0), driver(&rig, 1));
    let cpu = Cpu::for_region(&victim.guest, Bar1);
    let secret = victim.vram(4);
    victim.guest.vram_write(secret, &vec![0xc5; 4 * PAGE as usize]);
    show(&mut victim, 0, BAR1_MAPPED_AT, secret, 4);
    // Use the bus addresses at which the victim's pages may be mapped for the card as addresses of guest RAM.
    for mib in (0..512u64).step_by(2) {
        let mut channel = evil.channel(1);
        let own = evil.buffer(&channel, B, 1, 1);
        let at = mib * MIB + BAR1_MAPPED_AT % (2 * MIB);
        if at >= MIB {
            evil.map(channel.space, A, At::Ram(at), 1);
            evil.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
            assert_eq!(evil.wait_fault().va, A);
            assert!(evil.vram_holds(own, 1, 1));
        }
        evil.unbind(&channel);
        evil.rewind();
    }
    // The attacker's own aperture must show only the attacker's memory, for any address.
    let own = Cpu::for_region(&evil.guest, Bar1);
    for (page, at) in [(0, VM_MIB * MIB), (1, 63 * MIB), (2, 0xff_ffff_f000)] {
        show(&mut evil, 0, BAR1_MAPPED_AT + page * PAGE, at, 1);
    }
    assert!(own.is_zero(BAR1_MAPPED_AT, 3 * PAGE));
    assert_eq!(super::finds(&evil.guest, 0xc5), 0);
    assert_eq!(cpu.read(BAR1_MAPPED_AT, 4 * PAGE), vec![0xc5; 4 * PAGE as usize]);
}

#[test]
fn a_vm_with_trapped_apertures_maps_nothing() {
    let rig = rig();
    let driver = super::driver(&rig, 0);
    assert!(driver.guest.mapped(Bar1).is_none() && driver.guest.mapped(Bar3).is_none());
    let remapped = self::driver(&rig, 1);
    assert!(remapped.guest.mapped(Bar1).is_some() && remapped.guest.mapped(Bar3).is_some());
    assert!(driver.guest.mapped(Bar0).is_none() && remapped.guest.mapped(Bar0).is_some());
}
