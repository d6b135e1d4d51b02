//! Clears what one tenant's kernels leave in PGRAPH's multiprocessors, before another's run there.
//!
//! Registers and shared memory keep their contents until something is written there: a kernel that reads a register before
//! it writes it reads what ran before, whoever's that was. So PGRAPH has one tenant at a time, and a kernel of the
//! mediator's own comes in between. Local memory needs none of that: it lies in memory that the channel's own page tables
//! map.
//!
//! Parts: [`Tenancy`], whose PGRAPH is, as a state machine: what happens and the time in, steps out; [`kernel`], the kernel and
//! how it is launched.
//!
//! What it does not do: touch a card; the owner of one carries the steps out.

#![forbid(unsafe_code)]

pub mod kernel;
mod tenancy;

pub use tenancy::{Counts, Step, Tenancy};
