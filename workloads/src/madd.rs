//! Matrix addition, of integers and of floats, once or repeatedly.

use crate::element::Element;
use crate::{Bound, Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

/// Default number of rounds of `long-madd`, taken from GPUvm's figures.
pub(crate) const LONG_ROUNDS: u32 = 5;

/// Computes c = a + b, and then c = c + b in each additional round.
#[derive(Debug)]
pub(crate) struct Madd<E> {
    name: &'static str,
    kernel: &'static str,
    side: u32,
    rounds: u32,
    a: Vec<E>,
    b: Vec<E>,
}

/// Returns the side of the matrices for a scale.
pub(crate) fn side(scale: u32) -> u32 {
    128 * scale.isqrt().max(1)
}

impl Madd<u32> {
    pub(crate) fn new(name: &'static str, side: u32, seed: u64, rounds: u32) -> Self {
        Self::with_kernel(name, "madd", side, seed, rounds)
    }
}

impl Madd<f32> {
    pub(crate) fn floats(scale: u32, seed: u64) -> Self {
        Self::with_kernel("fmadd", "fmadd", side(scale), seed, 1)
    }
}

impl<E: Element> Madd<E> {
    fn with_kernel(name: &'static str, kernel: &'static str, side: u32, seed: u64, rounds: u32) -> Self {
        let (count, mut random) = ((side * side) as usize, Random::new(seed));
        let (a, b) = (E::random(&mut random, count), E::random(&mut random, count));
        Self { name, kernel, side, rounds: rounds.max(1), a, b }
    }
}

impl<E: Element> Workload for Madd<E> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn size(&self) -> String {
        format!("{0}x{0}", self.side)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/madd.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let c = Slot::scratch("c", size_of_val(&*self.a) as u64).output();
        vec![E::slot("a", &self.a), E::slot("b", &self.b), c]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [a, b, c] = setup.buffers()?;
        let count = self.side * self.side;
        let params = Params::new().word(count).word(self.rounds).buffer(a).buffer(b).buffer(c);
        setup.launch(gpu, self.kernel, Grid::line(count, 256), &params, &[a, b, c])
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let sum = |(a, b): (&E, &E)| (0..self.rounds).fold(*a, |sum, _| sum.plus(*b));
        let expected: Vec<E> = self.a.iter().zip(&self.b).map(sum).collect();
        // The card and the CPU both round each sum to nearest.
        E::same(results, "c", &expected, Bound::EXACT)
    }
}
