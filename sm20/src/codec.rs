//! Conversion between machine words and instructions. The same table is used for both directions.
//!
//! In a 64-bit word, the lowest four bits are the type, and the highest six bits (five in most types) are the opcode.
//! All instructions except for control instructions share these fields: bit 4 is the join flag, bits 10 to 13 are the
//! guard, bits 14 to 19 are the destination, bits 20 to 25 are the first operand, bits 26 to 47 are the second, and
//! bits 49 to 54 are the third.

mod address;
mod bits;
mod control;
mod convert;
mod double;
mod field;
mod integer;
mod logic;
mod memory;
mod moves;
mod short;
mod short_field;
mod single;
mod special;
mod table;

#[cfg(test)]
pub(crate) mod tests;

use std::sync::LazyLock;

use field::{Field, Flag, PredOp, Reason};
use table::{FieldError, Guarding, Row};

use crate::ir::{Form, Instruction, Op, Predicate, PredicateOperand};

/// Reason why a word is not a valid instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// No encoding has this type and opcode.
    #[error("{word:#x} is not an instruction")]
    Opcode {
        /// The undecodable word.
        word: u64,
    },
    /// Bits outside all fields of the encoding are set.
    #[error("{word:#x}: {name} with reserved bits {bits:#x} set")]
    Reserved {
        /// The undecodable word.
        word: u64,
        /// Name of the operation.
        name: &'static str,
        /// Reserved bits that are set.
        bits: u64,
    },
    /// A field has an undefined value.
    #[error("{word:#x}: {name}, {field}: {why}")]
    Field {
        /// The undecodable word.
        word: u64,
        /// Name of the operation.
        name: &'static str,
        /// The field, or several fields that are encoded together.
        field: &'static str,
        /// Reason for the error.
        why: &'static str,
    },
}

/// Reason why an instruction has no encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The operation has no 32-bit encoding.
    #[error("{name} has no 32-bit encoding")]
    NoShortForm {
        /// Name of the operation.
        name: &'static str,
    },
    /// A value does not fit in a field of the operation's first encoding.
    #[error("{name}, {field}: {why}")]
    Field {
        /// Name of the operation.
        name: &'static str,
        /// The field, or several fields that are encoded together.
        field: &'static str,
        /// Reason for the error.
        why: &'static str,
    },
}

/// Bit that is set in 32-bit and clear in 64-bit encodings.
const SHORT_FORM_BIT: u64 = 8;
const JOIN: Flag = Flag(4);
const GUARD: PredOp = PredOp { at: 10, not: 13 };

const LONG_TABLES: [&[Row]; 10] = [
    single::ROWS,
    double::ROWS,
    integer::ROWS,
    logic::ROWS,
    convert::ROWS,
    moves::ROWS,
    memory::ROWS,
    control::GUARDED,
    control::UNGUARDED,
    special::ROWS,
];
const SHORT_TABLES: [&[Row]; 3] = [short::ROWS, short::UNGUARDED, short::GUARDLESS];

/// Table rows that may match a word with a given key.
struct Index {
    rows: Vec<Vec<&'static Row>>,
    key: fn(u64) -> u64,
}

impl Index {
    /// Indexes the rows by the `bits`-bit key that `key` extracts from a word.
    fn new(tables: &[&'static [Row]], bits: u32, key: fn(u64) -> u64) -> Self {
        let matching = |wanted: u64| {
            let fits = |row: &&Row| (key(row.value) ^ wanted) & key(row.mask) == 0;
            tables.iter().flat_map(|table| table.iter()).filter(fits).collect()
        };
        Self { rows: (0..1_u64.wrapping_shl(bits)).map(matching).collect(), key }
    }

    fn find(&self, word: u64) -> Option<&'static Row> {
        let rows = usize::try_from((self.key)(word)).ok().and_then(|key| self.rows.get(key))?;
        rows.iter().find(|row| word & row.mask == row.value).copied()
    }
}

static LONG_INDEX: LazyLock<Index> =
    LazyLock::new(|| Index::new(&LONG_TABLES, 9, |word| word & 7 | bits::take(word, 58, 6).wrapping_shl(3)));
static SHORT_INDEX: LazyLock<Index> = LazyLock::new(|| Index::new(&SHORT_TABLES, 8, |word| word & 0xff));

/// Returns the size in bytes (4 or 8) of the instruction that starts with this 32-bit word.
pub const fn size(first: u32) -> u32 {
    if first & 8 != 0 { 4 } else { 8 }
}

/// Decodes the instruction in a word. A 32-bit encoding must be zero-extended.
pub fn decode(word: u64) -> Result<Instruction, DecodeError> {
    let short = word & SHORT_FORM_BIT != 0;
    if short && bits::take(word, 32, 32) != 0 {
        return Err(DecodeError::Reserved { word, name: "32-bit encoding", bits: word & !bits::ones(32) });
    }
    let (index, form) = if short { (&SHORT_INDEX, Form::Short) } else { (&LONG_INDEX, Form::Long) };
    let Some(row) = index.find(word) else {
        return unsupported(word, form).ok_or(DecodeError::Opcode { word });
    };
    let name = row.name;
    let at = |(field, why): FieldError| DecodeError::Field { word, name, field, why };
    let guard = guard(word, row.guarding).map_err(|why| at(("guard", why)))?;
    let join = row.joins && word & JOIN.mask() != 0;
    let reserved = word & !covered(row);
    if reserved != 0 {
        return Err(DecodeError::Reserved { word, name, bits: reserved });
    }
    let op = (row.decode)(word).map_err(at)?;
    check(&op).map_err(at)?;
    Ok(Instruction { guard, join, form, op })
}

/// Encodes an instruction, zero-extended if it is short. Encoding the result of [`decode`] yields the decoded word,
/// except that a guard that the hardware ignores becomes 0.
pub fn encode(instruction: &Instruction) -> Result<u64, EncodeError> {
    let op = &instruction.op;
    if let Op::Unsupported { name, word } = *op {
        return match decode(word) {
            Ok(decoded) if decoded == *instruction => Ok(word),
            _ => Err(EncodeError::Field { name, field: "word", why: "the word is another instruction" }),
        };
    }
    let name = op.mnemonic();
    let error = |(field, why): FieldError| EncodeError::Field { name, field, why };
    check(op).map_err(error)?;
    let tables: &[&[Row]] = match instruction.form {
        Form::Long => &LONG_TABLES,
        Form::Short => &SHORT_TABLES,
    };
    // If no encoding fits, report the error of the first one, which is the most common.
    let mut first = None;
    for row in tables.iter().flat_map(|table| table.iter()) {
        let Some(result) = (row.encode)(op) else { continue };
        match result.and_then(|word| Ok(word | common(row, instruction)?)) {
            Ok(word) => return Ok(word),
            Err(why) => _ = first.get_or_insert(why),
        }
    }
    Err(first.map_or(EncodeError::NoShortForm { name }, error))
}

/// Returns the mask of the bits that an encoding uses.
fn covered(row: &Row) -> u64 {
    let (fields, _) = (row.fields)();
    let guard = if row.guarding == Guarding::Absent { 0 } else { GUARD.mask() };
    row.mask | fields | guard | if row.joins { JOIN.mask() } else { 0 }
}

fn guard(word: u64, guarding: Guarding) -> Result<PredicateOperand, Reason> {
    match guarding {
        Guarding::Guard => GUARD.get(word),
        Guarding::Absent => Ok(PredicateOperand::TRUE),
        Guarding::Ignored => match bits::take(word, 10, 4) {
            0 | 7 => Ok(PredicateOperand::TRUE),
            _ => Err("this instruction is never guarded"),
        },
    }
}

/// Encodes the guard and the join flag.
fn common(row: &Row, instruction: &Instruction) -> Result<u64, FieldError> {
    let join = match (instruction.join, row.joins) {
        (false, _) => 0,
        (true, true) => JOIN.mask(),
        (true, false) => return Err(("join", "this encoding cannot join")),
    };
    let guard = match row.guarding {
        Guarding::Guard => GUARD.put(instruction.guard).map_err(|why| ("guard", why))?,
        _ if instruction.guard == PredicateOperand::TRUE => 0,
        _ => return Err(("guard", "this encoding has no guard")),
    };
    Ok(join | guard)
}

fn unsupported(word: u64, form: Form) -> Option<Instruction> {
    let table = match form {
        Form::Long => special::UNSUPPORTED,
        Form::Short => short::UNSUPPORTED,
    };
    let (name, ..) = table.iter().find(|(_, value, mask)| word & mask == *value)?;
    // The word of an unsupported instruction contains its guard and join flag. The interpreter rejects the instruction
    // in any case.
    let guard = PredicateOperand { predicate: Predicate::TRUE, negate: false };
    Some(Instruction { guard, join: false, form, op: Op::Unsupported { name, word } })
}

/// Checks conditions that involve several fields.
fn check(op: &Op) -> Result<(), FieldError> {
    convert::check(op)?;
    memory::check(op)
}
