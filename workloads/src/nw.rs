//! Needleman-Wunsch, which computes alignment scores of two letter sequences.

use crate::{Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

/// Side of a tile in letters, and number of threads per block.
const TILE: u32 = 32;
/// Number of letters in the alphabet.
const LETTERS: u32 = 24;
/// Amount subtracted from a score for each gap.
const GAP_PENALTY: i32 = 10;

/// Two sequences of equal length, and the similarity of each pair of letters.
#[derive(Debug)]
pub(crate) struct Nw {
    length: u32,
    across: Vec<u32>,
    down: Vec<u32>,
    similarity: Vec<i32>,
}

impl Nw {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        let (length, mut random) = (crate::side(192, scale).next_multiple_of(TILE), Random::new(seed));
        let mut letters = || (0..length).map(|_| random.below(LETTERS)).collect();
        let (across, down) = (letters(), letters());
        // Values are from -4 to 11, as in the usual tables.
        let similarity = (0..LETTERS * LETTERS).map(|_| random.below(16).cast_signed() - 4).collect();
        Self { length, across, down, similarity }
    }

    fn stride(&self) -> u32 {
        self.length + 1
    }
}

fn words(values: &[i32]) -> Vec<u32> {
    values.iter().map(|value| value.cast_unsigned()).collect()
}

impl Workload for Nw {
    fn name(&self) -> &'static str {
        "nw"
    }

    fn size(&self) -> String {
        format!("{0}x{0}", self.length)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/nw.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        // The first row and column contain the scores of alignments with an empty sequence.
        let stride = self.stride() as usize;
        let mut scores = vec![0; stride * stride];
        for gaps in 0..stride {
            scores[gaps] = -GAP_PENALTY * gaps as i32;
            scores[gaps * stride] = -GAP_PENALTY * gaps as i32;
        }
        vec![
            Slot::words("scores", &words(&scores)).output(),
            Slot::words("across", &self.across),
            Slot::words("down", &self.down),
            Slot::words("similarity", &words(&self.similarity)),
        ]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let buffers @ [scores, across, down, similarity] = setup.buffers()?;
        let tiles = self.length / TILE;
        for diagonal in 0..2 * tiles - 1 {
            let first = diagonal.saturating_sub(tiles - 1);
            let last = diagonal.min(tiles - 1);
            let params = Params::new().word(self.stride()).word(diagonal).word(first).word(GAP_PENALTY.cast_unsigned());
            let params = params.buffer(scores).buffer(across).buffer(down).buffer(similarity);
            setup.launch(gpu, "nw", Grid::line((last - first + 1) * TILE, TILE), &params, &buffers)?;
        }
        Ok(())
    }

    fn check(&self, results: &Results) -> Result<u64> {
        // Compute the table row by row.
        let mut expected: Vec<i32> = (0..=self.length).map(|gaps| -GAP_PENALTY * gaps.cast_signed()).collect();
        let mut above = expected.clone();
        for (row, down) in self.down.iter().enumerate() {
            let mut scores = vec![-GAP_PENALTY * (row as i32 + 1)];
            for (column, across) in self.across.iter().enumerate() {
                let aligned = above[column] + self.similarity[(across * LETTERS + down) as usize];
                scores.push(aligned.max(above[column + 1] - GAP_PENALTY).max(scores[column] - GAP_PENALTY));
            }
            expected.extend(&scores);
            above = scores;
        }
        results.same_words("scores", &words(&expected))
    }
}
