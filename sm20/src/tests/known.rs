//! Tests encodings from public sources, as independent evidence.

use super::text::word_of;
use crate::{Op, decode, encode};

/// Words and text from an sm_20 example in NVIDIA's manual "CUDA Binary Utilities".
const MANUAL: &[(u64, &str)] = &[
    (0x2800_4404_0000_5de4, "MOV R1, c[0x1][0x100]"),
    (0x2800_4000_8001_9de4, "MOV R6, c[0x0][0x20]"),
    (0x8c00_0000_0020_9c85, "LDU.E R2, [R2]"),
    (0x9400_0000_0040_1c85, "ST.E [R4], R0"),
    (0x8000_0000_0000_1de7, "EXIT"),
];

/// Words and text from cuobjdump listings for sm_20 and sm_30 (which encode these instructions identically) in NVIDIA's
/// developer forums and a blog post on disassembly.
const LISTINGS: &[(u64, &str)] = &[
    (0x4000_0000_0000_1de4, "NOP"),
    (0x2c00_0000_9800_9c04, "S2R R2, SR_CTAID.Y"),
    (0x2c00_0000_8800_dc04, "S2R R3, SR_TID.Y"),
    (0x6000_c000_1400_1c03, "SHL R0, R0, 0x5"),
    (0x4800_c001_0010_5d03, "IADD R1, R1, -(0x40)"),
    (0x2006_4000_2002_1ca3, "IMAD R8, R0, c[0x0][0x8], R3"),
    (0x2008_c001_2c85_9ca3, "IMAD R22, R8, 0x4b, R4"),
    (0x6800_4000_1011_1c43, "LOP.OR R4, R1, c[0x0][0x4]"),
    (0x1c00_0000_10a1_5c04, "I2I.U32.U16 R5, R4"),
    (0x1a0e_0000_1851_dc03, "ISETP.GT.U32.AND P0, PT, R5, R6, PT"),
    (0x188e_c000_8001_dc23, "ISETP.LT.AND P0, PT, R0, 0x20, PT"),
    (0x1b00_0000_1431_dc03, "ISETP.GE.U32.AND P0, PT, R3, R5, P0"),
    (0x8000_0000_0000_01e7, "@P0 EXIT"),
    (0x4003_fffe_4000_01e7, "@P0 BRA pc-0x70"),
    (0x4000_0001_0000_21e7, "@!P0 BRA pc+0x40"),
    (0x1800_0000_0400_1de2, "MOV32I R0, 0x1"),
    (0x9000_0000_2170_1c05, "ST.U8 [R23+0x8], R0"),
    (0x4001_4005_0001_1c43, "ISCADD R4.CC, R0, c[0x0][0x140], 0x2"),
    (0x208e_8005_1001_5ce3, "IMAD.HI.X R5, R0, R7, c[0x0][0x144]"),
    (0x8400_0000_0041_1c85, "LD.E R4, [R4]"),
    (0x0bff_ffff_fc00_1c02, "IADD32I R0, R0, 0xffffffff"),
    (0x9400_0000_002f_dc85, "ST.E [R2], RZ"),
    (0x2000_8005_2000_1ca3, "IMAD R0, R0, R0, c[0x0][0x148]"),
    (0x5000_0000_0810_5ca3, "IMUL R1, R1, R2"),
];

/// Routines from Mesa's GPU library, and Mesa's programs that read counters. Mesa contains the assembly text and the
/// words produced by envytools' assembler. The text here is ours.
const MESA_PROGRAMS: &[(u64, &str)] = &[
    (0x7800_0000_0400_9c03, "FLO.U32 R2, R1"),
    (0x7c20_9cdd, "LOP.XOR.E32 R2, R2, 0x1f"),
    (0x0010_dd18, "MOV.E32 R3, 0x1"),
    (0x6000_0000_0830_9c03, "SHL R2, R3, R2"),
    (0x0560_5c18, "I2I.U32.U32.E32 R1, -R1"),
    (0x0810_dc2a, "IMUL.U32.U32.E32 R3, R1, R2"),
    (0x2004_0000_0c20_9c43, "IMAD.U32.U32.HI R2, R2, R3, R2"),
    (0x2800_0000_0000_dde4, "MOV R3, R0"),
    (0x5000_0000_0800_1c43, "IMUL.U32.U32.HI R0, R0, R2"),
    (0x0010_430d, "IMAD.U32.U32.E32 R1, R1, R0, R3"),
    (0x1b0e_0000_0811_c003, "@P0 ISETP.GE.U32.AND P0, PT, R1, R2, PT"),
    (0x4800_0000_0810_4103, "@P0 IADD R1, R1, -R2"),
    (0x0800_0000_0400_0002, "@P0 IADD32I R0, R0, 0x1"),
    (0x9000_1dff, "RET.E32"),
    (0x9000_0000_0000_1de7, "RET"),
    (0x18c4_0000_fc17_dc23, "ISETP.LT.XOR P3, PT, R1, RZ, P2"),
    (0x0330_1e18, "I2I.S32.S32.E32 R0, |R0|"),
    (0x1c08, "NOP.E32"),
    (0x3800_0000_7c20_9c82, "LOP32I.XOR R2, R2, 0x1f"),
    (0x1c00_0000_0120_1ec4, "I2I.S32.S32 R0, |R0|"),
    (0x0c54_0000_0013_dc04, "PSETP.AND.XOR P1, PT, P1, P0, !P2"),
    (0x1900_0000_04a0_dc04, "I2F.F32.U16.B2 R3, R1"),
    (0x1100_0000_04a0_dc04, "F2F.F32.F16.H1 R3, R1"),
    (0x7000_c028_2800_5c03, "BFE.U32 R1, R0, 0xa0a"),
    (0xc800_0000_03f0_1cc5, "STL.128 [RZ], R0"),
    (0x2c00_0001_0000_5c04, "S2R R1, SR_0x40"),
    (0x3000_c3ff_fff0_9c04, "P2R R2, PR, RZ, 0xffff"),
    (0x3400_c3ff_fc20_1c04, "R2P PR, R2, 0xffff"),
    (0x6801_0000_0c1f_dc03, "LOP.AND RZ.CC, R1, R3"),
    (0x4000_000a_6000_1c47, "BRA CC.EQ, pc+0x298"),
    (0x4000_0001_0000_1ea7, "BRA CC.SFT, pc+0x40"),
    (0x7800_0009_c000_0007, "PRET.NOINC pc+0x270"),
    (0x0c00_0000_0430_dd02, "IADD32I R3.CC, R3, -(0x1)"),
    (0x2800_4064_0000_1de4, "MOV R0, c[0x0][0x1900]"),
    (0x547e_1800_0000_dd05, "ATOM.E.EXCH R3, [R0], R3"),
    (0x6000_0008_e000_0007, "SSY pc+0x238"),
    (0x4000_0000_0000_01f4, "@P0 NOP.S"),
    (0x9400_0000_2000_9ca5, "ST.E.64 [R0+0x8], R2"),
    (0xc000_0000_03f0_9ea5, "LDL.CS.64 R2, [RZ]"),
    (0x4801_0000_0c00_1c03, "IADD R0.CC, R0, R3"),
    (0x0800_0000_0010_5c42, "IADD32I.X R1, R1, 0x0"),
    (0xc100_0000_0030_9c85, "LDS R2, [R3]"),
    (0xe000_0000_0000_1c45, "MEMBAR.SYS"),
    (0xd000_0000_03ff_dcc5, "CCTLL.IVALL RZ, [RZ]"),
    (0x9c00_0000_000f_dcc5, "CCTL.E.IVALL RZ, [R0]"),
    (0x8400_0000_2000_9f05, "LD.E.CV.U8 R2, [R0+0x8]"),
    (0x0ffc_5cbf, "BRA.E32 CC.NE, pc-0x3c"),
    (0xd000_0000_0000_8007, "BPT.PAUSE 0x0"),
    (0xa000_0000_0000_4007, "RTT.TERMINATE"),
    (0x2800_7c1a_8002_9de4, "MOV R10, c[0xf][0x6a0]"),
    (0x1000_0000_c082_1c02, "IMUL32I.U32.U32 R8, R8, 0x30"),
    (0x9400_0000_00a0_1fc5, "ST.E.WT.128 [R10], R0"),
];

/// Words from Gdev's matrix addition test, which includes envytools' disassembly. The text here is ours.
const GDEV: &[(u64, &str)] = &[
    (0x2008_4000_3020_9c03, "IMAD.U32.U32 R2, R2, c[0x0][0xc], R4"),
    (0x1880_4000_e001_dc03, "ISETP.LT.U32.AND P0, PT, R0, c[0x0][0x38], P0"),
    (0x8000_0000_0000_21e7, "@!P0 EXIT"),
    (0x5000_c000_1031_1ce3, "IMUL.HI R4, R3, 0x4"),
    (0x200b_8000_8031_9ca3, "IMAD R6.CC, R3, R5, c[0x0][0x20]"),
    (0x4800_4000_9041_dc43, "IADD.X R7, R4, c[0x0][0x24]"),
];

/// Opcodes from asfermi, an assembler for the same hardware, with all operands 0. Unlike in the other sources, bit 58
/// of its DADD is also set.
const ASFERMI: &[(u64, &str)] = &[
    (0x3800_0000_0000_1c04, "B2R R0, 0x0"),
    (0x4400_0000_0000_1c04, "LEPC R0"),
    (0xa000_0000_0000_1c85, "LDLK P0, R0, [R0]"),
    (0xe800_0000_0000_1c85, "STUL [R0], R0"),
    (0x8800_0000_0000_1de7, "LONGJMP"),
    (0x0000_0000_0000_1de7, "JMP 0x0"),
    (0xd000_0000_0000_1c05, "CCTLL.QRY1 R0, [R0]"),
];

/// Words that Mesa's emitter for this hardware would write. They were assembled by hand from Mesa's opcode constants
/// and field positions, as a source in addition to envytools' tables.
const MESA_EMITTER: &[(u64, &str)] = &[
    (0x3008_0000_0c20_5c40, "FFMA.FTZ R1, R2, R3, R4"),
    (0x3108_4000_8020_5f20, "FFMA.RP.SAT R1, -R2, c[0x0][0x20], -R4"),
    (0x3006_8001_1020_5c00, "FFMA R1, R2, R3, c[0x0][0x44]"),
    (0x20fe_3333_3420_5c02, "FFMA32I R1, R2, 1.1, R1"),
    (0x5b80_0000_1c61_5c80, "FMUL.FMZ.RZ R5, -R6, R7"),
    (0x580c_d000_0061_5c00, "FMUL.M2 R5, R6, 2.0"),
    (0x30f7_3333_3461_5c22, "FMUL32I.SAT R5, R6, 0.1"),
    (0x5002_0000_0c20_5e60, "FADD.FTZ.SAT R1, -R2, |R3|"),
    (0x5000_efc0_0020_5c00, "FADD R1, R2, -0.5"),
    (0x28f7_3333_3420_5c82, "FADD32I R1, |R2|, 0.1"),
    (0x2014_0000_2061_1e01, "DFMA R4, -R6, R8, R10"),
    (0x5080_0000_2061_1c01, "DMUL.RM R4, R6, R8"),
    (0x4800_cffc_0061_1d01, "DADD R4, R6, -(1.0)"),
    (0xc800_0000_1040_dc00, "MUFU.RCP R3, R4"),
    (0xc800_0000_1440_de80, "MUFU.RSQ R3, -|R4|"),
    (0xc800_0000_1840_dc00, "MUFU.RCP64H R3, R4"),
    (0x6000_0000_2400_dd20, "RRO.EX2 R3, -R9"),
    (0x6000_0000_2400_dc00, "RRO.SINCOS R3, R9"),
    (0x081e_0000_0c20_5c20, "FMNMX.FTZ R1, R2, R3, !PT"),
    (0x080e_0000_1840_9c01, "DMNMX R2, R4, R6, PT"),
    (0x080e_0000_0c20_5c23, "IMNMX R1, R2, R3, PT"),
    (0x081f_0000_0c20_5c43, "IMNMX.U32.XLO R1.CC, R2, R3, !PT"),
    (0x160e_0000_0c20_5c20, "FSET.BF.GTU.AND R1, R2, R3, PT"),
    (0x288e_0000_0c25_dc00, "FSETP.LT.FTZ.AND P2, PT, R2, R3, PT"),
    (0x1922_0000_1024_dc01, "DSETP.EQ.OR P2, P3, R2, R4, P1"),
    (0x128e_0000_1020_5c01, "DSET.NE.AND R1, R2, R4, PT"),
    (0x1342_0000_0c20_5ce3, "ISET.BF.GE.X.XOR R1, R2, R3, P1"),
    (0x3208_0000_0c20_5c23, "ICMP.GT R1, R2, R3, R4"),
    (0x3c88_0000_0c20_5c20, "FCMP.LTU.FTZ R1, R2, R3, R4"),
    (0x3808_0000_0c20_5c03, "ISAD.U32 R1, R2, R3, R4"),
    (0x2808_c020_4020_5c03, "BFI R1, R2, 0x810, R4"),
    (0x7000_c020_4020_5d23, "BFE.BREV R1, R2, 0x810"),
    (0x7800_0000_0c00_5d63, "FLO.SH R1, ~R3"),
    (0x5400_0000_0c20_5e04, "POPC R1, ~R2, R3"),
    (0x2406_c048_c020_5c24, "PRMT.F4E R1, R2, 0x1230, R3"),
    (0x201a_0000_0c20_5c04, "SEL R1, R2, R3, !P5"),
    (0x5800_0000_0c20_5e23, "SHR.W R1, R2, R3"),
    (0x5800_c000_1020_5c03, "SHR.U32 R1, R2, 0x4"),
    (0x6800_0000_0c00_5dc3, "LOP.PASS_B R1, R0, ~R3"),
    (0x2108_0000_0c20_5da3, "IMAD.SAT R1, R2, R3, -R4"),
    (0x4101_0000_1020_5c63, "ISCADD R1.CC, -R2, R4, 0x3"),
    (0x1000_0000_0530_9c04, "F2F.F64.F32 R2, R1"),
    (0x1006_0000_09a0_5c04, "F2F.F32.F64.RZ R1, R2"),
    (0x1002_0000_0920_5c84, "F2F.F32.F32.FLOOR R1, R2"),
    (0x1406_0000_0920_5c84, "F2I.S32.F32.TRUNC R1, R2"),
    (0x1406_0000_09a0_5c04, "F2I.U32.F64.TRUNC R1, R2"),
    (0x1800_0000_0920_5e04, "I2F.F32.S32 R1, R2"),
    (0x1800_0000_0530_9c04, "I2F.F64.U32 R2, R1"),
    (0x1d80_0000_0820_5e84, "I2I.S32.S8.B3 R1, R2"),
    (0x87ff_ffff_c021_1ca5, "LD.E.64 R4, [R2-0x10]"),
    (0x8000_0004_0021_1d45, "LD.CG.U16 R4, [R2+0x100]"),
    (0x9400_0000_2021_1fc5, "ST.E.WT.128 [R2+0x8], R4"),
    (0xc003_ffff_f021_1c85, "LDL R4, [R2-0x4]"),
    (0xc800_0000_1021_1d05, "STL.CG.U8 [R2+0x4], R4"),
    (0xc100_0010_03f1_1c65, "LDS.S16 R4, [0x400]"),
    (0xc900_0000_0021_1c85, "STS [R2], R4"),
    (0xc404_0000_0021_1c85, "LDSLK P1, R4, [R2]"),
    (0xcc00_0000_0021_1c85, "STSUL [R2], R4"),
    (0x1400_0c00_4021_1c86, "LDC R4, c[0x3][R2+0x10]"),
    (0x547e_4800_1020_dc25, "ATOM.E.MIN R9, [R2+0x4], R3"),
    (0x540a_4800_0021_1d25, "ATOM.E.CAS R9, [R2], R4, R5"),
    (0x547e_4000_0021_1e05, "ATOM.E.ADD.U64 R8, [R2], R4"),
    (0x5c7e_4000_0021_1e45, "ATOM.E.MAX.S32 R8, [R2], R4"),
    (0x6c7e_4000_0021_1e05, "ATOM.E.ADD.F32 R8, [R2], R4"),
    (0x57fe_47ff_e021_1c05, "ATOM.E.ADD R8, [R2-0x8], R4"),
    (0x1400_0000_0021_1ce5, "RED.E.XOR [R2], R4"),
    (0x2c00_0000_0021_1e05, "RED.E.ADD.F32 [R2], R4"),
    (0xe000_0000_0000_1c25, "MEMBAR.GL"),
    (0x9c00_0001_002f_dca5, "CCTL.E.IV RZ, [R2+0x40]"),
    (0x50ee_8000_fc0f_dc04, "BAR.SYNC 0x0"),
    (0x50ee_c002_003f_dc04, "BAR.SYNC 0x3, 0x80"),
    (0x50ee_8000_143f_dc84, "BAR.ARV 0x3, R5"),
    (0x5024_4001_002f_dc24, "BAR.RED.AND P1, RZ, R2, 0x40, P2"),
    (0x50e4_8000_fc12_5c04, "BAR.RED.POPC PT, R9, 0x1, RZ, P2"),
    (0x4840_0000_00a0_dc24, "VOTE.ANY R3, P1, !P2"),
    (0x0c0e_0000_4ca3_dc04, "PSETP.OR.AND P1, PT, !P2, P3, PT"),
    (0x080e_0000_1c20_5c04, "PSET.AND.AND R1, P2, PT, PT"),
    (0x4003_ffff_e000_1de7, "BRA pc-0x8"),
    (0x4000_0001_0000_9de7, "BRA.U pc+0x40"),
    (0x5000_0004_0000_0007, "CAL.NOINC pc+0x100"),
    (0x5000_0004_0001_0007, "CAL pc+0x100"),
    (0x1000_048d_1401_0007, "JCAL 0x12345"),
    (0x6000_0000_8000_0007, "SSY pc+0x20"),
    (0x6800_0000_8000_0007, "PBK pc+0x20"),
    (0x7000_0000_8000_0007, "PCNT pc+0x20"),
    (0x7800_0000_8001_0007, "PRET pc+0x20"),
    (0xa800_0000_0000_1de7, "BRK"),
    (0xb000_0000_0000_1de7, "CONT"),
    (0x9800_0000_0000_1de7, "KIL"),
    (0x1a8e_0000_fc53_dc03, "ISETP.NE.U32.AND P1, PT, R5, RZ, PT"),
];

fn check(table: &[(u64, &str)]) {
    for (word, text) in table {
        let instruction = decode(*word).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(instruction.to_string(), *text, "{word:#018x}");
        assert_eq!(encode(&instruction), Ok(*word), "{text}");
        assert_eq!(word_of(text), Ok(*word), "{text}");
    }
}

#[test]
fn the_manual() {
    check(MANUAL);
}

#[test]
fn listings() {
    check(LISTINGS);
}

#[test]
fn mesa_programs() {
    check(MESA_PROGRAMS);
}

#[test]
fn gdev() {
    check(GDEV);
}

#[test]
fn mesa_emitter() {
    check(MESA_EMITTER);
}

#[test]
fn asfermi() {
    check(ASFERMI);
    // Decode a word with a meaningless guard.
    assert_eq!(decode(0x5800_0000_0000_1c07).unwrap().to_string(), "PLONGJMP pc+0x0");
}

#[test]
fn every_operation_is_known() {
    // Operations with encodings that appear only in the tables from which this crate was written, or elsewhere only in
    // encoded form.
    const UNSEEN: [&str; 6] = ["CSET", "CSETP", "PMTRIG", "BRX", "JMX", "PLONGJMP"];
    let tables = [MANUAL, LISTINGS, MESA_PROGRAMS, GDEV, ASFERMI, MESA_EMITTER];
    let known: Vec<_> =
        tables.iter().flat_map(|table| table.iter()).map(|(word, _)| decode(*word).unwrap().op).collect();
    for (name, _) in Op::TEMPLATES {
        assert!(known.iter().any(|op| op.mnemonic() == *name) || UNSEEN.contains(name), "{name}");
    }
}
