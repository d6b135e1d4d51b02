//! Enumerates the registers that an operation reads or writes.

use super::{Kind, Sign, Visitor, walk};
use crate::ir::*;

/// Calls `found` with each register that an operation reads or writes, including RZ, and with the number of registers
/// in the group that starts there.
pub(crate) fn registers(op: &Op, found: &mut dyn FnMut(Register, u8)) {
    let mut op = *op;
    // This visitor sets no values, so none can be rejected.
    _ = walk(&mut op, &mut Finder { found });
}

struct Finder<'a> {
    found: &'a mut dyn FnMut(Register, u8),
}

impl Finder<'_> {
    fn source(&mut self, source: &Source, kind: Kind) {
        if let Source::Register(register) = source {
            (self.found)(*register, kind.registers());
        }
    }
}

type Nothing = Result<(), ()>;

impl Visitor for Finder<'_> {
    type Error = ();

    fn flag(&mut self, _: &'static str, _: &mut bool) -> Nothing {
        Ok(())
    }

    fn code<T: Code>(&mut self, _: &mut T, _: bool) -> Nothing {
        Ok(())
    }

    fn required<T: Code>(&mut self, _: &mut T) -> Nothing {
        Ok(())
    }

    fn signs(&mut self, _: &mut bool, _: &mut bool) -> Nothing {
        Ok(())
    }

    fn dst(&mut self, dst: &mut Register, count: u8, _: Option<&mut bool>) -> Nothing {
        self.reg(dst, count)
    }

    fn reg(&mut self, register: &mut Register, count: u8) -> Nothing {
        (self.found)(*register, count);
        Ok(())
    }

    fn pred(&mut self, _: &mut Predicate) -> Nothing {
        Ok(())
    }

    fn pred_op(&mut self, _: &mut PredicateOperand, _: bool) -> Nothing {
        Ok(())
    }

    fn source(&mut self, source: &mut Source, kind: Kind) -> Nothing {
        Finder::source(self, source, kind);
        Ok(())
    }

    fn signed(&mut self, source: &mut Source, _: &mut bool, _: Sign, kind: Kind) -> Nothing {
        Finder::source(self, source, kind);
        Ok(())
    }

    fn float(&mut self, operand: &mut FloatOperand, kind: Kind) -> Nothing {
        Finder::source(self, &operand.source, kind);
        Ok(())
    }

    fn address(&mut self, address: &mut Address) -> Nothing {
        (self.found)(address.base, if address.wide { 2 } else { 1 });
        Ok(())
    }

    fn constant(&mut self, _: &mut u8, base: &mut Register, _: &mut i16) -> Nothing {
        self.reg(base, 1)
    }

    fn number(&mut self, _: &mut u32, _: Option<u32>) -> Nothing {
        Ok(())
    }

    fn word(&mut self, _: &'static str) -> Nothing {
        Ok(())
    }

    fn special(&mut self, _: &mut SpecialRegister) -> Nothing {
        Ok(())
    }

    fn target(&mut self, _: &mut Target, _: bool) -> Nothing {
        Ok(())
    }

    fn test(&mut self, _: &mut CcTest) -> Nothing {
        Ok(())
    }

    fn barrier(&mut self, operand: &mut BarrierOperand, _: bool) -> Nothing {
        match operand {
            BarrierOperand::Register(register) => self.reg(register, 1),
            BarrierOperand::Immediate(_) => Ok(()),
        }
    }

    fn reject(&mut self, _: &'static str) {}
}
