//! The side of the admin API that is sockets and bodies: so many connections at a time ([`Bounded`]), and bodies that are never there as
//! a whole ([`given`], [`taken`]), between a client and work that blocks.
//!
//! What it does not do: know a request, or the daemon.

#![forbid(unsafe_code)]

mod bodies;
mod bounded;

pub use bodies::{Given, Taken, given, taken};
pub use bounded::Bounded;
