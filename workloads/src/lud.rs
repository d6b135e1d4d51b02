//! Tiled in-place LU decomposition of a matrix.

use crate::{Bound, Gpu, Grid, Params, Random, Results, Setup, Slot, Workload, compare_floats};
use anyhow::Result;

/// Side of a tile in cells.
const TILE: u32 = 16;

/// Approximate value of the diagonal cells. It exceeds the sum of the other cells' magnitudes in a row or column, so no
/// pivoting is needed.
const PIVOT: f32 = 16.0;

/// A matrix with cells that decrease in magnitude away from the diagonal. At a distance n > 0, the magnitude is at most
/// 1 / (n + 1).
#[derive(Debug)]
pub(crate) struct Lud {
    side: u32,
    matrix: Vec<f32>,
}

impl Lud {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        // The work is proportional to the cube of the side.
        let volume = 96f64.powi(3) * f64::from(scale);
        let side = (volume.cbrt() as u32).next_multiple_of(TILE);
        let mut random = Random::new(seed);
        let cells = (0..side).flat_map(|row| (0..side).map(move |column| (row, column)));
        let mut cell = |(row, column): (u32, u32)| {
            let cell = (2.0 * random.unit() - 1.0) / (row.abs_diff(column) + 1) as f32;
            if row == column { cell + PIVOT } else { cell }
        };
        let matrix = cells.map(&mut cell).collect();
        Self { side, matrix }
    }

    /// Returns the decomposition, in double precision. For each column, divides the cells below the diagonal by the
    /// pivot, and subtracts their products with the pivot's row from all cells to the right and below.
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
        // This is a worst-case estimate. Relative to the pivot, the sums of L's magnitudes over a column and of U's
        // over a row are below 1, and U's cells next to the diagonal are below 2. Each rounding of an amount that is
        // subtracted from such a cell therefore adds an error below 3 * 2^-24. This happens at most `side` times. The
        // errors of the factors double this error. The relative error on the diagonal is the same. L's cells have U's
        // errors divided by a pivot of at least 8, plus the errors of the reciprocal (2^-23) and the product.
        let unit = 1.0 / (1 << 23) as f32;
        let upper = Bound { relative: side as f32 * unit, absolute: 3.0 * side as f32 * unit };
        let lower = Bound { relative: (side as f32 + 4.0) * unit, absolute: 3.0 / 8.0 * side as f32 * unit };
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
