//! Clears residual data of a tenant's kernels in PGRAPH's multiprocessors before another tenant's kernels run on them.
//!
//! Registers and shared memory keep their contents until they are overwritten. A kernel that reads an uninitialized
//! register would therefore obtain a value of the previous kernel, even if that kernel belonged to another tenant.
//! PGRAPH has at most one tenant at a time, and the mediator's own kernel runs between two tenants. Local memory does
//! not need to be cleared, because the channel's own page tables map it.
//!
//! Contents: [`Tenancy`], a state machine that tracks PGRAPH's tenant (its inputs are events and the time, its outputs
//! are steps), and [`kernel`], the clearing kernel and its launch.
//!
//! The crate does not access a card; the card manager executes the steps.

#![forbid(unsafe_code)]

pub mod kernel;
mod tenancy;

pub use tenancy::{Counts, Step, Tenancy};
