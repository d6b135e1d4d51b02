//! The cost of a doorbell for its guest and for other users of the card's lock.

use super::saving::ram_of;
use super::{A, B, driver, rig};
use nvspec::instance::userd;
use nvspec::regs::pmc;
use rig::Rig;
use rig::driver::{CE0, Channel, Driver, ce_copy, object};
use vmm_glue::RegionIndex;

#[test]
fn a_doorbell_takes_the_cards_lock_once() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 1);
    let to = driver.buffer(&channel, B, 1, 2);
    let taken = locks::taken::<locks::rank::Card>;
    let times = (0..8).map(|_| {
        let put = driver.queue_fenced(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
        let before = taken();
        driver.ring(&channel, put);
        let times = taken() - before;
        driver.wait(&channel);
        times
    });
    // The ringing thread handles events that arrive meanwhile.
    assert_eq!(times.min(), Some(1));
    assert!(driver.vram_holds(to, 1, 1));
}

/// Queues a copy of the page at `from`, rings, and does only the work before the answer.
fn ring_until_answered(driver: &mut Driver, channel: &mut Channel, from: u64) {
    let put = driver.queue_fenced(channel, &[object(CE0), ce_copy(from, B, 1)].concat());
    let at = u64::from(channel.id) * 4096 + userd::GP_PUT;
    assert!(driver.guest.write_until_answered(RegionIndex::Bar1, at, &put.to_le_bytes()), "nothing is left");
}

#[test]
fn deferred_doorbell_is_handled_at_next_guest_access() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 1);
    let to = driver.buffer(&channel, B, 1, 2);
    let before = driver.guest.counter("doorbells");
    ring_until_answered(&mut driver, &mut channel, A);
    assert_eq!(driver.guest.counter("doorbells"), before, "an operator's look takes nothing up");
    // The guest's next access, of any kind.
    driver.guest.rd(pmc::BOOT_0::OFFSET);
    assert_eq!(driver.guest.counter("doorbells"), before + 1);
    driver.wait(&channel);
    assert!(driver.vram_holds(to, 1, 1));
    // Two doorbells in sequence, through BAR1 as well.
    ring_until_answered(&mut driver, &mut channel, A);
    ring_until_answered(&mut driver, &mut channel, A);
    assert_eq!(driver.guest.counter("doorbells"), before + 2);
    driver.guest.rd(pmc::BOOT_0::OFFSET);
    driver.wait(&channel);
    assert_eq!(driver.guest.counter("doorbells"), before + 3);
}

#[test]
fn deferred_doorbell_is_part_of_saved_vm() {
    let cards: [Rig; 2] = [rig(), rig()];
    let mut driver = driver(&cards[0], 0);
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 1);
    let to = driver.buffer(&channel, B, 1, 2);
    ring_until_answered(&mut driver, &mut channel, A);
    let saved = driver.guest.save().expect("it can be saved");
    let ram = ram_of(&driver.guest);
    driver.guest.ram_write(0, &ram);
    driver.guest.restore(&cards[1], 1, &saved).expect("it goes on");
    driver.wait(&channel);
    assert!(driver.vram_holds(to, 1, 1));
}
