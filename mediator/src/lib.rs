//! Wires the crates into the daemon `mediatord`, and the operator's tool `mediatorctl`.
//!
//! Parts, from the operator inwards:
//! - [`config`]: the TOML file, checked, with mistakes told by line and key;
//! - [`logging`]: `tracing` to standard error, limited where a guest is the cause.

pub mod config;
pub mod logging;
