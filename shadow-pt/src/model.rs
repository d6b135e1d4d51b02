//! A model with which tests and fuzzing check the code under test: a small world, a specification of entries, and
//! random operations.

pub(crate) mod audit;
pub(crate) mod check;
pub(crate) mod machine;
pub(crate) mod spec;
pub(crate) mod world;
