//! A working set of a given size, which kernels and copies read and write completely and repeatedly.
//!
//! The set consists of buffers of equal size and a spare buffer. A pass processes the buffers in order. The copy engine
//! copies each buffer to the spare one, a kernel mixes every word of the copy with the word at the same offset in the
//! previous buffer, and the copied buffer becomes the next spare one. A final word therefore depends on the words at
//! its offset in all buffers, and one lost or stale word corrupts all later words.

use crate::{Buffer, Gpu, Grid, Params, Random, Results, Setup, Slot, Workload, compare_words};
use anyhow::{Context, Result};

/// Default size of the working set in bytes at scale 1.
const BYTES: u64 = 256 << 10;
/// Default number of passes.
const PASSES: u32 = 3;
/// Minimum size of a buffer in bytes.
const MIN_BUFFER_BYTES: u64 = 64 << 10;
/// Maximum number of buffers, excluding the spare buffer.
const MOST_BUFFERS: u64 = 64;
/// Number of threads per block.
const BLOCK: u32 = 512;
/// Number of words per buffer, at the same offsets, that the CPU computes at a time.
const COLUMNS: usize = 4096;
/// Mixing factor. The kernel uses the same constant.
const FACTOR: u32 = 0x9e37_79b1;
/// In each pass, the product of this value and the pass number, starting at 1, is XORed with the previous buffer's
/// words.
const KEY: u32 = 0x85eb_ca6b;

/// The working set.
#[derive(Debug)]
pub(crate) struct MemoryHungry {
    /// Number of buffers, excluding the spare buffer.
    count: usize,
    /// Size of each buffer in bytes.
    piece: u64,
    passes: u32,
    seed: u64,
}

impl MemoryHungry {
    pub(crate) fn new(scale: u32, seed: u64, working_set: Option<u64>, passes: Option<u32>) -> Self {
        let bytes = working_set.unwrap_or(BYTES * u64::from(scale));
        // Due to rounding and the minimum sizes, the working set may be larger than requested.
        let piece = bytes.div_ceil(MOST_BUFFERS).next_multiple_of(4096).max(MIN_BUFFER_BYTES);
        let count = bytes.div_ceil(piece).clamp(2, MOST_BUFFERS) as usize;
        Self { count, piece, passes: passes.unwrap_or(PASSES).max(1), seed }
    }

    /// Returns the initial contents of a buffer.
    fn input(&self, index: usize) -> Random {
        let mut random = Random::new(self.seed);
        random.skip(index as u64 * (self.piece / 4));
        random
    }

    /// Returns the final slot of each buffer, followed by the spare slot. Calls `then` for each step with the pass, the
    /// source, the target, and the previous buffer.
    fn steps(&self, mut then: impl FnMut(u32, usize, usize, usize) -> Result<()>) -> Result<Vec<usize>> {
        let (mut places, mut spare): (Vec<usize>, usize) = ((0..self.count).collect(), self.count);
        for pass in 0..self.passes {
            for index in 0..self.count {
                let before = places[(index + self.count - 1) % self.count];
                then(pass, places[index], spare, before)?;
                std::mem::swap(&mut places[index], &mut spare);
            }
        }
        places.push(spare);
        Ok(places)
    }

    /// Returns the final contents of all buffers, for `words` words starting at `first`. The spare buffer comes last.
    /// It contains the last buffer's contents before the last step.
    fn expected(&self, first: u64, words: usize) -> Vec<Vec<u32>> {
        let column = |index| {
            let mut random = self.input(index);
            random.skip(first);
            random.words(words)
        };
        let mut state: Vec<Vec<u32>> = (0..self.count).map(column).collect();
        let mut spare = Vec::new();
        for pass in 0..self.passes {
            for index in 0..self.count {
                let before = state[(index + self.count - 1) % self.count].clone();
                spare.clone_from(&state[index]);
                for (word, before) in state[index].iter_mut().zip(before) {
                    *word = word.rotate_left(7).wrapping_mul(FACTOR).wrapping_add(before ^ key(pass));
                }
            }
        }
        state.push(spare);
        state
    }
}

fn key(pass: u32) -> u32 {
    KEY.wrapping_mul(pass.wrapping_add(1))
}

fn name(slot: usize) -> String {
    format!("buffer{slot}")
}

impl Workload for MemoryHungry {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn size(&self) -> String {
        format!("{}KiBx{}", (self.piece >> 10) * self.count as u64, self.passes)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/memory.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let filled = (0..self.count).map(|index| Slot::random(name(index), self.piece, self.input(index)).output());
        filled.chain([Slot::scratch(name(self.count), self.piece).output()]).collect()
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let words = u32::try_from(self.piece / 4)?;
        let buffer = |slot: usize| -> Result<Buffer> { setup.all_buffers().get(slot).copied().context("a buffer") };
        self.steps(|pass, source, target, before| {
            let (source, target, before) = (buffer(source)?, buffer(target)?, buffer(before)?);
            gpu.copy(source, target, self.piece)?;
            let params = Params::new().word(words).word(key(pass)).buffer(target).buffer(before);
            setup.launch(gpu, "mix", Grid::line(words, BLOCK), &params, &[target, before])
        })?;
        Ok(())
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let places = self.steps(|_, _, _, _| Ok(()))?;
        let found = places.iter().map(|slot| results.bytes(&name(*slot))).collect::<Result<Vec<_>>>()?;
        let (words, mut verified) = ((self.piece / 4) as usize, 0);
        for first in (0..words).step_by(COLUMNS) {
            let count = COLUMNS.min(words - first);
            for (index, expected) in self.expected(first as u64, count).iter().enumerate() {
                let found = crate::bytes_to_words(&found[index][first * 4..][..count * 4]);
                let what = format!("buffer {index} from word {first}");
                verified += compare_words(&what, &found, expected)?;
            }
        }
        Ok(verified)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn working_set_has_requested_size_in_bounded_buffer_count() {
        for bytes in [1, 4096, 1 << 20, 100 << 20, (2 << 30) + 1] {
            let memory = MemoryHungry::new(1, 1, Some(bytes), None);
            let all = memory.piece * memory.count as u64;
            assert!(
                all >= bytes && all <= (bytes + (bytes >> 4)).max(2 * MIN_BUFFER_BYTES) + 64 * 4096,
                "{bytes}: {all}"
            );
            assert!((2..=64).contains(&memory.count) && memory.piece.is_multiple_of(4096));
        }
    }

    #[test]
    fn places_are_independent_and_each_buffer_has_its_slot() {
        let memory = MemoryHungry::new(1, 5, Some(3 * MIN_BUFFER_BYTES), Some(2));
        let (whole, part) = (memory.expected(0, 8), memory.expected(3, 2));
        assert_eq!(whole.len(), 4);
        assert!(whole.iter().zip(&part).all(|(whole, part)| whole[3..5] == part[..]));
        assert_eq!(memory.steps(|_, _, _, _| Ok(())).expect("steps"), [2, 3, 0, 1]);
    }
}
