//! Clears the residue of one tenant's kernels in PGRAPH's multiprocessors, before another tenant's kernels run on them.
//!
//! Registers and shared memory keep their contents until they are overwritten. A kernel that reads a register before
//! writing it therefore sees values of the previous kernel, even if that kernel belonged to another tenant. PGRAPH has
//! one tenant at a time, and the mediator's own kernel runs between two tenants. Local memory needs no clearing,
//! because it is in memory that the channel's own page tables map.
//!
//! Parts: [`Tenancy`], a state machine of PGRAPH's tenant (its inputs are events and the time, its outputs are steps);
//! [`kernel`], the clearing kernel and its launch.
//!
//! The crate does not access a card; the card's owner executes the steps.

#![forbid(unsafe_code)]

pub mod kernel;
mod tenancy;

pub use tenancy::{Counts, Step, Tenancy};
