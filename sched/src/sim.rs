//! Simulates a card, guests and their workloads, to test a scheduler before real guests use it.
//!
//! The simulation runs the real scheduler. The module simulates engines that run work in order and without preemption,
//! the latency of interrupts and doorbells, and guests that submit, wait for the end, think, and submit again. The same
//! seed produces exactly the same events.
//!
//! [`Scenario`] describes workloads as data, [`run`] executes a scenario, [`Outcome`] is the result, and [`Uses`]
//! contains the engine use by VM and time.
//!
//! The module does not simulate memory, page tables, or the reasons for the length of a kernel.

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
