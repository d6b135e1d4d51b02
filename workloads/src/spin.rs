//! A long compute loop with a given number of rounds, without input data.

use crate::{Gpu, Grid, Params, Results, Setup, Slot, Workload};
use anyhow::Result;

/// Number of threads in the grid.
const THREADS: u32 = 256;
/// Number of threads per block.
const BLOCK: u32 = 64;
/// Default number of rounds at scale 1.
const DEFAULT_ROUNDS: u32 = 2000;
/// Factor of each round. The kernel uses the same constant.
const FACTOR: u32 = 0x0019_660d;
const SUMMAND: u32 = 0x3c6e_f35f;

/// Each thread applies x = x * FACTOR + SUMMAND to the sum of its number and the seed, `rounds` times.
#[derive(Debug)]
pub(crate) struct Spin {
    rounds: u32,
    seed: u32,
}

impl Spin {
    pub(crate) fn new(scale: u32, seed: u64, rounds: Option<u32>) -> Self {
        Self { rounds: rounds.unwrap_or(DEFAULT_ROUNDS.saturating_mul(scale)).max(1), seed: seed as u32 }
    }
}

impl Workload for Spin {
    fn name(&self) -> &'static str {
        "loop"
    }

    fn size(&self) -> String {
        format!("{THREADS}x{}", self.rounds)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/loop.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        vec![Slot::scratch("x", u64::from(THREADS) * 4).output()]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [x] = setup.buffers()?;
        let params = Params::new().word(self.rounds).word(self.seed).buffer(x);
        setup.launch(gpu, "loop", Grid::line(THREADS, BLOCK), &params, &[x])
    }

    fn check(&self, results: &Results) -> Result<u64> {
        // Compute all rounds at once: exponentiate an affine map by squaring.
        let (mut factor, mut summand) = (1_u32, 0_u32);
        let (mut square, mut shift, mut rounds) = (FACTOR, SUMMAND, self.rounds);
        while rounds > 0 {
            if rounds & 1 == 1 {
                summand = summand.wrapping_mul(square).wrapping_add(shift);
                factor = factor.wrapping_mul(square);
            }
            shift = shift.wrapping_mul(square).wrapping_add(shift);
            square = square.wrapping_mul(square);
            rounds >>= 1;
        }
        let number = |thread: u32| thread.wrapping_add(self.seed).wrapping_mul(factor).wrapping_add(summand);
        results.same_words("x", &(0..THREADS).map(number).collect::<Vec<_>>())
    }
}
