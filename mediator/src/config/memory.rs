//! What a card's memory is to hold, and what a virtual machine may have of it.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use vram::{Limits, OnFull};

use super::CardSpec;

/// A `[card.memory]` table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CardMemory {
    /// MiB of host memory that may be pinned for what the card has no room for; 0 for none.
    pub host_mib: u64,
}

/// A `[vm.memory]` table, and the body of a request to change it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmMemory {
    /// MiB of the card that it may have at most; as much as its guest sees when nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota_mib: Option<u64>,
    /// MiB of the card that it is sure to get. When nothing is said, as much as its guest sees (and the quota allows), or
    /// nothing on a card with `overcommit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guarantee_mib: Option<u64>,
    /// MiB of host memory that it may have at most; when nothing is said, as much as there is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_cap_mib: Option<u64>,
    /// Its part of the card's memory while that is short, against the others' weights; 100 when nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// What happens when the guest uses memory and the card has none: `swap` (it lies in host memory), `queue` (its work
    /// waits), `refuse` (the guest sees no more than can be kept for it when it is added). When nothing is said, `swap`
    /// where the card has host memory, else `queue`.
    #[serde(skip_serializing_if = "Option::is_none", with = "on_full")]
    pub on_full: Option<OnFull>,
    /// Milliseconds that work waits under `queue` before its channel faults; 5000 when nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<u64>,
}

impl VmMemory {
    /// The largest weight.
    pub const WEIGHT_MAX: u32 = 10_000;
    /// Milliseconds that work waits under `queue`, when nothing else is said. Less than the 15 seconds after which nouveau
    /// itself gives a channel up.
    pub const QUEUE_MS: u64 = 5_000;

    /// What happens when the card has no memory for the virtual machine.
    #[must_use]
    pub fn policy(&self, card: &CardSpec) -> OnFull {
        self.on_full.unwrap_or(if card.memory.host_mib == 0 { OnFull::Queue } else { OnFull::Swap })
    }

    /// MiB of the card that are sure for a guest that sees `vram` MiB.
    #[must_use]
    pub fn guaranteed_mib(&self, vram: u64, card: &CardSpec) -> u64 {
        let quota = self.quota_mib.unwrap_or(vram).min(vram);
        self.guarantee_mib.map_or(if card.overcommit { 0 } else { quota }, |mib| mib.min(vram))
    }

    /// MiB of a guest that sees `vram` MiB for which there must be host memory.
    #[must_use]
    pub fn swapped_mib(&self, vram: u64, card: &CardSpec) -> u64 {
        if self.policy(card) == OnFull::Swap { vram.saturating_sub(self.guaranteed_mib(vram, card)) } else { 0 }
    }

    /// How long work waits for memory under `queue`.
    #[must_use]
    pub fn queue_limit(&self) -> Duration {
        Duration::from_millis(self.queue_ms.unwrap_or(Self::QUEUE_MS))
    }

    /// Limits in chunks of a card, of a guest that sees `vram` MiB.
    #[must_use]
    pub fn limits(&self, vram: u64, card: &CardSpec) -> Limits {
        let chunks = |mib: u64| u32::try_from(mib.saturating_mul(1024) / card.chunk_kib.max(1)).unwrap_or(u32::MAX);
        Limits {
            quota: self.quota_mib.map_or(u32::MAX, chunks),
            guarantee: chunks(self.guaranteed_mib(vram, card)),
            swap_cap: self.swap_cap_mib.map_or(u32::MAX, chunks),
            weight: self.weight.unwrap_or(Limits::default().weight),
            on_full: self.policy(card),
        }
    }

    /// What of it cannot be so, whatever the card: the key, and what is wrong.
    #[must_use]
    pub fn check(&self, card: &CardSpec) -> Vec<(&'static str, String)> {
        let mut wrong = Vec::new();
        let sizes = [
            ("memory.quota_mib", self.quota_mib),
            ("memory.guarantee_mib", self.guarantee_mib),
            ("memory.swap_cap_mib", self.swap_cap_mib),
        ];
        let chunk = card.chunk_kib;
        for (key, mib) in sizes {
            if let Some(mib) = mib
                && chunk != 0
                && mib.checked_mul(1024).is_none_or(|kib| kib % chunk != 0)
            {
                wrong.push((key, format!("{mib} MiB, expected a multiple of the chunk of {chunk} KiB")));
            }
        }
        if let (Some(quota), Some(guarantee)) = (self.quota_mib, self.guarantee_mib)
            && guarantee > quota
        {
            wrong.push(("memory.guarantee_mib", format!("{guarantee} MiB, expected at most the quota of {quota} MiB")));
        }
        if let Some(weight) = self.weight
            && !(1..=Self::WEIGHT_MAX).contains(&weight)
        {
            wrong.push(("memory.weight", format!("{weight}, expected 1 to {}", Self::WEIGHT_MAX)));
        }
        if self.on_full == Some(OnFull::Swap) && card.memory.host_mib == 0 {
            let what = format!("`swap`, expected another policy, or `memory.host_mib` of card `{}` above 0", card.name);
            wrong.push(("memory.on_full", what));
        }
        wrong
    }
}

/// A policy by its name.
mod on_full {
    use serde::de::{Deserialize, Deserializer, Error};
    use serde::{Serialize, Serializer};
    use vram::OnFull;

    pub fn serialize<S: Serializer>(policy: &Option<OnFull>, to: S) -> Result<S::Ok, S::Error> {
        policy.map(OnFull::name).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<OnFull>, D::Error> {
        let name = Option::<String>::deserialize(from)?;
        name.map(|name| name.parse().map_err(D::Error::custom)).transpose()
    }
}
