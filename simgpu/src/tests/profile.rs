//! Tests the engines' and kernels' access counts per memory block.

use super::driver::{At, CE0, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object, release, small, words};
use super::kernels::{ADD, BANK, DATA, launch, prepare, query, set_up};
use crate::Config;
use card::{AccessCounts, Card};
use simgpu_memory::memory::{Touched as Moved, Touches};

const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;
const SEM: u64 = 0x300_0000;
const BLOCK: u64 = AccessCounts::BLOCK_BYTES;
/// Number of bursts per page.
const BURSTS: u64 = PAGE / AccessCounts::BURST_BYTES;

fn profiled() -> Driver {
    Driver::new(&Config { profile: true, ..small() })
}

/// Block addresses, and the number of accesses to each block.
type Touched = Vec<(u64, u64)>;

/// Returns the accessed blocks in VRAM and in host memory.
fn touched(counts: &AccessCounts) -> (Touched, Touched) {
    let vram = (0..).zip(&counts.vram).filter(|(_, count)| **count != 0);
    (vram.map(|(block, count)| (block * BLOCK, *count)).collect(), counts.system.clone().into_iter().collect())
}

/// Maps 64 VRAM pages at `va` in the channel's address space, starting 16 pages before the end of a block. Returns the
/// address of this end.
fn across_blocks(driver: &mut Driver, channel: &Channel, va: u64) -> u64 {
    let at = driver.vram(4 * BLOCK / PAGE).next_multiple_of(BLOCK) + BLOCK;
    driver.map(channel.space, va, At::Vram(at - 16 * PAGE), 64);
    at
}

#[test]
fn card_without_a_profile_has_none() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 1, 1);
    driver.buffer(&channel, B, 1, 2);
    driver.push(&mut channel, &words(&[object(CE0), ce_copy(A, B, 1)]));
    driver.run_until_idle();
    assert_eq!(driver.card.access_counts(true), None);
}

#[test]
fn copies_are_counted_on_both_sides_until_they_are_read() {
    for (class, copy) in [(M2MF, m2mf_copy(A, B, 64 * PAGE as u32)), (CE0, ce_copy(A, B, 64))] {
        let mut driver = profiled();
        let mut channel = driver.only_channel(1);
        let from = across_blocks(&mut driver, &channel, A);
        let to = 0x12_3456_0000u64.next_multiple_of(BLOCK);
        let iova = to - 48 * PAGE;
        driver.host(iova, 64);
        driver.map(channel.space, B, At::Host(iova), 64);
        driver.buffer(&channel, SEM, 1, 0);
        assert_eq!(
            touched(&driver.card.access_counts(false).expect("a profile")),
            (vec![], vec![]),
            "accessed only by the CPU"
        );
        driver.push(&mut channel, &words(&[object(class), copy.clone(), release(SEM, 1)]));
        driver.run_until_idle();
        let vram = [(from - BLOCK, 16), (from, 32), (from + BLOCK, 16)];
        let host = [(to - 2 * BLOCK, 16), (to - BLOCK, 32), (to, 16)];
        let bursts = |pages: [(u64, u64); 3]| pages.map(|(block, pages)| (block, pages * BURSTS)).to_vec();
        let expected = (bursts(vram), bursts(host));
        assert_eq!(touched(&driver.card.access_counts(false).expect("a profile")), expected);
        let counts = driver.card.access_counts(true).expect("a profile");
        assert_eq!(touched(&counts), expected, "reading must not reset the counts");
        assert_eq!(counts.vram.len() as u64, (64 << 20) / BLOCK);
        assert_eq!(touched(&driver.card.access_counts(true).expect("a profile")), (vec![], vec![]));
        driver.push(&mut channel, &copy);
        driver.run_until_idle();
        assert_eq!(touched(&driver.card.access_counts(true).expect("a profile")), expected, "counting continues");
    }
}

#[test]
fn kernels_are_counted_by_transactions() {
    let mut driver = profiled();
    let mut channel = driver.only_channel(5);
    prepare(&mut driver, &channel, ADD);
    let at = across_blocks(&mut driver, &channel, BANK);
    let data = across_blocks(&mut driver, &channel, DATA);
    driver.host(DATA, 1);
    // The third page of the data is in host memory. All other pages are at the end of a block.
    driver.map(channel.space, DATA + 2 * PAGE, At::Host(DATA), 1);
    driver.buffer(&channel, SEM, 1, 9);
    driver.push(&mut channel, &words(&[set_up(&[DATA as u32, 100, 7]), launch(16, 256), query(SEM, 1)]));
    driver.run_until_idle();
    let counts = driver.card.access_counts(true).expect("a profile");
    // Expect three parameter accesses. Each data page is loaded and stored, with one transaction per warp.
    let expected = (vec![(at - BLOCK, 3), (data - BLOCK, 2 * 3 * BURSTS)], vec![(DATA, 2 * BURSTS)]);
    assert_eq!(touched(&counts), expected);
}

#[test]
fn unanswered_accesses_are_counted_in_no_vram_block() {
    let mut driver = profiled();
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 1, 1);
    // Access VRAM addresses beyond the card's 64 MiB, in the same and in later gibibytes, and unmapped host memory.
    for (page, at) in [At::Vram(80 << 20), At::Vram(3 << 30), At::Vram((1 << 40) - PAGE)].into_iter().enumerate() {
        driver.map(channel.space, B + page as u64 * PAGE, at, 1);
    }
    driver.map(channel.space, B + 3 * PAGE, At::Host((1 << 40) - PAGE), 1);
    driver.push(&mut channel, &words(&[object(CE0), (0..4).flat_map(|page| ce_copy(A, B + page * PAGE, 1)).collect()]));
    driver.run_until_idle();
    let (vram, system) = touched(&driver.card.access_counts(true).expect("a profile"));
    assert_eq!(vram.iter().map(|(_, count)| count).sum::<u64>(), 4 * BURSTS, "{vram:?}");
    assert_eq!(system, [((1 << 40) - BLOCK, BURSTS)]);
}

#[test]
fn touches_are_reported_in_order_after_first_call() {
    let mut driver = Driver::new(&Config { profile: true, compute_workers: Some(0), ..small() });
    let mut channel = driver.only_channel(1);
    let (from, to) = (across_blocks(&mut driver, &channel, A), across_blocks(&mut driver, &channel, B));
    let page = |driver: &mut Driver, channel: &mut Channel, index: u64| {
        driver.push(channel, &words(&[object(CE0), ce_copy(A + index * PAGE, B + index * PAGE, 1)]));
        driver.run_until_idle();
    };
    page(&mut driver, &mut channel, 0);
    assert_eq!(driver.card.take_touches(), [], "the recording has not been started");
    // Access the first blocks once, the next blocks twice, and the first blocks once more.
    for index in [0, 16, 17, 1] {
        page(&mut driver, &mut channel, index);
    }
    let touched = |behind: u64, pages: u64| -> Touches {
        let (read, written) = (Moved { read: pages * PAGE, written: 0 }, Moved { read: 0, written: pages * PAGE });
        [(from / BLOCK + behind - 1, read), (to / BLOCK + behind - 1, written)].into_iter().collect()
    };
    assert_eq!(driver.card.take_touches(), [touched(0, 1), touched(1, 2), touched(0, 1)]);
    assert_eq!(driver.card.take_touches(), []);
}
