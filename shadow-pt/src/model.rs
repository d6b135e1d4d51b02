//! A model for checking the code under test: a small world, a specification of entries, and random operations. Used by
//! tests and fuzzing.

pub(crate) mod audit;
pub(crate) mod check;
pub(crate) mod machine;
pub(crate) mod spec;
pub(crate) mod world;
