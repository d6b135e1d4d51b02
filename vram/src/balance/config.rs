//! Settings of how memory is divided.

use crate::victim::VictimPolicy;

/// Settings of how memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Choice of the chunk of a VM that goes first.
    pub policy: VictimPolicy,
    /// Seed of what is done at random.
    pub seed: u64,
    /// Chunks come back, and shares are evened out, so often, in ns.
    pub return_interval_ns: u64,
    /// A chunk that has moved does not move the other way for so long unless a request or a limit needs it, in ns.
    pub settle_ns: u64,
    /// A chunk that has come to the card of a VM that is at work stays for so long, whatever other VMs request, in ns: whoever has
    /// got its memory gets on with it. A limit, a guarantee or the mediator's own need takes it all the same.
    pub residency_ns: u64,
    /// A VM without a submission for so long has to give way to others, in ns.
    pub idle_after_ns: u64,
    /// So many chunks of the card are left free when chunks come back, so that the next request need not wait.
    pub low_water: u32,
    /// Most steps of one plan.
    pub steps_max: usize,
}

impl Default for Config {
    /// GPUswap's random victims; every 50 ms; settled after four intervals; idle after 2 s.
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
