//! Workload descriptions for the simulation.

use super::Random;
use crate::{Config, Engine, Nanos, TenantId, VgpuParams};
use serde::{Deserialize, Serialize};

/// A duration in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Length {
    /// Constant.
    Fixed(u64),
    /// Uniformly distributed between the two values.
    Uniform(u64, u64),
    /// Exponentially distributed, with the given mean.
    Exponential(u64),
    /// Infinite: the work does not end.
    Forever,
}

impl Length {
    /// Returns a random length, or `None` if the work does not end.
    pub fn draw(self, random: &mut Random) -> Option<u64> {
        match self {
            Self::Fixed(ns) => Some(ns),
            Self::Uniform(from, to) => Some(from + random.below(to.saturating_sub(from).saturating_add(1))),
            Self::Exponential(mean) => Some((-(1.0 - random.fraction()).ln() * mean as f64) as u64),
            Self::Forever => None,
        }
    }
}

/// One submission in a stream's round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Engine that executes the step.
    pub engine: Engine,
    /// Engine time of the step.
    pub length: Length,
}

/// Durations of the on and off phases of a pulsed stream, in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pulse {
    /// Duration of the on phase.
    pub on: u64,
    /// Duration of the off phase.
    pub off: u64,
}

/// Activity of one of a guest's channels, which repeats a round of steps. After each step, the guest waits for the end
/// of the step, and then for the think time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    /// Steps of a round.
    pub steps: Vec<Step>,
    /// Think time, which is the time from the guest's observation of an end to its next doorbell.
    pub think: Length,
    /// Number of concurrent rounds.
    pub depth: u32,
    /// Start time of the stream.
    pub from: Nanos,
    /// Time after which the stream submits no more work.
    pub until: Option<Nanos>,
    /// On and off phases, or `None` if the stream is always on.
    pub pulse: Option<Pulse>,
}

impl Stream {
    /// Returns a stream that runs one kernel repeatedly, and waits for `think` after each end.
    #[must_use]
    pub fn looping(length: Length, think: Length) -> Self {
        let steps = vec![Step { engine: Engine::Compute, length }];
        Self { steps, think, depth: 1, from: Nanos(0), until: None, pulse: None }
    }

    /// Returns the first time, not before `at`, at which the stream submits work, or `None` if the stream has ended by
    /// then.
    pub(super) fn next_start(&self, at: Nanos) -> Option<Nanos> {
        let at = at.max(self.from);
        let at = match self.pulse {
            Some(Pulse { on, off }) => {
                let within = at.since(self.from) % (on + off).max(1);
                if within < on { at } else { at.after(on + off - within) }
            }
            None => at,
        };
        self.until.is_none_or(|until| at < until).then_some(at)
    }
}

/// A simulated VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guest {
    /// Scheduling settings of the guest's vGPU.
    pub params: VgpuParams,
    /// Activity of the guest's channels.
    pub streams: Vec<Stream>,
    /// Time by which the guest backdates its forged end times, in ns.
    pub lie: u64,
    /// Time at which the guest's VMM dies.
    pub gone: Option<Nanos>,
}

impl Guest {
    /// Creates a VM with weight 100 and one channel.
    #[must_use]
    pub fn new(stream: Stream) -> Self {
        Self { params: VgpuParams::default(), streams: vec![stream], lie: 0, gone: None }
    }

    /// Sets the VM's weight.
    #[must_use]
    pub fn weight(mut self, weight: u32) -> Self {
        self.params.weight = weight;
        self
    }
}

/// Delays in the card and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Delay from a decision until the card receives the work.
    pub submit: Length,
    /// Delay from the end of a submission on the card until the scheduler and the guest observe it.
    pub interrupt: Length,
    /// Additional duration of a copy that starts while the compute engine is busy, in permille.
    pub copy_slowdown_permille: u32,
}

impl Default for Card {
    fn default() -> Self {
        Self {
            submit: Length::Uniform(1_000, 3_000),
            interrupt: Length::Uniform(3_000, 8_000),
            copy_slowdown_permille: 0,
        }
    }
}

/// A change of settings by the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Changes the card's settings.
    Config(Config),
    /// Changes a vGPU's settings.
    Vgpu(TenantId, VgpuParams),
}

/// Description of a simulation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scenario {
    /// VMs, whose vGPUs are numbered from 0.
    pub guests: Vec<Guest>,
    /// Simulated time, in ns.
    pub length: u64,
    /// Delays in the card and the host.
    pub card: Card,
    /// Initial settings of the scheduler.
    pub config: Config,
    /// The operator's changes, with their times.
    pub changes: Vec<(Nanos, Change)>,
}

impl Scenario {
    /// Creates a scenario with one card and the given VMs, and with typical delays.
    #[must_use]
    pub fn new(config: Config, length: u64, guests: Vec<Guest>) -> Self {
        Self { guests, length, card: Card::default(), config, changes: Vec::new() }
    }
}
