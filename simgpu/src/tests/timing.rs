//! Tests the time model with a manual clock.

use super::driver::{At, CE0, CE1, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object, release, small, words};
use crate::{ComputeTiming, Config, EngineId, EngineTiming, Fault, FaultKind, TimeModel};
use nvspec::regs::{pfifo, pmc};

const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;
const SEM: u64 = 0x300_0000;

/// Returns a configuration in which a byte takes 1 ns, a launch 1 us, and a channel switch 100 ns.
fn slow() -> Config {
    let timing = EngineTiming { bytes_per_second: 1_000_000_000, launch_ns: 1_000 };
    Config {
        time: Some(TimeModel {
            graph: timing,
            compute: ComputeTiming::default(),
            copy: timing,
            switch_ns: 100,
            bus_bytes_per_second: 0,
        }),
        ..small()
    }
}

#[test]
fn semaphore_after_copy_arrives_when_copy_time_passes() {
    let mut driver = Driver::new(&slow());
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 4, 1);
    driver.buffer(&channel, B, 4, 2);
    let sem = driver.buffer(&channel, SEM, 1, 3);
    driver.push(&mut channel, &words(&[object(M2MF), m2mf_copy(A, B, 4 * PAGE as u32), release(SEM, 1)]));
    driver.run_until_idle();
    assert_ne!(driver.peek(sem), 1);
    // The duration is the sum of loading the channel, loading its context, the launch, and the copy.
    let takes = 100 + 100 + 1_000 + 4 * PAGE;
    driver.advance(takes - 1);
    assert_ne!(driver.peek(sem), 1);
    driver.advance(1);
    assert_eq!(driver.peek(sem), 1);
    assert_eq!(u64::from(driver.peek(sem + 8)), takes & !31, "the timestamp is the end of the copy");
}

#[test]
fn host_time_and_bytes_of_copies_are_counted() {
    let began = std::time::Instant::now();
    let mut driver = Driver::new(&small());
    let (mut graph, mut copy) = (driver.channel(1), driver.channel(2));
    driver.submit_runlist(&[1, 2]);
    let before = driver.card.counters().copied;
    for channel in [&mut graph, &mut copy] {
        driver.buffer(channel, A, 16, 1);
        driver.buffer(channel, B, 16, 2);
    }
    driver.push(&mut graph, &words(&[object(M2MF), m2mf_copy(A, B, 16 * PAGE as u32)]));
    driver.push(&mut copy, &words(&[object(CE0), ce_copy(A, B, 16)]));
    driver.run_until_idle();
    let after = driver.card.counters().copied;
    assert_eq!(after.bytes - before.bytes, 32 * PAGE);
    let host_ns = after.host_ns - before.host_ns;
    assert!(host_ns > 0 && u128::from(host_ns) < began.elapsed().as_nanos(), "{host_ns}");
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
    driver.run_until_idle();
    let takes = 200 + 3 * (1_000 + 4 * PAGE);
    for _ in 0..6 {
        driver.advance(takes / 5);
    }
    assert_eq!(driver.peek(sem), 1);
    assert_eq!(u64::from(driver.peek(sem + 8)), takes & !31);
}

#[test]
fn late_host_does_not_delay_start_of_card_work() {
    let takes = |switches: u64| 100 * switches + 1_000 + 4 * PAGE;
    // Test both cases: the driver removes the channel from its engine before or after the card's thread runs.
    for off in [false, true] {
        let mut driver = Driver::new(&slow());
        let mut channel = driver.only_channel(1);
        driver.buffer(&channel, A, 4, 1);
        driver.buffer(&channel, B, 4, 2);
        let sem = driver.buffer(&channel, SEM, 1, 3);
        let stamp = |driver: &Driver| u64::from(driver.peek(sem + 8));
        let copy = words(&[object(M2MF), m2mf_copy(A, B, 4 * PAGE as u32), release(SEM, 1)]);
        // Let the card poll the newly bound channel, which has no work.
        driver.run_until_idle();
        driver.advance(1_000);
        driver.push(&mut channel, &copy);
        driver.card.gpu().advance(3_000);
        if off {
            driver.wr(pfifo::PREEMPT::OFFSET, 1);
        }
        driver.card.gpu().advance(4_000);
        driver.run_until_idle();
        driver.advance(takes(2));
        let (begins, switches) = if off { (4_000, 2) } else { (1_000, 1) };
        assert_eq!(stamp(&driver), (begins + takes(switches)) & !31, "{off}");
        // A doorbell that rings after earlier work has completed also starts its work without delay.
        let rung = 8_000 + takes(2);
        driver.push(&mut channel, &copy);
        driver.card.gpu().advance(2_000);
        driver.run_until_idle();
        driver.advance(takes(0));
        assert_eq!(stamp(&driver), (rung + takes(0)) & !31, "{off}");
    }
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
    driver.run_until_idle();
    driver.advance(1_000);
    driver.advance(16 * PAGE + 2_000);
    for at in semaphores {
        assert_eq!(driver.peek(at), 1);
    }
}

/// Name and implementation of a way for a driver to remove a channel from its engine.
type Removal = (&'static str, fn(&mut Driver));

#[test]
fn removed_channel_keeps_engine_until_its_work_time_passes() {
    let ways: [Removal; 3] = [
        ("removed from the runlist", |driver| driver.submit_runlist(&[2])),
        ("preempted", |driver| driver.wr(pfifo::PREEMPT::OFFSET, 1)),
        ("stopped and preempted", |driver| {
            driver.wr(pfifo::CHANNEL_STATE::at(1), 0);
            driver.wr(pfifo::PREEMPT::OFFSET, 1);
        }),
    ];
    for (what, take_off) in ways {
        let mut driver = Driver::new(&slow());
        let (mut long, mut next) = (driver.channel(1), driver.channel(2));
        driver.submit_runlist(&[1, 2]);
        for channel in [&long, &next] {
            driver.buffer(channel, A, 16, 1);
            driver.buffer(channel, B, 16, 2);
        }
        let sem = driver.buffer(&next, SEM, 1, 3);
        driver.push(&mut long, &words(&[object(M2MF), m2mf_copy(A, B, 16 * PAGE as u32)]));
        // The channel and its context have been loaded by now, and the copy is in progress.
        (0..3).for_each(|_| driver.advance(100));
        take_off(&mut driver);
        driver.push(&mut next, &words(&[object(M2MF), m2mf_copy(A, B, 64), release(SEM, 1)]));
        driver.advance(16 * PAGE);
        let status = driver.rd(pfifo::ENGINE_STATUS::at(0));
        assert!(pfifo::ENGINE_STATUS::BUSY.is_set(status), "{what}: the copy is still in progress");
        assert_eq!(pfifo::ENGINE_STATUS::CHANNEL.get(status), 1, "{what}");
        assert!(pfifo::CHANNEL_STATE::LOADED.is_set(driver.rd(pfifo::CHANNEL_STATE::at(1))), "{what}");
        assert_ne!(driver.peek(sem), 1, "{what}: the engine is not free");
        (0..4).for_each(|_| driver.advance(1_000));
        assert_eq!(driver.peek(sem), 1, "{what}");
    }
}

#[test]
fn engine_reset_ends_remaining_time_of_its_work() {
    let mut driver = Driver::new(&slow());
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 16, 1);
    driver.buffer(&channel, B, 16, 2);
    let sem = driver.buffer(&channel, SEM, 1, 3);
    driver.push(&mut channel, &words(&[object(M2MF), m2mf_copy(A, B, 16 * PAGE as u32), release(SEM, 1)]));
    (0..3).for_each(|_| driver.advance(100));
    assert!(pfifo::ENGINE_STATUS::BUSY.is_set(driver.rd(pfifo::ENGINE_STATUS::at(0))));
    assert_ne!(driver.peek(sem), 1);
    let units = driver.rd(pmc::ENABLE::OFFSET);
    driver.wr(pmc::ENABLE::OFFSET, units & !pmc::ENABLE::PGRAPH.mask());
    driver.wr(pmc::ENABLE::OFFSET, units);
    assert!(!pfifo::ENGINE_STATUS::BUSY.is_set(driver.rd(pfifo::ENGINE_STATUS::at(0))));
    // The rest of the push buffer consists of host methods, and the PBDMA is immediately free.
    driver.advance(100);
    assert_eq!(driver.peek(sem), 1);
}

#[test]
fn injected_delay_is_added_even_without_a_model() {
    let mut driver = Driver::new(&small());
    driver.card.inject(Fault { engine: EngineId::Copy0, kind: FaultKind::Delay { ns: 5_000 }, after: 0, count: 1 });
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 1, 1);
    driver.buffer(&channel, B, 1, 2);
    let sem = driver.buffer(&channel, SEM, 1, 3);
    driver.push(&mut channel, &words(&[object(CE0), ce_copy(A, B, 1), release(SEM, 1)]));
    driver.run_until_idle();
    driver.advance(4_999);
    assert_ne!(driver.peek(sem), 1);
    driver.advance(1);
    assert_eq!(driver.peek(sem), 1);
}

/// Selects the buffer pages that are in host memory, by index.
type Host = fn(u64) -> bool;

/// Maps `pages` pages at `va` in the channel's address space. The pages selected by `host` are in host memory, at the
/// I/O virtual address `va`.
fn buffer(driver: &mut Driver, channel: &Channel, va: u64, pages: u64, host: Host) {
    let vram = driver.vram(pages);
    driver.host(va, pages);
    for page in 0..pages {
        let at = if host(page) { At::Host(va + page * PAGE) } else { At::Vram(vram + page * PAGE) };
        driver.map(channel.space, va + page * PAGE, at, 1);
    }
}

#[test]
fn bytes_of_a_copy_that_cross_the_bus_take_its_time() {
    let (none, all, some): (Host, Host, Host) = (|_| false, |_| true, |page| page % 4 == 1);
    // The last field of each case is the copy's duration, as the number of pages that take as long at 1 ns per byte. It
    // is the maximum of the engine's time (16 pages) and the bus time of the pages that cross the bus.
    let cases: [(u64, Host, Host, u64); 7] = [
        (4, none, none, 16),
        (4, all, none, 16 * 4),
        (4, none, all, 16 * 4),
        (4, all, all, 2 * 16 * 4),
        (8, some, none, 4 * 8),
        // In this case, the engine is slower than the bus.
        (3, some, none, 16),
        (0, all, all, 16),
    ];
    for (bus, from_host, to_host, pages) in cases {
        for (class, copy) in
            [(M2MF, m2mf_copy(A, B, 16 * PAGE as u32)), (CE0, ce_copy(A, B, 16)), (CE1, ce_copy(A, B, 16))]
        {
            let time = slow()
                .time
                .map(|time| TimeModel { bus_bytes_per_second: 1_000_000_000u64.checked_div(bus).unwrap_or(0), ..time });
            let mut driver = Driver::new(&Config { time, ..small() });
            let mut channel = driver.only_channel(1);
            buffer(&mut driver, &channel, A, 16, from_host);
            buffer(&mut driver, &channel, B, 16, to_host);
            let sem = driver.buffer(&channel, SEM, 1, 3);
            // The first copy also loads the channel, so measure the second copy.
            let twice = [object(class), copy.clone(), release(SEM, 1), copy, release(SEM + 16, 1)];
            driver.push(&mut channel, &words(&twice));
            driver.run_until_idle();
            (0..4).for_each(|_| driver.advance(1_000_000));
            assert_eq!((driver.peek(sem), driver.peek(sem + 16)), (1, 1));
            let took = driver.peek(sem + 24) - driver.peek(sem + 8);
            // PTIMER has a resolution of 32 ns.
            let expected = 1_000 + (pages * PAGE) as u32;
            assert!(took.abs_diff(expected) <= 32, "{took}, not {expected}: {bus} ns per byte, {class:?}");
        }
    }
}
