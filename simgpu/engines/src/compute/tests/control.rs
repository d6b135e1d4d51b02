//! Tests divergence, calls, barriers, votes and special registers using programs with known results.

use super::rig::{DATA, Rig};
use nvspec::class::compute90c0 as methods;

/// Runs a kernel with one-dimensional blocks, in which each thread stores R10 at its global index.
fn run_in(rig: &mut Rig, code: &str, blocks: u32, threads: u32) -> Vec<u32> {
    let source = format!(
        ".kernel k
         .shared 4096
         .barriers 4
         S2R R0, SR_TID.X
         S2R R1, SR_CTAID.X
         S2R R2, SR_NTID.X
         IMAD.U32.U32 R9, R1, R2, R0
         MOV R10, RZ
         {code}
         end:
         ISCADD R9, R9, c[0][0x20], 0x2
         ST [R9], R10
         EXIT"
    );
    rig.params(&[DATA as u32]);
    rig.run(&source, blocks, threads).unwrap_or_else(|error| panic!("{error} in {code}"));
    rig.read(DATA, (blocks * threads) as usize)
}

fn run(code: &str, blocks: u32, threads: u32) -> Vec<u32> {
    run_in(&mut Rig::new(0), code, blocks, threads)
}

#[test]
fn diverged_lanes_join_with_the_others() {
    // Lanes vote after the join, so all of them must be active again.
    let values = run(
        "LOP.AND R3, R0, 0x3
         ISETP.EQ.AND P0, PT, R3, RZ
         ISETP.EQ.AND P1, PT, R3, 0x1
         SSY joined
         @P0 BRA zero
         SSY inner
         @P1 BRA one
         MOV R10, 0x64
         NOP.S
         one: @P1 MOV R10, 0xc8
         NOP.S
         inner: IADD R10, R10, 0x1
         NOP.S
         zero: MOV R10, 0x12c
         NOP.S
         joined: VOTE.ALL R4, P2, PT
         POPC R4, R4, R4
         IADD R10, R10, R4",
        1,
        64,
    );
    let expected: Vec<u32> = (0..64).map(|lane| 32 + [300, 201, 101, 101][lane % 4]).collect();
    assert_eq!(values, expected);
}

#[test]
fn loops_with_break_and_continue_count_each_lanes_rounds() {
    // for (i = 0; ; i++) { if (i == tid) break; if (i & 1) continue; sum += i; }
    let values = run(
        "MOV R3, RZ
         PBK out
         top: PCNT next
         ISETP.EQ.AND P0, PT, R3, R0
         @P0 BRK
         LOP.AND R4, R3, 0x1
         ISETP.NE.AND P1, PT, R4, RZ
         @P1 CONT
         IADD R10, R10, R3
         CONT
         next: IADD R3, R3, 0x1
         BRA top
         out: VOTE.ALL R4, P2, PT
         POPC R4, R4, R4
         ISCADD R10, R4, R10, 0x10",
        1,
        32,
    );
    let expected: Vec<u32> = (0..32u32).map(|tid| (0..tid).filter(|i| i % 2 == 0).sum::<u32>() + (32 << 16)).collect();
    assert_eq!(values, expected);
}

#[test]
fn recursion_by_calls() {
    // f(n) = n == 0 ? 1 : n * f(n - 1). Each level of recursion has a stack frame in local memory, which contains n.
    let source = ".kernel k
         .local 64
         S2R R0, SR_TID.X
         LOP.AND R1, R0, 0x7
         MOV R2, RZ
         MOV R10, 0x1
         CAL factorial
         ISCADD R9, R0, c[0][0x20], 0x2
         ST [R9], R10
         EXIT
         factorial:
         ISETP.EQ.AND P0, PT, R1, RZ
         @P0 RET
         STL [R2], R1
         IADD R2, R2, 0x4
         IADD R1, R1, -0x1
         CAL factorial
         IADD R2, R2, -0x4
         LDL R1, [R2]
         IMUL R10, R10, R1
         RET";
    let mut rig = Rig::new(0);
    rig.params(&[DATA as u32]);
    rig.run(source, 1, 64).expect("good");
    let factorials = [1, 1, 2, 6, 24, 120, 720, 5040];
    assert_eq!(rig.read(DATA, 64), (0..64).map(|tid| factorials[tid % 8]).collect::<Vec<u32>>());
}

#[test]
fn indexed_branches_go_to_as_many_places() {
    let values = run(
        "LOP.AND R3, R0, 0x3
         SHL R3, R3, 0x4
         SSY after
         BRX R3, table
         table:
         MOV R10, 0xa
         NOP.S
         MOV R10, 0xb
         NOP.S
         MOV R10, 0xc
         NOP.S
         MOV R10, 0xd
         NOP.S
         after: IADD R10, R10, 0x1",
        1,
        32,
    );
    assert_eq!(values, (0..32).map(|lane| 11 + lane % 4).collect::<Vec<u32>>());
}

#[test]
fn exited_lanes_stop_and_other_lanes_continue() {
    let mut rig = Rig::new(0);
    rig.write(DATA, &[7; 64]);
    let values = run_in(&mut rig, "ISETP.GE.AND P0, PT, R0, 0x14\nMOV R10, 0x5\n@P0 EXIT", 1, 64);
    assert_eq!(values[..20], [5; 20]);
    assert_eq!(values[20..], [7; 44]);
}

#[test]
fn barriers_in_loops_keep_warps_in_step() {
    // In each round, every thread adds the value stored by the thread whose index is `round + 33` higher. Without
    // barriers, the result would be wrong.
    let code = "SHL R3, R0, 0x2
         IADD R4, R0, 0x1
         STS [R3], R4
         MOV R5, RZ
         loop:
         BAR.SYNC 0
         IADD R6, R0, 0x21
         IADD R6, R6, R5
         LOP.AND R6, R6, 0xff
         SHL R6, R6, 0x2
         LDS R7, [R6]
         BAR.SYNC 0
         IADD R4, R4, R7
         STS [R3], R4
         IADD R5, R5, 0x1
         ISETP.LT.AND P0, PT, R5, 0xa
         @P0 BRA loop
         MOV R10, R4";
    let mut model: Vec<u32> = (1..=256).collect();
    for round in 0..10 {
        let before = model.clone();
        for (thread, value) in model.iter_mut().enumerate() {
            *value = value.wrapping_add(before[(thread + 33 + round) % 256]);
        }
    }
    let values = run(code, 3, 256);
    assert!(values.chunks(256).all(|block| block == model));
}

#[test]
fn barrier_reductions_and_arrivals() {
    let values = run(
        "LOP.AND R3, R0, 0x1
         ISETP.NE.AND P0, PT, R3, RZ
         BAR.RED.POPC P1, R10, 0x1, RZ, P0
         BAR.RED.AND P2, RZ, 0x2, RZ, P0
         BAR.RED.OR P3, RZ, 0x2, RZ, P0
         @P2 IADD R10, R10, 0x64
         @P3 IADD R10, R10, 0xc8",
        1,
        96,
    );
    assert_eq!(values, [248; 96]);
    // Warp 0 produces and arrives, and warp 1 waits and consumes. Barrier 3 waits for two warps.
    let values = run(
        "ISETP.GE.AND P0, PT, R0, 0x20
         @P0 BRA consumer
         SHL R3, R0, 0x2
         IADD R4, R0, 0x3e8
         STS [R3], R4
         BAR.ARV 0x3, 0x40
         BRA end
         consumer:
         BAR.SYNC 0x3, 0x40
         IADD R3, R0, -0x20
         SHL R3, R3, 0x2
         LDS R10, [R3]",
        1,
        64,
    );
    assert_eq!(values[32..], (1000..1032).collect::<Vec<u32>>());
}

#[test]
fn warps_that_end_are_not_waited_for() {
    let values = run("ISETP.GE.AND P0, PT, R0, 0x40\n@P0 BRA end\nBAR.SYNC 0\nMOV R10, 0x1", 1, 128);
    assert_eq!(values, [[1; 64], [0; 64]].concat());
}

#[test]
fn votes_count_active_lanes_only() {
    let values = run(
        "ISETP.LT.AND P0, PT, R0, 0x8
         SSY after
         @P0 BRA few
         NOP.S
         few:
         LOP.AND R3, R0, 0x1
         ISETP.EQ.AND P1, PT, R3, RZ
         VOTE.ANY R10, P2, P1
         VOTE.ALL RZ, P3, P1
         VOTE.EQ RZ, P4, P1
         @P2 IADD R10, R10, 0x100
         @P3 IADD R10, R10, 0x200
         @P4 IADD R10, R10, 0x400
         NOP.S
         after: NOP",
        1,
        32,
    );
    assert_eq!(values, [[0x155; 8].as_slice(), &[0; 24]].concat());
}

#[test]
fn special_registers_show_thread_position() {
    let source = ".kernel k
         S2R R0, SR_TID.X
         S2R R1, SR_TID.Y
         S2R R2, SR_TID.Z
         S2R R3, SR_CTAID.X
         S2R R4, SR_CTAID.Y
         S2R R5, SR_CTAID.Z
         S2R R6, SR_NTID.X
         S2R R7, SR_NTID.Y
         S2R R8, SR_NTID.Z
         S2R R9, SR_NCTAID.X
         S2R R10, SR_NCTAID.Y
         // ((ctaid.z * nctaid.y + ctaid.y) * nctaid.x + ctaid.x) * threads + thread
         IMAD R5, R5, R10, R4
         IMAD R5, R5, R9, R3
         IMUL R11, R6, R7
         IMUL R11, R11, R8
         IMAD R2, R2, R7, R1
         IMAD R2, R2, R6, R0
         IMAD R11, R5, R11, R2
         S2R R12, SR_LANEID
         S2R R13, SR_LTMASK
         POPC R13, R13, R13
         IADD R12, R12, -R13
         ISCADD R12, R12, R11, 0x10
         ISCADD R11, R11, c[0][0x20], 0x2
         ST [R11], R12
         EXIT";
    for workers in [0, 3] {
        let mut rig = Rig::new(workers);
        rig.params(&[DATA as u32]);
        let program = rig.load(source);
        rig.launch(&program, "k", [5, 3, 2], [7, 5, 2]).expect("good");
        rig.finish().expect("good");
        assert_eq!(rig.read(DATA, 2100), (0..2100).collect::<Vec<u32>>());
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_workers() {
    let code = "S2R R3, SR_CLOCKLO
         S2R R4, SR_VIRTID
         MOV R5, RZ
         loop:
         IMAD.U32.U32 R10, R10, 0x11, R9
         IADD R5, R5, 0x1
         LOP.AND R6, R9, 0x1f
         ISETP.LT.AND P0, PT, R5, R6
         @P0 BRA loop
         LOP.XOR R10, R10, R3
         LOP.XOR R10, R10, R4";
    let mut results = Vec::new();
    let mut work = Vec::new();
    for workers in [0, 1, 2, 7] {
        let mut rig = Rig::new(workers);
        results.push(run_in(&mut rig, code, 50, 100));
        work.push((rig.work.instructions, rig.work.transactions));
    }
    assert!(results.iter().all(|result| *result == results[0]));
    assert!(work.iter().all(|counts| *counts == work[0]), "{work:?}");
}

#[test]
fn state_survives_a_context_image() {
    let mut rig = Rig::new(0);
    rig.method(methods::GLOBAL_MAP_ENTRY, 0xc003_0000).expect("good");
    let words = rig.compute.save().to_words();
    assert_eq!(words.len(), crate::compute::Registers::IMAGE_WORDS);
    rig.compute.load(crate::compute::Registers::from_words(&words));
    assert_eq!(rig.compute.save().to_words(), words);
    // The words of a context image, even of a forged one, are masked to values that methods can set.
    let forged = crate::compute::Registers::from_words(&vec![u32::MAX; words.len()]);
    let words = forged.to_words();
    assert_eq!(crate::compute::Registers::from_words(&words).to_words(), words);
}

#[test]
fn every_kind_of_jump_and_return() {
    let source = ".kernel k
         MOV R10, RZ
         JCAL routine
         IADD R10, R10, 0x1
         PRET back
         JMP routine
         IADD R10, R10, 0x100
         back: IADD R10, R10, 0x2
         PLONGJMP out
         SSY nowhere
         LONGJMP
         nowhere: IADD R10, R10, 0x200
         out: IADD R10, R10, 0x4
         MOV R0, 0x8
         JMX R0, place
         place: IADD R10, R10, 0x400
         IADD R10, R10, 0x8
         LEPC R1
         IADD R2, R10, -0x3c
         IADD RZ.CC, R2, -0x1
         BRA CC.LT, end
         IADD R10, R10, 0x800
         BRA.U CC.T, end
         IADD R10, R10, 0x1000
         end: MOV R0, c[0][0x20]
         ST.64 [R0], R10
         EXIT
         routine: IADD R10, R10, 0x10
         MOV.E32 R11, R1
         RET";
    let mut rig = Rig::new(0);
    rig.params(&[DATA as u32]);
    rig.run(source, 1, 32).expect("good");
    assert_eq!(rig.read(DATA, 1), [0x10 * 2 + 1 + 2 + 4 + 8]);
}

#[test]
fn block_larger_than_its_warps_share_of_lanes_stays_within() {
    // With 33 threads, the second warp has a single lane.
    let values = run("VOTE.ALL R3, P0, PT\nPOPC R10, R3, R3", 2, 33);
    let block = [[32; 32].as_slice(), &[1]].concat();
    assert_eq!(values, [block.clone(), block].concat());
}
