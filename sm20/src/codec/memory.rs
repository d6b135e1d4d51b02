//! Memory: type 5 encodings, and type 6 for LDC.

use super::address::{ATOMIC, CacheLine, GLOBAL, GLOBAL_LOCK, WINDOW};
use super::field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const VALUE: Reg = Reg(14);
const ATOM_DST: Reg = Reg(43);
const NO_C: Fixed<Register> = Fixed(Register::ZERO);

/// Field for the first eight atomic operations.
const OPERATION: Coded<AtomicOp> = narrow(5, 3);
/// Field for the signed operations, which are only ADD, MIN and MAX. MAX has code 2, so two bits exclude all other
/// operations except for INC, which [`check`] rejects.
const SIGNED_OPERATION: Coded<AtomicOp> = narrow(5, 2);

rows! { ROWS, Guard, true, 0x8;
    Red 0x1000_0000_0000_0005 / 0xf800_0000_0000_0307 {
        address: GLOBAL, a: VALUE, operation: OPERATION, kind: Fixed(AtomicType::U32),
    }
    Red 0x1000_0000_0000_0205 / 0xf800_0000_0000_03e7 {
        address: GLOBAL, a: VALUE, operation: Fixed(AtomicOp::Add), kind: Fixed(AtomicType::U64),
    }
    Red 0x1800_0000_0000_0205 / 0xf800_0000_0000_0387 {
        address: GLOBAL, a: VALUE, operation: SIGNED_OPERATION, kind: Fixed(AtomicType::S32),
    }
    Red 0x2800_0000_0000_0205 / 0xf800_0000_0000_03e7 {
        address: GLOBAL, a: VALUE, operation: Fixed(AtomicOp::Add), kind: Fixed(AtomicType::F32),
    }
    Atom 0x507e_0000_0000_0005 / 0xf87e_0000_0000_0307 {
        dst: ATOM_DST, address: ATOMIC, a: VALUE, c: NO_C, operation: OPERATION, kind: Fixed(AtomicType::U32),
    }
    Atom 0x507e_0000_0000_0105 / 0xf87e_0000_0000_03e7 {
        dst: ATOM_DST, address: ATOMIC, a: VALUE, c: NO_C, operation: Fixed(AtomicOp::Exch), kind: Fixed(AtomicType::U32),
    }
    Atom 0x5000_0000_0000_0125 / 0xf800_0000_0000_03e7 {
        dst: ATOM_DST, address: ATOMIC, a: VALUE, c: Reg(49), operation: Fixed(AtomicOp::Cas),
        kind: Fixed(AtomicType::U32),
    }
    Atom 0x507e_0000_0000_0205 / 0xf87e_0000_0000_03e7 {
        dst: ATOM_DST, address: ATOMIC, a: VALUE, c: NO_C, operation: Fixed(AtomicOp::Add), kind: Fixed(AtomicType::U64),
    }
    Atom 0x507e_0000_0000_0305 / 0xf87e_0000_0000_03e7 {
        dst: ATOM_DST, address: ATOMIC, a: VALUE, c: NO_C, operation: Fixed(AtomicOp::Exch), kind: Fixed(AtomicType::U64),
    }
    Atom 0x5000_0000_0000_0325 / 0xf800_0000_0000_03e7 {
        dst: ATOM_DST, address: ATOMIC, a: VALUE, c: Reg(49), operation: Fixed(AtomicOp::Cas),
        kind: Fixed(AtomicType::U64),
    }
    Atom 0x587e_0000_0000_0205 / 0xf87e_0000_0000_0387 {
        dst: ATOM_DST, address: ATOMIC, a: VALUE, c: NO_C, operation: SIGNED_OPERATION, kind: Fixed(AtomicType::S32),
    }
    Atom 0x687e_0000_0000_0205 / 0xf87e_0000_0000_03e7 {
        dst: ATOM_DST, address: ATOMIC, a: VALUE, c: NO_C, operation: Fixed(AtomicOp::Add), kind: Fixed(AtomicType::F32),
    }
    Ld 0x8000_0000_0000_0005 / 0xf800_0000_0000_0007 { dst: VALUE, address: GLOBAL, width: coded(5), cache: coded(8) }
    Ldu 0x8800_0000_0000_0005 / 0xf800_0000_0000_0007 { dst: VALUE, address: GLOBAL, width: coded(5) }
    St 0x9000_0000_0000_0005 / 0xf800_0000_0000_0007 { address: GLOBAL, value: VALUE, width: coded(5), cache: coded(8) }
    Cctl 0x9800_0000_0000_0005 / 0xf800_0000_0000_0007 {
        dst: VALUE, address: CacheLine, operation: coded(5), level: coded(26),
    }
    Ldlk 0xa000_0000_0000_0005 / 0xf800_0000_0000_0007 {
        p: SplitPred { low: 8, high: 58 }, dst: VALUE, address: GLOBAL_LOCK, width: coded(5),
    }
    Ldl 0xc000_0000_0000_0005 / 0xfd00_0000_0000_0007 { dst: VALUE, address: WINDOW, width: coded(5), cache: coded(8) }
    Lds 0xc100_0000_0000_0005 / 0xfd00_0000_0000_0007 { dst: VALUE, address: WINDOW, width: coded(5) }
    Ldslk 0xc400_0000_0000_0005 / 0xfc00_0000_0000_0007 {
        p: Pred(50), dst: VALUE, address: WINDOW, width: coded(5),
    }
    Stl 0xc800_0000_0000_0005 / 0xfd00_0000_0000_0007 { address: WINDOW, value: VALUE, width: coded(5), cache: coded(8) }
    Sts 0xc900_0000_0000_0005 / 0xfd00_0000_0000_0007 { address: WINDOW, value: VALUE, width: coded(5) }
    Stsul 0xcc00_0000_0000_0005 / 0xfc00_0000_0000_0007 { address: WINDOW, value: VALUE, width: coded(5) }
    Cctll 0xd000_0000_0000_0005 / 0xfc00_0000_0000_0007 { dst: VALUE, address: WINDOW, operation: coded(5) }
    Membar 0xe000_0000_0000_0005 / 0xfc00_0000_0000_0007 { scope: coded(5) }
    Stul 0xe800_0000_0000_0005 / 0xfc00_0000_0000_0007 { address: GLOBAL_LOCK, value: VALUE, width: coded(5) }
    Ldc 0x1400_0000_0000_0006 / 0xfc00_0000_0000_0007 {
        dst: VALUE, bank: Num8 { at: 42, width: 5 }, base: Reg(20), offset: Signed16 { at: 26 }, width: coded(5),
    }
}

/// Rejects combinations that the fields can express but the instructions do not support.
pub(super) fn check(op: &Op) -> Result<(), (&'static str, Reason)> {
    match op {
        Op::Atom { operation: AtomicOp::Inc, kind: AtomicType::S32, .. }
        | Op::Red { operation: AtomicOp::Inc, kind: AtomicType::S32, .. } => {
            Err(("operation", "signed atomic operations are ADD, MIN and MAX"))
        }
        _ => Ok(()),
    }
}
