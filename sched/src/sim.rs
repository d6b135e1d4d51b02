//! Simulates a card, guests and their workloads, to test a scheduler before real guests use it.
//!
//! The scheduler is the real scheduler; the engines (in order, without preemption), the time that an interrupt and a
//! doorbell take, and guests that submit, wait for the end, think, and submit again are simulated. The same seed gives
//! exactly the same events.
//!
//! Parts: [`Scenario`] describes workloads as data, [`run`] executes it, [`Outcome`] is the result, and [`Uses`] is the
//! use by VM and time.
//!
//! Memory, page tables, and the causes of a kernel's length are not simulated.

mod outcome;
mod random;
mod uses;
mod workload;
mod world;

pub use outcome::Outcome;
pub use random::Random;
pub use uses::{ShareError, Uses, jain};
pub use workload::{Card, Change, Guest, Length, Pulse, Scenario, Step, Stream};
pub use world::{run, run_with};

#[cfg(test)]
mod tests;
#[cfg(test)]
mod toggled;
