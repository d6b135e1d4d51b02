//! Tests of the crate as a whole.

mod assembler;
mod cubin;
mod known;
pub(crate) mod text;
