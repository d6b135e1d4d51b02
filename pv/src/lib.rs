//! Paravirtual interface between a driver in a virtual machine and the mediator.
//!
//! Contents:
//! - [`abi`]: the binary interface between the guest and the mediator
//! - [`Batch`]: decodes bytes into validated, typed operations ([`Op`]); [`Answers`] contains their results
//! - [`Tables`]: typed page tables that the mediator maintains for a virtual machine
//! - [`guest`]: builds batches and parses answers, as a guest driver does
//! - [`header()`]: generates the C header of [`abi`] for guest drivers
//!
//! The crate performs no I/O, and does not use threads or clocks.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

pub mod abi;
mod batch;
pub mod guest;
mod header;
mod objects;
mod operation;
mod raw;
mod section;

#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    reason = "the numbers in the test model are small"
)]
mod model;

pub use batch::{Answers, Batch, Begun, Malformed, feature_of};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz;
pub use header::header;
pub use objects::{Counts, MAX_BINDINGS, NoTable, SLOT_BYTES, SavedTables, Tables};
pub use operation::{Control, Kind, Op, Question, TableId};
pub use raw::Problem;
