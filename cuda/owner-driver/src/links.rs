//! NVLink connections of a card to the host's other cards, according to NVML.

use std::collections::BTreeMap;
use std::path::Path;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::nvml_uuid;
use crate::users::library;

/// Maximum number of connections of a card: `NVML_NVLINK_MAX_LINKS`.
const MAX_LINKS: u32 = 18;
/// Maximum number of cards to query.
const MAX_CARDS: u32 = 64;

/// Active connections of a card.
#[derive(Default)]
struct Connections {
    /// Number of connections to NVSwitches.
    to_switches: u32,
    /// Number of connections to each other card, keyed by the other card's UUID.
    to_cards: BTreeMap<String, u32>,
}

/// Returns the active connections of a card. Connections that cannot be queried count as inactive, because every query
/// fails on a card without NVLink.
fn connections(nvml: &Nvml, device: &Device<'_>) -> Connections {
    let mut found = Connections::default();
    for number in 0..MAX_LINKS {
        let link = device.link_wrapper_for(number);
        if !matches!(link.is_active(), Ok(true)) {
            continue;
        }
        // A connection whose peer is not a card of this host leads to a switch: in virtual machines, NVML does not
        // report the addresses of switches.
        let peer = || nvml.device_by_pci_bus_id(link.remote_pci_info()?.bus_id)?.uuid();
        match peer() {
            Ok(uuid) => *found.to_cards.entry(uuid).or_default() += 1,
            Err(_) => found.to_switches += 1,
        }
    }
    found
}

/// Returns the number of NVLink connections from a card to each other card of the host, keyed by the other card's UUID.
/// For two cards that are connected to NVSwitches, this is the number of switch connections of the card that has fewer
/// of them.
fn query(path: &Path, uuid: [u8; 16]) -> Result<BTreeMap<String, u32>, NvmlError> {
    let nvml = Nvml::builder().lib_path(path.as_os_str()).init()?;
    let own = nvml_uuid(uuid);
    let Connections { to_switches, mut to_cards } = connections(&nvml, &nvml.device_by_uuid(own.as_str())?);
    if to_switches > 0 {
        for number in 0..nvml.device_count()?.min(MAX_CARDS) {
            // A card that has failed must not hide the others.
            let Ok(other) = nvml.device_by_index(number) else { continue };
            let Ok(uuid) = other.uuid() else { continue };
            let shared = connections(&nvml, &other).to_switches.min(to_switches);
            if shared > 0 {
                *to_cards.entry(uuid).or_default() += shared;
            }
        }
    }
    to_cards.remove(&own);
    Ok(to_cards)
}

/// Returns the NVLink connections of the card with this UUID, keyed by the other cards' UUIDs in NVML's form. The map
/// is empty if NVML cannot report them. `driver` is the path of the driver's library.
#[must_use]
pub fn links(driver: &Path, uuid: [u8; 16]) -> BTreeMap<String, u32> {
    query(&library(driver), uuid).unwrap_or_else(|error| {
        tracing::debug!(%error, "NVML does not report the NVLink connections of the card");
        BTreeMap::new()
    })
}
