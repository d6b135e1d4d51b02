//! Controls a CUDA program's work on one card: gates its submissions, limits its work in flight, and detects the
//! completion of this work.
//!
//! - [`gate`]: blocks submissions outside the tenant's slice and while chunks are relocated;
//! - [`pace`]: measures and limits the work in flight while other tenants also have work;
//! - [`solo_backlog`]: limits the work in flight while the program is alone;
//! - [`turn_end`]: times before the end of this work at which turns end and are announced;
//! - [`fences`]: detects the completion of work during captures ([`captures`]);
//! - [`pacing`]: combines these modules and drains the program's [`contexts`].
//!
//! A program has one gate and one [`pacing::Pacing`] per card. All cards share its captures.
//!
//! This crate does not send messages to the owner or intercept functions. `cuda-shim` does both.

#[cfg(test)]
use cuda_driver::symbols;
use cuda_driver::{calls as driver, streams};

pub mod captures;
pub mod contexts;
pub mod events;
pub mod fences;
pub mod gate;
pub mod pace;
pub mod pacing;
pub mod solo_backlog;
pub mod turn_end;
