//! Tests a card that does not respond. Memory that it may still access must not be reused.

use super::oversubscribe::eventually;
use super::relocate::{driver_of, move_all, still};
use super::{A, B, MIB};
use card::Card;
use card_manager::usage::Wait;
use card_manager::{Division, ManagedCard, Sharing};
use nvspec::fifo::VirtualChannelId;
use nvspec::regs::pfb::{MMU_CTRL, MMU_INVALIDATE, MMU_INVALIDATE_PDB};
use nvspec::regs::pfifo;
use rig::altered::{Alter, Altered};
use rig::driver::{CE0, PAGE, ce_copy, object};
use rig::{Rig, sharing};
use simgpu::{Config, SimGpu};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use vram::{Limits, TenantId, To};

/// A card whose failures the test controls.
#[derive(Clone, Default)]
struct Failing {
    /// Directory of the last TLB invalidation, as encoded in the register.
    flushed: Arc<AtomicU32>,
    /// Directory whose TLB invalidations never complete, or 0 for none.
    deaf_to: Arc<AtomicU32>,
    /// Set if channels never leave their engines.
    holds: Arc<AtomicBool>,
    /// Number of further polls during which no channel leaves its engine.
    hesitates: Arc<AtomicU32>,
    /// Directory whose TLB invalidations are counted, as encoded in the register.
    watched: Arc<AtomicU32>,
    /// Number of invalidations of that directory so far.
    flushes: Arc<AtomicU32>,
}

impl Alter for Failing {
    fn read32(&self, card: &SimGpu, offset: u32) -> u32 {
        let value = card.read32(offset);
        let deaf = self.deaf_to.load(Ordering::SeqCst);
        match offset {
            MMU_CTRL::OFFSET if deaf != 0 && deaf == self.flushed.load(Ordering::SeqCst) => {
                MMU_CTRL::FLUSH_DONE.with(value, 0)
            }
            pfifo::PREEMPT::OFFSET if self.hesitates() => value | pfifo::PREEMPT::PENDING.mask(),
            pfifo::PREEMPT::OFFSET if self.holds.load(Ordering::SeqCst) => value | pfifo::PREEMPT::PENDING.mask(),
            _ => value,
        }
    }

    fn write32(&self, card: &SimGpu, offset: u32, value: u32) {
        if offset == MMU_INVALIDATE::OFFSET {
            let directory = MMU_INVALIDATE_PDB::ADDRESS.get(card.read32(MMU_INVALIDATE_PDB::OFFSET));
            self.flushed.store(directory, Ordering::SeqCst);
            self.flushes.fetch_add(u32::from(directory == self.watched.load(Ordering::SeqCst)), Ordering::SeqCst);
        }
        card.write32(offset, value);
    }
}

impl Failing {
    /// Counts a poll. Returns true if no channel may leave its engine in this poll.
    fn hesitates(&self) -> bool {
        self.hesitates.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
    }
}

fn failing() -> (Rig, Failing) {
    failing_with(sharing().division)
}

fn failing_with(division: Division) -> (Rig, Failing) {
    let sharing = Sharing { chunk_bytes: 2 * MIB, host_bytes: 64 * MIB, division, ..sharing() };
    let failing = Failing::default();
    let altered = failing.clone();
    let config = Config { vram_mib: 64, ..Config::default() };
    (Rig::made(&config, &sharing, |card| Altered::over(card, altered)), failing)
}

/// Returns a driver, a channel that has executed work, and the channel's directory, which was the last one flushed.
fn at_work(rig: &Rig, card: &Failing) -> (rig::driver::Driver, rig::driver::Channel, u32) {
    let mut driver = driver_of(rig, 0, 16);
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 1);
    driver.buffer(&channel, B, 1, 2);
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    driver.wait(&channel);
    // Zeroing a chunk moves the mediator's own window, which causes a flush. Zero all chunks now, so that no flush
    // occurs later.
    rig.host.scrub();
    // Map a new page, which causes a flush.
    driver.buffer(&channel, B + PAGE, 1, 3);
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B + PAGE, 1)].concat());
    let directory = card.flushed.load(Ordering::SeqCst);
    driver.wait(&channel);
    (driver, channel, directory)
}

#[test]
fn vacated_chunks_are_quarantined_if_tlb_flush_fails() {
    let (rig, card) = failing();
    let (_driver, _channel, directory) = at_work(&rig, &card);
    card.deaf_to.store(directory, Ordering::SeqCst);
    let moved = move_all(&rig, 0, To::Host).moved;
    assert!(moved > 0);
    rig.host.scrub();
    let summary = rig.host.lock().vram().chunks.summary();
    // Moved chunks that no entry mapped were not in the TLB, so they are not quarantined.
    assert!(summary.quarantined > 0 && summary.quarantined <= moved && summary.to_scrub == 0);
}

#[test]
fn evicted_chunks_are_flushed_from_tlb_one_at_a_time() {
    let (rig, card) = failing();
    let (mut driver, mut channel, directory) = at_work(&rig, &card);
    // The buffer spans more than one chunk.
    driver.buffer(&channel, A, 768, 1);
    driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    driver.wait(&channel);
    card.watched.store(directory, Ordering::SeqCst);
    let moved = move_all(&rig, 0, To::Host).moved;
    // The card must drop its translations of each chunk when the chunk moves, rather than after all chunks have moved.
    let flushes = card.flushes.load(Ordering::SeqCst);
    assert!(flushes > 1 && flushes <= moved, "{moved} chunks, {flushes} flushes");
}

#[test]
fn channel_number_is_quarantined_if_tlb_flush_of_ring_fails() {
    let (rig, card) = failing();
    let (mut driver, channel, directory) = at_work(&rig, &card);
    card.deaf_to.store(directory, Ordering::SeqCst);
    driver.unbind(&channel);
    card.deaf_to.store(0, Ordering::SeqCst);
    assert_eq!(rig.host.lock().channels().stuck(), 1);
    assert!(driver.guest.remove().is_err(), "the VM's memory must not be released");
}

#[test]
fn channel_leaving_late_keeps_ring_and_number_until_off_card() {
    let (rig, card) = failing();
    let (mut driver, channel, _) = at_work(&rig, &card);
    let bound = rig.host.channels_in_use();
    // Make the channel stay for more polls than the guest's write performs.
    card.hesitates.store(100, Ordering::SeqCst);
    card.flushed.store(0, Ordering::SeqCst);
    driver.unbind(&channel);
    while rig.host.lock().channels().stuck() != 0 {
        // While the channel is on the card, its address space must still map its ring. Read the flag first, because the
        // channel may leave in between.
        let flushed = card.flushed.load(Ordering::SeqCst) != 0;
        let hesitates = card.hesitates.load(Ordering::SeqCst) != 0;
        assert!(!hesitates || !flushed, "the ring must not be unmapped while the channel is on the card");
        std::thread::yield_now();
    }
    assert_eq!(card.hesitates.load(Ordering::SeqCst), 0, "the channel has left once its number is free");
    assert_eq!(rig.host.channels_in_use(), bound - 1);
    // The channel can be bound again, and removing the VM releases all of its memory.
    driver.bind(&channel);
    driver.unbind(&channel);
    driver.guest.remove().unwrap();
}

#[test]
fn a_channel_that_has_left_between_two_looks_is_given_back() {
    let (rig, card) = failing();
    let (mut driver, channel, _) = at_work(&rig, &card);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // These threads poll departing channels whenever the card's lock is free, as the scheduler's tick does less
        // often.
        for _ in 0..4 {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    rig.host.wait_departed(TenantId(0));
                }
            });
        }
        for _ in 0..2000 {
            // The polls during the guest's write find the channel on its engine, and the next poll finds that it has
            // left.
            card.hesitates.store(16, Ordering::SeqCst);
            driver.unbind(&channel);
            driver.bind(&channel);
        }
        over.store(true, Ordering::SeqCst);
    });
    driver.unbind(&channel);
    let stuck = || rig.host.lock().channels().stuck();
    for _ in 0..60_000 {
        if stuck() == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(stuck(), 0, "a number was not released");
    driver.guest.remove().unwrap();
}

#[test]
fn target_slots_are_quarantined_if_copier_cannot_be_stopped() {
    let (rig, card) = failing();
    let driver = driver_of(&rig, 0, 16);
    driver.guest.vram_write(0, &[1; 4096]);
    card.holds.store(true, Ordering::SeqCst);
    // The mediator's own channel fails and does not leave the card.
    let lane = TenantId::MEDIATOR;
    rig.host.lock().retire_channel(lane, VirtualChannelId(0)).unwrap_err();
    let done = move_all(&rig, 0, To::Host);
    assert!(done.moved == 0 && done.stayed > 0, "{done:?}");
    rig.host.scrub();
    let summary = rig.host.lock().vram().chunks.summary();
    assert!(summary.host.quarantined > 0 && summary.host.to_scrub == 0);
    assert_eq!(summary.host.quarantined, summary.host.used);
}

#[test]
fn vm_whose_copies_fail_is_not_moved_again_at_once() {
    const CHUNKS: u32 = 24;
    let (rig, card) = failing_with(still());
    let (driver, _other) = (driver_of(&rig, 0, 48), driver_of(&rig, 1, 48));
    for chunk in 0..CHUNKS {
        driver.guest.vram_write(u64::from(chunk) * 2 * MIB, &[1; 16]);
    }
    card.holds.store(true, Ordering::SeqCst);
    rig.host.lock().retire_channel(TenantId::MEDIATOR, VirtualChannelId(0)).unwrap_err();
    // The guarantee requires chunks of the first VM. Each failed copy quarantines its destination slot.
    let limits = Limits { guarantee: CHUNKS / 2, ..Limits::default() };
    rig.host.make_room(|state| state.memory_mut().set_limits(TenantId(1), limits)).unwrap_err();
    let lost = rig.host.lock().vram().chunks.summary().host.quarantined;
    assert!(lost > 0 && lost <= CHUNKS / 2, "{lost} slots were lost in the attempts to move {} chunks", CHUNKS / 2);
}

#[test]
fn vm_whose_memory_moves_waits_for_the_move() {
    let (rig, card) = failing();
    let (mut driver, mut channel, _) = at_work(&rig, &card);
    let waits_for = || rig.host.lock().scheduler_usage(0).time.tenants.get(&TenantId(0)).and_then(|vm| vm.wait);
    std::thread::scope(|scope| {
        card.holds.store(true, Ordering::SeqCst);
        let moves = scope.spawn(|| move_all(&rig, 0, To::Host));
        eventually("memory moves", || rig.host.lock().memory().divider().machine().relocations.is_moving(TenantId(0)));
        driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
        eventually("the work waits for memory", || waits_for() == Some(Wait::Move));
        card.holds.store(false, Ordering::SeqCst);
        assert!(moves.join().expect("the mover does not panic").moved > 0);
    });
    driver.wait(&channel);
    eventually("no work waits", || waits_for().is_none());
}

#[test]
fn card_without_post_is_rejected_with_remedy() {
    let card = Arc::new(SimGpu::new(&Config { posted: false, ..Config::default() }).expect("the card can be created"));
    let refused = ManagedCard::open(card, "rig", &sharing(), firmware::Set::stand_in())
        .err()
        .expect("the card is rejected")
        .to_string();
    let found = "the VBIOS has not initialized the card: register 0x02240c reads 0x0, without bit 1; ";
    let what_to_do = refused.strip_prefix(found).unwrap_or_else(|| panic!("{refused}"));
    assert!(what_to_do.starts_with("let the host's firmware run the VBIOS"), "{what_to_do}");
}
