//! Tests that access the vGPU as a driver and the mediator do. The mediator's backend is a mock.

mod driver;
mod fifo;
mod interrupts;
mod memory;
pub(crate) mod mock;
mod random;
mod recovery;
