//! Integer matrix addition.

use crate::{Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

/// c = a + b.
#[derive(Debug)]
pub(crate) struct Madd {
    side: u32,
    a: Vec<u32>,
    b: Vec<u32>,
}

impl Madd {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        let side = 64 * scale.isqrt().max(1);
        let (count, mut random) = ((side * side) as usize, Random::new(seed));
        Self { side, a: random.words(count), b: random.words(count) }
    }
}

impl Workload for Madd {
    fn name(&self) -> &'static str {
        "madd"
    }

    fn size(&self) -> String {
        format!("{0}x{0}", self.side)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/madd.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let c = Slot::scratch("c", size_of_val(&*self.a) as u64).output();
        vec![Slot::words("a", &self.a), Slot::words("b", &self.b), c]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [a, b, c] = setup.buffers()?;
        let count = self.side * self.side;
        let params = Params::new().word(count).buffer(a).buffer(b).buffer(c);
        setup.launch(gpu, "madd", Grid::line(count, 256), &params, &[a, b, c])
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let expected: Vec<u32> = self.a.iter().zip(&self.b).map(|(a, b)| a.wrapping_add(*b)).collect();
        results.same_words("c", &expected)
    }
}
