//! Interaction of a CUDA card's owner with the host, without its driver and its state machine.
//!
//! - `probes`: checks that other owners respond before a gang's program is killed.
//! - `rights`: sockets with configurable access rights.
//! - `links`: connections to the owners of other cards, for the turns of tenants with several cards.
//! - `gang_quanta`: quanta of memory for tenants with several cards.
//! - `journal`: the processes that an owner serves, for the next owner.
//! - `accounts`: the file with the tenants' accounts, for the next owner.
//! - `lines`: limits the rate of log lines.
//! - `shares`: bounded records of the tokens for memory shared between processes.
//! - `stopped`: detects stopped processes.
//!
//! The crate starts no threads, and no function blocks on another process. Read `links` first.

#![forbid(unsafe_code)]

mod accounts;
mod gang_quanta;
mod journal;
mod lines;
mod links;
mod probes;
mod rights;
mod shares;
mod stopped;

pub use accounts::AccountsFile;
pub use gang_quanta::{CardState, GangQuanta, StateMessage};
pub use journal::Journal;
pub use lines::Lines;
pub use links::{LinkEvent, Links, MAX_CLOCK, OwnerLinks};
pub use probes::{Check, Outcome, Probes};
pub use rights::{Bound, ListenError, Rights};
pub use shares::{Named, Shares};
pub use stopped::is_stopped;
