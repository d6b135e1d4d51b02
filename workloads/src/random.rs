//! Generates inputs from a seed.

/// Increment of the state.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// An input generator (SplitMix64). The same seed results in the same numbers in guests and on the host, and a sequence
/// can be generated from any position.
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64-bit number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns the next 32-bit word.
    pub fn word(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// Skips a number of words.
    pub fn skip(&mut self, words: u64) {
        self.0 = self.0.wrapping_add(words.wrapping_mul(STEP));
    }

    /// Returns a number below `end`, which must not be 0.
    pub fn below(&mut self, end: u32) -> u32 {
        ((u64::from(self.word()) * u64::from(end)) >> 32) as u32
    }

    /// Returns a float from 0 (inclusive) to 1 (exclusive).
    pub fn unit(&mut self) -> f32 {
        (self.word() >> 8) as f32 / (1 << 24) as f32
    }

    /// Returns `count` words.
    pub fn words(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.word()).collect()
    }

    /// Returns `count` floats from 0 (inclusive) to 1 (exclusive).
    pub fn units(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.unit()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipping_is_taking() {
        let mut taken = Random::new(9);
        let words = taken.words(100);
        let mut skipped = Random::new(9);
        skipped.skip(90);
        assert_eq!(skipped.words(10), words[90..]);
        assert_eq!(skipped.next_u64(), taken.next_u64());
    }
}
