//! NVLink connections of a card to the host's other cards, according to NVML.

use std::collections::BTreeMap;
use std::path::Path;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::nvml_uuid;
use crate::users::library;

/// Maximum number of connections of a card: `NVML_NVLINK_MAX_LINKS`.
const MAX_LINKS: u32 = 18;
/// Maximum number of cards that are queried.
const MAX_CARDS: u32 = 64;

/// Active connections of a card.
#[derive(Default)]
struct Connections {
    /// Number of connections to NVSwitches.
    to_switches: u32,
    /// Number of connections to each other card, by its UUID.
    to_cards: BTreeMap<String, u32>,
}

/// Returns the connections of a card. Connections that cannot be queried are omitted, because a card without NVLink
/// fails each query.
fn connections(nvml: &Nvml, device: &Device<'_>) -> Connections {
    let mut found = Connections::default();
    for number in 0..MAX_LINKS {
        let link = device.link_wrapper_for(number);
        if !matches!(link.is_active(), Ok(true)) {
            continue;
        }
        // A connection to another device than a card of this host is one to a switch: in virtual machines, NVML does
        // not report the address of a switch.
        let peer = || nvml.device_by_pci_bus_id(link.remote_pci_info()?.bus_id)?.uuid();
        match peer() {
            Ok(uuid) => *found.to_cards.entry(uuid).or_default() += 1,
            Err(_) => found.to_switches += 1,
        }
    }
    found
}

/// Returns the number of NVLink connections between a card and each other card of the host, by the other card's UUID.
/// Cards with connections to NVSwitches are connected to each other with the lower of their numbers.
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

/// Returns the NVLink connections of the card with this identity, by the UUIDs of the other cards in NVML's form. The
/// map is empty if NVML cannot report them. `driver` is the path of the driver's library.
#[must_use]
pub fn links(driver: &Path, uuid: [u8; 16]) -> BTreeMap<String, u32> {
    query(&library(driver), uuid).unwrap_or_else(|error| {
        tracing::debug!(%error, "NVML does not report the NVLink connections of the card");
        BTreeMap::new()
    })
}
