//! Memory settings of a card, and of a virtual machine on it.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vram::victim::VictimPolicy;
use vram::{Limits, Mode, OnFull, QuantaConfig};

use super::CardSpec;

/// A `[card.memory]` table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CardMemory {
    /// Maximum pinned host memory for evicted chunks, in MiB; 0 means none.
    #[serde(deserialize_with = "crate::size::key")]
    pub host_mib: u64,
    /// Card memory reserved for immediate evictions, in MiB. It drains to host memory when no other moves are pending.
    #[serde(deserialize_with = "crate::size::key")]
    pub reserve_mib: u64,
    /// Policy that selects which chunk of a virtual machine to evict first: `random`, `priority`, `profiled` or
    /// `clock`.
    #[serde(with = "by_name")]
    #[schemars(with = "String")]
    pub victims: VictimPolicy,
    /// Interval at which the daemon checks if chunks can return to the card, in milliseconds.
    pub return_ms: u64,
    /// Minimum time between two moves of a chunk, unless it must be evicted, in milliseconds.
    pub settle_ms: u64,
    /// Time without work after which a virtual machine yields memory to those with work, in milliseconds.
    pub idle_ms: u64,
    /// Card memory that stays free for new requests when chunks return, in MiB.
    #[serde(deserialize_with = "crate::size::key")]
    pub low_water_mib: u64,
    /// Conditions under which virtual machines alternate in memory quanta.
    pub quanta: QuantaSpec,
    /// Default RAM limits for virtual machines that do not set their own.
    #[serde(skip_serializing_if = "RamSpec::is_silent")]
    pub ram: RamSpec,
    /// For tests: number of submissions between moves of random chunks; 0 means never.
    pub chaos_every: u32,
    /// For tests: seed of the random moves.
    pub chaos_seed: u64,
}

/// A `[card.memory.quanta]` table, which controls when virtual machines whose memory does not fit together alternate in
/// quanta.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct QuantaSpec {
    /// Mode: `auto` (when they thrash), `off` or `forced`.
    #[serde(with = "by_name")]
    #[schemars(with = "String")]
    pub mode: Mode,
    /// Window over which copies are measured, in milliseconds.
    pub window_ms: u64,
    /// Threshold for thrashing, in permille of the bus's copy capacity in the window.
    pub on_permille: u32,
    /// Fraction of the card's memory that must be free for one window before quanta end, in permille.
    pub margin_permille: u32,
    /// Ratio of a quantum's length to the duration of the copies at its start; by default 10, and 80 on a CUDA card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub factor: Option<u32>,
    /// Minimum length of a quantum, in milliseconds.
    pub min_ms: u64,
    /// Maximum length of a quantum, in milliseconds.
    pub max_ms: u64,
}

/// Nanoseconds per millisecond.
const MS: u64 = 1_000_000;

impl Default for QuantaSpec {
    fn default() -> Self {
        let QuantaConfig { mode, window_ns, on_permille, margin_permille, factor: _, min_ns, max_ns } =
            QuantaConfig::default();
        let (window_ms, min_ms, max_ms) = (window_ns / MS, min_ns / MS, max_ns / MS);
        Self { mode, window_ms, on_permille, margin_permille, factor: None, min_ms, max_ms }
    }
}

impl Default for CardMemory {
    fn default() -> Self {
        let balance = vram::balance::Config::default();
        Self {
            host_mib: 0,
            reserve_mib: 0,
            victims: balance.policy,
            return_ms: balance.return_interval_ns / MS,
            settle_ms: balance.settle_ns / MS,
            idle_ms: balance.idle_after_ns / MS,
            low_water_mib: 0,
            quanta: QuantaSpec::default(),
            ram: RamSpec::default(),
            chaos_every: 0,
            chaos_seed: 0,
        }
    }
}

impl CardMemory {
    /// Maximum value of keys that are durations, in ms.
    pub(crate) const MS_MAX: u64 = 3_600_000;

    /// Returns the invalid settings, each with its key and error.
    #[must_use]
    pub fn check(&self, chunk_kib: u64, shared_mib: u64) -> Vec<(&'static str, String)> {
        let mut wrong = Vec::new();
        for (key, ms, least) in [
            ("memory.return_ms", self.return_ms, 1),
            ("memory.settle_ms", self.settle_ms, 0),
            ("memory.idle_ms", self.idle_ms, 1),
            ("memory.quanta.window_ms", self.quanta.window_ms, 1),
            ("memory.quanta.min_ms", self.quanta.min_ms, 1),
            ("memory.quanta.max_ms", self.quanta.max_ms, self.quanta.min_ms),
        ] {
            if !(least..=Self::MS_MAX).contains(&ms) {
                wrong.push((key, format!("{ms}, expected {least} to {}", Self::MS_MAX)));
            }
        }
        for (key, permille) in [
            ("memory.quanta.on_permille", self.quanta.on_permille),
            ("memory.quanta.margin_permille", self.quanta.margin_permille),
        ] {
            if permille > 1000 {
                wrong.push((key, format!("{permille}, expected at most 1000")));
            }
        }
        if let Some(factor) = self.quanta.factor.filter(|factor| !(1..=1000).contains(factor)) {
            wrong.push(("memory.quanta.factor", format!("{factor}, expected 1 to 1000")));
        }
        for (key, mib) in [
            ("memory.host_mib", self.host_mib),
            ("memory.reserve_mib", self.reserve_mib),
            ("memory.low_water_mib", self.low_water_mib),
        ] {
            if chunk_kib != 0 && mib.checked_mul(1024).is_none_or(|kib| kib % chunk_kib != 0) {
                wrong.push((key, format!("{mib} MiB, expected a multiple of the chunk of {chunk_kib} KiB")));
            }
        }
        if self.host_mib > Self::HOST_MIB_MAX {
            wrong.push(("memory.host_mib", format!("{}, expected at most {}", self.host_mib, Self::HOST_MIB_MAX)));
        }
        if self.chaos_every != 0 && self.host_mib == 0 {
            let what = format!("{}, expected 0, or `memory.host_mib` above 0", self.chaos_every);
            wrong.push(("memory.chaos_every", what));
        }
        wrong.extend(self.ram.check());
        let kept = self.reserve_mib.saturating_add(self.low_water_mib);
        if kept > 0 && kept >= shared_mib {
            let what = format!("{} MiB, expected less than the {shared_mib} that VMs share", self.reserve_mib);
            wrong.push(("memory.reserve_mib", what));
        }
        wrong
    }

    /// Maximum size of host memory in MiB: the card's address space, excluding the part for guests' RAM.
    pub(crate) const HOST_MIB_MAX: u64 = 512 << 10;
}

/// A `[vm.memory]` table, and the body of a request to change it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VmMemory {
    /// Maximum memory on the card, in MiB; by default, the VRAM that the guest sees.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(deserialize_with = "crate::size::optional")]
    pub quota_mib: Option<u64>,
    /// Guaranteed memory on the card, in MiB. By default, the VRAM that the guest sees (at most the quota), or nothing
    /// on a card with `overcommit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(deserialize_with = "crate::size::optional")]
    pub guarantee_mib: Option<u64>,
    /// Maximum host memory, in MiB; by default, there is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(deserialize_with = "crate::size::optional")]
    pub swap_cap_mib: Option<u64>,
    /// Weight for the card's memory while memory is short, relative to the other weights; 100 by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Policy for a guest that needs memory while the card has none left: `swap` (host memory is used), `queue` (the
    /// work waits), `refuse` (the guest sees only memory that can be reserved for it when the virtual machine is
    /// added). The default is `swap` if the card has host memory, and otherwise `queue`.
    #[serde(skip_serializing_if = "Option::is_none", with = "by_name_if_any")]
    #[schemars(with = "Option<String>")]
    pub on_full: Option<OnFull>,
    /// With `queue`: maximum time that work waits for memory before its channel faults, in milliseconds; 5000 by
    /// default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<u64>,
    /// Limits of the RAM that the virtual machine may lend; by default, the values of the card's `memory.ram`.
    #[serde(skip_serializing_if = "RamSpec::is_silent")]
    pub ram: RamSpec,
}

/// A `[card.memory.ram]` or `[vm.memory.ram]` table: RAM that a virtual machine lends to the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RamSpec {
    /// Maximum lent RAM, in MiB; 167936 by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(deserialize_with = "crate::size::optional")]
    pub quota_mib: Option<u64>,
    /// Lent RAM for which bus addresses are reserved regardless of other virtual machines, in MiB; by default 4096, but
    /// at most the quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(deserialize_with = "crate::size::optional")]
    pub guarantee_mib: Option<u64>,
    /// Maximum lent RAM that the daemon or the card may touch first, in MiB. Such RAM is charged to the daemon's
    /// control group. By default, there is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(deserialize_with = "crate::size::optional")]
    pub touch_mib: Option<u64>,
}

impl RamSpec {
    /// Total bus address space for all virtual machines of a card, in MiB.
    pub(crate) const ALL_MIB: u64 = 896 << 10;
    /// Default quota in MiB.
    pub(crate) const QUOTA_MIB: u64 = 164 << 10;
    /// Default amount of RAM with guaranteed bus addresses, in MiB.
    pub(crate) const GUARANTEE_MIB: u64 = 4 << 10;

    /// Returns true if no key is set.
    #[must_use]
    pub(crate) fn is_silent(&self) -> bool {
        *self == Self::default()
    }

    /// Returns these settings, with the card's settings for unset keys.
    #[must_use]
    pub fn on(&self, card: &CardMemory) -> Self {
        let card = card.ram;
        let quota_mib = self.quota_mib.or(card.quota_mib).unwrap_or(Self::QUOTA_MIB);
        let guarantee_mib = self.guarantee_mib.or(card.guarantee_mib).unwrap_or(Self::GUARANTEE_MIB).min(quota_mib);
        Self {
            quota_mib: Some(quota_mib),
            guarantee_mib: Some(guarantee_mib),
            touch_mib: self.touch_mib.or(card.touch_mib),
        }
    }

    /// Returns the settings that are invalid for every card, each with its key and error.
    #[must_use]
    pub fn check(&self) -> Vec<(&'static str, String)> {
        let sizes = [
            ("memory.ram.quota_mib", self.quota_mib, 2),
            ("memory.ram.guarantee_mib", self.guarantee_mib, 0),
            ("memory.ram.touch_mib", self.touch_mib, 0),
        ];
        let mut wrong = Vec::new();
        for (key, mib, least) in sizes {
            let bounds = least..=Self::ALL_MIB;
            if let Some(mib) = mib.filter(|mib| !bounds.contains(mib) || !mib.is_multiple_of(2)) {
                wrong.push((key, format!("{mib} MiB, expected an even number from {least} to {}", Self::ALL_MIB)));
            }
        }
        if let (Some(quota), Some(guarantee)) = (self.quota_mib, self.guarantee_mib)
            && guarantee > quota
        {
            let what = format!("{guarantee} MiB, expected at most the quota of {quota} MiB");
            wrong.push(("memory.ram.guarantee_mib", what));
        }
        wrong
    }
}

impl VmMemory {
    /// Returns true if no key is set.
    #[must_use]
    pub(crate) fn is_silent(&self) -> bool {
        *self == Self::default()
    }

    /// Maximum weight.
    pub const WEIGHT_MAX: u32 = 10_000;
    /// Default time limit for work that waits under `queue`, in milliseconds. It is shorter than nouveau's own limit of
    /// 15 seconds for a channel.
    pub(crate) const QUEUE_MS: u64 = 5_000;

    /// Returns the policy that applies when the card has no memory left.
    #[must_use]
    pub fn policy(&self, card: &CardSpec) -> OnFull {
        self.on_full.unwrap_or(if card.memory.host_mib == 0 { OnFull::Queue } else { OnFull::Swap })
    }

    /// Returns the card memory guaranteed to a guest that sees `vram` MiB, in MiB.
    #[must_use]
    pub(crate) fn guaranteed_mib(&self, vram: u64, card: &CardSpec) -> u64 {
        let quota = self.quota_mib.unwrap_or(vram).min(vram);
        self.guarantee_mib.map_or(if card.overcommit { 0 } else { quota }, |mib| mib.min(vram))
    }

    /// Returns the amount of host memory that a guest with `vram` MiB may need, in MiB.
    #[must_use]
    pub(crate) fn swapped_mib(&self, vram: u64, card: &CardSpec) -> u64 {
        if self.policy(card) == OnFull::Swap { vram.saturating_sub(self.guaranteed_mib(vram, card)) } else { 0 }
    }

    /// Returns the maximum time that work waits for memory under `queue`.
    #[must_use]
    pub fn queue_limit(&self) -> Duration {
        Duration::from_millis(self.queue_ms.unwrap_or(Self::QUEUE_MS))
    }

    /// Returns the limits of a guest that sees `vram` MiB, in chunks of the card.
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

    /// Returns the settings that are invalid on this card, each with its key and error.
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
        wrong.extend(self.ram.check());
        if self.on_full == Some(OnFull::Swap) && card.memory.host_mib == 0 {
            let what = format!("`swap`, expected another policy, or `memory.host_mib` of card `{}` above 0", card.name);
            wrong.push(("memory.on_full", what));
        }
        wrong
    }
}

/// Serializes a setting as its name.
mod by_name {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::Serializer;

    pub fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Serializes an optional setting as its name.
mod by_name_if_any {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::Serializer;

    pub fn serialize<T: Display, S: Serializer>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => to.collect_str(value),
            None => to.serialize_none(),
        }
    }

    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
        let name = Option::<String>::deserialize(from)?;
        name.map(|name| name.parse().map_err(D::Error::custom)).transpose()
    }
}
