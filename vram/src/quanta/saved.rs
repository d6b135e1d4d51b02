//! Saved form of quanta. Times are in ns of the caller's clock.

use super::probes::Probes;
use super::sets::{WorkingSet, WorkingSets};
use super::{Mode, Quanta, QuantaConfig, Turn};
use crate::TenantId;
use saved_state::{Invalid, ascend, only_version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Saved detector and current quantum of a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedQuanta {
    config: SavedQuantaConfig,
    pub(crate) traffic: Vec<(u64, u64)>,
    bandwidth: u64,
    round_bandwidth: u64,
    capacity: u64,
    pub(crate) sets: Vec<(u32, SavedSet)>,
    idle: Vec<(u32, u64)>,
    pub(crate) turn: Option<(SavedTurn, Option<u64>)>,
    fits_since: Option<u64>,
}

only_version!(SavedQuanta, "vram.quanta", 2);

/// Saved working set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedSet {
    bytes: u64,
    resident: u64,
    weight: u32,
}

/// Members, holder and length of a quantum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedTurn {
    pub(crate) members: Vec<u32>,
    pub(crate) holder: u32,
    pub(crate) quantum_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedQuantaConfig {
    mode: SavedMode,
    window_ns: u64,
    on_permille: u32,
    margin_permille: u32,
    factor: u32,
    min_ns: u64,
    max_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SavedMode {
    Auto,
    Off,
    Forced,
}

impl Quanta {
    /// Saves the quanta.
    #[must_use]
    pub fn save(&self) -> SavedQuanta {
        // After a restore, quanta in use are assumed to help, and observations start over. A VM has one card, so no
        // other card controls its quanta.
        let Self {
            config,
            traffic,
            bandwidth,
            round_bandwidth,
            sets,
            idle,
            leads: _,
            led_since: _,
            unready: _,
            awaited_since: _,
            last: _,
            granted: _,
            went_first: _,
            turn,
            fits_since,
            probes: _,
        } = self;
        let WorkingSets { capacity, by_vm } = sets;
        let saved = |&WorkingSet { bytes, resident, weight }: &WorkingSet| SavedSet { bytes, resident, weight };
        SavedQuanta {
            config: (*config).into(),
            traffic: traffic.iter().copied().collect(),
            bandwidth: *bandwidth,
            round_bandwidth: *round_bandwidth,
            capacity: *capacity,
            sets: by_vm.iter().map(|(vm, set)| (vm.0, saved(set))).collect(),
            idle: idle.iter().map(|(vm, ns)| (vm.0, *ns)).collect(),
            turn: turn.as_ref().map(|(turn, since)| (turn.into(), *since)),
            fits_since: *fits_since,
        }
    }
}

impl TryFrom<SavedQuanta> for Quanta {
    type Error = Invalid;

    fn try_from(saved: SavedQuanta) -> Result<Self, Invalid> {
        let SavedQuanta { config, traffic, bandwidth, round_bandwidth, capacity, sets, idle, turn, fits_since } = saved;
        let ordered = ascend(sets.iter().map(|(vm, _)| vm)) && ascend(idle.iter().map(|(vm, _)| vm));
        Invalid::unless(ordered, || "working sets are not in order".into())?;
        Invalid::unless(ascend(traffic.iter().map(|(slot, _)| slot)), || "traffic is not in order".into())?;
        let set = |SavedSet { bytes, resident, weight }| WorkingSet { bytes, resident, weight };
        let turn = turn.map(|(turn, since)| Ok::<_, Invalid>((turn.try_into()?, since))).transpose()?;
        let by_vm: BTreeMap<_, _> = sets.into_iter().map(|(vm, saved)| (TenantId(vm), set(saved))).collect();
        let sets = WorkingSets { capacity, by_vm };
        let idle = idle.into_iter().map(|(vm, ns)| (TenantId(vm), ns)).collect();
        let probes = if turn.is_some() { Probes::found() } else { Probes::default() };
        let (config, traffic) = (config.into(), traffic.into());
        let rest = Self::new(config);
        Ok(Self { traffic, bandwidth, round_bandwidth, sets, idle, turn, fits_since, probes, ..rest })
    }
}

impl From<&Turn> for SavedTurn {
    fn from(Turn { members, holder, quantum_ns }: &Turn) -> Self {
        Self { members: members.iter().map(|vm| vm.0).collect(), holder: holder.0, quantum_ns: *quantum_ns }
    }
}

impl TryFrom<SavedTurn> for Turn {
    type Error = Invalid;

    fn try_from(SavedTurn { members, holder, quantum_ns }: SavedTurn) -> Result<Self, Invalid> {
        Invalid::unless(ascend(&members), || "the members of the turn are not in order".into())?;
        Ok(Self { members: members.into_iter().map(TenantId).collect(), holder: TenantId(holder), quantum_ns })
    }
}

impl From<QuantaConfig> for SavedQuantaConfig {
    fn from(config: QuantaConfig) -> Self {
        let QuantaConfig { mode, window_ns, on_permille, margin_permille, factor, min_ns, max_ns } = config;
        let mode = match mode {
            Mode::Auto => SavedMode::Auto,
            Mode::Off => SavedMode::Off,
            Mode::Forced => SavedMode::Forced,
        };
        Self { mode, window_ns, on_permille, margin_permille, factor, min_ns, max_ns }
    }
}

impl From<SavedQuantaConfig> for QuantaConfig {
    fn from(saved: SavedQuantaConfig) -> Self {
        let SavedQuantaConfig { mode, window_ns, on_permille, margin_permille, factor, min_ns, max_ns } = saved;
        let mode = match mode {
            SavedMode::Auto => Mode::Auto,
            SavedMode::Off => Mode::Off,
            SavedMode::Forced => Mode::Forced,
        };
        Self { mode, window_ns, on_permille, margin_permille, factor, min_ns, max_ns }
    }
}
