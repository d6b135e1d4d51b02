//! Speckle-reducing anisotropic diffusion, first version. Computes the image's exponential, statistics of the whole
//! image (with a reduction on the device), and the image's logarithm.

use crate::{Bound, Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

const ITERATIONS: u32 = 2;
/// Weight of the sum of a pixel's scaled differences from the four adjacent pixels, in each iteration.
pub(crate) const DIFFUSION_RATE: f32 = 0.5 / 4.0;
/// Number of threads in a one-dimensional block.
const THREADS: u32 = 256;
/// Number of values summed by a one-dimensional block.
const BLOCK_SUMS: u32 = 512;
/// Dimensions of a two-dimensional block in threads.
const PATCH: [u32; 2] = [32, 8];

/// An image with values from 0 to 255.
#[derive(Debug)]
pub(crate) struct Srad {
    side: u32,
    image: Vec<f32>,
}

/// Returns a noisy image with values below 1, a bright centre and darker surroundings.
pub(crate) fn speckled(side: u32, seed: u64) -> Vec<f32> {
    let (mut random, middle) = (Random::new(seed), side / 4..side / 4 * 3);
    let pixels = (0..side).flat_map(|row| (0..side).map(move |column| (row, column)));
    let bright = |(row, column)| middle.contains(&row) && middle.contains(&column);
    pixels.map(|pixel| if bright(pixel) { 0.5 + 0.5 * random.unit() } else { 0.5 * random.unit() }).collect()
}

/// Returns an image's variance relative to the square of its mean, which is a measure of its speckle.
pub(crate) fn variation(sum: f64, squares: f64, count: usize) -> f64 {
    let mean = sum / count as f64;
    (squares / count as f64 - mean * mean) / (mean * mean)
}

/// Returns an image after an iteration, in double precision. `variation` is the measure of the image's speckle.
pub(crate) fn diffused(image: &[f64], side: usize, variation: f64) -> Vec<f64> {
    let near = |at: usize| {
        let (row, column) = (at / side, at % side);
        let (north, south) = (row.saturating_sub(1), (row + 1).min(side - 1));
        let (west, east) = (column.saturating_sub(1), (column + 1).min(side - 1));
        [north * side + column, south * side + column, row * side + west, row * side + east]
    };
    let coefficient = |at: usize| {
        let differences = near(at).map(|near| (image[near] - image[at]) / image[at]);
        let (gradient, laplacian) = (differences.map(|d| d * d).iter().sum::<f64>(), differences.iter().sum::<f64>());
        let q = (gradient / 2.0 - laplacian * laplacian / 16.0) / (1.0 + laplacian / 4.0).powi(2);
        (1.0 / (1.0 + (q - variation) / (variation * (1.0 + variation)))).clamp(0.0, 1.0)
    };
    let coefficients: Vec<f64> = (0..image.len()).map(coefficient).collect();
    let moved = |at: usize| {
        let [north, south, west, east] = near(at);
        let flow = |from: usize, by: usize| coefficients[by] * (image[from] - image[at]);
        image[at]
            + f64::from(DIFFUSION_RATE) * (flow(north, at) + flow(south, south) + flow(west, at) + flow(east, east))
    };
    (0..image.len()).map(moved).collect()
}

/// Returns a bound for a pixel's relative error after `iterations` iterations, for an initial error `before` and an
/// error `statistics` of the variation. All errors are in units of 2^-24.
///
/// This is a worst-case estimate. Pixels are from 1 to e. The relative error of a coefficient c is the sum of the
/// errors of q and the variation, apart from a factor below 1.2. The pixel changes by an eighth of c times the
/// differences, and the sum of the magnitudes of the differences is about 2. About a third of the variation's error
/// therefore affects the pixel. The error of q is the error of two pixels, doubled by the square, plus about 30 units,
/// so an iteration triples earlier errors. Rounding errors have both signs, so the pixels' errors on `simgpu` are less
/// than a hundredth of this bound.
pub(crate) fn error(before: f32, statistics: f32, iterations: u32) -> f32 {
    (0..iterations).fold(before, |error, _| 3.0 * error + statistics / 3.0 + 64.0)
}

impl Srad {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        // Choose a side that leaves some threads of the edge blocks without a pixel.
        let side = crate::side(64, scale) - 3;
        Self { side, image: speckled(side, seed).iter().map(|pixel| 255.0 * pixel).collect() }
    }

    fn count(&self) -> u32 {
        self.side * self.side
    }
}

impl Workload for Srad {
    fn name(&self) -> &'static str {
        "srad"
    }

    fn size(&self) -> String {
        format!("{0}x{0}, {ITERATIONS} iterations", self.side)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/srad.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let names = ["values", "squares", "coefficients", "north", "south", "west", "east"];
        let bytes = size_of_val(&*self.image) as u64;
        let mut slots = vec![Slot::floats("image", &self.image).output()];
        slots.extend(names.map(|name| Slot::scratch(name, bytes)));
        slots
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [image, values, squares, coefficients, north, south, west, east] = setup.buffers()?;
        let (count, line) = (self.count(), Grid::line(self.count(), THREADS));
        let plane = Grid::plane([self.side.div_ceil(PATCH[0]), self.side.div_ceil(PATCH[1])], PATCH);
        let whole = Params::new().word(count).buffer(image);
        setup.launch(gpu, "extract", line, &whole, &[image])?;
        for _ in 0..ITERATIONS {
            let params = whole.clone().buffer(values).buffer(squares);
            setup.launch(gpu, "prepare", line, &params, &[image, values, squares])?;
            let (mut left, mut stride) = (count, size_of::<f32>() as u32);
            while left > 1 {
                let params = Params::new().word(left).word(stride).buffer(values).buffer(squares);
                let blocks = left.div_ceil(BLOCK_SUMS);
                setup.launch(gpu, "reduce", Grid::line(blocks * THREADS, THREADS), &params, &[values, squares])?;
                (left, stride) = (blocks, stride * BLOCK_SUMS);
            }
            let mut sum = |of| -> Result<f64> {
                let mut bytes = [0; size_of::<f32>()];
                gpu.download(of, 0, &mut bytes)?;
                Ok(f32::from_le_bytes(bytes).into())
            };
            let q = variation(sum(values)?, sum(squares)?, count as usize);
            let uses = [image, coefficients, north, south, west, east];
            let params = Params::new().word(self.side).float(q as f32).float((1.0 / (q * (1.0 + q))) as f32);
            let params = uses.into_iter().fold(params.float(DIFFUSION_RATE), Params::buffer);
            setup.launch(gpu, "coefficients", plane, &params, &uses)?;
            setup.launch(gpu, "diffuse", plane, &params, &uses)?;
        }
        setup.launch(gpu, "compress", line, &whole, &[image])
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let mut image: Vec<f64> = self.image.iter().map(|pixel| (f64::from(*pixel) / 255.0).exp()).collect();
        for _ in 0..ITERATIONS {
            let squares = image.iter().map(|pixel| pixel * pixel).sum();
            let q = variation(image.iter().sum(), squares, image.len());
            image = diffused(&image, self.side as usize, q);
        }
        let expected: Vec<f32> = image.iter().map(|pixel| (255.0 * pixel.ln()) as f32).collect();
        // The error of e^x is up to 6 units, and the error of a sum is up to 22 more units, in a tree over four million
        // values. The relative error of the variance, which is a 15th of the mean of the squares, is below 2048 units.
        // The logarithm's absolute error is its argument's relative error, plus two units in its last place.
        let unit = 1.0 / (1 << 24) as f32;
        let bound = Bound { relative: 8.0 * unit, absolute: 255.0 * error(6.0, 2048.0, ITERATIONS) * unit };
        results.same_floats("image", &expected, bound)
    }
}
