//! Integer, logic and move instructions of one thread, computed with 128-bit integers or bit by bit.

use super::{Cc, Env, Thread};
use sm20::{
    AddMode, Byte, CcTest, Compare, Extended, IntType, LogicOp, Op, PermuteMode, PredicateLogic, PredicateOperand,
    Register, Source,
};

type Done = Result<(), u32>;

fn signed(value: u32) -> i128 {
    i128::from(value.cast_signed())
}

fn number(value: u32, is_signed: bool) -> i128 {
    if is_signed { signed(value) } else { i128::from(value) }
}

pub(super) fn join(logic: PredicateLogic, a: bool, b: bool) -> bool {
    match logic {
        PredicateLogic::And => a && b,
        PredicateLogic::Or => a || b,
        PredicateLogic::Xor => a != b,
    }
}

fn all_ones(holds: bool, float: bool) -> u32 {
    match (holds, float) {
        (false, _) => 0,
        (true, false) => !0,
        (true, true) => 0x3f80_0000,
    }
}

/// Returns the zero and sign flags of a word.
fn plain_cc(value: u32) -> Cc {
    Cc { zero: value == 0, sign: value & 1 << 31 != 0, carry: false, overflow: false }
}

/// Computes a sum or difference with all flags, using integer arithmetic instead of bit operations.
fn sum(a: u32, b: u32, mode: AddMode, carry_in: Option<Cc>, saturate: bool) -> (u32, Cc) {
    let more = i128::from(carry_in.is_some_and(|cc| cc.carry));
    let exact = |a: i128, b: i128| match (mode, carry_in) {
        (AddMode::Add, _) => a + b + more,
        (AddMode::PlusOne, None) => a + b + 1,
        (AddMode::PlusOne, Some(_)) => a + b + more,
        (AddMode::SubtractB, None) => a - b,
        (AddMode::SubtractB, Some(_)) => a - b - 1 + more,
        (AddMode::SubtractA, None) => b - a,
        (AddMode::SubtractA, Some(_)) => b - a - 1 + more,
    };
    let (whole, natural) = (exact(signed(a), signed(b)), exact(a.into(), b.into()));
    let subtracts = matches!(mode, AddMode::SubtractA | AddMode::SubtractB);
    let range = i128::from(i32::MIN)..=i128::from(i32::MAX);
    let value = if saturate { whole.clamp(*range.start(), *range.end()) as u32 } else { whole as u32 };
    let carry = if subtracts { natural >= 0 } else { natural > i128::from(u32::MAX) };
    let zero = value == 0 && carry_in.is_none_or(|cc| cc.zero);
    (value, Cc { zero, carry, overflow: !range.contains(&whole), ..plain_cc(value) })
}

/// Returns the result of a condition code test.
pub(super) fn test(cc: Cc, test: CcTest) -> bool {
    let Cc { zero, sign, carry, overflow } = cc;
    // A NaN sets both the zero and the sign flag. A number never sets both flags.
    match test {
        CcTest::False => false,
        CcTest::True => true,
        CcTest::Eq => zero && !sign,
        CcTest::Ne => !zero,
        CcTest::Num => !(zero && sign),
        CcTest::Nan => zero && sign,
        CcTest::Equ => zero,
        CcTest::Neu => !zero || sign,
        CcTest::Lt => (sign && !zero) != overflow,
        CcTest::Ge => sign == overflow,
        CcTest::Le => sign != (zero || overflow),
        CcTest::Gt => !zero && sign == overflow,
        CcTest::Ltu => sign != overflow,
        CcTest::Geu => (!sign || zero) != overflow,
        CcTest::Leu => zero || sign != overflow,
        CcTest::Gtu => sign == (zero || overflow),
        CcTest::Off => !overflow,
        CcTest::Oft => overflow,
        CcTest::Lo => !carry,
        CcTest::Hs => carry,
        CcTest::Ls => zero || !carry,
        CcTest::Hi => carry && !zero,
        CcTest::Sff => !sign,
        CcTest::Sft => sign,
    }
}

/// Compares two words. If lower words set a condition code, the two words are the upper words of multi-word numbers.
fn holds(a: u32, b: u32, compare: Compare, is_signed: bool, lower: Option<Cc>) -> bool {
    let (a, b) = (number(a, is_signed), number(b, is_signed));
    let order = match lower {
        None => a.cmp(&b),
        Some(cc) => {
            // The lower words contribute -1, 0 or 1, according to their difference.
            let below = if cc.zero { 0 } else { 1 };
            let lower = if cc.carry { below } else { -1 };
            (((a - b) << 1) + lower).cmp(&0)
        }
    };
    compare.holds(Some(order))
}

/// Returns the position and length of a bit field.
fn field(b: u32) -> (u32, u32) {
    (b & 0xff, b >> 8 & 0xff)
}

fn maybe_reversed(value: u32, reverse: bool) -> u32 {
    if reverse { (0..32).fold(0, |result, bit| result | (value >> bit & 1) << (31 - bit)) } else { value }
}

fn bit(value: u32, index: u32) -> u32 {
    if index < 32 { value >> index & 1 } else { 0 }
}

pub(super) fn execute(op: &Op, thread: &mut Thread, env: &Env<'_>) -> Done {
    let old = thread.clone();
    let reg = |register| old.register(register);
    let src = |source: Source| old.word(source, env);
    let pred = |operand: PredicateOperand| old.predicate(operand);
    match *op {
        Op::IAdd { dst, write_cc, a, b, mode, saturate, carry_in } => {
            let (value, cc) = sum(reg(a), src(b)?, mode, carry_in.then_some(old.cc), saturate);
            thread.set(dst, value, write_cc.then_some(cc));
        }
        Op::IMul { dst, write_cc, a, b, a_signed, b_signed, high } => {
            let value = product(reg(a), src(b)?, a_signed, b_signed, high);
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::IMad { dst, write_cc, a, b, c, mode, a_signed, b_signed, high, saturate, carry_in } => {
            let value = product(reg(a), src(b)?, a_signed, b_signed, high);
            let (value, cc) = sum(value, src(c)?, mode, carry_in.then_some(old.cc), saturate);
            thread.set(dst, value, write_cc.then_some(cc));
        }
        Op::IScAdd { dst, write_cc, a, b, shift, mode } => {
            let shifted = u64::from(reg(a)) * (1u64 << shift);
            let (value, cc) = sum(shifted as u32, src(b)?, mode, None, false);
            thread.set(dst, value, write_cc.then_some(cc));
        }
        Op::ISad { dst, write_cc, a, b, c, signed } => {
            let distance = (number(reg(a), signed) - number(src(b)?, signed)).abs();
            let value = (distance + i128::from(src(c)?)) as u32;
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::IMnMx { dst, write_cc, a, b, select, signed, extended } => {
            let (a, b, least) = (reg(a), src(b)?, pred(select));
            let own = number(a, signed).cmp(&number(b, signed));
            let upper = match (old.cc.zero, old.cc.sign) {
                (true, _) => std::cmp::Ordering::Equal,
                (false, true) => std::cmp::Ordering::Less,
                (false, false) => std::cmp::Ordering::Greater,
            };
            let order = match extended {
                Extended::Whole | Extended::High => own,
                Extended::Middle | Extended::Low => upper.then(own),
            };
            // The intermediate flags require `less` and `equal` to describe the same ordering.
            let (less, equal) = (order.is_lt(), order.is_eq());
            let value = if less == least { a } else { b };
            let cc = match extended {
                Extended::Whole => plain_cc(value),
                _ => Cc { zero: equal, sign: less, carry: false, overflow: false },
            };
            thread.set(dst, value, write_cc.then_some(cc));
        }
        Op::ISet { dst, write_cc, a, b, compare, signed, carry_in, float_result, logic, accumulate } => {
            let own = holds(reg(a), src(b)?, compare, signed, carry_in.then_some(old.cc));
            let value = all_ones(join(logic, own, pred(accumulate)), float_result);
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::ISetP { p, q, a, b, compare, signed, carry_in, logic, accumulate } => {
            let own = holds(reg(a), src(b)?, compare, signed, carry_in.then_some(old.cc));
            thread.set_predicates(p, q, own, logic, pred(accumulate));
        }
        Op::ICmp { dst, a, b, c, compare, signed } => {
            let (b, c) = (src(b)?, src(c)?);
            thread.set(dst, if holds(c, 0, compare, signed, None) { reg(a) } else { b }, None);
        }
        Op::Lop { dst, write_cc, a, b, logic, invert_a, invert_b, carry_in } => {
            let (a, b) = (reg(a), src(b)?);
            let value = (0..32).fold(0, |value, index| {
                let (x, y) = ((bit(a, index) != 0) != invert_a, (bit(b, index) != 0) != invert_b);
                let one = match logic {
                    LogicOp::And => x && y,
                    LogicOp::Or => x || y,
                    LogicOp::Xor => x != y,
                    LogicOp::PassB => y,
                };
                value | u32::from(one) << index
            });
            let cc = plain_cc(value);
            let zero = cc.zero && (!carry_in || old.cc.zero);
            thread.set(dst, value, write_cc.then_some(Cc { zero, ..cc }));
        }
        Op::Shl { dst, write_cc, a, b, wrap, carry_in: false } => {
            let count = if wrap { src(b)? % 32 } else { src(b)?.min(64) };
            let value = (u128::from(reg(a)) << count) as u32;
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::Shr { dst, write_cc, a, b, signed, wrap, reverse, carry_in: false } => {
            let count = if wrap { src(b)? % 32 } else { src(b)?.min(64) };
            let value = (number(maybe_reversed(reg(a), reverse), signed) >> count) as u32;
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::Bfe { dst, write_cc, a, b, signed, reverse } => {
            let (a, (position, length)) = (maybe_reversed(reg(a), reverse), field(src(b)?));
            let top = if length == 0 { 0 } else { bit(a, (position + length - 1).min(31)) };
            let value = (0..32).fold(0, |value, index| {
                let inside = index < length && position + index < 32;
                let one = if inside {
                    bit(a, position + index)
                } else if signed && length != 0 {
                    top
                } else {
                    0
                };
                value | one << index
            });
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::Bfi { dst, write_cc, a, b, c } => {
            let (a, (position, length), c) = (reg(a), field(src(b)?), src(c)?);
            let value = (0..32).fold(0, |value, index| {
                let inside = index >= position && index - position < length;
                value | if inside { bit(a, index - position) } else { bit(c, index) } << index
            });
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::Flo { dst, write_cc, b, signed, invert, shift_amount } => {
            let value = if invert { !src(b)? } else { src(b)? };
            let sign = if signed { bit(value, 31) } else { 0 };
            let found = (0..32).rev().find(|index| bit(value, *index) != sign);
            let value = found.map_or(!0, |index| if shift_amount { 31 - index } else { index });
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::Popc { dst, a, b, invert_a, invert_b } => {
            let (a, b) = (reg(a), src(b)?);
            let both = |index: &u32| (bit(a, *index) != 0) != invert_a && (bit(b, *index) != 0) != invert_b;
            thread.set(dst, (0..32).filter(both).count() as u32, None);
        }
        Op::I2I { dst, write_cc, b, to, from, saturate, part } => {
            let value = integer(&old, b, from, part, env)?;
            let (least, most) = range(to);
            let value = if saturate { value.clamp(least, most) } else { narrowed(value, to) };
            set_integer(thread, dst, value, to, write_cc);
        }
        Op::Mov { dst, b, lanes } => {
            let value = src(b)?;
            if lanes >> (env.lane % 4) & 1 != 0 {
                thread.set(dst, value, None);
            }
        }
        Op::Sel { dst, a, b, select } => {
            let b = src(b)?;
            thread.set(dst, if pred(select) { reg(a) } else { b }, None);
        }
        Op::Prmt { dst, a, b, c, mode } => {
            let bytes = [reg(a).to_le_bytes(), src(c)?.to_le_bytes()].concat();
            let select = src(b)?;
            let low = (select & 3) as usize;
            let rows: [usize; 4] = match mode {
                PermuteMode::Index => std::array::from_fn(|index| (select >> (4 * index) & 7) as usize),
                PermuteMode::Forward4 => std::array::from_fn(|index| low + index),
                PermuteMode::Backward4 => std::array::from_fn(|index| (8 + low - index) % 8),
                PermuteMode::Replicate8 => [low; 4],
                PermuteMode::EdgeLeft => [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3; 4]][low],
                PermuteMode::EdgeRight => [[0; 4], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]][low],
                PermuteMode::Replicate16 => [[0, 1, 0, 1], [2, 3, 2, 3]][low % 2],
            };
            let chosen = std::array::from_fn(|index| {
                let byte = bytes[rows[index]];
                let sign = mode == PermuteMode::Index && select >> (4 * index + 3) & 1 != 0;
                if sign { (byte.cast_signed() >> 7).cast_unsigned() } else { byte }
            });
            thread.set(dst, u32::from_le_bytes(chosen), None);
        }
        Op::P2R { dst, a, b } => {
            let (a, mask) = (reg(a), src(b)?);
            let value = (0..32).fold(0, |value, index| {
                let own = old.p.get(index as usize).is_some_and(|p| *p && index < 7);
                value | if bit(mask, index) != 0 { u32::from(own) } else { bit(a, index) } << index
            });
            thread.set(dst, value, None);
        }
        Op::R2P { a, b } => {
            let (a, mask) = (reg(a), src(b)?);
            for index in (0..7).filter(|index| bit(mask, *index) != 0) {
                thread.p[index as usize] = bit(a, index) != 0;
            }
        }
        Op::PSet { dst, write_cc, a, b, combine, float_result, logic, accumulate } => {
            let own = join(combine, pred(a), pred(b));
            let value = all_ones(join(logic, own, pred(accumulate)), float_result);
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::PSetP { p, q, a, b, combine, logic, accumulate } => {
            thread.set_predicates(p, q, join(combine, pred(a), pred(b)), logic, pred(accumulate));
        }
        Op::CSet { dst, write_cc, test: wanted, float_result, logic, accumulate } => {
            let value = all_ones(join(logic, test(old.cc, wanted), pred(accumulate)), float_result);
            thread.set(dst, value, write_cc.then_some(plain_cc(value)));
        }
        Op::CSetP { p, q, test: wanted, logic, accumulate } => {
            thread.set_predicates(p, q, test(old.cc, wanted), logic, pred(accumulate));
        }
        Op::Lepc { dst } => thread.set(dst, env.pc, None),
        Op::B2R { dst, barrier: _ } => thread.set(dst, 0, None),
        Op::Nop { .. } | Op::Pmtrig { .. } | Op::Membar { .. } => {}
        Op::Vote { dst, p, a: _, mode } => {
            // The bench has already evaluated the participating lanes' votes.
            let (voters, yes) = env.vote;
            thread.set(dst, yes, None);
            thread.set_predicate(
                p,
                match mode {
                    sm20::VoteMode::All => yes == voters,
                    sm20::VoteMode::Any => yes != 0,
                    sm20::VoteMode::Eq => yes == 0 || yes == voters,
                },
            );
        }
        _ => panic!("{op:?} has no reference"),
    }
    Ok(())
}

/// Stores an integer of any type, using a register pair for 64 bits.
pub(super) fn set_integer(thread: &mut Thread, dst: Register, value: i128, kind: IntType, write_cc: bool) {
    if kind.bits() == 64 {
        let cc = Cc { zero: value as u64 == 0, sign: value as u64 >> 63 != 0, carry: false, overflow: false };
        thread.set_pair(dst, value as u64, write_cc.then_some(cc));
    } else {
        thread.set(dst, value as u32, write_cc.then_some(plain_cc(value as u32)));
    }
}

fn product(a: u32, b: u32, a_signed: bool, b_signed: bool, high: bool) -> u32 {
    let product = number(a, a_signed) * number(b, b_signed);
    if high { (product >> 32) as u32 } else { product as u32 }
}

pub(super) fn range(kind: IntType) -> (i128, i128) {
    let bits = kind.bits();
    if kind.signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// Returns the number of type `kind` with the same low bits.
pub(super) fn narrowed(value: i128, kind: IntType) -> i128 {
    let (_, most) = range(kind);
    let low = value.rem_euclid(1 << kind.bits());
    if low > most { low - (1 << kind.bits()) } else { low }
}

/// Returns the selected part of an integer operand, with modifiers applied.
pub(super) fn integer(
    thread: &Thread,
    b: sm20::FloatOperand,
    from: IntType,
    part: Byte,
    env: &Env<'_>,
) -> Result<i128, u32> {
    let whole = match (from.bits(), b.source) {
        (64, Source::Immediate(value) | Source::LongImmediate(value)) => signed(value),
        (64, source) => i128::from(thread.pair(source, env)?),
        (_, source) => i128::from(thread.word(source, env)?) >> (8 * part as u32),
    };
    let value = narrowed(whole, from);
    let value = if b.absolute { value.abs() } else { value };
    Ok(if b.negate { -value } else { value })
}
