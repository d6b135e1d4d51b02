//! Hands over state from one process to the next: a file of saved state, and named descriptors.
//!
//! The processes communicate over their own socket. At any time, exactly one of them owns the package:
//! 1. The receiver introduces itself and announces the parts that it supports ([`Receiver::connect`],
//!    [`Sender::meet`]).
//! 2. The sender saves its state for this receiver and sends it ([`Sender::give`], [`Receiver::take`]), but still owns
//!    it.
//! 3. The receiver rebuilds everything without accessing the objects that the state describes. It then reports that it
//!    is ready, or why it rejects the package ([`Receiver::ready`], [`Receiver::refuse`], [`Sender::await_ready`]).
//! 4. The sender gives up ownership and notifies the receiver ([`Sender::let_go`]), which then owns everything
//!    ([`Receiver::wait`]).
//!
//! If the receiver rejects the package, does not respond in time, exits, or cannot read the state before step 4, the
//! sender can continue as before. Neither process trusts received data: sizes are bounded, and contents are checked.
//!
//! The crate defines the daemon's own part of the state ([`Roster`]). It does not interpret the package, and does not
//! start processes.

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

/// A receiver's introduction to the sender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    /// Version of the receiver's program, for the log.
    pub program: String,
    /// The parts that the receiver can read.
    pub reads: Vec<Known>,
}

/// Record of the upgrade by which a daemon took over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Takeover {
    /// Time for which virtual machines were paused.
    pub pause: Duration,
    /// Number of upgrades since the first daemon.
    pub upgrades: u64,
    /// Time of day at which the upgrade ended.
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
