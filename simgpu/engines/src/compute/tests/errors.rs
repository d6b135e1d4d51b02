//! Tests program errors and driver errors.

use super::rig::{CODE, DATA, END, Rig};
use crate::engines::{EngineError, Progress};
use nvspec::class::compute90c0::{self as methods, warp_error};
use nvspec::class::data_error;
use nvspec::mmu::fault;

#[track_caller]
fn fails(code: &str, error: u32) {
    for workers in [0, 2] {
        let mut rig = Rig::new(workers);
        rig.params(&[DATA as u32, END as u32]);
        let source = format!(".kernel k\n.shared 64\n.local 16\n.barriers 2\n{code}\nEXIT");
        assert_eq!(rig.run(&source, 4, 40), Err(EngineError::Warp(error)), "{code}");
        // The engine still works.
        rig.run(".kernel k\nMOV R0, c[0][0x20]\nMOV R1, 0x2a\nST [R0], R1\nEXIT", 1, 1).expect("good");
        assert_eq!(rig.read(DATA, 1), [0x2a]);
    }
}

#[test]
fn instructions_that_are_none() {
    fails(".quad 0xffffffffffffffff", warp_error::ILLEGAL_ENCODING);
    fails(".quad 0x8010000000001c06", warp_error::ILLEGAL_ENCODING);
    fails("BPT.TRAP 0x1", warp_error::ILLEGAL_ENCODING);
}

#[test]
fn registers_that_are_not_there() {
    fails(".registers 4\n.quad 0x2800000000015de4", warp_error::OUT_OF_RANGE_REGISTER);
    fails("LD.64 R3, [RZ]", warp_error::MISALIGNED_REGISTER);
    fails("DADD R4, R6, R9", warp_error::MISALIGNED_REGISTER);
}

#[test]
fn jumps_to_where_no_code_is() {
    fails("JMP 0x2", warp_error::MISALIGNED_PC);
    let mut rig = Rig::new(0);
    let error = rig.run(".kernel k\nJMP 0x700000", 1, 1).expect_err("unmapped");
    let EngineError::ShaderFault(fault) = error else { panic!("{error}") };
    assert_eq!((fault.va.0, fault.write), (CODE + 0x70_0000, false));
    // Execution runs past the end of the mapped code.
    let mut rig = Rig::new(0);
    rig.page(CODE + 0x1000, 0);
    let words: Vec<u32> = [0x0000_1de4, 0x4000_0000].repeat(512);
    rig.load(".kernel k\nEXIT");
    rig.write(CODE, &words);
    let program = sm20::assemble(".kernel k\nEXIT").expect("good");
    rig.launch(&program, "k", [1, 1, 1], [32, 1, 1]).expect("good");
    assert!(matches!(rig.finish(), Err(EngineError::ShaderFault(fault)) if fault.va.0 == CODE + 0x1000));
}

#[test]
fn stacks_that_overflow_or_are_empty() {
    fails("here: CAL here", warp_error::STACK);
    fails("here: SSY here\nBRA here", warp_error::STACK);
    fails("RET", warp_error::EMPTY_STACK);
    fails("BRK", warp_error::EMPTY_STACK);
    fails("SSY there\nCONT\nthere: NOP", warp_error::EMPTY_STACK);
}

#[test]
fn addresses_that_are_not_aligned_or_not_there() {
    fails("MOV R0, c[0][0x20]\nLD R1, [R0+0x2]", warp_error::MISALIGNED_ADDRESS);
    fails("MOV R0, c[0][0x20]\nST.128 [R0+0x8], RZ", warp_error::MISALIGNED_ADDRESS);
    fails("LDS R1, [0x3e]", warp_error::MISALIGNED_ADDRESS);
    fails("LDS R1, [0x40]", warp_error::OUT_OF_RANGE_ADDRESS);
    fails("STS.64 [0x40], RZ", warp_error::OUT_OF_RANGE_ADDRESS);
    fails("STS [RZ-0x4], RZ", warp_error::OUT_OF_RANGE_ADDRESS);
    fails("LDL R1, [0x10]", warp_error::OUT_OF_RANGE_ADDRESS);
    fails("LDL R1, [RZ-0x4]", warp_error::OUT_OF_RANGE_ADDRESS);
    fails("S2R R0, SR_SWINLO\nRED.ADD [R0], R0", warp_error::ADDRESS_SPACE);
    fails("S2R R0, SR_LWINLO\nLDLK P0, R1, [R0]", warp_error::ADDRESS_SPACE);
    fails("S2R R0, SR_SWINLO\nSTUL [R0], R0", warp_error::ADDRESS_SPACE);
    fails("MOV R0, c[0][0x1000]", warp_error::CONSTANT_ADDRESS);
    fails("MOV R0, c[5][0x0]", warp_error::CONSTANT_ADDRESS);
    fails("MOV R0, 0x7fff\nLDC R1, c[0][R0+0x1]", warp_error::CONSTANT_ADDRESS_LDC);
    fails("MOV R0, 0x3\nLDC R1, c[0][R0]", warp_error::MISALIGNED_ADDRESS);
    fails("MOV R0, 0x10\nBAR.SYNC R0", warp_error::ILLEGAL_PARAMETER);
    fails("BAR.SYNC 0, 0x21", warp_error::ILLEGAL_PARAMETER);
}

#[test]
fn faults_name_the_first_lanes_address_of_the_lowest_block() {
    for workers in [0, 1, 4] {
        let mut rig = Rig::new(workers);
        rig.params(&[END as u32]);
        // All threads of block 3 and higher blocks, except for thread 0 of each block, store past the end of the
        // mapping.
        let source = ".kernel k
             S2R R0, SR_TID.X
             S2R R1, SR_CTAID.X
             ISETP.GE.AND P0, PT, R1, 0x3
             ISETP.GT.AND P0, PT, R0, RZ, P0
             ISCADD R2, R1, R0, 0x8
             ISCADD R2, R2, c[0][0x20], 0x2
             @P0 ST [R2], R0
             EXIT";
        let error = rig.run(source, 200, 64).expect_err("unmapped");
        let EngineError::ShaderFault(found) = error else { panic!("{error}") };
        let va = END + 4 * (3 * 256 + 1);
        assert_eq!((found.va.0, found.write, found.reason), (va, true, fault::PTE), "{workers} workers");
    }
}

#[test]
fn endless_grids_end_when_compute_state_is_saved() {
    for workers in [0, 2] {
        for code in ["here: BRA here", "BAR.SYNC 0, 0x80", "here: LD R1, [RZ+0x400000]\nBRA here"] {
            let mut rig = Rig::new(workers);
            let program = rig.load(&format!(".kernel k\n.barriers 1\n{code}\nEXIT"));
            rig.launch(&program, "k", [8, 1, 1], [64, 1, 1]).expect("good");
            for _ in 0..20 {
                assert!(matches!(rig.step(), Ok(Progress::More | Progress::Elsewhere)), "{code}");
            }
            assert!(rig.compute.pending());
            let state = rig.compute.save();
            assert!(!rig.compute.pending());
            rig.compute.load(state);
            rig.params(&[DATA as u32]);
            rig.run(".kernel k\nMOV R0, c[0][0x20]\nMOV R1, 0x2a\nST [R0], R1\nEXIT", 1, 1).expect("good");
            assert_eq!(rig.read(DATA, 1), [0x2a]);
        }
    }
}

#[test]
fn methods_that_are_wrong() {
    let mut rig = Rig::new(0);
    let value = Err(EngineError::Data(data_error::INVALID_VALUE));
    let field = Err(EngineError::Data(data_error::INVALID_BITFIELD));
    for method in [0x104, 0x114, 0x130, 0x200, 0x3800, 0x2ff0, 0x1001] {
        assert_eq!(rig.method(method, 0), Err(EngineError::IllegalMethod), "{method:#x}");
    }
    assert_eq!(rig.method(methods::GRID_Z, 0x1_0000), field);
    assert_eq!(rig.method(methods::CONSTANT_BIND, 0x2), field);
    assert_eq!(rig.method(methods::CONSTANT_BIND, 18 << 8 | 1), value);
    assert_eq!(rig.method(methods::GLOBAL_MAP_ENTRY, 1 << 8), field);
    rig.method(methods::CONSTANT_SIZE, 0x1_0001).expect("stored");
    assert_eq!(rig.method(methods::CONSTANT_BIND, 1), value);
    rig.method(methods::CONSTANT_SIZE, 0x10).expect("stored");
    rig.method(methods::CONSTANT_OFFSET, 0x10).expect("stored");
    assert_eq!(rig.method(methods::CONSTANT_DATA, 1), value);
    rig.method(methods::SEMAPHORE_ADDRESS_LOW, DATA as u32 + 2).expect("stored");
    assert_eq!(
        rig.method(methods::SEMAPHORE_EXECUTE, 0),
        Err(EngineError::Data(data_error::INVALID_ADDRESS_ALIGNMENT))
    );
    assert_eq!(rig.method(methods::SEMAPHORE_EXECUTE, 1), Err(EngineError::Data(data_error::INVALID_ENUM)));
    assert_eq!(rig.method(methods::SEMAPHORE_EXECUTE, 1 << 3), field);
    rig.method(methods::SEMAPHORE_ADDRESS_LOW, END as u32).expect("stored");
    assert!(matches!(rig.method(methods::SEMAPHORE_EXECUTE, 0), Err(EngineError::Fault(fault)) if fault.va.0 == END));
}

#[test]
fn launches_that_no_card_could_run() {
    let value = Err(EngineError::Data(data_error::INVALID_VALUE));
    let program = sm20::assemble(".kernel k\nEXIT").expect("good");
    for (grid, block) in [
        ([0, 1, 1], [1, 1, 1]),
        ([1, 1, 0], [1, 1, 1]),
        ([1, 1, 1], [1, 0, 1]),
        ([1, 1, 1], [1025, 1, 1]),
        ([1, 1, 1], [32, 33, 1]),
        ([1, 1, 1], [1, 1, 65]),
        ([1, 1, 1], [0xffff, 0xffff, 0xffff]),
    ] {
        assert_eq!(Rig::new(0).launch(&program, "k", grid, block), value, "{grid:?} {block:?}");
    }
    for (method, data) in [
        (methods::REGISTERS, 64),
        (methods::SHARED_SIZE, 0xc001),
        (methods::BLOCK_BARRIERS, 17),
        (methods::LOCAL_LOW_SIZE, 0xff_ffff),
    ] {
        let mut rig = Rig::new(0);
        for (method, data) in [(methods::GRID_YX, 0x1_0001), (methods::GRID_Z, 1), (methods::BLOCK_YX, 0x1_0001)] {
            rig.method(method, data).expect("good");
        }
        rig.method(methods::BLOCK_Z, 1).expect("good");
        rig.method(method, data).expect("stored");
        assert_eq!(rig.method(methods::LAUNCH, 0), value, "{method:#x}");
    }
    // 1024 threads with 33 registers each exceed the register file.
    let program = sm20::assemble(".kernel k\n.registers 33\nEXIT").expect("good");
    assert_eq!(Rig::new(0).launch(&program, "k", [1, 1, 1], [1024, 1, 1]), value);
    assert_eq!(Rig::new(0).launch(&program, "k", [1, 1, 1], [512, 1, 1]), Ok(()));
}
