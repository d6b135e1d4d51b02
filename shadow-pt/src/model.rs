//! A model that the code is checked against: a small world, a specification of entries, and random operations. For
//! tests and fuzzing.

pub(crate) mod audit;
pub(crate) mod check;
pub(crate) mod machine;
pub(crate) mod spec;
pub(crate) mod world;
