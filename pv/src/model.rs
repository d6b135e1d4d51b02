//! A model against which the code under test is checked: the binary form, decoded by hand ([`wire`]), the tables as a
//! guest sees them ([`tables`]), and a guest that input bytes control ([`machine`]). Used by tests and fuzzing.

pub(crate) mod machine;
pub(crate) mod tables;
pub(crate) mod wire;
