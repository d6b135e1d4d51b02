//! The paravirtual interface through which a driver in a virtual machine communicates with the mediator.
//!
//! Modules and types:
//! - [`abi`]: the binary format shared by guest and mediator
//! - [`Batch`]: decodes bytes into validated, typed operations ([`Op`]), and collects their [`Answers`]
//! - [`Tables`]: the typed page tables that the mediator keeps for a virtual machine
//! - [`guest`]: batches and answers from a guest driver's point of view
//! - [`header()`]: generates a C header from [`abi`] for guest drivers
//!
//! The crate uses no I/O, threads or clocks.

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
    reason = "a model of small numbers, for tests"
)]
mod model;

pub use batch::{Answers, Batch, Begun, Malformed, feature_of};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::fuzz;
pub use header::header;
pub use objects::{Counts, MAX_BINDINGS, NoTable, SLOT_BYTES, SavedTables, Tables};
pub use operation::{Control, Kind, Op, Question, TableId};
pub use raw::Problem;
