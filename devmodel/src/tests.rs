//! Tests that use the vGPU as a driver and as the mediator do, with a mock of the mediator.

mod driver;
mod fifo;
mod interrupts;
mod memory;
pub(crate) mod mock;
mod random;
mod recovery;
