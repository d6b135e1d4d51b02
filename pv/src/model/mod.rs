//! The model that the code under test is checked against: the binary form read by hand ([`wire`]), the tables as a guest may
//! think of them ([`tables`]), and a guest that does what bytes say ([`machine`]). For tests and fuzzing.

pub(crate) mod machine;
pub(crate) mod tables;
pub(crate) mod wire;
