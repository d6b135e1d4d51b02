//! Work of a CUDA program on one card: the gate before its submissions, the bound of its work in flight, and the end of
//! this work.
//!
//! - [`gate`]: submissions wait here outside the tenant's slice and while chunks move;
//! - [`pace`]: measures and bounds the work in flight while other tenants also have work;
//! - [`solo_backlog`]: bounds the work in flight of a program that is alone;
//! - [`fences`]: finds the end of work while a stream captures ([`captures`]);
//! - [`pacing`]: combines the last three, and drains the program's [`contexts`].
//!
//! A program has one gate and one [`pacing::Pacing`] for each card. Its captures are common to all cards.
//!
//! This crate does not send messages to the owner or intercept functions: `cuda-shim` does.

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
