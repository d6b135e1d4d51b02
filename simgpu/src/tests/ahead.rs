//! Tests host methods that run while an engine is busy.

use super::driver::{CE0, Driver, PAGE, acquire, ce_copy, object, release, small, words};
use crate::{EngineId, Fault, FaultKind};
use nvspec::regs::pfifo::{CHANNEL_STATE, ENGINE_STATUS};
use nvspec::regs::pmc;

const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;
const SEM: u64 = 0x300_0000;
/// Engine number of copy engine 0.
const UNIT: u32 = 4;

/// Starts an endless copy on a channel, and queues `more` after it.
fn behind_endless_work(driver: &mut Driver, more: &[Vec<u32>]) -> (super::driver::Channel, u64) {
    let mut channel = driver.only_channel(1);
    driver.card.inject(Fault { engine: EngineId::Copy0, kind: FaultKind::Hang, after: 0, count: 1 });
    driver.buffer(&channel, A, 1, 1);
    driver.buffer(&channel, B, 1, 2);
    let semaphore = driver.buffer(&channel, SEM, 1, 9);
    driver.push(&mut channel, &words(&[vec![object(CE0), ce_copy(A, B, 1)], more.to_vec()].concat()));
    driver.run_until_idle();
    (channel, semaphore)
}

fn state(driver: &Driver) -> (bool, bool) {
    let status = driver.rd(ENGINE_STATUS::at(UNIT));
    assert_eq!(ENGINE_STATUS::CHANNEL.get(status), 1);
    (ENGINE_STATUS::BUSY.is_set(status), CHANNEL_STATE::ACQUIRE_PENDING.is_set(driver.rd(CHANNEL_STATE::at(1))))
}

#[test]
fn channel_waits_for_a_semaphore_while_its_engine_works() {
    let mut driver = Driver::new(&small());
    let (_channel, semaphore) = behind_endless_work(&mut driver, &[acquire(SEM, 1, 1), release(SEM, 7)]);
    assert_eq!(state(&driver), (true, true));
    driver.poke(semaphore, 1);
    driver.advance(1_000_000);
    assert_eq!(state(&driver), (true, false), "it has the semaphore");
    assert_eq!(driver.peek(semaphore), 1, "a release waits for the engine");
    driver.reset_engine(pmc::ENABLE::CE0.mask());
    driver.advance(1_000_000);
    assert_eq!(driver.peek(semaphore), 7);
}

#[test]
fn release_without_wait_for_idle_precedes_end_of_work() {
    let mut driver = Driver::new(&small());
    // Operation 2 is a release. Bit 20 makes it not wait for the engine to become idle.
    let early = acquire(SEM, 3, 2 | 1 << 20);
    let (_channel, semaphore) = behind_endless_work(&mut driver, &[early, release(SEM, 7)]);
    assert_eq!((state(&driver), driver.peek(semaphore)), ((true, false), 3));
}

#[test]
fn methods_of_an_engine_wait_for_it_in_their_order() {
    let mut driver = Driver::new(&small());
    let more = [acquire(SEM, 5, 1), ce_copy(A, B + PAGE, 1), acquire(SEM, 1, 1)];
    let (_channel, semaphore) = behind_endless_work(&mut driver, &more);
    driver.poke(semaphore, 5);
    for _ in 0..3 {
        driver.advance(1_000_000);
        assert_eq!(state(&driver), (true, false), "the second acquire is queued after a copy");
    }
}
