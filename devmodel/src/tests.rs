//! Tests of the vGPU as a driver and a mediator use it, with a mock of the mediator.

mod driver;
mod fifo;
mod interrupts;
mod memory;
pub(crate) mod mock;
mod random;
mod recovery;
