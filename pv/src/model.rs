//! A model that the code is checked against, for tests and fuzzing: the binary format, decoded by hand ([`wire`]), the
//! tables as a guest sees them ([`tables`]), and a guest that is controlled by input bytes ([`machine`]).

pub(crate) mod machine;
pub(crate) mod tables;
pub(crate) mod wire;
