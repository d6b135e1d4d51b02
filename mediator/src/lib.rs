//! Wires the crates into the daemon `mediatord`, and the operator's tool `mediatorctl`.
//!
//! Parts, from the operator inwards:
//! - [`ctl`]: `mediatorctl`, a thin client of the admin API;
//! - [`admin`]: the admin API, HTTP and JSON over a UNIX socket, and metrics;
//! - [`config`]: the TOML file, checked, with mistakes told by line and key;
//! - [`daemon`]: cards and virtual machines, how they come and go;
//! - [`host`]: the owner of a card: memory, channels, interrupts;
//! - [`vgpu`]: one mediated virtual machine on it;
//! - [`passthrough`]: a virtual machine wired straight to a card;
//! - [`logging`]: `tracing` to standard error, limited where a guest is the cause.
//!
//! What it does not do: launch VMMs, reload its configuration, write changes back into it (they are kept beside it), or keep
//! what a guest has on a card over its own restart.

pub mod admin;
pub mod config;
pub mod ctl;
pub mod daemon;
pub mod host;
mod locks;
pub mod logging;
pub mod passthrough;
pub mod vgpu;
