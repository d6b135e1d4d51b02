//! Tests kernels that channels launch through PFIFO: semaphores, errors, switches, and time.

use super::driver::{At, Channel, Driver, PAGE, acquire, methods, object, release, small, words};
use crate::{ComputeTiming, Config, EngineId, EngineTiming, Fault, FaultKind, SimGpu, TimeModel};
use nvspec::class::compute90c0::{self as class, warp_error};
use nvspec::regs::{fecs, pfifo, pgraph, sm_trap};
use std::sync::Arc;

pub(super) const COMPUTE: (u32, u32) = (1, 0x90c0);
pub(super) const CODE: u64 = 0x100_0000;
pub(super) const BANK: u64 = 0x180_0000;
pub(super) const DATA: u64 = 0x200_0000;
pub(super) const SEM: u64 = 0x300_0000;

/// Loops for the number of iterations in the third parameter, and then adds the second parameter to each word of the
/// data at the address in the first parameter.
pub(super) const ADD: &str = ".kernel k
    S2R R0, SR_TID.X
    S2R R1, SR_CTAID.X
    S2R R2, SR_NTID.X
    IMAD R0, R1, R2, R0
    MOV R3, RZ
    round: IADD R3, R3, 0x1
    ISETP.LT.AND P0, PT, R3, c[0][0x28]
    @P0 BRA round
    ISCADD R4, R0, c[0][0x20], 0x2
    LD R5, [R4]
    IADD R5, R5, c[0][0x24]
    ST [R4], R5
    EXIT";

/// Creates buffers for code, a constant bank and data in a channel's address space, and stores the code. Returns the
/// VRAM address of the data.
pub(super) fn prepare(driver: &mut Driver, channel: &Channel, source: &str) -> u64 {
    let program = sm20::assemble(source).expect("a program");
    let code = driver.buffer(channel, CODE, 1, 0);
    for (index, word) in (0..).zip(&program.words) {
        driver.poke(code + 4 * index, *word);
    }
    driver.buffer(channel, BANK, 1, 0);
    driver.buffer(channel, DATA, 4, 0)
}

/// Returns the methods that set all launch state.
pub(super) fn set_up(params: &[u32]) -> Vec<u32> {
    let mut parts = vec![
        object(COMPUTE),
        methods(1, class::CODE_ADDRESS_HIGH, &[0, CODE as u32]),
        methods(1, class::CONSTANT_SIZE, &[0x1000, 0, BANK as u32, 0x20]),
    ];
    parts.extend(params.iter().map(|param| methods(1, class::CONSTANT_DATA, &[*param])));
    parts.push(methods(1, class::CONSTANT_BIND, &[1]));
    parts.push(methods(1, class::INVALIDATE_SHADER_CACHES_NO_WAIT, &[0x1111]));
    parts.push(methods(1, class::PROGRAM_START, &[0]));
    parts.push(methods(1, class::REGISTERS, &[8]));
    words(&parts)
}

pub(super) fn launch(blocks: u32, threads: u32) -> Vec<u32> {
    words(&[
        methods(1, class::BLOCK_YX, &[1 << 16 | threads, 1]),
        methods(1, class::GRID_YX, &[1 << 16 | blocks, 1]),
        methods(1, class::LAUNCH, &[0x1000]),
    ])
}

/// Returns the methods that release a semaphore through the compute class, with a timestamp.
pub(super) fn query(va: u64, payload: u32) -> Vec<u32> {
    methods(1, class::SEMAPHORE_ADDRESS_HIGH, &[0, va as u32, payload, 1 << 20])
}

#[test]
fn kernel_of_a_channel_runs_and_its_semaphore_follows() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(5);
    let data = prepare(&mut driver, &channel, ADD);
    let at = driver.buffer(&channel, SEM, 1, 9);
    let before: Vec<u32> = (0..1024).map(|index| driver.peek(data + 4 * index)).collect();
    let all = words(&[set_up(&[DATA as u32, 100, 7]), launch(4, 256), query(SEM, 0xcafe), launch(2, 256)]);
    driver.push(&mut channel, &all);
    driver.run_until_idle();
    assert_eq!(driver.peek(at), 0xcafe);
    assert_eq!(driver.rd(pfifo::NON_STALL_ID::OFFSET) & 1, 1, "its interrupt");
    for (index, before) in (0..).zip(before) {
        let rounds = if index < 512 { 2 } else { 1 };
        assert_eq!(driver.peek(data + 4 * index), before.wrapping_add(100 * rounds), "word {index}");
    }
    assert_eq!(driver.rd(pgraph::INTR::OFFSET), 0);
}

#[test]
fn channels_take_turns_with_their_own_state() {
    let mut driver = Driver::new(&small());
    let mut channels = [driver.channel(3), driver.channel(4)];
    driver.submit_runlist(&[3, 4]);
    let data: Vec<u64> = channels.iter().map(|channel| prepare(&mut driver, channel, ADD)).collect();
    for (channel, add) in channels.iter_mut().zip([10, 20]) {
        driver.push(channel, &set_up(&[DATA as u32, add, 1]));
    }
    driver.run_until_idle();
    let before: Vec<u32> = data.iter().map(|at| driver.peek(*at)).collect();
    for _ in 0..3 {
        for channel in channels.iter_mut().rev() {
            driver.push(channel, &launch(1, 32));
            driver.run_until_idle();
        }
    }
    for ((at, before), add) in data.iter().zip(before).zip([10, 20]) {
        assert_eq!(driver.peek(*at), before.wrapping_add(3 * add));
    }
}

/// Resets PGRAPH, as a driver does after a hang.
pub(super) fn reset_pgraph(driver: &Driver) {
    driver.reset_engine(nvspec::regs::pmc::ENABLE::PGRAPH.mask());
}

#[test]
fn channel_state_survives_interruption_between_any_two_methods() {
    let mut driver = Driver::new(&small());
    let (mut first, mut second) = (driver.channel(3), driver.channel(4));
    driver.submit_runlist(&[3, 4]);
    let data = [&first, &second].map(|channel| prepare(&mut driver, channel, ADD));
    let before = data.map(|at| driver.peek(at));
    let other = words(&[set_up(&[DATA as u32, 20, 1]), launch(1, 32)]);
    // Send the first channel's methods one word at a time. Between two words, the other channel runs a kernel.
    let whole = words(&[set_up(&[DATA as u32, 10, 3]), launch(1, 32), launch(1, 32)]);
    for (round, word) in (0u32..).zip(&whole) {
        driver.push(&mut first, &[*word]);
        driver.run_until_idle();
        driver.push(&mut second, &other);
        driver.run_until_idle();
        assert_eq!(driver.peek(data[1]), before[1].wrapping_add(20 * (round + 1)));
        match round % 4 {
            0 => {
                // Preempt the channels, so that their state is only in their context images.
                driver.wr(pfifo::PREEMPT::OFFSET, 3);
                assert_eq!(driver.rd(pfifo::PREEMPT::OFFSET), 3, "done");
            }
            1 => {
                driver.submit_runlist(&[4]);
                driver.run_until_idle();
                driver.submit_runlist(&[4, 3]);
            }
            2 => reset_pgraph(&driver),
            _ => {}
        }
    }
    assert_eq!(driver.peek(data[0]), before[0].wrapping_add(20));
    assert_eq!(driver.rd(pgraph::INTR::OFFSET), 0);
}

#[test]
fn warp_error_traps_channel_until_acknowledged() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(5);
    prepare(&mut driver, &channel, ".kernel k\nLDS R0, [0x100]\nEXIT");
    let at = driver.buffer(&channel, SEM, 1, 9);
    driver.push(&mut channel, &words(&[set_up(&[]), launch(1, 32), query(SEM, 1)]));
    driver.run_until_idle();
    assert_eq!(driver.rd(pgraph::INTR::OFFSET), pgraph::INTR::TRAP.mask());
    assert_eq!(driver.rd(pgraph::TRAP::OFFSET), pgraph::TRAP::GPC.mask());
    assert_eq!(driver.rd(pgraph::TRAP_GPCS::OFFSET), 1);
    assert_eq!(driver.rd(sm_trap::gpc(0)), 1 << 16);
    assert_eq!(driver.rd(sm_trap::tpc(0, 0)), 2);
    assert_eq!(driver.rd(sm_trap::warp_error(0, 0)), warp_error::OUT_OF_RANGE_ADDRESS);
    assert_eq!(driver.rd(fecs::CURRENT::OFFSET), 0x8000_0000 | (channel.instance >> 12) as u32);
    assert_ne!(driver.peek(at), 1, "no later method has run");
    driver.wr(sm_trap::warp_error(0, 0), 0);
    driver.wr(pgraph::TRAP::OFFSET, u32::MAX);
    driver.wr(pgraph::INTR::OFFSET, u32::MAX);
    driver.run_until_idle();
    assert_eq!(driver.peek(at), 1);
}

#[test]
fn fault_in_a_kernel_names_channel_and_address() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(5);
    prepare(&mut driver, &channel, ADD);
    driver.push(&mut channel, &words(&[set_up(&[0x555_5000, 1, 1]), launch(1, 32)]));
    driver.run_until_idle();
    assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 1, "PGRAPH's unit");
    assert_eq!(driver.rd(pfifo::FAULT_VA_LO::at(0)), 0x555_5000);
    assert_eq!(driver.rd(pfifo::FAULT_INST::at(0)), (channel.instance >> 12) as u32);
}

#[test]
fn endless_kernel_is_ended_by_resetting_pgraph() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(5);
    prepare(&mut driver, &channel, ".kernel k\nhere: BRA here");
    driver.push(&mut channel, &words(&[set_up(&[]), launch(1, 32)]));
    for _ in 0..100 {
        driver.card.gpu().step();
    }
    assert_eq!(driver.rd(pgraph::STATUS::OFFSET) & 1, 1, "busy");
    reset_pgraph(&driver);
    assert_eq!(driver.rd(pgraph::STATUS::OFFSET) & 1, 0);
    driver.run_until_idle();
}

#[test]
fn time_of_a_kernel_follows_from_its_instructions() {
    let timing = EngineTiming { bytes_per_second: 1_000_000_000, launch_ns: 1_000 };
    let compute = ComputeTiming { warp_instructions_per_second: 1_000_000_000, bytes_per_second: 0 };
    let time = Some(TimeModel { graph: timing, compute, copy: timing, switch_ns: 100, bus_bytes_per_second: 0 });
    let elapsed = |rounds: u32| {
        let mut driver = Driver::new(&Config { time, ..small() });
        let mut channel = driver.only_channel(5);
        prepare(&mut driver, &channel, ADD);
        let at = driver.buffer(&channel, SEM, 1, 9);
        let setup = set_up(&[DATA as u32, 1, rounds]);
        driver.push(&mut channel, &words(&[setup, query(SEM, 1), launch(2, 64), query(SEM + 16, 1)]));
        for _ in 0..1000 {
            driver.advance(1_000);
        }
        let stamp = |at: u64| u64::from(driver.peek(at + 12)) << 32 | u64::from(driver.peek(at + 8));
        assert_eq!(driver.peek(at + 16), 1);
        stamp(at + 16) - stamp(at)
    };
    // Each of the four warps executes 10 instructions, plus three per iteration. PTIMER has a resolution of 32 ns.
    for rounds in [1, 100, 5000] {
        let expected = 1_000 + 4 * (10 + 3 * u64::from(rounds));
        assert!(elapsed(rounds).abs_diff(expected) <= 32, "{} for {rounds}, not {expected}", elapsed(rounds));
    }
}

/// Increments one word per thread, in a loop. The second parameter is the distance between the words of adjacent
/// threads, in bytes.
const STRIDE: &str = ".kernel k
    S2R R0, SR_TID.X
    MOV R1, c[0][0x24]
    IMAD R4, R0, R1, c[0][0x20]
    MOV R3, RZ
    round: LD R5, [R4]
    IADD R5, R5, 0x1
    ST [R4], R5
    IADD R3, R3, 0x1
    ISETP.LT.AND P0, PT, R3, c[0][0x28]
    @P0 BRA round
    EXIT";

/// Returns a time model with this bus bandwidth, in which each launch takes 10 us plus the kernel's own time.
fn model(compute: ComputeTiming, bus_bytes_per_second: u64) -> TimeModel {
    let timing = EngineTiming { bytes_per_second: 0, launch_ns: 10_000 };
    TimeModel { graph: timing, compute, copy: timing, switch_ns: 100, bus_bytes_per_second }
}

/// Returns the time between two semaphores around kernels of 16 warps, on a card with a running clock and `workers`
/// threads. Data pages whose bit is set in `host` are in host memory.
fn time_between_semaphores(
    workers: usize,
    time: TimeModel,
    host: u64,
    stride: u32,
    rounds: u32,
    launches: usize,
) -> u64 {
    let config = Config { time: Some(time), compute_workers: Some(workers), ..small() };
    let mut driver = Driver::on(Arc::new(SimGpu::new(&config).expect("a card")));
    let mut channel = driver.only_channel(5);
    prepare(&mut driver, &channel, STRIDE);
    driver.host(DATA, 4);
    for va in (0..4).filter(|page| host & 1 << page != 0).map(|page| DATA + page * PAGE) {
        driver.map(channel.space, va, At::Host(va), 1);
    }
    let at = driver.buffer(&channel, SEM, 1, 9);
    let kernels = launch(4, 128).repeat(launches);
    let setup = set_up(&[DATA as u32, stride, rounds]);
    driver.push(&mut channel, &words(&[setup, query(SEM, 1), kernels, query(SEM + 16, 1)]));
    // TIMEOUT: a thousand times the usual time. A longer wait means that the kernel hangs.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while driver.peek(at + 16) != 1 {
        assert!(std::time::Instant::now() < deadline, "the kernel does not end");
        std::thread::yield_now();
    }
    let stamp = |at: u64| u64::from(driver.peek(at + 12)) << 32 | u64::from(driver.peek(at + 8));
    stamp(at + 16) - stamp(at)
}

#[test]
fn kernel_time_depends_on_work_and_not_on_worker_count() {
    let clock = ComputeTiming { warp_instructions_per_second: 1_000_000_000, bytes_per_second: 0 };
    let memory = ComputeTiming { bytes_per_second: 1_000_000_000, ..clock };
    // A warp that accesses contiguous words makes one 128-byte transaction. A warp whose lanes access separate lines
    // makes 32.
    for (compute, stride, per_access) in [(clock, 4, 0), (memory, 4, 1), (memory, 128, 32)] {
        for (rounds, launches) in [(3u32, 1), (40, 1), (40, 3)] {
            let instructions = 16 * (5 + 6 * u64::from(rounds));
            let bytes = 16 * 2 * u64::from(rounds) * per_access * 128;
            let expected = launches as u64 * (10_000 + instructions.max(bytes));
            for workers in [0, 1, 2] {
                let took = time_between_semaphores(workers, model(compute, 0), 0, stride, rounds, launches);
                // PTIMER has a resolution of 32 ns.
                let what = format!("{workers} workers, stride {stride}, {rounds} rounds, {launches} launches");
                assert!(took.abs_diff(expected) <= 32, "{what}: {took}, not {expected}");
            }
        }
    }
}

#[test]
fn transactions_of_host_memory_take_the_time_of_the_bus() {
    let compute = ComputeTiming { warp_instructions_per_second: 1_000_000_000, bytes_per_second: 1_000_000_000 };
    let rounds = 20;
    // Each case contains the stride, the pages in host memory, the transactions per warp access, and the host memory
    // transactions per block of four warps.
    for (stride, host, per_access, per_block) in
        [(4, 0, 1, 0), (4, 1, 1, 4), (128, 0b0010, 32, 32), (128, 0b1011, 32, 96)]
    {
        for bus in [0, 250_000_000, 2_000_000_000] {
            let memory = 4 * 4 * 2 * rounds * per_access * 128;
            let crossing = (4 * 2 * rounds * per_block * 128 * 1_000_000_000u64).checked_div(bus).unwrap_or(0);
            let expected = 10_000 + memory.max(16 * (5 + 6 * rounds)).max(crossing);
            for workers in [0, 2] {
                let time = model(compute, bus);
                let took = time_between_semaphores(workers, time, host, stride, rounds as u32, 1);
                // PTIMER has a resolution of 32 ns.
                let what = format!("{workers} workers, stride {stride}, pages {host:#b}, {bus} bytes per second");
                assert!(took.abs_diff(expected) <= 32, "{what}: {took}, not {expected}");
            }
        }
    }
}

#[test]
fn launches_can_be_made_to_hang() {
    let fault = Fault { engine: EngineId::Graph, kind: FaultKind::Hang, after: 0, count: 1 };
    let mut driver = Driver::new(&Config { faults: vec![fault], ..small() });
    let mut channel = driver.only_channel(5);
    let data = prepare(&mut driver, &channel, ADD);
    let before = driver.peek(data);
    driver.push(&mut channel, &words(&[set_up(&[DATA as u32, 1, 1]), launch(1, 32)]));
    driver.run_until_idle();
    assert_eq!(driver.peek(data), before);
    assert_eq!(driver.rd(pgraph::STATUS::OFFSET) & 1, 1, "busy");
}

#[test]
fn launches_can_be_made_to_corrupt_data() {
    let fault = Fault { engine: EngineId::Graph, kind: FaultKind::Corrupt, after: 1, count: 1 };
    let mut driver = Driver::new(&Config { faults: vec![fault], ..small() });
    let mut channel = driver.only_channel(5);
    let data = prepare(&mut driver, &channel, ADD);
    let mut before: Vec<u32> = (0..256).map(|index| driver.peek(data + 4 * index)).collect();
    for wrong in [0, 1, 0] {
        driver.push(&mut channel, &words(&[set_up(&[DATA as u32, 3, 5000]), launch(1, 256)]));
        driver.run_until_idle();
        let after: Vec<u32> = (0..256).map(|index| driver.peek(data + 4 * index)).collect();
        let differ = before.iter().zip(&after).filter(|(before, after)| before.wrapping_add(3) != **after).count();
        assert_eq!(differ, wrong);
        before = after;
    }
}

#[test]
fn kernels_run_with_any_number_of_worker_threads() {
    for workers in [0, 1, 2] {
        let config = Config { compute_workers: Some(workers), ..small() };
        let mut driver = Driver::on(Arc::new(SimGpu::new(&config).expect("a card")));
        let (mut channel, mut other) = (driver.channel(5), driver.channel(6));
        driver.submit_runlist(&[5, 6]);
        let data = prepare(&mut driver, &channel, ADD);
        let at = driver.buffer(&channel, SEM, 1, 9);
        driver.map(other.space, SEM, super::driver::At::Vram(at), 1);
        driver.push(&mut other, &words(&[acquire(SEM + 16, 0xcafe, 1 | 1 << 12), release(SEM, 0xbeef)]));
        let before = driver.peek(data);
        let all = words(&[set_up(&[DATA as u32, 3, 1000]), launch(4, 256).repeat(5), query(SEM + 16, 0xcafe)]);
        driver.push(&mut channel, &all);
        // TIMEOUT: a thousand times the usual time. A longer wait means that the kernel hangs.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while driver.peek(at) != 0xbeef {
            assert!(std::time::Instant::now() < deadline, "{workers} workers do not finish");
            std::thread::yield_now();
        }
        assert_eq!(driver.peek(data), before.wrapping_add(15));
        assert_eq!(driver.peek(data + PAGE - 4), super::driver::pattern(0, PAGE / 4 - 1).wrapping_add(15));
        // A card reset ends an endless kernel even while the kernel's threads are running.
        driver.push(&mut channel, &words(&[set_up(&[DATA as u32, 3, 0x7fff_ffff]), launch(64, 32)]));
        while driver.rd(pgraph::STATUS::OFFSET) & 1 == 0 {
            assert!(std::time::Instant::now() < deadline, "{workers} workers do not start");
            std::thread::yield_now();
        }
        card::Card::reset(&*driver.card);
        assert_eq!(driver.rd(pgraph::STATUS::OFFSET) & 1, 0);
    }
}
