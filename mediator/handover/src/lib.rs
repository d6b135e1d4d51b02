//! Hands over state from one process to the next, as a file with the saved state and named file descriptors.
//!
//! The processes communicate over a dedicated socket. At any time, exactly one of them owns the package:
//! 1. The receiver introduces itself and lists the parts that it supports ([`Receiver::connect`], [`Sender::meet`]).
//! 2. The sender saves its state for this receiver and sends it, but retains ownership ([`Sender::give`],
//!    [`Receiver::take`]).
//! 3. The receiver rebuilds everything without accessing the objects described by the state. It then reports that it is
//!    ready, or the reason why it rejects the package ([`Receiver::ready`], [`Receiver::refuse`],
//!    [`Sender::await_ready`]).
//! 4. The sender transfers ownership to the receiver ([`Sender::let_go`], [`Receiver::wait`]).
//!
//! Before step 4, the sender can always resume, even if the receiver rejects the package, cannot read the state, does
//! not respond in time, or exits. Neither process trusts received data: sizes are bounded, and contents are validated.
//!
//! The crate defines the daemon's own part of the state ([`Roster`]). It neither interprets the package nor starts
//! processes.

#![forbid(unsafe_code)]

mod error;
mod package;
pub mod points;
mod receiver;
mod roster;
mod sender;
mod wire;

pub use error::Error;
pub use package::Package;
pub use receiver::Receiver;
pub use roster::{CudaPart, Roster, RosterCard, RosterCudaCard, RosterVm};
pub use sender::Sender;

use std::time::{Duration, SystemTime};

use saved_state::Known;
use serde::{Deserialize, Serialize};

/// The receiver's introduction to the sender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    /// Version of the receiver's program, for logging.
    pub program: String,
    /// Parts that the receiver can read.
    pub reads: Vec<Known>,
}

/// Record of the upgrade in which a daemon took over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Takeover {
    /// Duration of the VMs' pause.
    pub pause: Duration,
    /// Number of upgrades since the first daemon started.
    pub upgrades: u64,
    /// Wall-clock time at which the upgrade ended.
    pub at: SystemTime,
}

impl Takeover {
    /// Creates the record of an upgrade that ends now.
    #[must_use]
    pub fn now(pause: Duration, upgrades: u64) -> Self {
        Self { pause, upgrades, at: SystemTime::now() }
    }
}

#[cfg(test)]
mod tests;
