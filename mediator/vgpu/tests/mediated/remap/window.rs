//! Tests a PRAMIN window that the client maps.

use super::{Cpu, HIGH3, copy, driver, hide_window, pages};
use crate::handover::handover;
use crate::{A, B, MIB, VM_MIB, rig, usage};
use nvspec::regs::{pbus, pfifo, windows::pramin};
use rig::driver::{CE0, Driver, PAGE, ce_copy, object, pattern};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use vmm_glue::RegionIndex::{Bar0, Bar3};

/// Moves the window to `at`, rounded down to 64 KiB. Returns the offset of `at` in PRAMIN's file, which uses BAR0
/// offsets.
fn in_window(driver: &mut Driver, at: u64) -> u64 {
    driver.guest.wr(pbus::PRAMIN_WINDOW::OFFSET, (at >> 16) as u32);
    u64::from(pramin::BASE) + (at & 0xffff)
}

#[test]
fn cpu_writes_through_mapped_pramin_reach_gpu_without_message() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar0);
    let mut channel = driver.channel(1);
    let (from, to) = (driver.buffer(&channel, A, 4, 1), driver.buffer(&channel, B, 4, 2));
    let at = in_window(&mut driver, from);
    assert_eq!(cpu.read(at, 4 * PAGE), pages(1, 4), "the previous contents were moved");
    cpu.write(at, &pages(3, 4));
    copy(&mut driver, &mut channel, A, B, 4);
    assert!(driver.vram_holds(to, 4, 3));
    // After a move, PRAMIN must show the new pages, and earlier writes must be in VRAM.
    let at = in_window(&mut driver, to);
    assert_eq!(cpu.read(at, 4 * PAGE), pages(3, 4));
    hide_window(&mut driver);
    assert!(cpu.is_zero(u64::from(pramin::BASE), pramin::BYTES.into()));
    assert!(driver.vram_holds(from, 4, 3));
    // PRAMIN shows neither guest RAM nor addresses beyond guest VRAM. Both read as zeros, and no data is lost.
    for value in [2 << 24, ((VM_MIB * MIB) >> 16) as u32 - 1] {
        driver.guest.wr(pbus::PRAMIN_WINDOW::OFFSET, value);
        assert!(cpu.is_zero(u64::from(pramin::BASE) + 0x1_0000, 0xf_0000), "{value:#x}");
    }
    assert_eq!((driver.guest.counter("faults"), driver.guest.counter("aperture_aliases")), (0, 0));
}

#[test]
fn page_tables_written_through_pramin_are_used_by_work() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar0);
    let mut channel = driver.channel(1);
    let to = driver.buffer(&channel, B, 1, 7);
    let [first, second] = [5, 6].map(|seed| {
        let at = driver.vram(1);
        driver.guest.vram_write(at, &pattern(seed, 0));
        at
    });
    let entry = channel.space.table + (A >> 12) * 8;
    for (page, seed) in [(first, 5), (second, 6), (first, 5)] {
        let at = in_window(&mut driver, entry);
        cpu.write(at, &((page >> 8) | 1).to_le_bytes());
        driver.flush();
        copy(&mut driver, &mut channel, A, B, 1);
        assert!(driver.vram_holds(to, 1, seed));
    }
    // After the window has moved, the data must be in VRAM.
    let at = in_window(&mut driver, entry);
    cpu.write(at, &[0; 8]);
    hide_window(&mut driver);
    driver.flush();
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    assert_eq!(driver.wait_fault().va, A);
}

#[test]
fn page_moves_from_pramin_to_bar3_and_back() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let (cpu, cpu3) = (Cpu::for_region(&driver.guest, Bar0), Cpu::for_region(&driver.guest, Bar3));
    let at = driver.vram(2);
    driver.guest.vram_write(at, &pages(4, 2));
    // Like a driver, start with PRAMIN, and then use BAR3 without unmapping PRAMIN.
    let space = driver.apertures[1];
    driver.pte(space, HIGH3, (at >> 8) as u32 | 1, 0);
    let place = in_window(&mut driver, at);
    assert_eq!(cpu.read(place, 2 * PAGE), pages(4, 2));
    cpu.write(place, &pattern(5, 0));
    driver.flush();
    assert_eq!(cpu3.read(HIGH3, PAGE), pattern(5, 0));
    assert!(cpu.is_zero(place, PAGE), "PRAMIN gives way");
    assert_eq!(cpu.read(place + PAGE, PAGE), pages(4, 2)[PAGE as usize..]);
    cpu3.write(HIGH3, &pattern(6, 0));
    assert_eq!(driver.guest.counter("aperture_aliases"), 0);
    // While BAR3 shows the page, a write to it through PRAMIN is lost and counted.
    cpu.write(place, &[1]);
    driver.guest.wr(pbus::BAR3_BLOCK::OFFSET, 0);
    assert_eq!(cpu.read(place, PAGE), pattern(6, 0));
    assert_eq!(driver.guest.counter("aperture_aliases"), 1);
    hide_window(&mut driver);
    assert!(driver.vram_holds(at, 1, 6));
}

#[test]
fn a_window_that_goes_where_nothing_was_used_takes_no_memory() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let before = usage(&rig);
    for at in (0..VM_MIB * MIB).step_by(MIB as usize) {
        in_window(&mut driver, at);
    }
    assert_eq!(usage(&rig), before);
}

#[test]
fn pramin_stays_in_place_after_move_and_hand_over() {
    let handover = handover(16);
    let (mut first, second) = (handover.rig(), rig());
    let mut driver = driver(&first, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar0);
    let at = driver.vram(2);
    driver.guest.vram_write(at, &pages(4, 2));
    let place = in_window(&mut driver, at);
    let goes_on = |driver: &Driver, seed: u32| {
        assert_eq!(cpu.read(place + PAGE, PAGE), pages(4, 2)[PAGE as usize..]);
        cpu.write(place, &pattern(seed, 0));
        assert!(driver.vram_holds(at, 1, seed));
    };
    handover.hand_over(&mut first, &mut [&mut driver.guest]);
    goes_on(&driver, 5);
    driver.guest.move_to(&second, 9, true).unwrap();
    goes_on(&driver, 6);
    // The guest must be able to continue from here.
    hide_window(&mut driver);
    assert!(cpu.is_zero(place, 2 * PAGE) && driver.vram_holds(at, 1, 6));
}

#[test]
fn unwritten_window_pages_are_neither_read_nor_written() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar0);
    // The last two MiB are unused.
    let at = (VM_MIB - 2) * MIB;
    let place = in_window(&mut driver, at);
    cpu.write(place + 3 * PAGE, &pattern(5, 0));
    let words = |driver: &Driver| ["vram_words_read", "vram_words_written"].map(|name| driver.guest.counter(name));
    let before = words(&driver);
    in_window(&mut driver, at + MIB);
    assert_eq!(words(&driver), [before[0], before[1] + PAGE / 8], "one of 512 pages was written");
    assert!(cpu.is_zero(u64::from(pramin::BASE), pramin::BYTES.into()));
    assert!(driver.vram_holds(at + 3 * PAGE, 1, 5));
    let place = in_window(&mut driver, at);
    assert_eq!(cpu.read(place + 3 * PAGE, PAGE), pattern(5, 0));
    assert!(cpu.is_zero(place, 3 * PAGE));
}

/// Maximum burst of moved pages, as in `device/pace.rs`.
const BURST_PAGES: u64 = 1 << 16;
/// Maximum number of moved pages per second, as in `device/pace.rs`.
const PAGES_PER_SECOND: u64 = 1 << 15;

/// Makes a guest exceed its burst with `step`, and compares the number of moved pages with the elapsed time.
fn moves_no_faster_than_it_may(driver: &mut Driver, mut step: impl FnMut(&mut Driver, usize)) {
    let began = Instant::now();
    let moved = |driver: &Driver| driver.guest.counter("aperture_moves");
    for round in 0.. {
        step(driver, round);
        if moved(driver) > BURST_PAGES + PAGES_PER_SECOND {
            break;
        }
        assert!(round < 1000, "{} pages have moved", moved(driver));
    }
    // The last move may exceed the budget.
    let most = BURST_PAGES as f64 + PAGES_PER_SECOND as f64 * began.elapsed().as_secs_f64() + 4.0 * 4096.0;
    assert!((moved(driver) as f64) < most, "{} pages have moved; the maximum is {most}", moved(driver));
    // A busy host may move pages more slowly than the limit permits.
    println!("{} moves have waited, of {} pages", driver.guest.counter("aperture_waits"), moved(driver));
}

#[test]
fn guest_moving_window_repeatedly_delays_only_itself() {
    let rig = rig();
    let (mut driver, mut neighbour) = (driver(&rig, 0), super::driver(&rig, 1));
    let cpu = Cpu::for_region(&driver.guest, Bar0);
    let at = driver.vram(768).next_multiple_of(MIB);
    driver.guest.vram_write(at, &pages(4, 512));
    let mut channel = neighbour.channel(1);
    neighbour.buffer(&channel, A, 4, 1);
    let to = neighbour.buffer(&channel, B, 4, 2);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            let mut copies = 0;
            while !done.load(Ordering::SeqCst) {
                copy(&mut neighbour, &mut channel, A, B, 4);
                copies += 1;
            }
            copies
        });
        let moves = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            moves_no_faster_than_it_may(&mut driver, |driver, round| {
                let first = (round % 2) as u64 * 256;
                let place = in_window(driver, at + first * PAGE);
                // When the reply to the write has arrived, the window must show its new pages.
                assert_eq!(cpu.read(place, PAGE), pattern(4, first), "{round}");
            });
        }));
        done.store(true, Ordering::SeqCst);
        moves.unwrap_or_else(|error| std::panic::resume_unwind(error));
        assert!(beside.join().unwrap() > 0);
    });
    assert!(neighbour.vram_holds(to, 4, 1));
    assert_eq!(neighbour.guest.counter("aperture_waits"), 0, "the guest is not charged");
}

/// Writes all pages that the window shows at two adjacent positions, so that each move between them unmaps 256 pages
/// and maps 256 others. Returns the first position, where the window is.
fn two_windows(driver: &mut Driver) -> u64 {
    let at = driver.vram(768).next_multiple_of(MIB);
    driver.guest.vram_write(at, &pages(4, 512));
    in_window(driver, at);
    at
}

#[test]
fn card_lock_is_free_between_pages_of_moved_window() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let at = two_windows(&mut driver);
    // Returns the number of pages that one register write moves, and how often the card is locked. At most one page may
    // move per critical section.
    let mut place = |at: u64| {
        let before = (driver.guest.counter("aperture_moves"), rig.host.lock_holds().count());
        in_window(&mut driver, at);
        (driver.guest.counter("aperture_moves") - before.0, rig.host.lock_holds().count() - before.1)
    };
    for round in [1, 0, 1] {
        let (pages, holds) = place(at + round * MIB);
        println!("{pages} pages in {holds} critical sections of the card's lock");
        assert!(pages >= 512 && holds >= 2 * pages, "{pages} pages in {holds} critical sections of the card's lock");
    }
    // As a control, a write that moves no pages must rarely lock the card.
    let (pages, holds) = place(at + MIB);
    assert!(pages == 0 && holds < 64, "{holds} critical sections for a window that does not move");
}

#[test]
fn a_neighbours_registers_answer_while_a_window_is_placed() {
    const MOVES: u64 = 48;
    const MAX_BATCHES: u64 = 50;
    let rig = rig();
    let (mut driver, mut neighbour) = (driver(&rig, 0), super::driver(&rig, 1));
    let at = two_windows(&mut driver);
    let channel = neighbour.channel(1);
    let (moving, done, answers) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let (most, waits) = std::thread::scope(|scope| {
        // Count the neighbour's reads that complete while a window moves.
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                let began = moving.load(Ordering::SeqCst);
                neighbour.guest.rd(pfifo::CHANNEL_STATE::at(channel.id.into()));
                answers.fetch_add(u64::from(began && moving.load(Ordering::SeqCst)), Ordering::SeqCst);
            }
        });
        // A busy host may not run the neighbour's thread in each batch of moves.
        let moves = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut most = 0;
            for _ in 0..MAX_BATCHES {
                let before = answers.load(Ordering::SeqCst);
                for round in 0..MOVES {
                    moving.store(true, Ordering::SeqCst);
                    in_window(&mut driver, at + (round + 1) % 2 * MIB);
                    moving.store(false, Ordering::SeqCst);
                }
                most = most.max(answers.load(Ordering::SeqCst) - before);
                if most > 4 * MOVES {
                    break;
                }
            }
            most
        }));
        done.store(true, Ordering::SeqCst);
        let most = moves.unwrap_or_else(|error| std::panic::resume_unwind(error));
        (most, driver.guest.counter("aperture_waits"))
    });
    println!("{most} reads of a neighbour completed while {MOVES} writes moved 512 pages each");
    assert_eq!(waits, 0, "the guest is within its budget");
    // A single critical section for all pages would permit about one read per move.
    assert!(most > 4 * MOVES, "{most} reads of a neighbour in {MOVES} moves");
}

#[test]
fn guest_remapping_aperture_repeatedly_delays_only_itself() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let cpu = Cpu::for_region(&driver.guest, Bar3);
    let at = driver.vram(1024);
    driver.guest.vram_write(at, &pages(4, 1024));
    super::show(&mut driver, 1, HIGH3, at, 1024);
    let directory = driver.apertures[1].directory;
    let mut entry = vec![0; 8];
    driver.guest.vram_read(directory, &mut entry);
    // A single directory entry maps or unmaps the whole range.
    moves_no_faster_than_it_may(&mut driver, |driver, round| {
        let shown = round % 2 == 1;
        driver.guest.vram_write(directory, if shown { &entry } else { &[0; 8] });
        driver.flush();
        assert_eq!(cpu.is_zero(HIGH3, PAGE), !shown, "{round}");
    });
}
