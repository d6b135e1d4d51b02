//! Rows of the encoding tables.

use super::field::Reason;
use crate::ir::Op;

/// Use of the guard's bits in an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guarding {
    /// The guard.
    Guard,
    /// Ignored by the hardware. Compilers write 0 or 7 (PT) there. To detect a guard by mistake, only these two are
    /// accepted, and 0 is written.
    Ignored,
    /// Used for another purpose.
    Absent,
}

/// A field that could not be read or written: its name and the reason.
pub(super) type FieldError = (&'static str, Reason);

/// One encoding of an operation. The tables' macro makes both directions, and the bits, from the same list of fields.
pub(super) struct Row {
    /// The operation's name.
    pub name: &'static str,
    /// Value of the bits of `mask`.
    pub value: u64,
    /// The bits that distinguish the encoding from other encodings.
    pub mask: u64,
    /// Use of the guard's bits.
    pub guarding: Guarding,
    /// Set if bit 4 is the join flag.
    pub joins: bool,
    /// The bits of the fields, and the bits that several fields share (none; tests check it).
    pub fields: fn() -> (u64, u64),
    /// Operation of a word that matches.
    pub decode: fn(u64) -> Result<Op, FieldError>,
    /// Word of an operation, without guard; `None` if it is another operation.
    pub encode: fn(&Op) -> Option<Result<u64, FieldError>>,
}

/// Bits of fields, and bits that occur twice.
pub(super) fn union(masks: &[u64]) -> (u64, u64) {
    masks.iter().fold((0, 0), |(all, twice), mask| (all | mask, twice | (all & mask)))
}

/// A field's result, with its name in the error.
pub(super) fn named<T>(field: &'static str, result: Result<T, Reason>) -> Result<T, FieldError> {
    result.map_err(|why| (field, why))
}

/// Makes a static table: its name, the use of the guard's bits, whether bit 4 joins, and bits that every mask has in
/// addition (bit 3 for the 64-bit encodings, whose opcodes the sources give without it).
///
/// Rows follow: `Variant value / mask { field: codec, ... }`, with several fields before a colon for a codec that holds
/// them together. Bits in neither mask nor fields are reserved.
macro_rules! rows {
    ($table:ident, $guarding:ident, $joins:literal, $size:literal;
     $($variant:ident $value:literal / $mask:literal {
         $($first:ident $($more:ident)*: $codec:expr),* $(,)?
     })*) => {
        pub(super) static $table: &[Row] = &[$(Row {
            name: stringify!($variant),
            value: $value,
            mask: $mask | $size,
            guarding: Guarding::$guarding,
            joins: $joins,
            fields: || {
                $(let $first = $codec;)*
                let fields = union(&[$(Field::mask(&$first)),*]);
                // Never called: it fixes the type of each field's operand.
                let _types = || -> Result<Op, Reason> {
                    $(let group!($first $($more)*) = Field::get(&$first, 0)?;)*
                    Ok(Op::$variant { $($first $(, $more)*),* })
                };
                fields
            },
            decode: |_word| {
                $(let group!($first $($more)*) = named(stringify!($first $($more)*), Field::get(&$codec, _word))?;)*
                Ok(Op::$variant { $($first $(, $more)*),* })
            },
            encode: |op| match op {
                Op::$variant { $($first $(, $more)*),* } => Some((|| {
                    Ok($value $(| named(stringify!($first $($more)*), Field::put(&$codec, values!($first $($more)*)))?)*)
                })()),
                _ => None,
            },
        }),*];
    };
}

/// The pattern of one name, or of several names as a tuple.
macro_rules! group {
    ($field:ident) => {
        $field
    };
    ($($field:ident)+) => {
        ($($field),+)
    };
}

/// Type that one reference refers to, or several, as a tuple.
macro_rules! values {
    ($field:ident) => {
        *$field
    };
    ($($field:ident)+) => {
        ($(*$field),+)
    };
}

pub(super) use {group, rows, values};
