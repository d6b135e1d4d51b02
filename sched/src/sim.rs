//! Simulates a card, guests, and their workloads, to test a scheduler before real guests use it.
//!
//! The simulation uses the real scheduler. It simulates engines that execute work in order and without preemption, the
//! latency of interrupts and doorbells, and guests that submit work, wait for its end, think, and submit again. The
//! same seed results in exactly the same events.
//!
//! [`Scenario`] describes workloads as data, [`run`] executes a scenario, [`Outcome`] is its result, and [`Uses`]
//! records engine use by VM over time.
//!
//! Memory, page tables, and the causes of kernel lengths are not simulated.

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
