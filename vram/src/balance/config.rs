//! Settings of the division of memory.

use crate::victim::VictimPolicy;

/// Settings of the division of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Policy that chooses which chunk of a VM is evicted first.
    pub policy: VictimPolicy,
    /// Seed of random choices.
    pub seed: u64,
    /// Interval at which chunks are returned and shares are equalized, in ns.
    pub return_interval_ns: u64,
    /// Minimum time between two moves of a chunk, unless a request or a limit needs the second move, in ns.
    pub settle_ns: u64,
    /// Time for which a chunk returned to the card of a VM at work stays, even if other VMs request memory, in ns: the
    /// VM can make progress with its memory. A limit, a guarantee or the mediator's own need evicts it all the same.
    pub residency_ns: u64,
    /// A VM without a submission for this time gives way to others, in ns.
    pub idle_after_ns: u64,
    /// Number of chunks of the card that returns leave free, so that the next request need not wait.
    pub low_water: u32,
    /// Maximum number of steps in one plan.
    pub steps_max: usize,
}

impl Default for Config {
    /// GPUswap's random victims; returns every 50 ms; chunks settle after four intervals; VMs are idle after 2 s.
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
