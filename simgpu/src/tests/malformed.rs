//! Tests invalid kernels and methods. The card must report the hardware's error for their channel, while another
//! channel continues to compute.

use super::driver::{Channel, Driver, methods, small, words};
use super::kernels::{ADD, CODE, DATA, SEM, launch, prepare, query, reset_pgraph, set_up};
use crate::{Config, SimGpu};
use nvspec::class::compute90c0::{self as class, warp_error};
use nvspec::class::data_error;
use nvspec::mmu::fault;
use nvspec::regs::{fecs, pfifo, pgraph, sm_trap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The error that the card must report.
#[derive(Clone, Copy, Debug)]
enum Error {
    Warp(u32),
    /// An MMU fault of a shader: the reason, the address, and a flag that is true for a write.
    Shader(u32, u64, bool),
    /// An MMU fault of a method's own access, with the same fields.
    Method(u32, u64, bool),
    /// A data error: the method's address, and the error code.
    Data(u32, u32),
    Illegal(u32),
}

/// An unmapped address.
const UNMAPPED_ADDR: u64 = 0x555_5000;
/// Address of a read-only page.
const READ_ONLY: u64 = 0x440_0000;

/// A card with two channels, a failing one and a computing one.
struct Pair {
    driver: Driver,
    bad: Channel,
    good: Channel,
    data: u64,
    stamp: u64,
}

impl Pair {
    fn new(driver: Driver, code: &str) -> Self {
        let mut driver = driver;
        let (bad, good) = (driver.channel(3), driver.channel(4));
        driver.submit_runlist(&[3, 4]);
        prepare(&mut driver, &bad, &format!(".kernel k\n{code}\nEXIT"));
        let page = driver.buffer(&bad, READ_ONLY, 1, 0);
        driver.pte(bad.space, READ_ONLY, (page >> 8) as u32 | 5, 0);
        driver.flush();
        let data = prepare(&mut driver, &good, ADD);
        let stamp = driver.buffer(&good, SEM, 1, 9);
        Self { driver, bad, good, data, stamp }
    }

    /// Sends the setup, `more` methods and a launch on the failing channel.
    fn err(&mut self, more: &[Vec<u32>]) {
        let limits = [
            methods(1, class::SHARED_SIZE, &[64]),
            methods(1, class::LOCAL_ADDRESS_HIGH, &[0, DATA as u32, 0, 0x2000]),
            methods(1, class::LOCAL_LOW_SIZE, &[16]),
            methods(1, class::BLOCK_BARRIERS, &[2]),
        ];
        let all =
            [vec![set_up(&[DATA as u32, UNMAPPED_ADDR as u32, READ_ONLY as u32])], limits.to_vec(), more.to_vec()];
        let all = all.concat();
        self.driver.push(&mut self.bad, &words(&[words(&all), launch(2, 40)]));
    }

    fn computes(&mut self, payload: u32) {
        let all = words(&[set_up(&[DATA as u32, 5, 2]), launch(2, 64), query(SEM, payload)]);
        self.driver.push(&mut self.good, &all);
    }
}

/// Checks that the failing channel reports the expected error, and that the other channel computes both before and
/// after the driver handles the error.
#[track_caller]
fn errs(code: &str, more: &[Vec<u32>], error: Error) {
    let mut pair = Pair::new(Driver::new(&small()), code);
    let before = pair.driver.peek(pair.data);
    pair.computes(1);
    pair.driver.run_until_idle();
    pair.err(more);
    pair.driver.run_until_idle();
    let driver = &pair.driver;
    let instance = (pair.bad.instance >> 12) as u32;
    let faulted = |kind: u32, reason: u32, va: u64, write: bool| {
        assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 1, "{code}: PGRAPH's fault unit");
        let address = (driver.rd(pfifo::FAULT_VA_HI::at(0)), driver.rd(pfifo::FAULT_VA_LO::at(0)));
        assert_eq!(address, ((va >> 32) as u32, va as u32), "{code}");
        assert_eq!(driver.rd(pfifo::FAULT_INST::at(0)), instance, "{code}");
        assert_eq!(driver.rd(pfifo::FAULT_TYPE::at(0)), kind | reason | u32::from(write) << 7, "{code}");
        assert_eq!(driver.rd(pgraph::INTR::OFFSET), 0, "{code}");
    };
    match error {
        // The client is number 1 of the first GPC (its texture unit and L1), or number 4 of the hub (dispatch).
        Error::Shader(reason, va, write) => faulted(1 << 8, reason, va, write),
        Error::Method(reason, va, write) => faulted(1 << 6 | 4 << 8, reason, va, write),
        Error::Warp(error) => {
            assert_eq!(driver.rd(pgraph::INTR::OFFSET), pgraph::INTR::TRAP.mask(), "{code}");
            assert_eq!(driver.rd(sm_trap::warp_error(0, 0)), error, "{code}");
        }
        Error::Data(method, error) => {
            assert_eq!(driver.rd(pgraph::INTR::OFFSET), pgraph::INTR::DATA_ERROR.mask(), "{code}");
            assert_eq!(driver.rd(pgraph::DATA_ERROR::OFFSET), error, "{code}");
            assert_eq!(driver.rd(pgraph::TRAPPED_ADDRESS::OFFSET), 1 << 16 | method, "{code}");
        }
        Error::Illegal(method) => {
            assert_eq!(driver.rd(pgraph::INTR::OFFSET), pgraph::INTR::ILLEGAL_METHOD.mask(), "{code}");
            assert_eq!(driver.rd(pgraph::TRAPPED_ADDRESS::OFFSET), 1 << 16 | method, "{code}");
        }
    }
    assert_eq!(driver.rd(fecs::CURRENT::OFFSET), 0x8000_0000 | instance, "{code}");
    // Recover like a driver: remove the channel, and acknowledge the errors.
    pair.computes(2);
    let driver = &pair.driver;
    driver.wr(pfifo::CHANNEL_STATE::at(3), 0x001f_0000);
    driver.wr(sm_trap::warp_error(0, 0), 0);
    driver.wr(pgraph::TRAP::OFFSET, u32::MAX);
    driver.wr(pgraph::INTR::OFFSET, u32::MAX);
    driver.wr(pfifo::MMU_FAULT_ID::OFFSET, 1);
    driver.wr(pfifo::SCHED_ENABLE_ACK::OFFSET, 1);
    if matches!(error, Error::Shader(..) | Error::Method(..)) {
        reset_pgraph(driver);
    }
    driver.run_until_idle();
    assert_eq!(driver.peek(pair.stamp), 2, "{code}: the other channel continues");
    assert_eq!(driver.peek(pair.data), before.wrapping_add(10), "{code}");
    assert_eq!((driver.rd(pgraph::INTR::OFFSET), driver.rd(pfifo::MMU_FAULT_ID::OFFSET)), (0, 0), "{code}");
}

#[test]
fn code_that_is_none() {
    errs(".quad 0xffffffffffffffff", &[], Error::Warp(warp_error::ILLEGAL_ENCODING));
    errs(".quad 0x8010000000001c06", &[], Error::Warp(warp_error::ILLEGAL_ENCODING));
    errs("JMP 0x2", &[], Error::Warp(warp_error::MISALIGNED_PC));
    errs("JMP 0x700000", &[], Error::Shader(fault::PTE, CODE + 0x70_0000, false));
    errs("BRA pc+0x5ffff8", &[], Error::Shader(fault::PTE, CODE + 0x60_0000, false));
    let far = [methods(1, class::CODE_ADDRESS_HIGH, &[0xff, 0xffff_f000]), methods(1, class::PROGRAM_START, &[0x1000])];
    errs("EXIT", &far, Error::Warp(warp_error::PC_OVERFLOW));
    errs("MOV R20, R1", &[], Error::Warp(warp_error::OUT_OF_RANGE_REGISTER));
    errs("DADD R0, R1, R2", &[], Error::Warp(warp_error::MISALIGNED_REGISTER));
}

#[test]
fn stacks_that_overflow_or_are_empty() {
    errs("here: CAL here", &[], Error::Warp(warp_error::STACK));
    errs("here: SSY here\nBRA here", &[], Error::Warp(warp_error::STACK));
    errs("RET", &[], Error::Warp(warp_error::EMPTY_STACK));
    errs("BRK", &[], Error::Warp(warp_error::EMPTY_STACK));
}

#[test]
fn accesses_that_are_misaligned_or_outside() {
    for code in [
        "MOV R0, c[0][0x20]\nLD R1, [R0+0x2]",
        "MOV R0, c[0][0x20]\nST.64 [R0+0x4], R2",
        "MOV R0, c[0][0x20]\nATOM.ADD R1, [R0+0x1], R2",
        "LDS R1, [0x3e]",
        "STS.64 [0x4], R2",
        "LDL.128 R4, [0x8]",
    ] {
        errs(code, &[], Error::Warp(warp_error::MISALIGNED_ADDRESS));
    }
    for code in [
        "LDS R1, [0x40]",
        "STS [RZ-0x4], R1",
        "LDL R1, [0x10]",
        "STL [RZ-0x4], R1",
        "S2R R0, SR_SWINLO\nLD R1, [R0+0x40]",
        "S2R R0, SR_LWINLO\nST [R0+0x10], R1",
    ] {
        errs(code, &[], Error::Warp(warp_error::OUT_OF_RANGE_ADDRESS));
    }
    errs("S2R R0, SR_SWINLO\nRED.ADD [R0], R1", &[], Error::Warp(warp_error::ADDRESS_SPACE));
    errs("MOV R0, c[0][0x1000]", &[], Error::Warp(warp_error::CONSTANT_ADDRESS));
    errs("MOV R0, 0x7ffc\nLDC R1, c[0][R0]", &[], Error::Warp(warp_error::CONSTANT_ADDRESS_LDC));
    errs("BAR.SYNC 0x5", &[], Error::Warp(warp_error::ILLEGAL_PARAMETER));
}

#[test]
fn unmapped_and_read_only_memory_faults() {
    errs("MOV R0, c[0][0x24]\nLD R1, [R0+0x10]", &[], Error::Shader(fault::PTE, UNMAPPED_ADDR + 0x10, false));
    errs("MOV R0, c[0][0x24]\nST [R0+0x10], R1", &[], Error::Shader(fault::PTE, UNMAPPED_ADDR + 0x10, true));
    errs("MOV R0, c[0][0x24]\nATOM.ADD R1, [R0], R2", &[], Error::Shader(fault::PTE, UNMAPPED_ADDR, true));
    errs(
        "MOV R0, c[0][0x28]\nLD R1, [R0]\nST [R0+0x20], R1",
        &[],
        Error::Shader(fault::READ_ONLY, READ_ONLY + 0x20, true),
    );
    errs("MOV R0, RZ\nMOV R1, 0x1\nLD.E R2, [R0]", &[], Error::Shader(fault::PDE, 1 << 32, false));
    // Access an address beyond the channel's 2^40 limit.
    errs("MOV R0, RZ\nMOV R1, 0x100\nLD.E R2, [R0]", &[], Error::Shader(fault::VA_LIMIT, 1 << 40, false));
    // Use an unbound constant bank and unbound local memory.
    let bank = [
        methods(1, class::CONSTANT_SIZE, &[0x100, 0, UNMAPPED_ADDR as u32]),
        methods(1, class::CONSTANT_BIND, &[0x101]),
    ];
    errs("MOV R0, c[1][0x8]", &bank, Error::Shader(fault::PTE, UNMAPPED_ADDR, false));
    let local = [methods(1, class::LOCAL_ADDRESS_HIGH, &[0, UNMAPPED_ADDR as u32])];
    errs("STL [0x4], R1", &local, Error::Shader(fault::PTE, UNMAPPED_ADDR + 0x80, true));
}

#[test]
fn methods_and_launches_that_no_card_could_do() {
    let value = Error::Data(class::LAUNCH, data_error::INVALID_VALUE);
    let launches = |grid: u32, block: u32| {
        [words(&[
            methods(1, class::BLOCK_YX, &[block, 1]),
            methods(1, class::GRID_YX, &[grid, 1]),
            methods(1, class::LAUNCH, &[0]),
        ])]
    };
    errs("EXIT", &launches(0x1_0000, 0x1_0020), value);
    errs("EXIT", &launches(0x1_0001, 0x1_0000), value);
    errs("EXIT", &launches(0x1_0001, 0x1_0401), value);
    errs("EXIT", &launches(0x1_0001, 0xffff_ffff), value);
    let refused = |method: u32, data: u32| [words(&[methods(1, method, &[data]), launch(1, 1024)])];
    errs("EXIT", &refused(class::REGISTERS, 64), value);
    errs("EXIT", &refused(class::REGISTERS, 33), value);
    errs("EXIT", &refused(class::SHARED_SIZE, 0xc001), value);
    errs("EXIT", &refused(class::BLOCK_BARRIERS, 17), value);
    errs("EXIT", &refused(class::LOCAL_LOW_SIZE, 0xff_fff0), value);
    errs("EXIT", &[methods(1, 0x104, &[0])], Error::Illegal(0x104));
    let semaphore = |va: u64, how: u32| [methods(1, class::SEMAPHORE_ADDRESS_HIGH, &[0, va as u32, 7, how])];
    let execute = class::SEMAPHORE_EXECUTE;
    errs("EXIT", &semaphore(DATA + 2, 0), Error::Data(execute, data_error::INVALID_ADDRESS_ALIGNMENT));
    errs("EXIT", &semaphore(DATA, 1), Error::Data(execute, data_error::INVALID_ENUM));
    errs("EXIT", &semaphore(UNMAPPED_ADDR, 0), Error::Method(fault::PTE, UNMAPPED_ADDR, true));
    let upload = [methods(1, class::CONSTANT_SIZE, &[0x1000, 0, UNMAPPED_ADDR as u32, 0x40, 5])];
    errs("EXIT", &upload, Error::Method(fault::PTE, UNMAPPED_ADDR + 0x40, true));
}

/// Polls `until` until it returns true, with a time limit.
#[track_caller]
fn wait(what: &str, mut until: impl FnMut() -> bool) {
    // TIMEOUT: a thousand times the usual time. A longer wait means that the card hangs.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !until() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn endless_kernel_is_removed_by_reset_and_other_channel_runs() {
    for workers in [0, 2] {
        for code in
            ["here: BRA here", "BAR.SYNC 0x0, 0x80", "here: LD R1, [RZ]\nBRA here", "SSY out\nhere: BRA here\nout: NOP"]
        {
            let code = code.replace("[RZ]", &format!("[RZ+{DATA:#x}]"));
            let config = Config { compute_workers: Some(workers), ..small() };
            let mut pair = Pair::new(Driver::on(Arc::new(SimGpu::new(&config).expect("a card"))), &code);
            let before = pair.driver.peek(pair.data);
            pair.err(&[]);
            let busy = |driver: &Driver| driver.rd(pgraph::STATUS::OFFSET) & 1 != 0;
            wait("it does not start", || busy(&pair.driver));
            pair.computes(3);
            // Neither a TLB flush nor a register read waits for the kernel to end.
            pair.driver.flush();
            pair.driver.wr(pfifo::CHANNEL_STATE::at(3), 0x001f_0000);
            pair.driver.wr(pfifo::PREEMPT::OFFSET, 3);
            assert!(busy(&pair.driver), "{code}: a grid is not preempted");
            assert_ne!(pair.driver.peek(pair.stamp), 3);
            reset_pgraph(&pair.driver);
            pair.driver.submit_runlist(&[4]);
            wait("the other channel does not continue", || pair.driver.peek(pair.stamp) == 3);
            assert_eq!(pair.driver.peek(pair.data), before.wrapping_add(5), "{code}");
            wait("it rests", || !busy(&pair.driver));
            assert_eq!(pair.driver.rd(pgraph::INTR::OFFSET), 0);
        }
    }
}
