//! The last status of a CUDA card's owner, for readers that must never wait for the owner ([`StatusCell`], [`Seen`]),
//! and its representation in the admin API ([`show`]).
//!
//! The crate does not communicate with the owner.

#![forbid(unsafe_code)]

pub mod show;
mod status_cell;

pub use status_cell::{Seen, StatusCell};
