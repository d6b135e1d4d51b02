//! Speckle-reducing anisotropic diffusion, second version. Uses tiles in shared memory, and statistics that the CPU
//! computes for a part of the image.

use crate::srad::{DIFFUSION_RATE, diffused, error, speckled, variation};
use crate::{Bound, Gpu, Grid, Params, Results, Setup, Slot, Workload};
use anyhow::Result;

const ITERATIONS: u32 = 2;
/// Side of a tile in pixels.
const TILE: u32 = 16;
/// Number of image rows that contain no variation other than speckle, because they show only the surroundings.
const SAMPLE_ROWS: u32 = 16;

/// An image with values from 1 to e.
#[derive(Debug)]
pub(crate) struct Srad2 {
    side: u32,
    image: Vec<f32>,
}

impl Srad2 {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        let side = crate::side(64, scale);
        Self { side, image: speckled(side, seed).iter().map(|pixel| pixel.exp()).collect() }
    }

    fn sample(&self) -> usize {
        (SAMPLE_ROWS * self.side) as usize
    }
}

/// Returns the variation of the given pixels.
fn variation_of(pixels: impl Iterator<Item = f64>) -> f64 {
    let add = |(sum, squares, count), pixel| (sum + pixel, squares + pixel * pixel, count + 1);
    let (sum, squares, count) = pixels.fold((0.0, 0.0, 0), add);
    variation(sum, squares, count)
}

impl Workload for Srad2 {
    fn name(&self) -> &'static str {
        "srad2"
    }

    fn size(&self) -> String {
        format!("{0}x{0}, {ITERATIONS} iterations", self.side)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/srad2.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let bytes = size_of_val(&*self.image) as u64;
        let mut slots = vec![Slot::floats("image", &self.image).output()];
        slots.extend(["coefficients", "north", "south", "west", "east"].map(|name| Slot::scratch(name, bytes)));
        slots
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let uses: [_; 6] = setup.buffers()?;
        let grid = Grid::plane([self.side / TILE; 2], [TILE; 2]);
        for _ in 0..ITERATIONS {
            let mut sample = vec![0; self.sample() * size_of::<f32>()];
            gpu.download(uses[0], 0, &mut sample)?;
            let q = variation_of(crate::bytes_to_floats(&sample).into_iter().map(f64::from));
            let params = Params::new().word(self.side).float(q as f32).float((1.0 / (q * (1.0 + q))) as f32);
            let params = uses.into_iter().fold(params.float(DIFFUSION_RATE), Params::buffer);
            setup.launch(gpu, "coefficients", grid, &params, &uses)?;
            setup.launch(gpu, "diffuse", grid, &params, &uses)?;
        }
        Ok(())
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let mut image: Vec<f64> = self.image.iter().copied().map(f64::from).collect();
        for _ in 0..ITERATIONS {
            let q = variation_of(image[..self.sample()].iter().copied());
            image = diffused(&image, self.side as usize, q);
        }
        let expected: Vec<f32> = image.iter().map(|pixel| *pixel as f32).collect();
        // The CPU computes the statistics in double precision, so their error is due only to the pixels' errors.
        let relative = error(0.0, 256.0, ITERATIONS) / (1 << 24) as f32;
        results.same_floats("image", &expected, Bound { relative, absolute: 0.0 })
    }
}
