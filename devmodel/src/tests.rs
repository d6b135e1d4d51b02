//! Tests that access the vGPU like a driver and like the mediator. The mediator is a mock.

mod driver;
mod fifo;
mod interrupts;
mod memory;
pub(crate) mod mock;
mod random;
mod recovery;
