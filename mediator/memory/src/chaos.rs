//! Fault injection for the mediator's own tests: moves random chunks while VMs run.
//!
//! A seeded generator selects a few chunks of one VM at a time. Selected chunks on the card move to host memory, and
//! those in host memory return. A chunk whose move would exceed a limit stays in place.

use super::Memory;
use super::moved::Plan;
use fastrand::Rng;
use vram::{Step, TenantId, Tier, To};

/// Maximum number of chunks per random move.
const CHUNKS: usize = 4;

/// Settings of random moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chaos {
    /// Number of submissions, by all VMs together, between random moves; 0 for never.
    pub every: u32,
    /// Seed that determines the moves, together with the VMs' chunks.
    pub seed: u64,
}

/// Counts submissions, and generates random numbers.
#[derive(Debug)]
pub(crate) struct Dice {
    chaos: Chaos,
    random: Rng,
    submissions: u32,
    due: bool,
}

impl Dice {
    /// Creates a generator with these settings.
    #[must_use]
    pub fn new(chaos: Chaos) -> Self {
        Self { chaos, random: Rng::with_seed(chaos.seed), submissions: 0, due: false }
    }

    /// Counts a submission. Returns true if a move is due.
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
}

impl Memory {
    /// Returns the random moves that are due: evictions first, and then returns.
    pub fn inject_random_moves(&mut self) -> Plan {
        if !std::mem::take(&mut self.dice.due) {
            return Plan::new();
        }
        let (table, dice) = (&self.vram.chunks, &mut self.dice);
        let vms: Vec<TenantId> = table.vms().map(|(vm, _)| vm).filter(|vm| !self.travelling.contains(vm)).collect();
        if vms.is_empty() {
            return Plan::new();
        }
        let vm = vms[dice.random.usize(..vms.len())];
        let mut draw = |tier, to| {
            let mut resting: Vec<u32> = table.resting(vm, tier).collect();
            let count = dice.random.usize(..=CHUNKS).min(resting.len());
            let mut taken = || resting.swap_remove(dice.random.usize(..resting.len()));
            (0..count).map(|_| Step { vm, index: taken(), to }).collect::<Vec<_>>()
        };
        [draw(Tier::Card, To::Host), draw(Tier::Host, To::Card)].map(|steps| (vm, steps)).into()
    }
}
