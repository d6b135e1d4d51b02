//! Fault injection: moves chunks at random while VMs work. Only for tests of the mediator.
//!
//! For each VM in turn a few chunks are drawn from a seed: those on the card go to host memory, those in host memory
//! come back. Chunks whose move exceeds the limits stay in place.

use super::Memory;
use super::moved::Plan;
use vram::{Step, TenantId, Tier, To};

/// Maximum number of chunks that move at a time.
const CHUNKS: u64 = 4;

/// Rate of random moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chaos {
    /// Moves chunks after this many submissions of all VMs; 0 for never.
    pub every: u32,
    /// The moves are determined by it and by the VMs' chunks.
    pub seed: u64,
}

/// Counts submissions, and draws random numbers.
#[derive(Debug, Default)]
pub struct Dice {
    chaos: Chaos,
    state: u64,
    submissions: u32,
    due: bool,
}

impl Dice {
    /// Creates dice with this rate.
    #[must_use]
    pub fn new(chaos: Chaos) -> Self {
        Self { chaos, state: chaos.seed, ..Self::default() }
    }

    /// Counts a submission. Returns whether a move is due now.
    pub fn submitted(&mut self) -> bool {
        if self.chaos.every == 0 {
            return false;
        }
        self.submissions += 1;
        if self.submissions >= self.chaos.every {
            (self.submissions, self.due) = (0, true);
        }
        self.due
    }

    /// Returns the next number below `bound`, which is not 0: the upper half of a linear congruential generator.
    fn below(&mut self, bound: u64) -> u64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 32) % bound
    }
}

impl Memory {
    /// Returns random moves, if they are due: first evictions, then returns.
    pub fn inject_random_moves(&mut self) -> Plan {
        if !std::mem::take(&mut self.dice.due) {
            return Plan::new();
        }
        let (table, dice) = (&self.vram.chunks, &mut self.dice);
        let vms: Vec<TenantId> = table.vms().map(|(vm, _)| vm).filter(|vm| !self.travelling.contains(vm)).collect();
        if vms.is_empty() {
            return Plan::new();
        }
        let vm = vms[dice.below(vms.len() as u64) as usize];
        let mut draw = |tier, to| {
            let mut resting: Vec<u32> = table.resting(vm, tier).collect();
            let count = dice.below(CHUNKS + 1).min(resting.len() as u64);
            let mut taken = || resting.swap_remove(dice.below(resting.len() as u64) as usize);
            (0..count).map(|_| Step { vm, index: taken(), to }).collect::<Vec<_>>()
        };
        [draw(Tier::Card, To::Host), draw(Tier::Host, To::Card)].map(|steps| (vm, steps)).into()
    }
}
