//! Tests that a doorbell locks the card only once, and that each deferred doorbell is submitted once.

use super::handover::handover;
use super::saving::ram_of;
use super::{A, B, MIB, VM_MIB, driver, rig};
use nvspec::instance::userd;
use nvspec::regs::pmc;
use rig::driver::{CE0, Channel, Driver, PAGE, ce_copy, object};
use rig::{Rig, settings};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use vgpu::{Apertures, Settings};
use vmm_glue::{Deferred, RegionIndex};

/// Time limit for detecting a doorbell. The polling thread is much faster, so only a failing test waits this long.
const WAIT_LIMIT: Duration = Duration::from_secs(20);

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
    // The thread that rings the doorbell also handles events that arrive in the meantime, so only the lowest count
    // matters.
    assert_eq!(times.min(), Some(1));
    assert!(driver.vram_holds(to, 1, 1));
}

/// A VM with a channel and buffers for [`ring_until_answered`].
struct Scene {
    driver: Driver,
    channel: Channel,
    /// VRAM address of the page that the copies write.
    to: u64,
}

impl Scene {
    fn new(mut driver: Driver) -> Self {
        let channel = driver.channel(1);
        driver.buffer(&channel, A, 1, 1);
        let to = driver.buffer(&channel, B, 1, 2);
        Self { driver, channel, to }
    }

    /// Queues a copy and rings the doorbell. Does only the work that precedes the reply.
    fn ring_until_answered(&mut self) -> Deferred {
        let put = self.driver.queue_fenced(&mut self.channel, &[object(CE0), ce_copy(A, B, 1)].concat());
        let at = u64::from(self.channel.id) * PAGE + userd::GP_PUT;
        let deferred = self.driver.guest.write_until_answered(RegionIndex::Bar1, at, &put.to_le_bytes());
        deferred.expect("the doorbell is deferred")
    }

    fn doorbells(&self) -> u64 {
        self.driver.guest.counter("doorbells")
    }

    /// Waits for the copies and verifies them.
    fn assert_copied(&mut self) {
        self.driver.wait(&self.channel);
        assert!(self.driver.vram_holds(self.to, 1, 1));
    }
}

#[test]
fn deferred_doorbell_is_submitted_only_at_its_completion() {
    let rig = rig();
    let mut scene = Scene::new(driver(&rig, 0));
    let before = scene.doorbells();
    for round in 1..3 {
        let deferred = scene.ring_until_answered();
        // Lock the VM in between, as other threads may.
        scene.driver.guest.while_locked(|| {});
        scene.driver.guest.vram_read(scene.to, &mut [0; 4]);
        assert_eq!(scene.doorbells(), before + round - 1);
        scene.driver.guest.complete(deferred);
        assert_eq!(scene.doorbells(), before + round);
        scene.assert_copied();
    }
}

#[test]
fn polled_doorbell_does_not_overtake_deferred_one() {
    let rig = rig();
    let mut guest = rig.guest_with(0, &Settings { apertures: Apertures::Remapped, ..settings(VM_MIB, 16) });
    assert!(guest.map_ram(0, MIB, true));
    let mut scene = Scene::new(Driver::new(guest));
    // BAR3 shows USERD at offset 0.
    let mapped = scene.driver.guest.mapped(RegionIndex::Bar3).expect("a region with a file");
    let mut polled = scene.driver.channel(2);
    let put = scene.driver.queue_fenced(&mut polled, &[]);
    let before = scene.doorbells();
    let deferred = scene.ring_until_answered();
    let at = u64::from(polled.id) * PAGE + userd::GP_PUT;
    assert_eq!(rustix::io::pwrite(&mapped, &put.to_le_bytes(), at), Ok(4));
    let began = Instant::now();
    while scene.doorbells() == before && began.elapsed() < WAIT_LIMIT {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(scene.doorbells(), before + 2, "the poll also submits the deferred doorbell");
    scene.driver.guest.complete(deferred);
    assert_eq!(scene.doorbells(), before + 2, "the doorbell was already submitted");
    scene.assert_copied();
    scene.driver.wait(&polled);
}

#[test]
fn deferred_doorbell_is_part_of_saved_vm() {
    let cards: [Rig; 2] = [rig(), rig()];
    let mut scene = Scene::new(driver(&cards[0], 0));
    let _deferred = scene.ring_until_answered();
    let saved = scene.driver.guest.save().expect("saving the VM succeeds");
    let ram = ram_of(&scene.driver.guest);
    scene.driver.guest.ram_write(0, &ram);
    scene.driver.guest.restore(&cards[1], 1, &saved).expect("the VM continues");
    scene.assert_copied();
}

#[test]
fn deferred_doorbell_survives_upgrade() {
    let handover = handover(0);
    let mut rig = handover.rig();
    let mut scene = Scene::new(driver(&rig, 0));
    let _deferred = scene.ring_until_answered();
    handover.hand_over(&mut rig, &mut [&mut scene.driver.guest]);
    scene.assert_copied();
}

#[test]
#[cfg(debug_assertions)]
fn access_before_deferred_doorbell_is_completed_panics() {
    let rig = rig();
    let mut scene = Scene::new(driver(&rig, 0));
    let _deferred = scene.ring_until_answered();
    let access = AssertUnwindSafe(|| scene.driver.guest.rd(pmc::BOOT_0::OFFSET));
    assert!(catch_unwind(access).is_err());
}
