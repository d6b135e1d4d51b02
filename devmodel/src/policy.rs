//! Policy for register accesses: types and lookup. `table` contains the policy of each register.
//!
//! Accesses are denied by default: a dword is accessible only if it belongs to a declared register listed in the table,
//! or to a listed range. A policy cannot refer to the physical card. Accesses that need the card become calls to
//! [`crate::Backend`], which validates them using its own addresses and numbers.

mod table;

pub use table::{RANGES, REGISTERS, Register};

/// Policy for accesses to a register or range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Virtual: a value stored in this vGPU, subject to the register's access mode.
    Store,
    /// Virtual: state of this vGPU, with side effects.
    Model,
    /// Translated: an operation on channels, page tables, memory or the clock.
    Translate,
    /// Denied and counted.
    Deny,
}

impl Policy {
    /// Returns the name of the policy for logs and tools.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Store | Self::Model => "virtual",
            Self::Translate => "translate",
            Self::Deny => "deny",
        }
    }
}

/// Table entry of a declared register.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// Name of the register block.
    pub block: &'static str,
    /// Name of the register.
    pub name: &'static str,
    /// Byte offset in BAR0 of the register, or of the first register of an array.
    pub offset: u32,
    /// Policy for accesses to the register.
    pub policy: Policy,
}

/// Table entry of a range without declared registers. Entries of declared registers in the range take precedence.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Name of the range.
    pub name: &'static str,
    /// Start of the range, a byte offset in BAR0.
    pub base: u32,
    /// End of the range, exclusive.
    pub end: u32,
    /// Policy for accesses to the range.
    pub policy: Policy,
    /// Kind of range: a window, a ROM, or storage.
    pub kind: RangeKind,
}

/// Kinds of ranges without declared registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeKind {
    /// PRAMIN, the VRAM window.
    Pramin,
    /// The VBIOS ROM.
    Prom,
    /// State registers without side effects.
    State,
}

/// Target of an access to BAR0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A declared register, its array index, and its policy.
    Register(Register, u32, Policy),
    /// A dword in a range.
    Range(RangeKind),
    /// There is no accessible register.
    Nothing,
}

/// Returns the target of an access to byte `offset` of BAR0.
#[must_use]
pub fn find(offset: u32) -> Target {
    if let Some((register, index)) = Register::decode(offset) {
        return Target::Register(register, index, register.policy());
    }
    RANGES
        .iter()
        .find(|range| (range.base..range.end).contains(&offset))
        .map_or(Target::Nothing, |range| Target::Range(range.kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvspec::regs::{self, windows};
    use std::collections::HashMap;

    #[test]
    fn every_declared_register_has_exactly_one_policy() {
        let mut lines: HashMap<(&str, &str), usize> = HashMap::new();
        for line in REGISTERS {
            *lines.entry((line.block, line.name)).or_default() += 1;
        }
        let mut wrong = Vec::new();
        for (block, _, _, info) in regs::blocks() {
            for reg in *info {
                let count = lines.remove(&(*block, reg.name)).unwrap_or(0);
                if count != 1 {
                    wrong.push(format!("{block}.{} has {count} policies", reg.name));
                }
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
        assert!(lines.is_empty(), "table entries without a register: {lines:?}");
    }

    #[test]
    fn policy_table_entries_match_lookup() {
        for line in REGISTERS {
            let Target::Register(register, 0, policy) = find(line.offset) else {
                panic!("{}.{} was not found", line.block, line.name)
            };
            assert_eq!((register.info().name, policy), (line.name, line.policy), "{}", line.block);
        }
    }

    #[test]
    fn every_window_and_state_range_has_exactly_one_line() {
        let named = windows::STATE_RANGES.iter().map(|&(_, base, end)| (base, end));
        let all =
            named.chain([(windows::pramin::BASE, windows::pramin::END), (windows::prom::BASE, windows::prom::END)]);
        let mut count = 0;
        for (base, end) in all {
            let lines = RANGES.iter().filter(|range| (range.base, range.end) == (base, end)).count();
            assert_eq!(lines, 1, "{base:#x}..{end:#x}");
            count += 1;
        }
        assert_eq!(count, RANGES.len(), "an entry has no range");
    }

    #[test]
    fn ranges_do_not_overlap() {
        for (at, a) in RANGES.iter().enumerate() {
            for b in &RANGES[at + 1..] {
                assert!(a.end <= b.base || b.end <= a.base, "{} and {} overlap", a.name, b.name);
            }
        }
    }

    #[test]
    fn offset_outside_the_table_has_no_target() {
        assert_eq!(find(0x6000c), Target::Nothing, "the peephole's data port must not be accessible");
        assert_eq!(find(0x800000), Target::Nothing);
        assert_eq!(find(u32::MAX), Target::Nothing);
    }
}
