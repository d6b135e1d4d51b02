//! Temperature of a chip, as a stencil computation over several time steps, with heat from each cell's power.

use crate::{Bound, Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

/// Total number of time steps.
const TIME_STEPS: u32 = 5;
/// Number of time steps per launch. The last launch has one step fewer.
const LAUNCH_STEPS: u32 = 2;
/// Side of a block's tile in cells.
const TILE: u32 = 16;
/// Side of the part of a tile that is still valid after a launch, in cells.
const STRIDE: u32 = TILE - 2 * LAUNCH_STEPS;
/// Conductance to each neighboring cell in the x direction.
const ALONG_X: f32 = 1.0;
/// Conductance to each neighboring cell in the y direction.
const ALONG_Y: f32 = 0.75;
/// Conductance to the environment.
const AMBIENT_WEIGHT: f32 = 0.0625;
/// Temperature of the environment.
const AMBIENT: f32 = 80.0;
/// Temperature increase per unit of heat.
const WARMING: f32 = 0.125;

/// Cells with temperatures from 80 to 180 and powers from 0 to 16.
#[derive(Debug)]
pub(crate) struct Hotspot {
    side: u32,
    temperatures: Vec<f32>,
    powers: Vec<f32>,
}

impl Hotspot {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        let (side, mut random) = (crate::side(64, scale), Random::new(seed));
        let count = (side * side) as usize;
        let temperatures = random.units(count).iter().map(|unit| AMBIENT + 100.0 * unit).collect();
        Self { side, temperatures, powers: random.units(count).iter().map(|unit| 16.0 * unit).collect() }
    }

    /// Returns the temperatures after a step, in double precision.
    fn step(&self, before: &[f64]) -> Vec<f64> {
        let side = self.side as usize;
        let mut after = Vec::with_capacity(before.len());
        for (row, column) in (0..side).flat_map(|row| (0..side).map(move |column| (row, column))) {
            let at = |row: usize, column: usize| before[row * side + column];
            let own = at(row, column);
            let x = at(row, column.saturating_sub(1)) + at(row, (column + 1).min(side - 1)) - 2.0 * own;
            let y = at(row.saturating_sub(1), column) + at((row + 1).min(side - 1), column) - 2.0 * own;
            let heat = f64::from(self.powers[row * side + column])
                + x * f64::from(ALONG_X)
                + y * f64::from(ALONG_Y)
                + (f64::from(AMBIENT) - own) * f64::from(AMBIENT_WEIGHT);
            after.push(own + heat * f64::from(WARMING));
        }
        after
    }
}

impl Workload for Hotspot {
    fn name(&self) -> &'static str {
        "hotspot"
    }

    fn size(&self) -> String {
        format!("{0}x{0}, {TIME_STEPS} steps", self.side)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/hotspot.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        // The launches alternate between two buffers. Their number is odd, so the second buffer contains the result.
        let after = Slot::scratch("temperatures", size_of_val(&*self.temperatures) as u64).output();
        vec![Slot::floats("powers", &self.powers), Slot::floats("before", &self.temperatures), after]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [powers, mut before, mut after] = setup.buffers()?;
        let blocks = self.side.div_ceil(STRIDE);
        for first in (0..TIME_STEPS).step_by(LAUNCH_STEPS as usize) {
            let steps = LAUNCH_STEPS.min(TIME_STEPS - first);
            let params = Params::new()
                .word(self.side)
                .word(steps)
                .float(ALONG_X)
                .float(ALONG_Y)
                .float(AMBIENT_WEIGHT)
                .float(AMBIENT);
            let params = params.float(WARMING).buffer(powers).buffer(before).buffer(after);
            let grid = Grid::plane([blocks; 2], [TILE; 2]);
            setup.launch(gpu, "hotspot", grid, &params, &[powers, before, after])?;
            (before, after) = (after, before);
        }
        Ok(())
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let mut temperatures: Vec<f64> = self.temperatures.iter().copied().map(f64::from).collect();
        for _ in 0..TIME_STEPS {
            temperatures = self.step(&temperatures);
        }
        // The new temperature is a mean of the old ones with non-negative weights, plus heat, so earlier errors do not
        // grow. In units of 2^-24 of the highest temperature, the rounding errors of a step's heat total 16 and are
        // multiplied by an eighth, and the rounding error of the sum is 1. The highest temperature is 2.4 times the
        // lowest.
        let bound = Bound { relative: 8.0 * TIME_STEPS as f32 / (1 << 24) as f32, absolute: 0.0 };
        let expected: Vec<f32> = temperatures.iter().map(|value| *value as f32).collect();
        results.same_floats("temperatures", &expected, bound)
    }
}
