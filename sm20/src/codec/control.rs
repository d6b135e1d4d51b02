//! Control instructions (type 7). Bits 5 to 9 select a test of the condition code. Pushes, calls and traps have no
//! guard.

use super::address::Goto;
use super::field::*;
use super::table::{Guarding, Row, group, named, rows, union, values};
use crate::ir::*;

const UNIFORM: Flag = Flag(15);
const LIMIT: Flag = Flag(16);

rows! { GUARDED, Guard, false, 0x8;
    Jmp 0x0000_0000_0000_0007 / 0xf800_0000_0000_0007 {
        target: Goto::Absolute, test: coded(5), uniform: UNIFORM, limit: LIMIT,
    }
    Jmx 0x0800_0000_0000_0007 / 0xf800_0000_0000_0007 {
        target: Goto::Absolute, index: Reg(20), test: coded(5), limit: LIMIT,
    }
    Bra 0x4000_0000_0000_0007 / 0xf800_0000_0000_0007 {
        target: Goto::Relative, test: coded(5), uniform: UNIFORM, limit: LIMIT,
    }
    Brx 0x4800_0000_0000_0007 / 0xf800_0000_0000_0007 {
        target: Goto::Relative, index: Reg(20), test: coded(5), limit: LIMIT,
    }
    Exit 0x8000_0000_0000_0007 / 0xf800_0000_0000_0007 { test: coded(5) }
    Longjmp 0x8800_0000_0000_0007 / 0xf800_0000_0000_0007 { test: coded(5) }
    Ret 0x9000_0000_0000_0007 / 0xf800_0000_0000_0007 { test: coded(5) }
    Kil 0x9800_0000_0000_0007 / 0xf800_0000_0000_0007 { test: coded(5) }
    Brk 0xa800_0000_0000_0007 / 0xf800_0000_0000_0007 { test: coded(5) }
    Cont 0xb000_0000_0000_0007 / 0xf800_0000_0000_0007 { test: coded(5) }
}

rows! { UNGUARDED, Ignored, false, 0x8;
    Jcal 0x1000_0000_0000_0007 / 0xf800_0000_0000_0007 { target: Goto::Absolute, limit: LIMIT }
    Cal 0x5000_0000_0000_0007 / 0xf800_0000_0000_0007 { target: Goto::Relative, limit: LIMIT }
    Plongjmp 0x5800_0000_0000_0007 / 0xf800_0000_0000_0007 { target: Goto::Relative }
    Ssy 0x6000_0000_0000_0007 / 0xf800_0000_0000_0007 { target: Goto::Relative }
    Pbk 0x6800_0000_0000_0007 / 0xf800_0000_0000_0007 { target: Goto::Relative }
    Pcnt 0x7000_0000_0000_0007 / 0xf800_0000_0000_0007 { target: Goto::Relative }
    Pret 0x7800_0000_0000_0007 / 0xf800_0000_0000_0007 { target: Goto::Relative, limit: LIMIT }
    Rtt 0xa000_0000_0000_0007 / 0xf800_0000_0000_0007 { terminate: Flag(14) }
    Bpt 0xd000_0000_0000_0007 / 0xf800_0000_0000_0007 { kind: coded(14), number: Num32 { at: 26, width: 20 } }
}
