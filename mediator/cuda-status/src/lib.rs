//! Stores the last status of a CUDA card's owner, for readers that must not block on the owner.
//!
//! The crate does not communicate with the owner, and does not depend on the admin API; `card-views` does.

#![forbid(unsafe_code)]

mod status_cell;

pub use status_cell::{Seen, StatusCell};
