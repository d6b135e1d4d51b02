//! A model to check the code under test against: the binary form, decoded by hand ([`wire`]), the tables from a guest's
//! view ([`tables`]), and a guest that input bytes control ([`machine`]). Used by tests and fuzzing.

pub(crate) mod machine;
pub(crate) mod tables;
pub(crate) mod wire;
