//! The model that the code under test is checked against: the binary form read by hand ([`wire`]), the tables from a
//! guest's view ([`tables`]), and a guest that bytes control ([`machine`]). For tests and fuzzing.

pub(crate) mod machine;
pub(crate) mod tables;
pub(crate) mod wire;
