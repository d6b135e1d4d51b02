//! A model for checking the code under test, for tests and fuzzing: the binary format, decoded manually ([`wire`]), the
//! tables as seen by a guest ([`tables`]), and a guest controlled by input bytes ([`machine`]).

pub(crate) mod machine;
pub(crate) mod tables;
pub(crate) mod wire;
