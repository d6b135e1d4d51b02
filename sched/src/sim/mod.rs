//! A card, guests and their workloads, all in simulated time: what a scheduler does with them, before a guest meets it.
//!
//! The scheduler is the real one; what is simulated are the engines (in order, without preemption), the time that an
//! interrupt and a doorbell take, and guests that submit, wait for the end, think, and submit again. The same seed gives
//! the same run, event by event.
//!
//! Parts: [`Scenario`] and what it is made of: workloads as data; [`run`]; [`Outcome`]: what came of it; [`Uses`]:
//! who had what, and when.
//!
//! Not here: memory, page tables, and what makes a kernel take as long as it does.

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
