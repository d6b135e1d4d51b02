//! State that cards and VMs do not save themselves: the list of these objects, and run-time settings.

use saved_state::first_version;
use serde::{Deserialize, Serialize};

/// The daemon's own part of the state that an upgrade hands over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roster {
    /// Time at which the VMs were paused, in ns of the host's monotonic clock.
    pub began_ns: u64,
    /// Number of previous upgrades.
    pub upgrades: u64,
    /// Settings that differ from the configuration file, in the format of `state_dir`.
    pub state: String,
    /// Cards owned by the mediator.
    pub cards: Vec<RosterCard>,
}

first_version!(Roster, "mediatord");

/// Cards with an owner process. Earlier versions of the daemon ignore this part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaPart(pub Vec<RosterCudaCard>);

first_version!(CudaPart, "mediatord.cuda");

/// A card with an owner process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterCudaCard {
    /// Card name.
    pub name: String,
    /// Card model.
    pub model: String,
    /// UUID in NVML's format.
    pub uuid: String,
    /// Saved state of the owner, as JSON.
    pub owner: String,
    /// File with the CUDA functions and the clients of the VMs.
    pub file: Vec<u8>,
    /// VMs of the card.
    pub vms: Vec<RosterVm>,
}

/// A card owned by the mediator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterCard {
    /// Card name.
    pub name: String,
    /// Number of the next VM.
    pub next_vm: u32,
    /// File with the parts of the card and its VMs, which have separate versions.
    pub file: Vec<u8>,
    /// VMs of the card.
    pub vms: Vec<RosterVm>,
}

/// A VM of a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterVm {
    /// VM name.
    pub name: String,
    /// VM number.
    pub id: u32,
    /// Guest-visible VRAM in bytes.
    pub vram_bytes: u64,
    /// True if the VMM does not share the guest's memory.
    pub memory_not_shared: bool,
    /// Number of resets of the VM's device.
    pub resets: u64,
}
