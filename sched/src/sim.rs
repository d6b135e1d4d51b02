//! A card, guests and their workloads, in simulated time: they show how a scheduler behaves, before a guest meets it.
//!
//! The scheduler is the real one; the engines (in order, without preemption), the time that an interrupt and a doorbell
//! take, and guests that submit, wait for the end, think, and submit again are simulated. The same seed gives the same
//! run, event by event.
//!
//! Parts: [`Scenario`] and its parts: workloads as data; [`run`]; [`Outcome`]: the result; [`Uses`]: use by VM and
//! time.
//!
//! Not here: memory, page tables, and the reasons for a kernel's length.

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
