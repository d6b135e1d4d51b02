//! Tests of the crate as a whole.

pub(crate) mod random;
