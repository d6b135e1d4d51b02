//! Parses an instruction: guard, mnemonic, suffixes, operands.

use super::cursor::{Cursor, Failure};
use super::expression::expression;
use super::symbols::{Named, Symbols, plain_predicate, plain_register};
use crate::ir::*;
use crate::syntax::{Kind, Sign, Visitor, walk};

/// Parses the instruction at an address.
pub(super) fn instruction(
    cursor: &mut Cursor<'_>,
    symbols: &Symbols,
    address: u32,
    form: Form,
) -> Result<Instruction, Failure> {
    let guard = if cursor.eat("@") { predicate_operand(cursor, symbols)? } else { PredicateOperand::TRUE };
    cursor.skip_spaces();
    let at = cursor.column();
    let mut parts = Suffixes::read(cursor);
    let mnemonic = parts.mnemonic.to_ascii_uppercase();
    let Some((mut op, long)) = template(&mnemonic) else {
        return Err(Failure::new(at, format!("there is no instruction `{}`", parts.mnemonic)));
    };
    let join = parts.take("S");
    _ = parts.take("E32");
    let mut instruction = Instruction { guard, join, form, op };
    let size = instruction.size();
    let end = i64::from(address).saturating_add(size.into());
    let mut operands = Operands { cursor, symbols, suffixes: &mut parts, end, at, long, first: true };
    walk(&mut op, &mut operands)?;
    let unused_long = operands.long;
    cursor.finish()?;
    if unused_long {
        return Err(Failure::new(at, format!("{mnemonic} needs a 32-bit immediate")));
    }
    parts.finish()?;
    instruction.op = op;
    Ok(instruction)
}

/// Returns a mnemonic's default operation, and a flag that is true for the form with a 32-bit immediate.
fn template(mnemonic: &str) -> Option<(Op, bool)> {
    let find = |name: &str| Op::TEMPLATES.iter().find(|(known, _)| *known == name).map(|(_, template)| template());
    if let Some(op) = find(mnemonic) {
        return Some((op, false));
    }
    let op = find(mnemonic.strip_suffix("32I")?)?;
    let has_long = matches!(
        op,
        Op::IAdd { .. }
            | Op::IMul { .. }
            | Op::IMad { .. }
            | Op::IScAdd { .. }
            | Op::Lop { .. }
            | Op::Mov { .. }
            | Op::FAdd { .. }
            | Op::FMul { .. }
            | Op::FFma { .. }
    );
    has_long.then_some((op, true))
}

/// The suffixes of a mnemonic. Each modifier consumes its own suffix.
struct Suffixes<'a> {
    mnemonic: &'a str,
    /// Suffixes with their columns. An entry becomes `None` when a modifier consumes the suffix.
    left: Vec<Option<(&'a str, u32)>>,
}

impl<'a> Suffixes<'a> {
    fn read(cursor: &mut Cursor<'a>) -> Self {
        let mnemonic = cursor.name();
        let mut left = Vec::new();
        while cursor.peek() == Some('.') {
            cursor.take(|c| c == '.');
            let column = cursor.column();
            left.push(Some((cursor.take(|c| c.is_ascii_alphanumeric() || c == '_'), column)));
        }
        Self { mnemonic, left }
    }

    /// Consumes the first suffix for which `wanted` returns a value.
    fn take_if<T>(&mut self, wanted: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.left.iter_mut().find_map(|suffix| {
            let found = wanted(suffix.as_ref()?.0)?;
            *suffix = None;
            Some(found)
        })
    }

    fn take(&mut self, name: &str) -> bool {
        self.take_if(|suffix| suffix.eq_ignore_ascii_case(name).then_some(())).is_some()
    }

    fn take_code<T: Code>(&mut self) -> Option<T> {
        self.take_if(|suffix| {
            let entry = T::TABLE.iter().find(|(.., name)| !name.is_empty() && suffix.eq_ignore_ascii_case(name));
            entry.map(|(value, ..)| *value)
        })
    }

    fn finish(&self) -> Result<(), Failure> {
        match self.left.iter().flatten().next() {
            Some((suffix, column)) => {
                Err(Failure::new(*column, format!("`.{suffix}` is not a suffix of {}, or is repeated", self.mnemonic)))
            }
            None => Ok(()),
        }
    }
}

/// Parses operands as required by an operation's description.
struct Operands<'a, 'b> {
    cursor: &'a mut Cursor<'b>,
    symbols: &'a Symbols,
    suffixes: &'a mut Suffixes<'b>,
    /// Address of the next instruction.
    end: i64,
    /// Column of the mnemonic.
    at: u32,
    /// True until the 32-bit immediate of a `32I` mnemonic has been parsed.
    long: bool,
    /// True until the first operand has been parsed.
    first: bool,
}

type Read<T> = Result<T, Failure>;

impl<'b> Operands<'_, 'b> {
    /// Skips to the next operand.
    fn next(&mut self) -> Read<()> {
        if self.cursor.at_end() {
            return self.cursor.fail("an operand is missing");
        }
        if !self.first {
            self.cursor.expect(",")?;
        }
        self.first = false;
        self.cursor.skip_spaces();
        Ok(())
    }

    /// Returns true if another operand follows.
    fn more(&mut self) -> bool {
        !self.cursor.at_end()
    }

    fn register(&mut self) -> Read<Register> {
        register(self.cursor, self.symbols)
    }

    /// Parses a register, constant or number without a prefix.
    fn plain_source(&mut self, kind: Kind) -> Read<Source> {
        if let Some(address) = self.constant_address()? {
            return Ok(Source::Constant(address));
        }
        let mut ahead = *self.cursor;
        let name = ahead.name();
        let named = || match self.symbols.named(name) {
            Some(Named::Register(register)) => Some(register),
            _ => None,
        };
        if let Some(register) = plain_register(name).or_else(named) {
            *self.cursor = ahead;
            return Ok(Source::Register(register));
        }
        let value = self.immediate(kind)?;
        if self.long {
            self.long = false;
            return Ok(Source::LongImmediate(value));
        }
        Ok(Source::Immediate(value))
    }

    /// Parses `c[bank][offset]` if it comes next.
    fn constant_address(&mut self) -> Read<Option<ConstAddress>> {
        let Some(bank) = self.bank()? else { return Ok(None) };
        self.cursor.expect("[")?;
        let offset = self.ranged(u16::MAX.into(), "a constant's offset")?;
        self.cursor.expect("]")?;
        Ok(Some(ConstAddress { bank, offset: u16::try_from(offset).unwrap_or(u16::MAX) }))
    }

    /// Parses `c[bank]` if it comes next.
    fn bank(&mut self) -> Read<Option<u8>> {
        let mut ahead = *self.cursor;
        if !matches!(ahead.name(), "c" | "C") || !ahead.eat("[") {
            return Ok(None);
        }
        *self.cursor = ahead;
        let bank = self.ranged(31, "a constant bank")?;
        self.cursor.expect("]")?;
        Ok(Some(u8::try_from(bank).unwrap_or(u8::MAX)))
    }

    /// Parses a number from 0 to `limit`.
    fn ranged(&mut self, limit: u32, what: &str) -> Read<u32> {
        self.cursor.skip_spaces();
        let at = *self.cursor;
        let value = expression(self.cursor, self.symbols)?;
        match u32::try_from(value) {
            Ok(value) if value <= limit => Ok(value),
            _ => at.fail(format!("{what} is from 0 to {limit:#x}, not {value}")),
        }
    }

    /// Parses an immediate into 32 bits. A float is written with or without a point or exponent, or as its bits in
    /// hexadecimal.
    fn immediate(&mut self, kind: Kind) -> Read<u32> {
        self.cursor.skip_spaces();
        let at = *self.cursor;
        let text = if matches!(kind, Kind::Float | Kind::Double) { decimal(self.cursor) } else { None };
        match text {
            Some(text) if kind == Kind::Double => {
                let bits = text.parse().map(f64::to_bits).or_else(|_| at.fail("the number cannot be read"))?;
                return match (bits & 0xffff_ffff, u32::try_from(bits.wrapping_shr(32))) {
                    (0, Ok(upper)) => Ok(upper),
                    _ => at.fail("the number's lower word is not zero: it must come from a constant bank"),
                };
            }
            Some(text) => return text.parse().map(f32::to_bits).or_else(|_| at.fail("the number cannot be read")),
            None => {}
        }
        let value = expression(self.cursor, self.symbols)?;
        match (u32::try_from(value), i32::try_from(value)) {
            (Ok(bits), _) => Ok(bits),
            (_, Ok(signed)) => Ok(signed.cast_unsigned()),
            _ => at.fail(format!("{value} does not fit 32 bits")),
        }
    }

    /// Parses an operand after an optional `prefix`, and returns true if the prefix is present and is not part of a
    /// number. The operand may then be in parentheses.
    fn prefixed<T>(&mut self, prefix: char, read: impl FnOnce(&mut Self) -> Read<T>) -> Read<(bool, T)> {
        let mut ahead = *self.cursor;
        ahead.take(|c| c == prefix);
        let mut several = *self.cursor;
        let marks = several.take(|c| c == prefix);
        let number = ahead.peek().is_some_and(|c| c.is_ascii_digit() || c == '.') && prefix == '-';
        if marks.is_empty() || number || !self.is_operand(ahead) {
            return Ok((false, read(self)?));
        }
        if marks.len() > 1 {
            return self.cursor.fail(format!("only one `{prefix}` is permitted"));
        }
        *self.cursor = ahead;
        let parenthesis = self.cursor.peek() == Some('(') && self.cursor.eat("(");
        let value = read(self)?;
        if parenthesis {
            self.cursor.expect(")")?;
        }
        Ok((true, value))
    }

    /// Returns true if the next text is an operand that permits the prefix, rather than a name in an expression.
    fn is_operand(&self, mut cursor: Cursor<'b>) -> bool {
        match cursor.peek() {
            Some('(' | '|') => true,
            Some(c) if c.is_ascii_digit() => true,
            _ => {
                let name = cursor.name();
                plain_register(name).is_some()
                    || self.symbols.named(name).is_some()
                    || (matches!(name, "c" | "C") && cursor.peek() == Some('['))
            }
        }
    }

    /// Parses `[R0]`, `[R0+4]`, `[R0-4]` or `[4]`.
    fn base_and_offset(&mut self, limit: (i64, i64)) -> Read<(Register, i64)> {
        self.cursor.expect("[")?;
        self.cursor.skip_spaces();
        let mut ahead = *self.cursor;
        let name = ahead.name();
        let named = match self.symbols.named(name) {
            Some(Named::Register(register)) => Some(register),
            _ => None,
        };
        let base = plain_register(name).or(named);
        if base.is_some() {
            *self.cursor = ahead;
        }
        self.cursor.skip_spaces();
        let at = *self.cursor;
        let offset = match (base, self.cursor.peek()) {
            (Some(_), Some(']')) => 0,
            (Some(_), Some('+' | '-')) | (None, _) => expression(self.cursor, self.symbols)?,
            (Some(_), _) => return at.fail("`]`, `+` or `-` is needed here"),
        };
        if offset < limit.0 || offset > limit.1 {
            return at.fail(format!("the displacement is from {} to {}", limit.0, limit.1));
        }
        self.cursor.expect("]")?;
        Ok((base.unwrap_or(Register::ZERO), offset))
    }
}

impl Visitor for Operands<'_, '_> {
    type Error = Failure;

    fn flag(&mut self, name: &'static str, value: &mut bool) -> Read<()> {
        *value = self.suffixes.take(name);
        Ok(())
    }

    fn code<T: Code>(&mut self, value: &mut T, _: bool) -> Read<()> {
        *value = self.suffixes.take_code().unwrap_or_default();
        Ok(())
    }

    fn required<T: Code>(&mut self, value: &mut T) -> Read<()> {
        match self.suffixes.take_code() {
            Some(found) => *value = found,
            None => {
                let names: Vec<_> = T::TABLE.iter().map(|(.., name)| format!(".{name}")).collect();
                let mnemonic = self.suffixes.mnemonic;
                return Err(Failure::new(self.at, format!("{mnemonic} needs one of {}", names.join(" "))));
            }
        }
        Ok(())
    }

    fn signs(&mut self, a: &mut bool, b: &mut bool) -> Read<()> {
        let read = |suffix: &str| match suffix.to_ascii_uppercase().as_str() {
            "U32" => Some(false),
            "S32" => Some(true),
            _ => None,
        };
        (*a, *b) = match (self.suffixes.take_if(read), self.suffixes.take_if(read)) {
            (None, _) => (true, true),
            (Some(a), Some(b)) => (a, b),
            (Some(_), None) => return Err(self.reject("the types of both operands are needed, or neither")),
        };
        Ok(())
    }

    fn dst(&mut self, dst: &mut Register, _: u8, cc: Option<&mut bool>) -> Read<()> {
        self.next()?;
        *dst = self.register()?;
        let mut ahead = *self.cursor;
        ahead.take(|c| c == '.');
        if self.cursor.peek() != Some('.') {
            return Ok(());
        }
        if !ahead.name().eq_ignore_ascii_case("CC") {
            return self.cursor.fail("a destination's only suffix is `.CC`");
        }
        match cc {
            Some(cc) => *cc = true,
            None => return self.cursor.fail("this instruction does not write the condition code"),
        }
        *self.cursor = ahead;
        Ok(())
    }

    fn reg(&mut self, register: &mut Register, _: u8) -> Read<()> {
        self.next()?;
        *register = self.register()?;
        Ok(())
    }

    fn pred(&mut self, predicate: &mut Predicate) -> Read<()> {
        self.next()?;
        *predicate = self::predicate(self.cursor, self.symbols)?;
        Ok(())
    }

    fn pred_op(&mut self, predicate: &mut PredicateOperand, last: bool) -> Read<()> {
        if last && !self.more() {
            *predicate = PredicateOperand::TRUE;
            return Ok(());
        }
        self.next()?;
        *predicate = predicate_operand(self.cursor, self.symbols)?;
        Ok(())
    }

    fn source(&mut self, source: &mut Source, kind: Kind) -> Read<()> {
        self.next()?;
        *source = self.plain_source(kind)?;
        Ok(())
    }

    fn signed(&mut self, source: &mut Source, set: &mut bool, sign: Sign, kind: Kind) -> Read<()> {
        self.next()?;
        let prefix = match sign {
            Sign::Minus => '-',
            Sign::Invert => '~',
        };
        (*set, *source) = self.prefixed(prefix, |operands| operands.plain_source(kind))?;
        Ok(())
    }

    fn float(&mut self, operand: &mut FloatOperand, kind: Kind) -> Read<()> {
        self.next()?;
        let (negate, (absolute, source)) = self.prefixed('-', |operands| {
            if !operands.cursor.eat("|") {
                return Ok((false, operands.plain_source(kind)?));
            }
            operands.cursor.skip_spaces();
            let source = operands.plain_source(kind)?;
            operands.cursor.expect("|")?;
            Ok((true, source))
        })?;
        *operand = FloatOperand { source, negate, absolute };
        Ok(())
    }

    fn address(&mut self, address: &mut Address) -> Read<()> {
        self.next()?;
        // Also accept unsigned numbers, because the number may be an address without a register.
        let (base, offset) = self.base_and_offset((i32::MIN.into(), u32::MAX.into()))?;
        address.base = base;
        let unsigned = u32::try_from(offset).map(u32::cast_signed);
        address.offset = i32::try_from(offset).or(unsigned).unwrap_or(i32::MAX);
        Ok(())
    }

    fn constant(&mut self, bank: &mut u8, base: &mut Register, offset: &mut i16) -> Read<()> {
        self.next()?;
        match self.bank()? {
            Some(found) => *bank = found,
            None => return self.cursor.fail("a constant, `c[bank][address]`, is needed here"),
        }
        let (register, displacement) = self.base_and_offset((i16::MIN.into(), u16::MAX.into()))?;
        *base = register;
        let unsigned = u16::try_from(displacement).map(u16::cast_signed);
        *offset = i16::try_from(displacement).or(unsigned).unwrap_or(i16::MAX);
        Ok(())
    }

    fn number(&mut self, value: &mut u32, default: Option<u32>) -> Read<()> {
        if let (Some(default), false) = (default, self.more()) {
            *value = default;
            return Ok(());
        }
        self.next()?;
        *value = self.ranged(u32::MAX, "the number")?;
        Ok(())
    }

    fn word(&mut self, word: &'static str) -> Read<()> {
        self.next()?;
        let at = *self.cursor;
        if self.cursor.name().eq_ignore_ascii_case(word) { Ok(()) } else { at.fail(format!("{word} is needed here")) }
    }

    fn special(&mut self, special: &mut SpecialRegister) -> Read<()> {
        self.next()?;
        let at = *self.cursor;
        let name = self.cursor.dotted().to_ascii_uppercase().replace('.', "_");
        let known = SpecialRegister::NAMES.iter().find(|(_, known)| known.replace('.', "_") == name);
        let number = || u8::from_str_radix(name.strip_prefix("SR_0X")?, 16).ok().map(SpecialRegister);
        match known.map(|(register, _)| *register).or_else(number) {
            Some(found) => *special = found,
            None => return at.fail("a special register is needed here"),
        }
        Ok(())
    }

    fn target(&mut self, target: &mut Target, absolute: bool) -> Read<()> {
        self.next()?;
        if let Some(address) = self.constant_address()? {
            *target = Target::Constant(address);
            return Ok(());
        }
        let at = *self.cursor;
        let mut ahead = *self.cursor;
        let from_here = ahead.name() == "pc";
        let value = if from_here {
            *self.cursor = ahead;
            if self.cursor.at_end() { 0 } else { expression(self.cursor, self.symbols)? }
        } else {
            expression(self.cursor, self.symbols)?
        };
        *target = if absolute {
            if from_here {
                return at.fail("this instruction's target is absolute");
            }
            u32::try_from(value).map(Target::Absolute).or_else(|_| at.fail("an address has 32 bits"))?
        } else {
            let offset = if from_here { value } else { value.saturating_sub(self.end) };
            i32::try_from(offset).map(Target::Relative).or_else(|_| at.fail("the target is too far away"))?
        };
        Ok(())
    }

    fn test(&mut self, test: &mut CcTest) -> Read<()> {
        let mut ahead = *self.cursor;
        if !self.first {
            _ = ahead.eat(",");
        }
        ahead.skip_spaces();
        let at = ahead;
        let Some(name) = ahead.dotted().to_ascii_uppercase().strip_prefix("CC.").map(str::to_owned) else {
            *test = CcTest::default();
            return Ok(());
        };
        match CcTest::TABLE.iter().find(|(.., known)| *known == name) {
            Some((found, ..)) => *test = *found,
            None => return at.fail(format!("the condition code has no test {name}")),
        }
        *self.cursor = ahead;
        self.first = false;
        Ok(())
    }

    fn barrier(&mut self, operand: &mut BarrierOperand, last: bool) -> Read<()> {
        if last && !self.more() {
            *operand = BarrierOperand::default();
            return Ok(());
        }
        self.next()?;
        let mut ahead = *self.cursor;
        let name = ahead.name();
        if plain_register(name).is_some() || self.symbols.named(name).is_some() {
            *operand = BarrierOperand::Register(self.register()?);
            return Ok(());
        }
        let value = self.ranged(u16::MAX.into(), "the number")?;
        *operand = BarrierOperand::Immediate(u16::try_from(value).unwrap_or(u16::MAX));
        Ok(())
    }

    fn reject(&mut self, why: &'static str) -> Failure {
        Failure::new(self.at, why)
    }
}

fn register(cursor: &mut Cursor<'_>, symbols: &Symbols) -> Read<Register> {
    cursor.skip_spaces();
    let at = *cursor;
    let name = cursor.name();
    match (plain_register(name), symbols.named(name)) {
        (Some(register), _) | (None, Some(Named::Register(register))) => Ok(register),
        _ => at.fail(format!("a register is needed here, not `{name}`")),
    }
}

fn predicate(cursor: &mut Cursor<'_>, symbols: &Symbols) -> Read<Predicate> {
    cursor.skip_spaces();
    let at = *cursor;
    let name = cursor.name();
    match (plain_predicate(name), symbols.named(name)) {
        (Some(predicate), _) | (None, Some(Named::Predicate(predicate))) => Ok(predicate),
        _ => at.fail(format!("a predicate is needed here, not `{name}`")),
    }
}

fn predicate_operand(cursor: &mut Cursor<'_>, symbols: &Symbols) -> Read<PredicateOperand> {
    let negate = cursor.eat("!");
    Ok(PredicateOperand { predicate: predicate(cursor, symbols)?, negate })
}

/// Consumes a decimal floating-point number with its sign, if one comes next.
fn decimal<'a>(cursor: &mut Cursor<'a>) -> Option<&'a str> {
    let mut ahead = *cursor;
    ahead.take(|c| c == '-');
    let digits = ahead.take(|c| c.is_ascii_digit() || c == '.');
    if digits.is_empty() || matches!(ahead.peek(), Some('x' | 'X' | 'b' | 'B' | '_')) {
        return None;
    }
    if matches!(ahead.peek(), Some('e' | 'E')) {
        ahead.take(|c| matches!(c, 'e' | 'E'));
        ahead.take(|c| matches!(c, '+' | '-'));
        ahead.take(|c| c.is_ascii_digit());
    }
    let text = cursor.between(&ahead);
    *cursor = ahead;
    Some(text)
}
