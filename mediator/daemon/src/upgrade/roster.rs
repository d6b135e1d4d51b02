//! State that cards and virtual machines do not serialize themselves: the list of them, and run-time changes.

use saved_state::first_version;
use serde::{Deserialize, Serialize};

/// The daemon's own part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Roster {
    /// Time at which virtual machines started to wait, on the host's monotonic clock, in ns.
    pub began_ns: u64,
    /// Upgrades before this one.
    pub upgrades: u64,
    /// Differences from the configuration file, as in `state_dir`.
    pub state: String,
    pub cards: Vec<RosterCard>,
}

first_version!(Roster, "mediatord");

/// The log of events. Daemons before it do not read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EventsPart(pub events::SavedLog);

first_version!(EventsPart, "events");

/// A card that the mediator has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RosterCard {
    pub name: String,
    /// Number of the next virtual machine.
    pub next_vm: u32,
    /// The file with the parts of the card and of its virtual machines, which have their own version numbers.
    pub file: Vec<u8>,
    pub vms: Vec<RosterVm>,
}

/// One of its virtual machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RosterVm {
    pub name: String,
    /// Its number.
    pub id: u32,
    /// Bytes of VRAM that its guest sees.
    pub vram_bytes: u64,
    /// Guest memory is private to the VMM.
    pub memory_not_shared: bool,
    pub resets: u64,
}
