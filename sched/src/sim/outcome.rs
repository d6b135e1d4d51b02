//! Results of a simulation.

use super::uses::{ShareError, Uses};
use crate::{Engine, Histogram, Scheduler};

/// Result of a simulation.
#[derive(Debug)]
pub struct Outcome {
    /// Scheduler at the end of the run, with its accounts.
    pub scheduler: Scheduler,
    /// Times from a doorbell to the start of its work, in ns, for each VM.
    pub waits: Vec<Histogram>,
    /// Number of completed rounds of each VM's streams.
    pub rounds: Vec<u64>,
    /// Number of completed submissions.
    pub completed: u64,
    /// Number of killed channels.
    pub killed: u64,
    /// Number of events sent to the scheduler.
    pub events: u64,
    /// Number of ticks among these events.
    pub ticks: u64,
    pub(super) uses: Uses,
    pub(super) busy: [u64; Engine::COUNT],
    pub(super) length: u64,
}

impl Outcome {
    /// Returns the simulated busy time of an engine, in ns.
    #[must_use]
    pub fn busy(&self, engine: Engine) -> u64 {
        self.busy[engine.index()]
    }

    /// Returns the fraction of the total time for which an engine was busy.
    #[must_use]
    pub fn utilisation(&self, engine: Engine) -> f64 {
        self.busy(engine) as f64 / self.length as f64
    }

    /// Returns a VM's simulated use of an engine between `from` and `until`, in ns.
    #[must_use]
    pub fn used(&self, vm: usize, engine: Engine, from: u64, until: u64) -> u64 {
        self.uses.used(vm, engine, from, until)
    }

    /// Returns each VM's fraction of the total use of an engine between the times `from` and `until`.
    #[must_use]
    pub fn shares(&self, engine: Engine, from: u64, until: u64) -> Vec<f64> {
        self.uses.shares(engine, from, until)
    }

    /// Returns the shares in consecutive windows of `window` ns between `from` and `until`.
    pub fn windows(&self, engine: Engine, window: u64, from: u64, until: u64) -> impl Iterator<Item = Vec<f64>> {
        self.uses.windows(engine, window, from, until)
    }

    /// Compares the shares in consecutive windows after `from` with `wanted`, which contains one share per VM.
    #[must_use]
    pub fn share_error(&self, engine: Engine, window: u64, from: u64, wanted: &[f64]) -> ShareError {
        self.uses.share_error(engine, window, from, self.length, wanted)
    }
}
