//! State that is not serialized by cards and virtual machines: the list of these objects, and run-time changes.

use saved_state::first_version;
use serde::{Deserialize, Serialize};

/// The daemon's own part of the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roster {
    /// Time at which virtual machines started to wait, in ns of the host's monotonic clock.
    pub began_ns: u64,
    /// Number of previous upgrades.
    pub upgrades: u64,
    /// Differences from the configuration file, in the format used in `state_dir`.
    pub state: String,
    /// The cards that belong to the mediator.
    pub cards: Vec<RosterCard>,
}

first_version!(Roster, "mediatord");

/// Cards with an owner process. Daemons of earlier versions ignore this part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaPart(pub Vec<RosterCudaCard>);

first_version!(CudaPart, "mediatord.cuda");

/// A card with an owner process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterCudaCard {
    /// Name of the card.
    pub name: String,
    /// Name of its model.
    pub model: String,
    /// UUID in NVML's form.
    pub uuid: String,
    /// The owner's saved form, as JSON.
    pub owner: String,
    /// The file with the functions and clients of the virtual machines.
    pub file: Vec<u8>,
    /// The virtual machines of the card.
    pub vms: Vec<RosterVm>,
}

/// A card that belongs to the mediator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterCard {
    /// Name of the card.
    pub name: String,
    /// Number of the next virtual machine.
    pub next_vm: u32,
    /// The file with the parts of the card and of its virtual machines, which have separate version numbers.
    pub file: Vec<u8>,
    /// The virtual machines of the card.
    pub vms: Vec<RosterVm>,
}

/// A virtual machine of the card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterVm {
    /// Name of the virtual machine.
    pub name: String,
    /// Number of the virtual machine.
    pub id: u32,
    /// Size of the VRAM that the guest sees, in bytes.
    pub vram_bytes: u64,
    /// True if the guest's memory is private to the VMM.
    pub memory_not_shared: bool,
    /// Number of its resets.
    pub resets: u64,
}
