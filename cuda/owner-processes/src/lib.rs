//! Processes that the owner of a CUDA card serves: a [`Journal`] of them for the next owner, and [`is_stopped`].
//!
//! The crate only reads `/proc`, control groups and its own file, and does not send signals. If a file cannot be read,
//! no process is known, and no process is stopped.

#![forbid(unsafe_code)]

mod journal;
mod stopped;

pub use journal::Journal;
pub use stopped::is_stopped;
