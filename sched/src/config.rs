//! Operator settings of a card's scheduler.

use serde::{Deserialize, Serialize};

/// Number of nanoseconds in a millisecond.
pub(crate) const MS: u64 = 1_000_000;
/// A card's whole time, in the unit of guarantees and caps.
pub const PERMILLE: u32 = 1000;

/// A scheduling policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// Starts each submission immediately.
    Direct,
    /// Runs the work of one vGPU at a time, in order of arrival.
    Fifo,
    /// GPUvm's CREDIT, which refills budgets in each period. A vGPU that has used up its budget runs after the others.
    Credit,
    /// Gdev's BAND (bandwidth-aware non-preemptive device scheduler), as used in GPUvm.
    #[default]
    Band,
    /// Measures use during a short interval, and then runs all vGPUs without restrictions, except for those above their
    /// share.
    Disengaged,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Direct, Self::Fifo, Self::Credit, Self::Band, Self::Disengaged];

    /// Returns the policy's name in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Fifo => "fifo",
            Self::Credit => "credit",
            Self::Band => "band",
            Self::Disengaged => "disengaged",
        }
    }
}

/// Grouping of engines into queues and accounts (Gdev, section 5.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Queues {
    /// One set per engine, which corresponds to Gdev's multiple resource queues (MRQ).
    #[default]
    #[doc(alias = "MRQ")]
    Separate,
    /// One set for all engines, which corresponds to Gdev's single device queue (SDQ). For comparison.
    #[doc(alias = "SDQ")]
    Single,
}

/// Parameters of CREDIT and BAND.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BandParams {
    /// Interval at which budgets are refilled, in ns.
    pub period_ns: u64,
    /// Time limit for BAND to wait for the next submission of a vGPU below its share, in ns.
    pub wait_ns: u64,
    /// Carries a vGPU's surplus or deficit over to the next period instead of clearing it, measures it relative to the
    /// competing vGPUs, and waits only for vGPUs that are due. The published BAND does not do this.
    pub correct: bool,
    /// Charges the scheduler's own time and the engine's idle time as GPU time (GPUvm, section 3.5).
    pub own_time: bool,
    /// With `correct`: idle time that is not charged while the engine waits for a vGPU's next submission, in permille
    /// of the GPU time that the vGPU has used since it got the engine. Longer waits delay other vGPUs, so they are
    /// charged.
    pub free_wait_permille: u32,
}

impl Default for BandParams {
    /// Returns the papers' values, 30 ms and 500 us, with `correct` set.
    fn default() -> Self {
        Self { period_ns: 30 * MS, wait_ns: MS / 2, correct: true, own_time: true, free_wait_permille: 125 }
    }
}

impl BandParams {
    /// Returns the parameters of the published BAND with GPUvm's accounting.
    #[must_use]
    pub fn published() -> Self {
        Self { correct: false, ..Self::default() }
    }
}

/// Parameters of the disengaged policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DisengagedParams {
    /// Length of the interval in which vGPUs run one at a time for measurements, in ns.
    pub engaged_ns: u64,
    /// Time between measurements, in which vGPUs run without restrictions, in ns.
    pub free_ns: u64,
}

impl Default for DisengagedParams {
    fn default() -> Self {
        Self { engaged_ns: 5 * MS, free_ns: 25 * MS }
    }
}

/// Maximum number of submissions in flight on an engine, all of them from the same vGPU. Does not apply to policies
/// that start each submission immediately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Pipeline {
    /// Limit while vGPUs compete.
    pub contended: u32,
    /// Limit while only one vGPU has work.
    pub alone: u32,
    /// Maximum expected duration of the work in flight on an engine, in ns. Above this limit, no more work starts,
    /// because it would delay other vGPUs. A vGPU without competitors may have two submissions of any length.
    pub ahead_ns: u64,
}

impl Default for Pipeline {
    fn default() -> Self {
        Self { contended: 4, alone: 64, ahead_ns: 2 * MS }
    }
}

impl Pipeline {
    /// Limit of one submission at a time, as in the papers.
    pub const ONE: Self = Self { contended: 1, alone: 1, ahead_ns: 0 };
}

/// Scheduler settings of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Policy for the order of submissions.
    pub policy: PolicyKind,
    /// Assignment of engines to queues.
    pub queues: Queues,
    /// Parameters of CREDIT and BAND.
    pub band: BandParams,
    /// Parameters of the disengaged policy.
    pub disengaged: DisengagedParams,
    /// Limits on work in flight.
    pub pipeline: Pipeline,
    /// Maximum difference between the card's completion time and the observation of the completion, in ns. Guests can
    /// forge the completion time, so an earlier time is clamped to this bound.
    pub stamp_slack_ns: u64,
    /// Number of submissions that exceed their time limit before a vGPU is quarantined, or 0 for no quarantine.
    pub strikes: u32,
    /// Length of a quarantine in ns, or 0 for a quarantine that lasts until the operator releases the vGPU.
    pub quarantine_ns: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: PolicyKind::default(),
            queues: Queues::default(),
            band: BandParams::default(),
            disengaged: DisengagedParams::default(),
            pipeline: Pipeline::default(),
            stamp_slack_ns: MS,
            strikes: 3,
            quarantine_ns: 0,
        }
    }
}

/// Minimum length of a period or interval, in ns.
const MIN_INTERVAL_NS: u64 = 100_000;
/// Maximum length of a period, wait, or interval, in ns.
const MAX_INTERVAL_NS: u64 = 10_000 * MS;
/// Upper bound of the limits on submissions in flight.
const MAX_PIPELINE_DEPTH: u32 = 1024;

/// A setting that is out of bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} = {value} is not between {least} and {most}")]
pub struct ConfigError {
    /// Name of the setting.
    pub name: &'static str,
    /// Value of the setting.
    pub value: u64,
    /// Minimum valid value.
    pub least: u64,
    /// Maximum valid value.
    pub most: u64,
}

pub(crate) fn within(name: &'static str, value: u64, least: u64, most: u64) -> Result<(), ConfigError> {
    if (least..=most).contains(&value) { Ok(()) } else { Err(ConfigError { name, value, least, most }) }
}

impl Config {
    /// Checks the settings against their bounds.
    ///
    /// # Errors
    /// Returns an error with the first setting that is out of bounds.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Self { policy: _, queues: _, band, disengaged, pipeline, stamp_slack_ns: _, strikes: _, quarantine_ns: _ } =
            self;
        within("band.period_ns", band.period_ns, MIN_INTERVAL_NS, MAX_INTERVAL_NS)?;
        within("band.wait_ns", band.wait_ns, 0, MAX_INTERVAL_NS)?;
        within("band.free_wait_permille", band.free_wait_permille.into(), 0, PERMILLE.into())?;
        within("disengaged.engaged_ns", disengaged.engaged_ns, MIN_INTERVAL_NS, MAX_INTERVAL_NS)?;
        within("disengaged.free_ns", disengaged.free_ns, MIN_INTERVAL_NS, MAX_INTERVAL_NS)?;
        within("pipeline.contended", pipeline.contended.into(), 1, MAX_PIPELINE_DEPTH.into())?;
        within("pipeline.alone", pipeline.alone.into(), pipeline.contended.into(), MAX_PIPELINE_DEPTH.into())
    }
}

/// Priority among the vGPUs that are due. It affects waits but not shares: a vGPU above its share runs after the
/// others, regardless of its class.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum LatencyClass {
    /// Runs before the other classes.
    Interactive,
    /// Default class.
    #[default]
    Normal,
    /// Runs after the other classes.
    Background,
}
