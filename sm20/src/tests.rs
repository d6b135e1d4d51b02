//! Tests of the crate as a whole.

mod assembler;
mod known;
pub(crate) mod text;
