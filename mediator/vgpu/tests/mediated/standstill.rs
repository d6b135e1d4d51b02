//! A card that stands still while guests go on.

use super::oversubscribe::eventually;
use super::relocate::{Dice, driver_of, rig_of, work_until};
use super::stuck::{hang, works};
use super::{MIB, driver, rig};
use card::Card;
use nvspec::fifo::engine;
use nvspec::regs::pfifo;
use owner::overdue::Awaited;
use rig::Rig;
use rig::driver::{CE0, Driver, ce_copy, object};
use simgpu::EngineId;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use vram::VmId;

const LIMIT: Duration = Duration::from_secs(20);

/// Says whether no engine works for a channel.
fn is_idle(rig: &Rig) -> bool {
    (0..engine::COUNT).all(|unit| !pfifo::ENGINE_STATUS::BUSY.is_set(rig.card.read32(pfifo::ENGINE_STATUS::at(unit))))
}

#[test]
fn guests_work_on_and_lose_nothing_while_the_card_stands_still_again_and_again() {
    let rig = rig_of(2 * MIB, 96, 0);
    let drivers: Vec<Driver> = (0..3).map(|vm| driver_of(&rig, vm, 16)).collect();
    let (done, working) = (AtomicBool::new(false), AtomicU32::new(3));
    let mut stood = 0;
    std::thread::scope(|scope| {
        for (vm, mut driver) in (0u64..).zip(drivers) {
            let (done, working) = (&done, &working);
            scope.spawn(move || {
                let enough = |round| round >= 60 && done.load(Ordering::SeqCst);
                let worked = catch_unwind(AssertUnwindSafe(|| work_until(&mut driver, enough, &mut Dice(vm))));
                working.fetch_sub(1, Ordering::SeqCst);
                worked.unwrap_or_else(|error| resume_unwind(error));
            });
        }
        while stood < 50 && working.load(Ordering::SeqCst) == 3 {
            let still = rig.host.stand_still(LIMIT).expect("a card that stands still");
            assert!(is_idle(&rig));
            // Nothing is on an engine, so the card itself can be written down.
            rig.card.halt().expect("a card at rest");
            assert!(rig.card.save().is_some());
            rig.card.go_on();
            std::thread::sleep(Duration::from_millis(1));
            assert!(is_idle(&rig), "it stays so, whatever guests ring for");
            drop(still);
            stood += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        done.store(true, Ordering::SeqCst);
    });
    assert_eq!(stood, 50);
}

#[test]
fn what_was_submitted_before_and_meanwhile_is_done_when_the_card_goes_on() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let mut channel = driver.channel(1);
    let still = rig.host.stand_still(LIMIT).unwrap();
    driver.buffer(&channel, super::A, 1, 5);
    let to = driver.buffer(&channel, super::B, 1, 9);
    driver.submit(&mut channel, &[object(CE0), ce_copy(super::A, super::B, 1)].concat());
    std::thread::sleep(Duration::from_millis(1100));
    assert!(driver.vram_holds(to, 1, 9), "nothing runs");
    let usage = rig.host.lock().scheduler_usage(1);
    let waits = &usage.vms[&VmId(0)].overdue;
    assert!(waits.iter().any(|waits| waits.awaited == Awaited::Standstill), "{waits:?}");
    // One that comes now stands still as well, though nobody asked again.
    let mut late = super::driver(&rig, 1);
    let mut other = late.channel(1);
    late.buffer(&other, super::A, 1, 6);
    let there = late.buffer(&other, super::B, 1, 8);
    late.submit(&mut other, &[object(CE0), ce_copy(super::A, super::B, 1)].concat());
    std::thread::sleep(Duration::from_millis(20));
    assert!(late.vram_holds(there, 1, 8) && is_idle(&rig));
    drop(still);
    driver.wait(&channel);
    late.wait(&other);
    assert!(driver.vram_holds(to, 1, 5) && late.vram_holds(there, 1, 6));
}

#[test]
fn channel_that_does_not_leave_in_time_hangs_and_costs_the_others_nothing() {
    for engine in [EngineId::Copy0, EngineId::Graph] {
        let rig = rig();
        let (mut bad, mut good) = (driver(&rig, 0), driver(&rig, 1));
        let mut channel = good.channel(1);
        works(&mut good, &mut channel, 3);
        hang(&rig, &mut bad, engine);
        let still = rig.host.stand_still(Duration::from_millis(50)).expect("an engine that is reset");
        assert!(is_idle(&rig));
        rig.card.halt().expect("a card at rest");
        rig.card.go_on();
        drop(still);
        eventually("its guest is told", || bad.guest.counter("hangs") == 1);
        works(&mut good, &mut channel, 4);
        // Its guest goes on with another channel.
        let mut next = bad.channel(2);
        works(&mut bad, &mut next, 5);
    }
}
