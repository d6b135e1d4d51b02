//! Saved form of the balancer and its information about VMs and chunks. Times are in ns of the caller's clock.

use super::{Balancer, Config, Known};
use crate::quanta::SavedTurn;
use crate::victim::{Hints, SavedHints, VictimPolicy};
use crate::{ChunkTable, TenantId, To};
use saved_state::{Invalid, ascend, only_version};
use serde::{Deserialize, Serialize};

/// Saved balancer of a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedBalancer {
    pub(crate) config: SavedConfig,
    /// State of the policy's random generator.
    pub(crate) phase: u64,
    /// Information about VMs, sorted by VM number.
    pub(crate) known: Vec<SavedKnown>,
    /// Number of each VM and time in ns of its last submission or memory request, sorted by VM number.
    pub(crate) active: Vec<(u32, u64)>,
    /// Time in ns and destination of each planned move, with its VM and chunk as the key.
    pub(crate) moved: Vec<((u32, u32), (u64, SavedTo))>,
    pub(crate) due_ns: u64,
    pub(crate) turn: Option<SavedTurn>,
}

only_version!(SavedBalancer, "vram.balance", 2);

/// Information about a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedKnown {
    pub(crate) vm: u32,
    pub(crate) advertised: u32,
    pub(crate) hints: SavedHints,
    /// Indices of pinned chunks, in ascending order.
    pub(crate) pins: Vec<u32>,
}

/// Saved form of the balancer's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedConfig {
    policy: SavedPolicy,
    seed: u64,
    return_interval_ns: u64,
    settle_ns: u64,
    residency_ns: u64,
    idle_after_ns: u64,
    low_water: u32,
    steps_max: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SavedPolicy {
    Random,
    Priority,
    Profiled,
    Clock,
    Loops,
}

/// Planned destination of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedTo {
    Card,
    Host,
    Reserve,
}

impl Balancer {
    /// Saves the balancer.
    #[must_use]
    pub fn save(&self) -> SavedBalancer {
        let Self { config, policy, known, active, moved, due_ns, turn } = self;
        let saved_known = |(vm, known): (&TenantId, &Known)| {
            let Known { advertised, hints, pins } = known;
            SavedKnown { vm: vm.0, advertised: *advertised, hints: hints.save(), pins: pins.iter().copied().collect() }
        };
        let saved_move = |(&(vm, index), &(when, to)): (&(TenantId, u32), &(u64, To))| {
            let to = match to {
                To::Card => SavedTo::Card,
                To::Host => SavedTo::Host,
                To::Reserve => SavedTo::Reserve,
            };
            ((vm.0, index), (when, to))
        };
        SavedBalancer {
            config: (*config).into(),
            phase: policy.phase(),
            known: known.iter().map(saved_known).collect(),
            active: active.iter().map(|(vm, when)| (vm.0, *when)).collect(),
            moved: moved.iter().map(saved_move).collect(),
            due_ns: *due_ns,
            turn: turn.as_ref().map(SavedTurn::from),
        }
    }

    /// Restores a balancer for the chunks of `table`.
    ///
    /// # Errors
    /// Returns an error if the saved state is unsorted or invalid, or contradicts the VRAM sizes of the VMs in `table`.
    pub fn restored(saved: SavedBalancer, table: &ChunkTable) -> Result<Self, Invalid> {
        let SavedBalancer { config, phase, known, active, moved, due_ns, turn } = saved;
        let ordered = ascend(known.iter().map(|known| known.vm))
            && ascend(active.iter().map(|(vm, _)| vm))
            && ascend(moved.iter().map(|(chunk, _)| chunk));
        Invalid::unless(ordered, || "the information about VMs is not in order".into())?;
        let config = Config::try_from(config)?;
        let known = known.into_iter().map(|known| restored_known(known, table)).collect::<Result<_, _>>()?;
        let restored_move = |((vm, index), (when, to)): ((u32, u32), (u64, SavedTo))| {
            let to = match to {
                SavedTo::Card => To::Card,
                SavedTo::Host => To::Host,
                SavedTo::Reserve => To::Reserve,
            };
            ((TenantId(vm), index), (when, to))
        };
        Ok(Self {
            policy: config.policy.build(phase),
            config,
            known,
            active: active.into_iter().map(|(vm, when)| (TenantId(vm), when)).collect(),
            moved: moved.into_iter().map(restored_move).collect(),
            due_ns,
            turn: turn.map(TryInto::try_into).transpose()?,
        })
    }
}

fn restored_known(saved: SavedKnown, table: &ChunkTable) -> Result<(TenantId, Known), Invalid> {
    let SavedKnown { vm, advertised, hints, pins } = saved;
    let vm = TenantId(vm);
    // The next plan drops removed VMs.
    let has = table.vm_bytes(vm).map(|bytes| bytes.div_ceil(table.chunk_bytes()));
    Invalid::unless(has.is_none_or(|has| has == u64::from(advertised)), || {
        format!("VM {vm} is recorded with {advertised} chunks, but has {has:?}")
    })?;
    Invalid::unless(ascend(&pins) && pins.last().is_none_or(|last| *last < advertised), || {
        format!("the recorded pins of VM {vm} are beyond its last chunk")
    })?;
    let hints = Hints::restored(hints, advertised)?;
    Ok((vm, Known { advertised, hints, pins: pins.into_iter().collect() }))
}

impl From<Config> for SavedConfig {
    fn from(config: Config) -> Self {
        let Config { policy, seed, return_interval_ns, settle_ns, residency_ns, idle_after_ns, low_water, steps_max } =
            config;
        let policy = match policy {
            VictimPolicy::Random => SavedPolicy::Random,
            VictimPolicy::Priority => SavedPolicy::Priority,
            VictimPolicy::Profiled => SavedPolicy::Profiled,
            VictimPolicy::Clock => SavedPolicy::Clock,
            VictimPolicy::Loops => SavedPolicy::Loops,
        };
        let steps_max = steps_max as u64;
        Self { policy, seed, return_interval_ns, settle_ns, residency_ns, idle_after_ns, low_water, steps_max }
    }
}

impl TryFrom<SavedConfig> for Config {
    type Error = Invalid;

    fn try_from(saved: SavedConfig) -> Result<Self, Invalid> {
        let SavedConfig {
            policy,
            seed,
            return_interval_ns,
            settle_ns,
            residency_ns,
            idle_after_ns,
            low_water,
            steps_max,
        } = saved;
        let policy = match policy {
            SavedPolicy::Random => VictimPolicy::Random,
            SavedPolicy::Priority => VictimPolicy::Priority,
            SavedPolicy::Profiled => VictimPolicy::Profiled,
            SavedPolicy::Clock => VictimPolicy::Clock,
            SavedPolicy::Loops => VictimPolicy::Loops,
        };
        let steps_max = usize::try_from(steps_max).map_err(|_| Invalid::new("a plan has too many steps"))?;
        Ok(Self { policy, seed, return_interval_ns, settle_ns, residency_ns, idle_after_ns, low_water, steps_max })
    }
}
