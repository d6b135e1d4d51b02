//! Sockets and HTTP bodies of the admin API: a connection limit ([`Bounded`]), the process at the other end ([`Peer`]),
//! bodies that are streamed between a client and blocking code ([`given`], [`taken`]), and files that buffer a body for
//! a slow client ([`Spool`]).
//!
//! The crate does not depend on the requests or the daemon.

#![forbid(unsafe_code)]

mod bodies;
mod bounded;
mod spool;

pub use bodies::{Given, Taken, given, taken};
pub use bounded::{Bounded, Peer};
pub use spool::{Spool, Spooled};
