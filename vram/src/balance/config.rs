//! Settings for the division of memory.

use crate::victim::VictimPolicy;

/// Settings for the division of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Policy for selecting the chunk of a VM to evict first.
    pub policy: VictimPolicy,
    /// Seed for random decisions.
    pub seed: u64,
    /// Interval in ns at which chunks are returned and shares are equalized.
    pub return_interval_ns: u64,
    /// Minimum time between two moves of a chunk, in ns. Moves due to a request or a limit are exempt.
    pub settle_ns: u64,
    /// Time in ns for which a returned chunk of a working VM stays on the card despite requests of other VMs. The VM
    /// needs this time to make progress. Limits, guarantees, and the mediator's own requests are exempt.
    pub residency_ns: u64,
    /// Time in ns without a submission after which a VM is idle, so that its memory can be evicted for other VMs.
    pub idle_after_ns: u64,
    /// Number of card chunks that stay free when chunks are returned, so that the next request does not wait.
    pub low_water: u32,
    /// Maximum number of steps in one plan.
    pub steps_max: usize,
}

impl Default for Config {
    /// Returns the default settings: random victims (as in GPUswap), returns every 50 ms, a settling time of four
    /// intervals, and idle VMs after 2 s.
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
