//! The time model, on a clock that stands until it is advanced.

use super::driver::{CE0, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object, release, small, words};
use crate::{ComputeTiming, Config, EngineId, EngineTiming, Fault, FaultKind, TimeModel};

const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;
const SEM: u64 = 0x300_0000;

/// A byte per nanosecond, a microsecond per launch, 100 ns per switch.
fn slow() -> Config {
    let timing = EngineTiming { bytes_per_second: 1_000_000_000, launch_ns: 1_000 };
    Config {
        time: Some(TimeModel { graph: timing, compute: ComputeTiming::default(), copy: timing, switch_ns: 100 }),
        ..small()
    }
}

#[test]
fn semaphore_behind_a_copy_comes_when_its_time_has_passed() {
    let mut driver = Driver::new(&slow());
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 4, 1);
    driver.buffer(&channel, B, 4, 2);
    let sem = driver.buffer(&channel, SEM, 1, 3);
    driver.push(&mut channel, &words(&[object(M2MF), m2mf_copy(A, B, 4 * PAGE as u32), release(SEM, 1)]));
    driver.settle();
    assert_ne!(driver.peek(sem), 1);
    // Loading the channel, loading the context, launch, copy.
    let takes = 100 + 100 + 1_000 + 4 * PAGE;
    driver.advance(takes - 1);
    assert_ne!(driver.peek(sem), 1);
    driver.advance(1);
    assert_eq!(driver.peek(sem), 1);
    assert_eq!(u64::from(driver.peek(sem + 8)), takes & !31, "the stamp is the end of the copy");
}

#[test]
fn late_host_does_not_make_the_card_slower() {
    let mut driver = Driver::new(&slow());
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 4, 1);
    driver.buffer(&channel, B, 4, 2);
    let sem = driver.buffer(&channel, SEM, 1, 3);
    let copy = m2mf_copy(A, B, 4 * PAGE as u32);
    driver.push(&mut channel, &words(&[object(M2MF), copy.clone(), copy.clone(), copy, release(SEM, 1)]));
    driver.settle();
    let takes = 200 + 3 * (1_000 + 4 * PAGE);
    for _ in 0..6 {
        driver.advance(takes / 5);
    }
    assert_eq!(driver.peek(sem), 1);
    assert_eq!(u64::from(driver.peek(sem + 8)), takes & !31);
}

#[test]
fn copy_engine_and_pgraph_work_at_the_same_time() {
    let mut driver = Driver::new(&slow());
    let (mut graph, mut copy) = (driver.channel(1), driver.channel(2));
    driver.submit_runlist(&[1, 2]);
    let mut semaphores = Vec::new();
    for channel in [&mut graph, &mut copy] {
        driver.buffer(channel, A, 16, 1);
        driver.buffer(channel, B, 16, 2);
        semaphores.push(driver.buffer(channel, SEM, 1, 3));
    }
    driver.push(&mut copy, &words(&[object(CE0), ce_copy(A, B, 16), release(SEM, 1)]));
    driver.push(&mut graph, &words(&[object(M2MF), m2mf_copy(A, B, 16 * PAGE as u32), release(SEM, 1)]));
    driver.settle();
    driver.advance(1_000);
    driver.advance(16 * PAGE + 2_000);
    for at in semaphores {
        assert_eq!(driver.peek(at), 1);
    }
}

#[test]
fn injected_delay_comes_on_top_even_without_a_model() {
    let mut driver = Driver::new(&small());
    driver.card.inject(Fault { engine: EngineId::Copy0, kind: FaultKind::Delay { ns: 5_000 }, after: 0, count: 1 });
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 1, 1);
    driver.buffer(&channel, B, 1, 2);
    let sem = driver.buffer(&channel, SEM, 1, 3);
    driver.push(&mut channel, &words(&[object(CE0), ce_copy(A, B, 1), release(SEM, 1)]));
    driver.settle();
    driver.advance(4_999);
    assert_ne!(driver.peek(sem), 1);
    driver.advance(1);
    assert_eq!(driver.peek(sem), 1);
}
