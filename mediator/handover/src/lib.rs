//! Hands state from one process to the next: a file of saved state, and descriptors by name.
//!
//! They talk over their own socket, and at each moment one of them owns the package:
//! 1. The receiver introduces itself, with the parts that it reads ([`Receiver::connect`], [`Sender::meet`]).
//! 2. The sender writes its state for this reader and sends it ([`Sender::give`], [`Receiver::take`]). The sender still
//!    owns it.
//! 3. The receiver rebuilds everything without touching the objects behind it, and reports that it is ready, or the
//!    reason of a refusal ([`Receiver::ready`], [`Receiver::refuse`], [`Sender::await_ready`]).
//! 4. The sender gives up ownership and notifies the receiver ([`Sender::let_go`]), which then owns everything
//!    ([`Receiver::wait`]).
//!
//! Until step 4 the sender can continue as before: if the receiver refuses, is silent for too long, ends, or cannot
//! read the state. All received data is untrusted: bounded, and checked.
//!
//! The crate does not interpret the package, or start a process.

#![forbid(unsafe_code)]

mod error;
mod package;
mod receiver;
mod sender;
mod wire;

pub use error::Error;
pub use package::Package;
pub use receiver::Receiver;
pub use sender::Sender;

use saved_state::Known;
use serde::{Deserialize, Serialize};

/// Introduction of a receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    /// Version of its program, for the log.
    pub program: String,
    /// The parts that it reads.
    pub reads: Vec<Known>,
}

#[cfg(test)]
mod tests;
