//! Host interface of a CUDA card's owner, excluding the driver and the state machine.
//!
//! - `probes`: checks that other owners respond before a gang's program is killed.
//! - `rules`: converts the daemon's rules for a card to the settings of the state machine.
//! - `rights`: sockets with configurable access rights.
//! - `links`: connections to the owners of other cards, for the turns of tenants with several cards.
//! - `gang_quanta`: memory quanta for tenants with several cards.
//! - `journal`: the processes that an owner serves, for the next owner.
//! - `accounts`: the file with the tenants' accounts, for the next owner.
//! - `occupations`: processes that occupy the card without a turn.
//! - `moves`: progress of processes that move between cards.
//! - `lines`: limits the rate of log lines.
//! - `settings`: settings for tenants and for processes of no tenant.
//! - `shares`: bounded records of the tokens for memory shared between processes.
//! - `stopped`: detects stopped processes.
//!
//! The crate does not start threads, and no function blocks on another process. Read `links` first.

#![forbid(unsafe_code)]

mod accounts;
mod gang_quanta;
mod journal;
mod lines;
mod links;
mod moves;
mod occupations;
mod probes;
mod rights;
mod rules;
mod settings;
mod shares;
mod stopped;

pub use accounts::AccountsFile;
pub use gang_quanta::{CardState, GangQuanta, StateMessage};
pub use journal::Journal;
pub use lines::Lines;
pub use links::{LinkEvent, Links, MAX_CLOCK, OwnerLinks};
pub use moves::{Arrival, Departure, Leaving};
pub use occupations::Occupations;
pub use probes::{Check, Outcome, Probes};
pub use rights::{Bound, ListenError, Rights};
pub use rules::rules;
pub use settings::{OnStranger, OnStuck, ShareGroup, TenantSpec, Unaccounted};
pub use shares::{Named, Shares};
pub use stopped::is_stopped;
