//! Barriers, votes and NOP (type 4 encodings), and unmodelled instructions of all types.

use super::field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const PRED_A: PredOp = PredOp { at: 20, not: 23 };

rows! { ROWS, Guard, true, 0x8;
    Nop 0x4000_0000_0000_0004 / 0xfc04_0000_0000_0007 { test: coded(5) }
    Pmtrig 0x4004_0000_0000_0004 / 0xfc04_0000_0000_0007 { test: coded(5), mask: Num16 { at: 26, width: 16 } }
    Vote 0x4800_0000_0000_0004 / 0xfc00_0000_0000_0007 { dst: Reg(14), p: Pred(54), a: PRED_A, mode: coded(5) }
    Bar 0x5000_0000_0000_0004 / 0xfc00_0000_0000_0007 {
        operation: coded(5), p: Pred(53), dst: Reg(14), barrier: BarrierField { at: 20, width: 4, select: 47 },
        count: BarrierField { at: 26, width: 12, select: 46 }, a: PredOp { at: 49, not: 52 },
    }
}

/// Name, value and mask of instructions that exist but are not modelled. Bits outside the mask are ignored.
pub(super) static UNSUPPORTED: &[(&str, u64, u64)] = &[
    ("FSWZ", 0x4800_0000_0000_0000, 0xf800_0000_0000_000f),
    ("IPA", 0xc000_0000_0000_0000, 0xf800_0000_0000_000f),
    ("VADD", 0xc000_0000_0000_0004, 0xf800_0000_0000_000f),
    ("VMNMX", 0xc800_0000_0000_0004, 0xf800_0000_0000_000f),
    ("VABSDIFF", 0xd000_0000_0000_0004, 0xf800_0000_0000_000f),
    ("VSET", 0xd800_0000_0000_0004, 0xf800_0000_0000_000f),
    ("VSHR", 0xe000_0000_0000_0004, 0xf800_0000_0000_000f),
    ("VSHL", 0xe800_0000_0000_0004, 0xf800_0000_0000_000f),
    ("VMAD", 0xf000_0000_0000_0004, 0xf800_0000_0000_000f),
    ("VSETP", 0xf800_0000_0000_0004, 0xf800_0000_0000_000f),
    // Loads one value from shared memory and one from global memory, or two from global memory, in one instruction.
    ("LDS_LDU", 0xa800_0000_0000_0005, 0xf800_0000_0000_000f),
    ("LD_LDU", 0xb000_0000_0000_0005, 0xf000_0000_0000_000f),
    ("SULD", 0xd400_0000_0000_0005, 0xfc00_0000_0000_000f),
    ("SURED", 0xd800_0000_0000_0005, 0xfc00_0000_0000_000f),
    ("SUST", 0xdc00_0000_0000_0005, 0xfc00_0000_0000_000f),
    ("SUQ", 0xe400_0000_0000_0005, 0xfc00_0000_0000_000f),
    ("SULEA", 0xf000_0000_0000_0005, 0xfc00_0000_0000_000f),
    ("VILD", 0x0000_0000_0000_0006, 0xfc00_0000_0000_000f),
    ("ALD", 0x0400_0000_0000_0006, 0xfc00_0000_0000_000f),
    ("AST", 0x0800_0000_0000_0006, 0xfc00_0000_0000_000f),
    ("PIXLD", 0x1000_0000_0000_0006, 0xfc00_0000_0000_000f),
    ("OUT", 0x1c00_0000_0000_0006, 0xfc00_0000_0000_000f),
    ("TEX", 0x8000_0000_0000_0006, 0xf000_0000_0000_000f),
    ("TLD", 0x9000_0000_0000_0006, 0xf000_0000_0000_000f),
    ("TLD4", 0xa000_0000_0000_0006, 0xf000_0000_0000_000f),
    ("TMML", 0xb000_0000_0000_0006, 0xf000_0000_0000_000f),
    ("TXQ", 0xc000_0000_0000_0006, 0xf000_0000_0000_000f),
    ("TEXCSAA", 0xd000_0000_0000_0006, 0xf000_0000_0000_000f),
    ("TXD", 0xe000_0000_0000_0006, 0xf000_0000_0000_000f),
    ("QUADON", 0xc000_0000_0000_0007, 0xf800_0000_0000_000f),
    ("QUADPOP", 0xc800_0000_0000_0007, 0xf800_0000_0000_000f),
];
