//! A card, guests and their workloads, in simulated time: to test a scheduler before real guests use it.
//!
//! The scheduler is the real one; the engines (in order, without preemption), the time that an interrupt and a doorbell
//! take, and guests that submit, wait for the end, think, and submit again are simulated. The same seed gives exactly
//! the same events.
//!
//! Parts: [`Scenario`] and its parts: workloads as data; [`run`]; [`Outcome`]: the result; [`Uses`]: use by VM and
//! time.
//!
//! Not simulated: memory, page tables, and the causes of a kernel's length.

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
