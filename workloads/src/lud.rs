//! LU decomposition of a matrix in place, by tiles.

use crate::{Bound, Gpu, Grid, Params, Random, Results, Setup, Slot, Workload, compare_floats};
use anyhow::Result;

/// Side of a tile.
const TILE: u32 = 16;

/// A matrix in which each cell on the diagonal is at least four times the sum of the others of its row or column: it is
/// decomposed without exchanging rows.
#[derive(Debug)]
pub(crate) struct Lud {
    side: u32,
    matrix: Vec<f32>,
}

impl Lud {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        // The work grows with the cube of the side.
        let volume = 96f64.powi(3) * f64::from(scale);
        let side = (volume.cbrt() as u32).next_multiple_of(TILE);
        let mut matrix: Vec<f32> = Random::new(seed).units((side * side) as usize);
        matrix.iter_mut().for_each(|cell| *cell = 2.0 * *cell - 1.0);
        matrix.iter_mut().step_by(side as usize + 1).for_each(|cell| *cell += 4.0 * side as f32);
        Self { side, matrix }
    }

    /// The decomposition, whatever the precision: for each column, divide what is below the diagonal, and subtract its
    /// product with the row from all that is right and below.
    fn decomposed(&self) -> Vec<f64> {
        let side = self.side as usize;
        let mut matrix: Vec<f64> = self.matrix.iter().copied().map(f64::from).collect();
        for step in 0..side {
            let (above, below) = matrix.split_at_mut((step + 1) * side);
            let pivots = &above[step * side + step..];
            for row in below.chunks_mut(side) {
                let (factor, rest) = row[step..].split_at_mut(1);
                factor[0] /= pivots[0];
                rest.iter_mut().zip(&pivots[1..]).for_each(|(cell, pivot)| *cell -= factor[0] * pivot);
            }
        }
        matrix
    }
}

impl Workload for Lud {
    fn name(&self) -> &'static str {
        "lud"
    }

    fn size(&self) -> String {
        format!("{0}x{0}", self.side)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/lud.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        vec![Slot::floats("matrix", &self.matrix).output()]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let buffers @ [matrix] = setup.buffers()?;
        for first in (0..self.side).step_by(TILE as usize) {
            let params = Params::new().word(self.side).word(first).buffer(matrix);
            setup.launch(gpu, "diagonal", Grid::plane([1; 2], [TILE; 2]), &params, &buffers)?;
            let rest = (self.side - first) / TILE - 1;
            if rest > 0 {
                setup.launch(gpu, "perimeter", Grid::line(rest * 2 * TILE, 2 * TILE), &params, &buffers)?;
                setup.launch(gpu, "internal", Grid::plane([rest; 2], [TILE; 2]), &params, &buffers)?;
            }
        }
        Ok(())
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let side = self.side as usize;
        // What is subtracted from a cell in a step is smaller than 1/side: L's cells are below 0.6/side, U's beside the
        // diagonal below 2. The cell gets one more rounding, of 2^-24 of at most 2, and what was wrong with the factors:
        // over `side` steps, that makes errors e times as large. So it is below 3 * side * 2^-23, and on the diagonal,
        // whose cells are 4 * side, as much again in proportion. L's cells have U's errors divided by 4 * side, and those
        // of the reciprocal (2^-23) and the product.
        let unit = 1.0 / (1 << 23) as f32;
        let upper = Bound { relative: side as f32 * unit, absolute: 3.0 * side as f32 * unit };
        let lower = Bound { relative: (side as f32 + 4.0) * unit, absolute: unit };
        let found = results.floats("matrix")?;
        let mut verified = 0;
        for (row, (found, expected)) in found.chunks(side).zip(self.decomposed().chunks(side)).enumerate() {
            let expected: Vec<f32> = expected.iter().map(|cell| *cell as f32).collect();
            let (found, expected) = (found.split_at(row), expected.split_at(row));
            verified += compare_floats(&format!("row {row} of L"), found.0, expected.0, lower)?;
            verified += compare_floats(&format!("row {row} of U"), found.1, expected.1, upper)?;
        }
        Ok(verified)
    }
}
