//! Clears the residue of one tenant's kernels in PGRAPH's multiprocessors, before another tenant's kernels run there.
//!
//! Registers and shared memory keep their contents until they are overwritten: a kernel that reads a register before it
//! writes it sees values of the previous kernel, even another tenant's. So PGRAPH has one tenant at a time, and the
//! mediator's own kernel runs in between. Local memory needs no clearing: it is in memory that the channel's own page
//! tables map.
//!
//! Parts: [`Tenancy`], a state machine of PGRAPH's tenant (events and the time in, steps out); [`kernel`], the kernel
//! and its launch.
//!
//! The crate does not access a card; the card's owner carries out the steps.

#![forbid(unsafe_code)]

pub mod kernel;
mod tenancy;

pub use tenancy::{Counts, Step, Tenancy};
