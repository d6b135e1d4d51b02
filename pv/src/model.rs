//! A model with which tests and fuzzing check the code under test. It decodes the binary format manually ([`wire`]),
//! and contains the tables as seen by a guest ([`tables`]) and a guest controlled by input bytes ([`machine`]).

pub(crate) mod machine;
pub(crate) mod tables;
pub(crate) mod wire;
