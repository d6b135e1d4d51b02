//! One process gives what it has to the next one: a file of saved state, and descriptors by name.
//!
//! They talk over a socket of theirs, and one of them owns what is given at each moment:
//! 1. The taker says who it is and which parts it reads ([`Taker::connect`], [`Giver::meet`]).
//! 2. The giver writes what it has for that reader, and gives it ([`Giver::give`], [`Taker::take`]). It is still the giver's.
//! 3. The taker makes everything of it, does nothing to what it is of, and says that it is ready, or why it is not
//!    ([`Taker::ready`], [`Taker::refuse`], [`Giver::await_ready`]).
//! 4. The giver lets go and says so ([`Giver::let_go`]); from then on all is the taker's ([`Taker::wait`]).
//!
//! Until step 4 the giver can go on as if nothing had been: when the taker refuses, says nothing for too long, ends, or is of a
//! program that does not read what there is. What either of them reads is untrusted: bounded, and checked.
//!
//! What it does not do: know what is given, or start a process.

#![forbid(unsafe_code)]

mod error;
mod giver;
mod package;
mod taker;
mod wire;

pub use error::Error;
pub use giver::Giver;
pub use package::Package;
pub use taker::Taker;

use saved_state::Known;
use serde::{Deserialize, Serialize};

/// Introduction of a taker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    /// Version of its program, for the log.
    pub program: String,
    /// The parts that it reads.
    pub reads: Vec<Known>,
}

#[cfg(test)]
mod tests;
