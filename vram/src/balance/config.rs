//! Settings for the division of memory.

use crate::victim::VictimPolicy;

/// Settings for the division of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Policy that chooses which chunk of a VM is evicted first.
    pub policy: VictimPolicy,
    /// Seed of random choices.
    pub seed: u64,
    /// Interval at which chunks are returned and shares are equalized, in ns.
    pub return_interval_ns: u64,
    /// Minimum time in ns between two moves of a chunk, unless a request or a limit requires the second move.
    pub settle_ns: u64,
    /// Time in ns for which a returned chunk of a working VM stays on the card even if other VMs request memory, so
    /// that the VM can make progress. A limit, a guarantee, or the mediator's own needs evict the chunk nevertheless.
    pub residency_ns: u64,
    /// Time in ns without a submission after which a VM gives up memory to other VMs.
    pub idle_after_ns: u64,
    /// Number of card chunks that returns leave free, so that the next request need not wait.
    pub low_water: u32,
    /// Maximum number of steps in one plan.
    pub steps_max: usize,
}

impl Default for Config {
    /// Returns the default settings: random victims as in GPUswap, returns every 50 ms, and a settling time of four
    /// intervals. VMs are idle after 2 s.
    fn default() -> Self {
        Self {
            policy: VictimPolicy::default(),
            seed: 0,
            return_interval_ns: 50_000_000,
            settle_ns: 200_000_000,
            residency_ns: 20_000_000,
            idle_after_ns: 2_000_000_000,
            low_water: 0,
            steps_max: 256,
        }
    }
}
