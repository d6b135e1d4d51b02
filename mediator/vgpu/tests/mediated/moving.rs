//! Tests moves of VMs with work in progress to another card, next to VMs that stay.

use super::handover::{copy, handover};
use super::oversubscribe::eventually;
use super::relocate::{free_settings, move_all, work};
use super::schedule::acquire;
use super::{A, B, MIB, fill, is_filled, usage};
use fastrand::Rng;
use nvspec::regs::ptimer;
use rig::driver::{At, Channel, Driver, release};
use rig::{CHUNK, Guest, Rig, settings, sharing};
use sched::PolicyKind;
use simgpu::{ComputeTiming, Config, EngineTiming, TimeModel};
use vgpu::{Left, Settings};
use vram::{Step, TenantId, To};

/// Number of pages per copy.
const PAGES: u64 = 20;
/// Virtual address of a semaphore.
const SEMAPHORE: u64 = 0x300_0000;

/// Creates a card with `host_mib` MiB of host memory.
pub(crate) fn card(host_mib: u64) -> Rig {
    handover(host_mib).rig()
}

fn driver(rig: &Rig, vm: u32, settings: &Settings) -> Driver {
    let mut guest = rig.guest_with(vm, settings);
    assert!(guest.map_ram(0, MIB, true));
    Driver::new(guest)
}

/// A VM, and the state to check after its move.
pub(crate) struct Traveller {
    pub(crate) driver: Driver,
    channels: [Channel; 2],
    pub(crate) places: [u64; 2],
    seed: u32,
}

impl Traveller {
    pub(crate) fn new(rig: &Rig, vm: u32) -> Self {
        let mut driver = driver(rig, vm, &free_settings(16));
        let channels = [driver.channel(1), driver.channel(2)];
        Self { driver, channels, places: [0; 2], seed: 0 }
    }

    /// Submits work to both channels. Some of it will be in progress, and some will be queued.
    pub(crate) fn begin(&mut self, seed: u32) {
        self.seed = seed;
        let Self { driver, channels, places, .. } = self;
        *places = channels.each_mut().map(|channel| {
            driver.buffer(channel, A, PAGES, seed);
            driver.buffer(channel, B, PAGES, 7)
        });
        for by in 0..4 {
            channels.iter_mut().for_each(|channel| copy(driver, channel, by + seed));
        }
    }

    /// Waits for all copies, and verifies all bytes.
    pub(crate) fn check(&mut self) {
        let Self { driver, channels, places, seed } = self;
        for (channel, to) in channels.iter().zip(places) {
            driver.wait(channel);
            assert!(driver.vram_holds(*to, PAGES, *seed), "seed {seed}");
        }
        assert_eq!((driver.faults.len(), driver.guest.counter("faults")), (0, 0));
    }
}

/// Writes to each MiB of VRAM that the VM's driver does not use.
pub(crate) fn use_up(driver: &Driver) {
    (6..16).for_each(|mib| driver.guest.vram_write(mib * MIB, &[0x5a; 64]));
}

/// Allocates VM numbers on a card. Numbers are never reused: an arriving VM gets the next one.
struct Numbers(u32);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 += 1;
        self.0
    }
}

/// Moves two VMs through `cards`, each of which also has another VM that stays.
fn go_round(cards: &[Rig], rounds: u32, emptied: bool) {
    let mut numbers = Numbers(100);
    let mut stay: Vec<Traveller> = cards.iter().map(|card| Traveller::new(card, 0)).collect();
    let mut travel: Vec<(usize, Traveller)> = (0..2).map(|of| (of, Traveller::new(&cards[of], 1))).collect();
    for round in 0..rounds {
        stay.iter_mut().zip(1..).for_each(|(one, of)| one.begin(1000 * round + of));
        for (at, one) in &mut travel {
            one.begin(1000 * round + 500 + *at as u32);
            if round % 3 == 1 {
                move_all(&cards[*at], one.driver.guest.vm().id().0, To::Host);
            }
            let to = (*at + 1) % cards.len();
            one.driver.guest.move_to(&cards[to], numbers.next(), emptied && round % 2 == 0).unwrap();
            *at = to;
        }
        stay.iter_mut().chain(travel.iter_mut().map(|(_, one)| one)).for_each(Traveller::check);
    }
    // Drop the moved VMs before those that stayed.
    drop(travel);
}

#[test]
fn vms_in_mid_work_move_between_cards_with_others_running() {
    go_round(&[card(0), card(0)], 8, false);
}

#[test]
fn vms_with_evicted_memory_move_between_cards() {
    go_round(&[card(64), card(64), card(64), card(64)], 8, true);
}

#[test]
fn writes_and_drops_after_copy_are_kept_on_other_card() {
    let cards = [card(64), card(64)];
    let mut one = Traveller::new(&cards[0], 1);
    use_up(&one.driver);
    one.begin(5);
    let write = |guest: &mut Guest| {
        guest.vram_write(9 * MIB, b"later");
        guest.vram_write(13 * MIB + 70_000, b"later");
        guest.vram_write(10 * MIB, &[0; 64]);
    };
    let copied = one.driver.guest.move_beside(&cards[1], 9, true, write, |_, left| drop(left));
    // Each chunk is copied once and as a whole.
    assert_eq!(copied.unwrap() % CHUNK, 0);
    one.check();
    let read = |guest: &Guest, at: u64| {
        let mut bytes = [1; 5];
        guest.vram_read(at, &mut bytes);
        bytes
    };
    let guest = &mut one.driver.guest;
    assert_eq!([9 * MIB, 13 * MIB + 70_000].map(|at| read(guest, at)), [*b"later"; 2]);
    assert_eq!((read(guest, 10 * MIB), read(guest, 11 * MIB)), ([0; 5], [0x5a; 5]));
    // The client disconnects and unmaps all of its memory. The other card must stop using this memory.
    guest.move_beside(&cards[0], 10, true, Guest::reconnect, |_, left| drop(left)).unwrap();
    assert!((6..16).all(|mib| read(guest, mib * MIB) == [0; 5]));
}

#[test]
fn borrowed_slot_taken_by_another_vm_keeps_that_vms_data() {
    // There is only enough host memory for one VM.
    let cards = [card(16), card(64)];
    let mut one = Traveller::new(&cards[0], 1);
    use_up(&one.driver);
    one.begin(5);
    let other = cards[0].guest_with(2, &free_settings(16));
    fill(&other, 0x77);
    let taken = |_: &mut Guest| {
        // The memory returns to the card, and its old slot is assigned to another VM.
        assert!(move_all(&cards[0], 1, To::Card).moved > 0);
        cards[0].host.scrub();
        assert!(move_all(&cards[0], 2, To::Host).moved > 0);
    };
    one.driver.guest.move_beside(&cards[1], 9, true, taken, |_, left| drop(left)).unwrap();
    one.check();
    let mut bytes = [1; 5];
    one.driver.guest.vram_read(9 * MIB, &mut bytes);
    assert_eq!(bytes, [0x5a; 5]);
    assert!(is_filled(&other, 0x77));
    one.driver.guest.remove().unwrap();
    cards[1].host.scrub();
    assert!(is_filled(&other, 0x77));
}

#[test]
fn guest_writes_during_copy_of_borrowed_memory_persist() {
    let cards = [card(64), card(64)];
    let mut one = Traveller::new(&cards[0], 1);
    use_up(&one.driver);
    // Last value written to each address, kept over all rounds, because a round may have only a few writes on a busy
    // host.
    let (mut last, mut count) = ([0; 10], 0_u64);
    for (round, to) in [1, 0, 1, 0, 1, 0].into_iter().enumerate() {
        one.begin(50 + round as u32);
        let (last, count) = (&mut last, &mut count);
        let beside = |guest: &mut Guest, left: Left<'_>| {
            std::thread::scope(|scope| {
                let settles = scope.spawn(move || drop(left));
                while !settles.is_finished() {
                    *count += 1;
                    let at = *count as usize % last.len();
                    last[at] = *count;
                    guest.vram_write((6 + at as u64) * MIB + 0x20, &count.to_le_bytes());
                }
            });
        };
        one.driver.guest.move_beside(&cards[to], 20 + round as u32, true, |_| (), beside).unwrap();
        one.check();
        for (at, count) in (0..).zip(*last) {
            let mut bytes = [0; 8];
            one.driver.guest.vram_read((6 + at) * MIB + 0x20, &mut bytes);
            let expected = if count == 0 { u64::from_le_bytes([0x5a; 8]) } else { count };
            assert_eq!(u64::from_le_bytes(bytes), expected, "MiB {} in round {round}", 6 + at);
        }
    }
}

#[test]
fn a_card_that_still_has_anothers_memory_is_not_handed_over() {
    let cards = [card(64), card(64)];
    let mut one = Traveller::new(&cards[0], 1);
    use_up(&one.driver);
    let beside = |_: &mut Guest, left: Left<'_>| {
        let refused = cards[1].host.check_movable().unwrap_err().to_string();
        assert!(refused.contains("memory of the card that a VM has left"), "{refused}");
        drop(left);
        cards[1].host.check_movable().unwrap();
    };
    one.driver.guest.move_beside(&cards[1], 2, true, |_| (), beside).unwrap();
}

#[test]
fn long_work_is_descheduled_and_resumes_on_another_card() {
    let mut handover = handover(64);
    let engine = EngineTiming { bytes_per_second: 20_000_000, launch_ns: 1_000_000 };
    let compute = ComputeTiming::default();
    handover.config.time =
        Some(TimeModel { graph: engine, compute, copy: engine, switch_ns: 10_000, bus_bytes_per_second: 0 });
    for policy in PolicyKind::ALL {
        handover.sharing.scheduler.policy = policy;
        go_round(&[handover.rig(), handover.rig()], 2, true);
    }
}

#[test]
fn a_channel_that_waits_for_a_semaphore_waits_on_the_other_card() {
    let cards = [card(64), card(64)];
    let mut driver = driver(&cards[0], 1, &free_settings(16));
    let (mut waits, mut tells) = (driver.channel(1), driver.channel(2));
    driver.buffer(&waits, A, PAGES, 5);
    let to = driver.buffer(&waits, B, PAGES, 6);
    let semaphore = driver.vram(1);
    for channel in [&waits, &tells] {
        driver.map(channel.space, SEMAPHORE, At::Vram(semaphore), 1);
    }
    driver.flush();
    driver.submit(&mut waits, &acquire(SEMAPHORE, 0x77));
    copy(&mut driver, &mut waits, 0);
    // Give the work time to reach the engine, where it waits for the semaphore.
    std::thread::sleep(std::time::Duration::from_millis(20));
    for (to, vm) in [(1, 2), (0, 3), (1, 4)] {
        driver.guest.move_to(&cards[to], vm, vm % 2 == 0).unwrap();
        assert!(!driver.is_done(&waits));
    }
    driver.submit(&mut tells, &release(SEMAPHORE, 0x77));
    driver.wait(&tells);
    driver.wait(&waits);
    assert!(driver.vram_holds(to, PAGES, 5) && driver.faults.is_empty());
}

#[test]
fn nothing_is_left_on_the_card_that_a_vm_leaves() {
    let cards = [card(64), card(64)];
    let before = cards.each_ref().map(usage);
    let mut driver = driver(&cards[0], 1, &free_settings(16));
    use_up(&driver);
    work(&mut driver, 20, &mut Rng::with_seed(1));
    driver.guest.move_to(&cards[1], 5, true).unwrap();
    eventually("the VM has left", || usage(&cards[0]) == before[0]);
    work(&mut driver, 20, &mut Rng::with_seed(2));
    driver.guest.remove().unwrap();
    eventually("the VM is gone", || usage(&cards[1]) == before[1]);
    let host = cards.each_ref().map(|card| card.usage().0.host.used);
    assert_eq!(host, [0, 0]);
}

#[test]
fn vm_after_failed_move_continues_on_its_card() {
    let here = card(64);
    // Another VM uses almost all memory of the other card, which has no host memory.
    let there = Rig::made(&Config { vram_mib: 48, ..Config::default() }, &sharing(), |card| card);
    let other = there.guest_with(0, &settings(24, 8));
    fill(&other, 0x11);
    let before = usage(&there);
    let mut one = Traveller::new(&here, 1);
    use_up(&one.driver);
    for (seed, emptied) in [(3, false), (4, true), (5, false)] {
        one.begin(seed);
        let refused = one.driver.guest.move_to(&there, 10 + seed, emptied).unwrap_err().to_string();
        assert!(refused.contains("gets no chunk"), "{refused}");
        one.check();
    }
    assert!(is_filled(&other, 0x11));
    eventually("none of its resources are left there", || usage(&there) == before);
}

#[test]
fn time_does_not_go_back() {
    let cards = [card(0), card(0)];
    let mut guest = cards[0].guest_with(1, &free_settings(16));
    let time = |guest: &mut Guest| {
        u64::from(guest.rd(ptimer::TIME_1::OFFSET)) << 32 | u64::from(guest.rd(ptimer::TIME_0::OFFSET))
    };
    let mut last = time(&mut guest);
    for (to, vm) in [(1, 7), (0, 8), (1, 9)] {
        guest.move_to(&cards[to], vm, false).unwrap();
        let now = time(&mut guest);
        assert!(now >= last && now - last < 60_000_000_000, "{last} and then {now}");
        last = now;
    }
}

#[test]
fn moved_vm_keeps_its_memory_and_unused_memory_stays_unbacked() {
    let cards = [card(64), card(64)];
    let mut guest = cards[0].guest_with(1, &free_settings(16));
    guest.vram_write(5, b"here");
    guest.vram_write(9 * MIB, b"there");
    cards[0].host.relocate(TenantId(1), &[Step { vm: TenantId(1), index: 0, to: To::Host }]);
    // Pages that contain zeros on the first card must not be copied.
    assert!((1..2 * CHUNK).contains(&guest.move_to(&cards[1], 4, false).unwrap()));
    let (mut here, mut there) = ([0; 4], [0; 5]);
    guest.vram_read(5, &mut here);
    guest.vram_read(9 * MIB, &mut there);
    assert_eq!((&here, &there), (b"here", b"there"));
    assert_eq!(cards[1].usage().0.vms[&TenantId(4)].unbacked, 6);
}
