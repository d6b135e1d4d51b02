//! Matrix multiplication, of integers and of floats.

use crate::element::Element;
use crate::{Bound, Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

/// Number of rows and columns of the tile that a block computes.
const TILE: u32 = 16;

/// Computes c = a * b.
#[derive(Debug)]
pub(crate) struct Mmul<E> {
    name: &'static str,
    source: &'static str,
    side: u32,
    a: Vec<E>,
    b: Vec<E>,
}

impl Mmul<u32> {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        Self::with_source("mmul", include_str!("kernels/mmul.sm20"), scale, seed)
    }
}

impl Mmul<f32> {
    pub(crate) fn floats(scale: u32, seed: u64) -> Self {
        Self::with_source("fmmul", include_str!("kernels/fmmul.sm20"), scale, seed)
    }
}

impl<E: Element> Mmul<E> {
    fn with_source(name: &'static str, source: &'static str, scale: u32, seed: u64) -> Self {
        // The work is proportional to the cube of the side.
        let side = TILE * (4.0 * f64::from(scale).cbrt()).round() as u32;
        let (count, mut random) = ((side * side) as usize, Random::new(seed));
        Self { name, source, side, a: E::random(&mut random, count), b: E::random(&mut random, count) }
    }

    fn expected(&self) -> Vec<E> {
        let side = self.side as usize;
        let element = |at: usize| {
            let row = &self.a[at / side * side..][..side];
            E::dot(row.iter().copied().zip(self.b[at % side..].iter().copied().step_by(side)))
        };
        (0..side * side).map(element).collect()
    }
}

impl<E: Element> Workload for Mmul<E> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn size(&self) -> String {
        format!("{0}x{0}", self.side)
    }

    fn source(&self) -> &'static str {
        self.source
    }

    fn buffers(&self) -> Vec<Slot> {
        let c = Slot::scratch("c", size_of_val(&*self.a) as u64).output();
        vec![E::slot("a", &self.a), E::slot("b", &self.b), c]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [a, b, c] = setup.buffers()?;
        let params = Params::new().word(self.side).buffer(a).buffer(b).buffer(c);
        let grid = Grid::plane([self.side / TILE; 2], [TILE; 2]);
        setup.launch(gpu, self.name, grid, &params, &[a, b, c])
    }

    fn check(&self, results: &Results) -> Result<u64> {
        // Each of the `side` sums of positive terms has a rounding error of at most half a unit in the last place. The
        // bound is twice the total of these errors.
        let bound = Bound { relative: self.side as f32 * f32::EPSILON, absolute: 0.0 };
        E::same(results, "c", &self.expected(), bound)
    }
}
