//! The host around the owner of a CUDA card, without its driver and its state machine.
//!
//! - `probes`: checks that other owners respond before a gang's program is killed.
//! - `rules`: the daemon's rules of a card, in the form of the state machine.
//! - `rights`: sockets with access rights that an operator sets.
//! - `links`: connections to the owners of other cards, for the turns of tenants with several cards.
//! - `indices`: the unused indices of a tenant's memory.
//! - `journal`: the processes that an owner serves, for the next owner.
//! - `lines`: limits the rate of log lines.
//! - `shares`: bounded records of the tokens with which processes share memory.
//! - `stopped`: detects stopped processes.
//!
//! The crate starts no threads, and no function waits for another process. Read `links` first.

#![forbid(unsafe_code)]

mod indices;
mod journal;
mod lines;
mod links;
mod probes;
mod rights;
mod rules;
mod shares;
mod stopped;

pub use indices::Indices;
pub use journal::Journal;
pub use lines::Lines;
pub use links::{LinkEvent, Links, MAX_CLOCK, OwnerLinks};
pub use probes::{Check, Outcome, Probes};
pub use rights::{Bound, ListenError, Rights};
pub use rules::rules;
pub use shares::{Named, Shares};
pub use stopped::is_stopped;
