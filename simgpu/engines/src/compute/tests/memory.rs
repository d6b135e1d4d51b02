//! Tests accesses to all kinds of memory.

use super::rig::{DATA, LOCAL, LOCAL_BYTES, Rig};
use crate::engines::{EngineError, Progress};
use nvspec::class::compute90c0 as methods;

#[test]
fn widths_extend_and_cut() {
    let mut rig = Rig::new(0);
    rig.write(DATA, &[0x8182_8384, 0x1122_3344, 0x5566_7788, 0x99aa_bbcc]);
    rig.params(&[DATA as u32]);
    rig.run(
        ".kernel k
         MOV R0, c[0][0x20]
         LD.U8 R1, [R0+0x3]
         LD.S8 R2, [R0+0x1]
         LD.U16 R3, [R0+0x2]
         LD.S16 R4, [R0]
         MOV R5, RZ
         LD.E.128 R8, [R0]     // R1 is not zero: see below
         EXIT",
        1,
        1,
    )
    .expect_err("the upper word of the address is not zero");
    rig.run(
        ".kernel k
         MOV R20, c[0][0x20]
         MOV R21, RZ
         LD.U8 R1, [R20+0x3]
         LD.S8 R2, [R20+0x1]
         LD.U16 R3, [R20+0x2]
         LD.S16 R4, [R20]
         LD.E.128 R8, [R20]
         LD.E.64 R12, [R20+0x8]
         ST.U8 [R20+0x100], R8
         ST.S16 [R20+0x102], R9
         ST [R20+0x104], R1
         ST [R20+0x108], R2
         ST [R20+0x10c], R3
         ST.E [R20+0x110], R4
         ST.E.128 [R20+0x120], R8
         ST.64 [R20+0x130], R12
         EXIT",
        1,
        1,
    )
    .expect("good");
    let values = rig.read(DATA + 0x100, 14);
    assert_eq!(values[..5], [0x3344_0084, 0x81, 0xffff_ff83, 0x8182, 0xffff_8384]);
    assert_eq!(values[8..], [0x8182_8384, 0x1122_3344, 0x5566_7788, 0x99aa_bbcc, 0x5566_7788, 0x99aa_bbcc]);
}

#[test]
fn scattered_and_contiguous_accesses_agree() {
    // out[permuted tid] = in[tid], once with contiguous lanes and once with scattered lanes.
    let source = ".kernel k
         S2R R0, SR_TID.X
         IMUL.U32.U32 R1, R0, 0x25
         LOP.AND R1, R1, 0xff
         ISCADD R2, R0, c[0][0x20], 0x2
         ISCADD R3, R1, c[0][0x24], 0x2
         LD R4, [R2]
         ST [R3], R4
         BAR.SYNC 0
         LD R5, [R3]
         ISCADD R6, R0, c[0][0x28], 0x2
         ST [R6], R5
         EXIT";
    let mut rig = Rig::new(0);
    let input: Vec<u32> = (0..256).map(|i: u32| i.wrapping_mul(0x9e37_79b9)).collect();
    rig.write(DATA, &input);
    rig.params(&[DATA as u32, DATA as u32 + 0x1000, DATA as u32 + 0x2000]);
    rig.run(source, 1, 256).expect("good");
    let scattered = rig.read(DATA + 0x1000, 256);
    for (index, value) in input.iter().enumerate() {
        assert_eq!(scattered[index * 0x25 % 256], *value);
    }
    assert_eq!(rig.read(DATA + 0x2000, 256), input);
}

#[test]
fn generic_addresses_show_shared_and_local_memory() {
    let source = ".kernel k
         .shared 1024
         .local 32
         S2R R0, SR_TID.X
         S2R R1, SR_SWINLO
         S2R R2, SR_LWINLO
         ISCADD R3, R0, R1, 0x2
         IADD R4, R0, 0x7
         ST [R3], R4
         SHL R5, R0, 0x2
         LDS R6, [R5]
         ST.64 [R2+0x8], R6
         LDL R7, [0x8]
         LD R8, [R2+0x8]
         IADD R7, R7, R8
         ISCADD R9, R0, c[0][0x20], 0x2
         ST [R9], R7
         EXIT";
    let mut rig = Rig::new(0);
    rig.params(&[DATA as u32]);
    rig.run(source, 2, 64).expect("good");
    assert_eq!(rig.read(DATA, 64), (0..64).map(|tid| 2 * (tid + 7)).collect::<Vec<u32>>());
}

#[test]
fn local_memory_is_each_threads_own_on_many_workers() {
    let source = ".kernel k
         .local 64
         S2R R0, SR_TID.X
         S2R R1, SR_CTAID.X
         S2R R2, SR_NTID.X
         IMAD R9, R1, R2, R0
         MOV R3, RZ
         fill: IADD R4, R9, R3
         STL [R3], R4
         IADD R3, R3, 0x4
         ISETP.LT.AND P0, PT, R3, 0x40
         @P0 BRA fill
         MOV R10, RZ
         add: IADD R3, R3, -0x4
         LDL R4, [R3]
         IADD R10, R10, R4
         ISETP.GT.AND P0, PT, R3, RZ
         @P0 BRA add
         LDL.U8 R5, [0x5]
         STL.U8 [0x5], R5
         LDL.64 R6, [0x8]
         IADD R10, R10, R7
         ISCADD R9, R9, c[0][0x20], 0x2
         ST [R9], R10
         EXIT";
    let mut rig = Rig::new(5);
    rig.params(&[DATA as u32]);
    rig.run(source, 60, 64).expect("good");
    let expected: Vec<u32> =
        (0..3840).map(|index| 16 * index + (0..16).map(|i| 4 * i).sum::<u32>() + index + 12).collect();
    assert_eq!(rig.read(DATA, 3840), expected);
    // Each worker has its own part of local memory, and the host's scheduler determines which worker runs a block.
    let local = rig.read(LOCAL, (LOCAL_BYTES / 4) as usize);
    assert!(local.iter().any(|word| *word != 0), "local memory is at the address that the driver set");
    // Test negative addresses: a thread's local memory ends at 2^24.
    rig.method(methods::LOCAL_HIGH_SIZE, 16).expect("good");
    let source = ".kernel k
         MOV32I R1, 0xfffff0
         MOV R2, 0x11
         STL [R1+0xc], R2
         LDL R3, [RZ-0x4]
         MOV R4, c[0][0x20]
         ST [R4], R3
         EXIT";
    rig.run(source, 1, 1).expect("good");
    assert_eq!(rig.read(DATA, 1), [0x11]);
}

#[test]
fn atomics_under_contention_lose_nothing() {
    let source = ".kernel k
         S2R R0, SR_TID.X
         S2R R1, SR_CTAID.X
         S2R R2, SR_NTID.X
         IMAD R9, R1, R2, R0
         MOV R3, c[0][0x20]
         MOV R4, 0x1
         ATOM.ADD R5, [R3], R4          // each gets another number
         ISCADD R6, R5, c[0][0x24], 0x2
         RED.ADD [R6], R4               // every word is hit once
         RED.MAX [R3+0x4], R9
         RED.MIN [R3+0x8], R9
         RED.XOR [R3+0xc], R9
         RED.OR [R3+0x10], R9
         MOV R7, 0x9
         RED.INC [R3+0x14], R7          // modulo 10
         SHL R8, R4, 0x1e
         MOV32I R10, 0x3f800000
         RED.ADD.F32 [R3+0x18], R10
         MOV R12, R8
         MOV R13, R4
         RED.ADD.U64 [R3+0x20], R12
         // Increments a counter with compare and swap.
         again: LD.CV R14, [R3+0x28]
         IADD R15, R14, 0x3
         MOV R16, R14
         MOV R17, R15
         ATOM.CAS R18, [R3+0x28], R16, R17
         ISETP.NE.AND P0, PT, R18, R16
         @P0 BRA again
         EXIT";
    for workers in [0, 4] {
        let mut rig = Rig::new(workers);
        rig.write(DATA, &[0, 0, u32::MAX, 0, 0, 0, 0, 0, 0, 0, 0]);
        rig.params(&[DATA as u32, DATA as u32 + 0x1000]);
        rig.run(source, 33, 96).expect("good");
        let n = 33 * 96u32;
        let words = rig.read(DATA, 11);
        let xor = (0..n).fold(0, |a, b| a ^ b);
        assert_eq!(words[..6], [n, n - 1, 0, xor, 0xfff, n % 10]);
        assert_eq!(words[6], (n as f32).to_bits());
        let wide = u64::from(n) * ((1 << 32) + (1 << 30));
        assert_eq!(u64::from(words[9]) << 32 | u64::from(words[8]), wide);
        assert_eq!(words[10], 3 * n);
        assert_eq!(rig.read(DATA + 0x1000, n as usize), vec![1; n as usize]);
    }
}

#[test]
fn locks_on_shared_memory_serialize_lanes() {
    let source = ".kernel k
         .shared 64
         .barriers 1
         S2R R0, SR_TID.X
         LOP.AND R1, R0, 0x3
         SHL R1, R1, 0x2
         SSY all
         again:
         LDSLK P0, R2, [R1]
         @P0 IADD R2, R2, R0
         @P0 STSUL [R1], R2
         @!P0 BRA again
         NOP.S
         all: BAR.SYNC 0
         LDS R3, [R1]
         ISCADD R4, R0, c[0][0x20], 0x2
         ST [R4], R3
         EXIT";
    let mut rig = Rig::new(0);
    rig.params(&[DATA as u32]);
    rig.run(source, 1, 128).expect("good");
    let sums: [u32; 4] = std::array::from_fn(|slot| (0..128).filter(|tid| tid % 4 == slot as u32).sum());
    assert_eq!(rig.read(DATA, 128), (0..128).map(|tid| sums[tid % 4]).collect::<Vec<u32>>());
}

#[test]
fn locks_on_global_memory_serialize_threads_of_all_blocks() {
    // Adds to four 64-bit sums, each under a lock.
    let source = ".kernel k
         S2R R0, SR_TID.X
         S2R R1, SR_CTAID.X
         S2R R2, SR_NTID.X
         IMAD R0, R1, R2, R0
         LOP.AND R1, R0, 0x3
         ISCADD R4, R1, c[0][0x20], 0x3
         SSY all
         again:
         LDLK.64 P0, R2, [R4]
         @P0 IADD R2.CC, R2, c[0][0x24]
         @P0 IADD.X R3, R3, RZ
         @P0 STUL.64 [R4], R2
         @!P0 BRA again
         NOP.S
         all: EXIT";
    for workers in [0, 4] {
        let mut rig = Rig::new(workers);
        rig.write(DATA, &[0; 8]);
        rig.params(&[DATA as u32, 0x7fff_ffff]);
        rig.run(source, 9, 96).expect("good");
        let sum = 9 * 96 / 4 * 0x7fff_ffffu64;
        assert_eq!(rig.read(DATA, 8), [sum as u32, (sum >> 32) as u32].repeat(4), "{workers} workers");
    }
}

#[test]
fn races_in_shared_memory_end_the_same_in_each_run() {
    // Each thread repeatedly swaps two adjacent words and adds its number to one of them, without ordering between
    // warps. The result depends only on the turns of 256 instructions, which are independent of the host.
    let source = ".kernel k
         .shared 1024
         S2R R0, SR_TID.X
         S2R R1, SR_CTAID.X
         S2R R2, SR_NTID.X
         IMAD R8, R1, R2, R0
         IMAD R3, R8, c[0][0x24], R8
         MOV R7, RZ
         round: IMAD32I R3, R3, 0x41c64e6d, R3
         IADD R3, R3, 0x3039
         BFE.U32 R4, R3, c[0][0x28]
         SHL R4, R4, 0x2
         LDS R5, [R4]
         IADD R5, R5, R8
         LDS R6, [R4+0x4]
         STS [R4+0x4], R5
         STS [R4], R6
         IADD R7, R7, 0x1
         ISETP.LT.AND P0, PT, R7, 0x64
         @P0 BRA round
         SHL R4, R0, 0x2
         LDS R5, [R4]
         ISCADD R6, R8, c[0][0x20], 0x2
         ST [R6], R5
         EXIT";
    let outcome = |workers: usize, seed: u32| {
        let mut rig = Rig::new(workers);
        // Extract seven bits, starting at bit 16.
        rig.params(&[DATA as u32, seed, 0x0710]);
        rig.run(source, 4, 128).expect("good");
        rig.read(DATA, 512)
    };
    for seed in [1, 2, 3] {
        let first = outcome(0, seed);
        assert!(first.iter().any(|word| *word != 0));
        for workers in [0, 1, 2, 4] {
            assert_eq!(outcome(workers, seed), first, "seed {seed}, {workers} workers");
        }
    }
    assert_ne!(outcome(0, 1), outcome(0, 2));
}

#[test]
fn constants_come_from_bound_buffer_and_refresh_per_grid() {
    let source = ".kernel k
         S2R R0, SR_TID.X
         SHL R1, R0, 0x2
         LDC R2, c[3][R1+0x10]
         LDC.U8 R3, c[3][R1+0x11]
         IADD R2, R2, c[3][0x0]
         ISCADD R4, R0, c[0][0x20], 0x3
         ST.64 [R4], R2
         EXIT";
    let mut rig = Rig::new(2);
    rig.params(&[DATA as u32]);
    for (method, data) in [
        (methods::CONSTANT_SIZE, 0x200),
        (methods::CONSTANT_ADDRESS_LOW, DATA as u32 + 0x1000),
        (methods::CONSTANT_BIND, 0x301),
        (methods::CONSTANT_OFFSET, 0),
    ] {
        rig.method(method, data).expect("good");
    }
    for round in 0..3 {
        rig.method(methods::CONSTANT_OFFSET, 0).expect("good");
        rig.method(methods::CONSTANT_DATA, 1000 * round).expect("good");
        let table: Vec<u32> = (0..32).map(|i| i * 0x101).collect();
        for (index, value) in table.iter().enumerate() {
            rig.method(methods::CONSTANT_OFFSET, 0x10 + 4 * index as u32).expect("good");
            rig.method(methods::CONSTANT_DATA + 4 * (index as u32 % 16), *value).expect("good");
        }
        rig.run(source, 1, 32).expect("good");
        for (pair, value) in rig.read(DATA, 64).chunks(2).zip(table) {
            assert_eq!(pair, [value + 1000 * round, value >> 8 & 0xff]);
        }
    }
}

#[test]
fn changed_code_is_seen_by_the_next_grid() {
    let mut rig = Rig::new(1);
    rig.params(&[DATA as u32]);
    for value in [5, 6, 7] {
        rig.run(&format!(".kernel k\nMOV R0, c[0][0x20]\nMOV R1, 0x{value}\nST [R0], R1\nEXIT"), 1, 1).expect("good");
        assert_eq!(rig.read(DATA, 1), [value]);
    }
}

#[test]
fn relocated_page_is_seen_mid_grid_after_flush() {
    // The kernel spins on a word until the word changes.
    let source = ".kernel k
         MOV R0, c[0][0x20]
         spin: LD.CV R1, [R0]
         ISETP.EQ.AND P0, PT, R1, RZ
         @P0 BRA spin
         ST [R0+0x4], R1
         EXIT";
    let mut rig = Rig::new(0);
    rig.params(&[DATA as u32]);
    rig.write(DATA, &[0, 0]);
    rig.write(DATA + 0x1000, &[9, 0]);
    let program = rig.load(source);
    rig.launch(&program, "k", [1, 1, 1], [1, 1, 1]).expect("good");
    for _ in 0..5 {
        assert_eq!(rig.step(), Ok(Progress::More));
    }
    // Remap the virtual page to another frame. The old translation remains in use until the flush.
    rig.page(DATA, 1 | (0x40_0000 + DATA + 0x1000) >> 8);
    assert_eq!(rig.step(), Ok(Progress::More));
    rig.flush();
    rig.finish().expect("good");
    assert_eq!(rig.read(DATA + 0x1000, 2), [9, 9]);
    assert_eq!(rig.read(DATA + 4, 1), [0], "the old frame is unchanged");
    // An access to an unmapped page faults.
    rig.page(DATA, 0);
    rig.flush();
    let error = rig.run(source, 1, 1).expect_err("unmapped");
    let EngineError::ShaderFault(fault) = error else { panic!("{error}") };
    assert_eq!((fault.va.0, fault.write, fault.reason), (DATA, false, nvspec::mmu::fault::PTE));
}

#[test]
fn global_map_gives_the_upper_byte() {
    let source = ".kernel k
         MOV R0, c[0][0x20]
         MOV R1, 0x3
         MOV R2, 0x4d
         ST.E [R0], R2
         MOV R1, 0x4
         @P0 ST.E [R0], R2
         EXIT";
    let mut rig = Rig::new(0);
    rig.params(&[DATA as u32]);
    assert!(
        matches!(rig.run(source, 1, 1), Err(EngineError::ShaderFault(fault)) if fault.va.0 == 3 << 32 | DATA && fault.write)
    );
    rig.method(methods::GLOBAL_MAP_ENTRY, 0xc003_0000).expect("good");
    assert!(rig.run(source, 1, 1).is_err(), "not enabled");
    rig.method(methods::GLOBAL_MAP_MODE, 1).expect("good");
    rig.run(source, 1, 1).expect("good");
    assert_eq!(rig.read(DATA, 1), [0x4d]);
    rig.method(methods::GLOBAL_MAP_ENTRY, 0x4003_0000).expect("good");
    let error = methods::warp_error::ADDRESS_SPACE;
    assert_eq!(rig.run(source, 1, 1), Err(EngineError::Warp(error)), "not for stores");
}
