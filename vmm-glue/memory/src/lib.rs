//! Guest memory that a VMM shares with the server, and descriptors that outlive a process.
//!
//! - [`memory`]: the client's memory regions, their mappings, and the logs of accesses
//! - [`descriptors`], [`keeper`]: descriptors for another process, and their storage outside this process
//! - [`wake`]: an event that wakes a server's thread
//!
//! The crate does not know the client's protocol. It validates sizes, offsets and descriptors received from a client.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]
#![cfg_attr(
    test,
    allow(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        reason = "a failing test may panic"
    )
)]

pub mod descriptors;
pub mod keeper;
pub mod memory;
pub mod wake;
