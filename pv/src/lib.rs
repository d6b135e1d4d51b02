//! The paravirtual interface: how a driver that knows it is in a virtual machine speaks to the mediator.
//!
//! Parts:
//! - [`abi`]: the binary form, as guest and mediator share it.
//!
//! No I/O, no threads, no time.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

pub mod abi;
