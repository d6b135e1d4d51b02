//! Settings for the division of memory among VMs.

use crate::victim::VictimPolicy;

/// Settings for the division of memory among VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Policy that determines the order in which a VM's chunks are evicted.
    pub policy: VictimPolicy,
    /// Seed for random selections.
    pub seed: u64,
    /// Interval at which chunks are returned and shares are equalized, in ns.
    pub return_interval_ns: u64,
    /// Minimum time between two moves of a chunk, in ns. Moves for a request or a limit are exempt.
    pub settle_ns: u64,
    /// Time for which a returned chunk of a VM with work stays on the card despite requests from other VMs, in ns. The
    /// VM needs this time to make progress. Moves for limits, guarantees, and the mediator's own requests are exempt.
    pub residency_ns: u64,
    /// Time without a submission or memory request after which a VM is idle, in ns. Memory of idle VMs can be evicted
    /// for active VMs.
    pub idle_after_ns: u64,
    /// Number of card chunks to leave free when chunks are returned, so that the next request need not wait.
    pub low_water: u32,
    /// Maximum number of steps in a plan.
    pub steps_max: usize,
}

impl Default for Config {
    /// Returns the default settings: random victims (as in GPUswap), a return interval of 50 ms, a settling time of
    /// four intervals, and an idle time of 2 s.
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
