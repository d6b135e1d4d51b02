//! Cards as Kubernetes devices, with their names, attributes, capacities and taints.

use std::collections::BTreeMap;

use api::{Card, CardMemory, CardScheduler};
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::{DRIVER, MEMORY, TIME, WHOLE_CARD_PERMILLE};

/// Kind of cards that serve CUDA tenants.
const CUDA: &str = "cuda";
/// Maximum length of a device name, in bytes.
const MAX_NAME: usize = 63;
/// Maximum length of an attribute value or a taint value, in bytes.
const MAX_VALUE: usize = 64;
/// Number of equal parts of a card. A request without a capacity gets one part.
const PARTS: u64 = 8;
/// Minimum memory of a virtual machine in MiB.
const LEAST_MIB: u64 = 16;
/// Maximum number of devices in a slice.
pub const MAX_DEVICES: usize = 128;

/// Reason why a card cannot be used for new claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The card is out of service.
    Failed,
    /// A virtual machine uses the whole card.
    Passthrough,
    /// An operator is draining the card.
    Drained,
    /// The daemon does not respond.
    Unreachable,
}

impl Trouble {
    fn name(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Passthrough => "passthrough",
            Self::Drained => "drained",
            Self::Unreachable => "unreachable",
        }
    }

    /// Returns the explanation to use if the daemon does not provide one.
    fn words(self) -> &'static str {
        match self {
            Self::Failed => "it is out of service",
            Self::Passthrough => "a virtual machine uses the whole card",
            Self::Drained => "an operator is draining it (`mediatorctl card undrain` ends this)",
            Self::Unreachable => "mediatord does not respond",
        }
    }
}

/// A card with its published properties.
#[derive(Clone, Debug, PartialEq)]
pub struct Offer {
    /// Name of the device.
    pub device: String,
    /// Name of the card.
    pub card: String,
    /// Set if the card serves tenants instead of virtual machines.
    pub tenants: bool,
    /// Memory shared by the card's users, in MiB.
    pub memory_mib: u64,
    /// Allocation unit of memory, in MiB.
    pub chunk_mib: u64,
    /// Reason why the card cannot be used for new claims, if any.
    pub trouble: Option<Trouble>,
    /// Explanation of this reason, if any.
    pub why: Option<String>,
    attributes: BTreeMap<String, DeviceAttribute>,
}

/// Converts a card's name to a valid Kubernetes name. Two cards may get the same name.
#[must_use]
pub fn name(card: &str) -> String {
    let plain = |byte: u8| if byte.is_ascii_alphanumeric() { char::from(byte.to_ascii_lowercase()) } else { '-' };
    let name: String = card.bytes().take(MAX_NAME).map(plain).collect();
    let name = name.trim_matches('-');
    if name.is_empty() { "card".to_owned() } else { name.to_owned() }
}

fn text(value: &str) -> DeviceAttribute {
    let value = value.chars().filter(|character| !character.is_control()).take(MAX_VALUE).collect();
    DeviceAttribute { string: Some(value), ..DeviceAttribute::default() }
}

fn number(value: u64) -> DeviceAttribute {
    DeviceAttribute { int: Some(i64::try_from(value).unwrap_or(i64::MAX)), ..DeviceAttribute::default() }
}

fn flag(value: bool) -> DeviceAttribute {
    DeviceAttribute { bool: Some(value), ..DeviceAttribute::default() }
}

impl Offer {
    /// Creates the offers for the cards in the daemon's replies, at most [`MAX_DEVICES`]. If two cards get the same
    /// name, the second card is omitted.
    #[must_use]
    pub fn all(cards: &[Card], memories: &[CardMemory], schedulers: &[CardScheduler]) -> Vec<Self> {
        let mut offers: BTreeMap<String, Self> = BTreeMap::new();
        for card in cards {
            let memory = memories.iter().find(|memory| memory.card == card.name);
            let scheduler = schedulers.iter().find(|scheduler| scheduler.card == card.name);
            let offer = Self::from_card(card, memory, scheduler);
            if let Some(there) = offers.get(&offer.device) {
                tracing::warn!(
                    card = card.name,
                    other = there.card,
                    "two cards have the same name in Kubernetes: rename one of them"
                );
                continue;
            }
            offers.insert(offer.device.clone(), offer);
        }
        offers.into_values().take(MAX_DEVICES).collect()
    }

    fn from_card(card: &Card, memory: Option<&CardMemory>, scheduler: Option<&CardScheduler>) -> Self {
        let tenants = card.kind == CUDA;
        let chunk_mib = memory.map_or(2, |memory| memory.chunk_bytes >> 20).max(1);
        let shared = if tenants { card.vram_mib } else { card.vram_mib.saturating_sub(card.vram_reserved_mib) };
        let memory_mib = shared / chunk_mib * chunk_mib;
        let trouble = match () {
            () if card.error.is_some() => Some(Trouble::Failed),
            () if card.passthrough => Some(Trouble::Passthrough),
            () if card.drained => Some(Trouble::Drained),
            () => None,
        };
        let mut attributes = BTreeMap::from([
            ("card".to_owned(), text(&card.name)),
            ("kind".to_owned(), text(&card.kind)),
            ("share".to_owned(), text(if tenants { "tenant" } else { "vgpu" })),
            ("vramMiB".to_owned(), number(card.vram_mib)),
        ]);
        let mut add = |name: &str, value| attributes.insert(name.to_owned(), value);
        if !card.pci_id.is_empty() {
            add("pciId", text(&card.pci_id));
        }
        if !card.model.is_empty() {
            add("model", text(&card.model));
        }
        if let Some(memory) = memory {
            add("memoryPolicy", text(memory.settings.victims.name()));
            add("chunkMiB", number(chunk_mib));
            add("hostMemoryMiB", number(memory.settings.host_mib));
            add("linkBytesPerSecond", number(memory.copy_bytes_per_second));
            add("swaps", flag(memory.settings.host_mib > 0));
        }
        if let Some(scheduler) = scheduler {
            add("schedulerPolicy", text(scheduler.settings.policy.name()));
        }
        Self {
            device: name(&card.name),
            card: card.name.clone(),
            tenants,
            memory_mib,
            chunk_mib,
            trouble,
            why: card.error.clone().or_else(|| trouble.map(|trouble| trouble.words().to_owned())),
            attributes,
        }
    }

    /// Returns the offer to publish while the daemon is unreachable.
    #[must_use]
    pub fn unreachable(mut self) -> Self {
        self.trouble = Some(Trouble::Unreachable);
        self.why = Some(Trouble::Unreachable.words().to_owned());
        self
    }

    /// Returns the device for a resource slice.
    #[must_use]
    pub fn device(&self) -> Device {
        let taint = self.trouble.map(|trouble| DeviceTaint {
            key: format!("{DRIVER}/unusable"),
            value: Some(trouble.name().to_owned()),
            effect: "NoSchedule".to_owned(),
            time_added: None,
        });
        Device {
            name: self.device.clone(),
            allow_multiple_allocations: Some(true),
            attributes: Some(self.attributes.clone()),
            capacity: Some(BTreeMap::from([(MEMORY.to_owned(), self.memory()), (TIME.to_owned(), time())])),
            taints: taint.map(|taint| vec![taint]),
            ..Device::default()
        }
    }

    fn memory(&self) -> DeviceCapacity {
        let mib = |mib: u64| Quantity(format!("{mib}Mi"));
        let least = LEAST_MIB.next_multiple_of(self.chunk_mib).min(self.memory_mib);
        let part = (self.memory_mib / PARTS / self.chunk_mib * self.chunk_mib).max(least);
        let range = CapacityRequestPolicyRange {
            min: mib(least),
            max: Some(mib(self.memory_mib)),
            step: Some(mib(self.chunk_mib)),
        };
        capacity(mib(self.memory_mib), mib(part), range)
    }
}

fn time() -> DeviceCapacity {
    let permille = |permille: u64| Quantity(permille.to_string());
    let range = CapacityRequestPolicyRange {
        min: permille(1),
        max: Some(permille(WHOLE_CARD_PERMILLE.into())),
        step: Some(permille(1)),
    };
    capacity(permille(WHOLE_CARD_PERMILLE.into()), permille(u64::from(WHOLE_CARD_PERMILLE) / PARTS), range)
}

fn capacity(value: Quantity, default: Quantity, range: CapacityRequestPolicyRange) -> DeviceCapacity {
    let policy = CapacityRequestPolicy { default: Some(default), valid_range: Some(range), valid_values: None };
    DeviceCapacity { value, request_policy: Some(policy) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::quantity;

    /// Returns a card as reported by the daemon.
    pub fn card(name: &str, kind: &str) -> Card {
        serde_json::from_value(serde_json::json!({
            "name": name, "kind": kind, "pci_id": "10de:06d8", "vram_mib": 1024, "vram_reserved_mib": 64,
            "vram_assigned_mib": 0, "vram_free_mib": 960, "bar1_mib": 128, "bar3_mib": 64, "channels": 128,
            "channels_used": 0, "vms": [], "passthrough": false, "error": null,
        }))
        .unwrap()
    }

    #[test]
    fn names_are_those_that_kubernetes_takes() {
        for (card, expected) in [("card0", "card0"), ("H100.a_B", "h100-a-b"), ("0-", "0"), ("a.", "a")] {
            assert_eq!(name(card), expected);
        }
        assert_eq!(name(&"x".repeat(80)).len(), 63);
        let offers = Offer::all(&[card("a.b", "simgpu"), card("a-b", "cuda")], &[], &[]);
        assert_eq!(offers.len(), 1);
        assert_eq!(offers[0].card, "a.b");
    }

    #[test]
    fn device_capacities_match_shareable_amounts() {
        let device = Offer::all(&[card("card0", "simgpu")], &[], &[]).remove(0).device();
        let capacity = device.capacity.unwrap();
        assert_eq!(quantity::mib(&capacity[MEMORY].value.0), Ok(960));
        assert_eq!(quantity::whole(&capacity[TIME].value.0), Ok(1000));
        for capacity in capacity.values() {
            let policy = capacity.request_policy.as_ref().unwrap();
            let range = policy.valid_range.as_ref().unwrap();
            let value = |quantity: &Quantity| quantity::whole(&quantity.0).unwrap();
            let (min, max, step) =
                (value(&range.min), value(range.max.as_ref().unwrap()), value(range.step.as_ref().unwrap()));
            let default = value(policy.default.as_ref().unwrap());
            // The API server rejects slices that violate these conditions.
            assert!(min <= default && default <= max && max <= value(&capacity.value));
            assert!((default - min).is_multiple_of(step) && (max - min).is_multiple_of(step));
        }
        let cuda = Offer::all(&[card("h100", "cuda")], &[], &[]).remove(0);
        assert!(cuda.tenants && cuda.memory_mib == 1024);
        assert_eq!(cuda.device().attributes.unwrap()["share"].string.as_deref(), Some("tenant"));
    }

    #[test]
    fn trouble_is_a_taint() {
        let mut failed = card("card0", "simgpu");
        assert_eq!(Offer::all(&[failed.clone()], &[], &[])[0].device().taints, None);
        failed.error = Some("the card fell off the bus".to_owned());
        let offer = Offer::all(&[failed.clone()], &[], &[]).remove(0);
        let taint = offer.device().taints.unwrap().remove(0);
        assert_eq!((taint.key.as_str(), taint.effect.as_str()), ("gpu-mediator.internal/unusable", "NoSchedule"));
        assert_eq!(taint.value.as_deref(), Some("failed"));
        assert_eq!(offer.unreachable().device().taints.unwrap()[0].value.as_deref(), Some("unreachable"));
        (failed.error, failed.passthrough) = (None, true);
        assert_eq!(Offer::all(&[failed], &[], &[])[0].trouble, Some(Trouble::Passthrough));
    }

    #[test]
    fn card_that_is_drained_takes_no_new_claims_and_says_so() {
        let drained = Card { drained: true, ..card("card0", "simgpu") };
        let offer = Offer::all(std::slice::from_ref(&drained), &[], &[]).remove(0);
        let taints = offer.device().taints.unwrap();
        let told: Vec<_> =
            taints.iter().map(|taint| (taint.key.as_str(), taint.value.as_deref(), taint.effect.as_str())).collect();
        // Pods that already use the card keep running, because the taint's effect does not evict pods.
        assert_eq!(told, [("gpu-mediator.internal/unusable", Some("drained"), "NoSchedule")]);
        let back = Card { drained: false, ..drained };
        assert_eq!(Offer::all(&[back], &[], &[])[0].device().taints, None);
        // If a card is both drained and failed, report the failure.
        let both = Card { drained: true, error: Some("gone".to_owned()), ..card("card0", "simgpu") };
        assert_eq!(Offer::all(&[both], &[], &[])[0].trouble, Some(Trouble::Failed));
    }
}
