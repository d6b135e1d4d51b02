//! Rows of the encoding tables.

use super::field::Reason;
use crate::ir::Op;

/// Use of the guard bits in an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guarding {
    /// The bits are the guard.
    Guard,
    /// The hardware ignores these bits, and compilers write 0 or 7 (PT) to them. To detect guards that were set by
    /// mistake, only these two values are accepted, and 0 is written.
    Ignored,
    /// The bits are used for another purpose.
    Absent,
}

/// A field that could not be read or written: its name and the reason.
pub(super) type FieldError = (&'static str, Reason);

/// An encoding of an operation. The tables' macro generates both directions and the masks from the same list of fields.
pub(super) struct Row {
    /// Name of the operation.
    pub name: &'static str,
    /// Value of the bits in `mask`.
    pub value: u64,
    /// Bits that distinguish the encoding from others.
    pub mask: u64,
    /// Use of the guard bits.
    pub guarding: Guarding,
    /// True if bit 4 is the join flag.
    pub joins: bool,
    /// Returns the bits of all fields, and the bits shared by several fields. Tests check that there are no shared
    /// bits.
    pub fields: fn() -> (u64, u64),
    /// Decodes a matching word.
    pub decode: fn(u64) -> Result<Op, FieldError>,
    /// Encodes an operation, but not its guard. Returns `None` for other operations.
    pub encode: fn(&Op) -> Option<Result<u64, FieldError>>,
}

/// Returns the bits of all fields, and the bits that occur more than once.
pub(super) fn union(masks: &[u64]) -> (u64, u64) {
    masks.iter().fold((0, 0), |(all, twice), mask| (all | mask, twice | (all & mask)))
}

/// Returns `result`, with the field's name in the error.
pub(super) fn named<T>(field: &'static str, result: Result<T, Reason>) -> Result<T, FieldError> {
    result.map_err(|why| (field, why))
}

/// Defines a static table. The arguments are its name, the use of the guard bits, a flag that is true if bit 4 is the
/// join flag, and the bits that are added to every mask. These are bit 3 for the 64-bit encodings, because the sources
/// list the opcodes without this bit.
///
/// Each row has the form `Variant value / mask { field: codec, ... }`. Several fields before one colon are encoded
/// together by the codec. Bits outside the mask and all fields are reserved.
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
                // This closure is never called. Its only purpose is to let the compiler infer the operand type of each
                // field.
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

/// Expands to the pattern of one name, or of several names as a tuple.
macro_rules! group {
    ($field:ident) => {
        $field
    };
    ($($field:ident)+) => {
        ($($field),+)
    };
}

/// Expands to the dereferenced value of one name, or of several names as a tuple.
macro_rules! values {
    ($field:ident) => {
        *$field
    };
    ($($field:ident)+) => {
        ($(*$field),+)
    };
}

pub(super) use {group, rows, values};
