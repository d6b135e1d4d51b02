//! Clears residual data of one tenant's kernels from PGRAPH's multiprocessors, before kernels of another tenant run on
//! them.
//!
//! Registers and shared memory keep their contents until they are overwritten. A kernel that reads an uninitialized
//! register therefore sees a value from the previous kernel, even if that kernel belonged to another tenant. PGRAPH has
//! one tenant at a time, and the mediator's own kernel runs between two tenants. Local memory needs no clearing,
//! because it is in memory mapped by the channel's own page tables.
//!
//! Parts: [`Tenancy`], a state machine that tracks the tenant of PGRAPH (its inputs are events and the time, its
//! outputs are steps), and [`kernel`], the clearing kernel and its launch.
//!
//! The crate does not access a card; the owner of the card executes the steps.

#![forbid(unsafe_code)]

pub mod kernel;
mod tenancy;

pub use tenancy::{Counts, Step, Tenancy};
