//! Nearest neighbours. Computes the distances between records and points. The CPU selects the smallest ones.

use crate::{Bound, Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

/// Number of query points.
const POINTS: usize = 4;
/// Number of neighbours of each point.
const NEIGHBOURS: usize = 10;
const THREADS: u32 = 256;
/// The error consists of four roundings of 2^-24 before the square root, which halves them, two units in the last place
/// (2^-22) of the hardware's reciprocal square root, and one more rounding. The sum is less than 2^-21.
const BOUND: Bound = Bound { relative: 1.0 / (1 << 21) as f32, absolute: 0.0 };

/// Records and query points in the unit square.
#[derive(Debug)]
pub(crate) struct Nn {
    /// x and y coordinates of each record.
    records: Vec<f32>,
    points: Vec<[f32; 2]>,
}

impl Nn {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        let mut random = Random::new(seed);
        // Leave some threads of the last block without a record.
        let records = random.units(2 * (8192 * scale as usize - 100));
        // One point is also a record, so its distance is zero.
        let mut points = vec![[records[0], records[1]]];
        points.resize_with(POINTS, || [random.unit(), random.unit()]);
        Self { records, points }
    }

    fn count(&self) -> usize {
        self.records.len() / 2
    }
}

/// Returns the indices and distances of the [`NEIGHBOURS`] nearest records, nearest first.
fn nearest(distances: &[f32]) -> Vec<(usize, f32)> {
    let mut all: Vec<(usize, f32)> = distances.iter().copied().enumerate().collect();
    let (least, ..) = all.select_nth_unstable_by(NEIGHBOURS, |a, b| a.1.total_cmp(&b.1));
    least.sort_by(|a, b| a.1.total_cmp(&b.1));
    least.to_vec()
}

impl Workload for Nn {
    fn name(&self) -> &'static str {
        "nn"
    }

    fn size(&self) -> String {
        format!("{} records, {POINTS} points", self.count())
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/nn.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let bytes = self.count() * POINTS * size_of::<f32>();
        vec![Slot::floats("records", &self.records), Slot::scratch("distances", bytes as u64).output()]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [records, distances] = setup.buffers()?;
        let count = self.count();
        for (index, [x, y]) in self.points.iter().enumerate() {
            let row = distances.address + (index * count * size_of::<f32>()) as u64;
            let params = Params::new().word(count as u32).float(*x).float(*y).buffer(records).address(row);
            setup.launch(gpu, "nn", Grid::line(count as u32, THREADS), &params, &[records, distances])?;
        }
        Ok(())
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let distance = |record: &[f32], [x, y]: [f32; 2]| {
            (f64::from(record[0]) - f64::from(x)).hypot(f64::from(record[1]) - f64::from(y)) as f32
        };
        let of = |point: [f32; 2]| self.records.chunks(2).map(move |record| distance(record, point));
        let expected: Vec<f32> = self.points.iter().copied().flat_map(of).collect();
        let verified = results.same_floats("distances", &expected, BOUND)?;
        // Records with distances that are equal within the bound may be swapped, because the distances still agree.
        let found = results.floats("distances")?;
        for (found, expected) in found.chunks(self.count()).zip(expected.chunks(self.count())) {
            let (found, expected): (Vec<f32>, Vec<f32>) = nearest(found)
                .iter()
                .zip(nearest(expected))
                .map(|((at, _), (_, least))| (expected[*at], least))
                .unzip();
            // The bound applies twice: to the selected record and to the other record.
            let bound = Bound { relative: 2.5 * BOUND.relative, ..BOUND };
            crate::compare_floats("the neighbours' distances", &found, &expected, bound)?;
        }
        Ok(verified)
    }
}
