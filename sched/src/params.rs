//! Operator settings of a vGPU.

use crate::config::{ConfigError, LatencyClass, MS, PERMILLE, within};
use crate::engine::Engine;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Scheduling settings of a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct VgpuParams {
    /// Weight for dividing time, relative to the weights of all competitors.
    pub weight: u32,
    /// Guaranteed share of the time while the vGPU has work, in permille.
    pub guarantee_permille: u32,
    /// Maximum share of the time, in permille, even if time is left unused.
    pub cap_permille: u32,
    /// Latency class. Among vGPUs that are due, a better class runs first.
    pub class: LatencyClass,
    /// Maximum run time of one submission in ns, or `None` for no limit.
    pub max_run_ns: Option<u64>,
    /// Settings for the copy engines, if they differ. If there is one queue for all engines, these settings have no
    /// effect.
    pub copies: CopyShare,
}

/// A vGPU's share of each copy engine. Unset values are the same as for the compute engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CopyShare {
    /// Weight for dividing time, relative to the weights of all competitors.
    pub weight: Option<u32>,
    /// Guaranteed share of the time while the vGPU has work, in permille.
    pub guarantee_permille: Option<u32>,
    /// Maximum share of the time, in permille, even if time is left unused.
    pub cap_permille: Option<u32>,
}

impl CopyShare {
    /// The same settings as for the compute engine.
    pub const AS_COMPUTE: Self = Self { weight: None, guarantee_permille: None, cap_permille: None };

    /// Returns true if all settings are the same as for the compute engine.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        *self == Self::AS_COMPUTE
    }
}

impl Default for VgpuParams {
    fn default() -> Self {
        Self {
            weight: 100,
            guarantee_permille: 0,
            cap_permille: PERMILLE,
            class: LatencyClass::default(),
            max_run_ns: Some(10_000 * MS),
            copies: CopyShare::AS_COMPUTE,
        }
    }
}

/// Maximum weight.
pub const WEIGHT_MAX: u32 = 10_000;

impl VgpuParams {
    /// Returns the default settings with the given weight.
    #[must_use]
    pub fn weight(weight: u32) -> Self {
        Self { weight, ..Self::default() }
    }

    /// Checks the settings against their bounds.
    ///
    /// # Errors
    /// Returns an error with the first setting that is out of bounds.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Self { weight, guarantee_permille, cap_permille, class: _, max_run_ns, copies } = *self;
        within("weight", weight.into(), 1, WEIGHT_MAX.into())?;
        within("guarantee_permille", guarantee_permille.into(), 0, PERMILLE.into())?;
        within("cap_permille", cap_permille.into(), guarantee_permille.max(1).into(), PERMILLE.into())?;
        max_run_ns.map_or(Ok(()), |limit| within("max_run_ns", limit, 1, u64::MAX))?;
        if copies.is_silent() {
            return Ok(());
        }
        let Self { weight, guarantee_permille, cap_permille, .. } = self.for_engine(Engine::Copy0);
        within("copies.weight", weight.into(), 1, WEIGHT_MAX.into())?;
        within("copies.guarantee_permille", guarantee_permille.into(), 0, PERMILLE.into())?;
        within("copies.cap_permille", cap_permille.into(), guarantee_permille.max(1).into(), PERMILLE.into())
    }

    /// Returns the settings of a vGPU that uses the time of several `members` (including itself) while the other
    /// members wait for their memory to be moved. Its weight and guarantee are the sums over all members. Its cap is
    /// scaled by the same factor as its weight, because the vGPU runs only for its part of the time.
    #[must_use]
    pub fn on_behalf_of(&self, members: impl IntoIterator<Item = Self>) -> Self {
        let (mut weights, mut guarantees) = (0u64, 0u64);
        for member in members {
            weights += u64::from(member.weight);
            guarantees += u64::from(member.guarantee_permille);
        }
        let weight = weights.clamp(self.weight.into(), WEIGHT_MAX.into());
        let own = u64::from(self.weight.max(1));
        let cap = (u64::from(self.cap_permille) * weight).div_ceil(own).min(PERMILLE.into());
        let guarantee = guarantees.max(self.guarantee_permille.into()).min(cap);
        Self { weight: weight as u32, guarantee_permille: guarantee as u32, cap_permille: cap as u32, ..*self }
    }

    /// Returns the combined settings of two vGPUs that use the engine at the same time: the sums of their weights and
    /// guarantees, the better class, and the longer run time limit. The result is uncapped, because each vGPU has its
    /// own cap.
    pub(crate) fn together_with(&self, other: &Self) -> Self {
        Self {
            weight: self.weight.saturating_add(other.weight).min(WEIGHT_MAX),
            guarantee_permille: self.guarantee_permille.saturating_add(other.guarantee_permille).min(PERMILLE),
            cap_permille: PERMILLE,
            class: self.class.min(other.class),
            max_run_ns: self.max_run_ns.zip(other.max_run_ns).map(|(one, two)| one.max(two)),
            copies: CopyShare::AS_COMPUTE,
        }
    }

    /// Returns the settings for one engine. For a copy engine, values in `copies` take precedence.
    #[must_use]
    pub fn for_engine(&self, engine: Engine) -> Self {
        let plain = Self { copies: CopyShare::AS_COMPUTE, ..*self };
        if engine == Engine::Compute {
            return plain;
        }
        let CopyShare { weight, guarantee_permille, cap_permille } = self.copies;
        Self {
            weight: weight.unwrap_or(self.weight),
            guarantee_permille: guarantee_permille.unwrap_or(self.guarantee_permille),
            cap_permille: cap_permille.unwrap_or(self.cap_permille),
            ..plain
        }
    }
}

/// Settings excluding [`VgpuParams::copies`]. A saved scheduler stores copy shares [separately](crate::SavedScheduler),
/// so that settings that were saved before copy shares existed can still be read.
#[derive(Serialize, Deserialize)]
struct Saved {
    weight: u32,
    guarantee_permille: u32,
    cap_permille: u32,
    class: LatencyClass,
    max_run_ns: Option<u64>,
}

/// Serialized form of the settings for users and programs.
#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename = "VgpuParams")]
struct Told {
    weight: u32,
    guarantee_permille: u32,
    cap_permille: u32,
    class: LatencyClass,
    max_run_ns: Option<u64>,
    #[serde(skip_serializing_if = "CopyShare::is_silent")]
    copies: CopyShare,
}

impl Default for Told {
    fn default() -> Self {
        VgpuParams::default().into()
    }
}

impl From<VgpuParams> for Told {
    fn from(params: VgpuParams) -> Self {
        let VgpuParams { weight, guarantee_permille, cap_permille, class, max_run_ns, copies } = params;
        Self { weight, guarantee_permille, cap_permille, class, max_run_ns, copies }
    }
}

impl Serialize for VgpuParams {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return Told::from(*self).serialize(serializer);
        }
        let Self { weight, guarantee_permille, cap_permille, class, max_run_ns, copies: _ } = *self;
        Saved { weight, guarantee_permille, cap_permille, class, max_run_ns }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for VgpuParams {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            let Told { weight, guarantee_permille, cap_permille, class, max_run_ns, copies } =
                Told::deserialize(deserializer)?;
            return Ok(Self { weight, guarantee_permille, cap_permille, class, max_run_ns, copies });
        }
        let Saved { weight, guarantee_permille, cap_permille, class, max_run_ns } = Saved::deserialize(deserializer)?;
        Ok(Self { weight, guarantee_permille, cap_permille, class, max_run_ns, copies: CopyShare::AS_COMPUTE })
    }
}
