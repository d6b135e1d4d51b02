//! The model for checking the code under test: the binary form read by hand ([`wire`]), the tables from a guest's view
//! ([`tables`]), and a guest that bytes control ([`machine`]). Used by tests and fuzzing.

pub(crate) mod machine;
pub(crate) mod tables;
pub(crate) mod wire;
