//! Test data: randomly accessible byte streams, and the expected contents of a buffer.
//!
//! The 64-bit word `i` of stream `seed` is output `i + 1` of splitmix64 with this seed, in little-endian order. A byte
//! that was copied from a wrong address, or not copied, is detected with a probability of 255/256.

use anyhow::{Result, bail};

/// A stream of test bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(pub u64);

impl Stream {
    fn word(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Fills `out` with the stream's bytes starting at `offset`.
    pub fn fill(self, offset: u64, out: &mut [u8]) {
        let shift = (offset % 8) as u32 * 8;
        let mut index = offset / 8;
        let mut low = self.word(index);
        for chunk in out.chunks_mut(8) {
            let word = if shift == 0 {
                let word = low;
                index += 1;
                low = self.word(index);
                word
            } else {
                index += 1;
                let high = self.word(index);
                let word = low >> shift | high << (64 - shift);
                low = high;
                word
            };
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        }
    }
}

/// Computes the finishing function of splitmix64.
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// Random numbers for choosing cases and seeds. Based on [`mix`], which also generates the test data.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// Returns a random number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a random number below `bound`, or 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// Returns a new random stream.
    pub fn stream(&mut self) -> Stream {
        Stream(self.next())
    }
}

/// A range of a buffer, filled from a range of a stream.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// Offset in the buffer, in bytes.
    pub at: u64,
    /// Length in bytes.
    pub length: u64,
    /// Stream that provides the contents.
    pub stream: Stream,
    /// Offset in the stream, in bytes.
    pub from: u64,
}

/// Expected contents of a buffer: a background overlaid with ranges. Later ranges overlay earlier ones.
#[derive(Debug, Clone)]
pub struct Expected {
    background: Stream,
    pieces: Vec<Piece>,
}

impl Expected {
    /// Creates contents in which byte `i` of the buffer is byte `i` of the stream.
    pub fn background(background: Stream) -> Self {
        Self { background, pieces: Vec::new() }
    }

    /// Overlays the contents with a range.
    pub fn put(&mut self, piece: Piece) {
        if piece.length > 0 {
            self.pieces.push(piece);
        }
    }

    /// Fills `out` with the expected bytes starting at `offset`.
    pub fn fill(&self, offset: u64, out: &mut [u8]) {
        self.background.fill(offset, out);
        let end = offset + out.len() as u64;
        for piece in &self.pieces {
            let (start, stop) = (piece.at.max(offset), (piece.at + piece.length).min(end));
            if start < stop {
                let place = (start - offset) as usize..(stop - offset) as usize;
                piece.stream.fill(piece.from + (start - piece.at), &mut out[place]);
            }
        }
    }

    /// Checks `found`, which was read at `offset` of the named memory.
    pub fn check(&self, what: &str, offset: u64, found: &[u8]) -> Result<()> {
        let mut wanted = vec![0; found.len()];
        self.fill(offset, &mut wanted);
        if wanted == found {
            return Ok(());
        }
        let wrong = wanted.iter().zip(found).filter(|(wanted, found)| wanted != found).count();
        let first = wanted.iter().zip(found).position(|(wanted, found)| wanted != found).unwrap_or(0);
        let stop = found.len().min(first + 16);
        bail!(
            "{what}: byte {:#x} is wrong: wanted {:02x?}, found {:02x?} ({wrong} of these {} bytes differ)",
            offset + first as u64,
            &wanted[first..stop],
            &found[first..stop],
            found.len(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_words_are_those_of_splitmix64() {
        // The values are a published test vector, with seed 1234567.
        let mut bytes = [0; 24];
        Stream(1_234_567).fill(0, &mut bytes);
        let words: Vec<u64> =
            bytes.chunks(8).map(|chunk| u64::from_le_bytes(chunk.try_into().expect("8 bytes"))).collect();
        assert_eq!(words, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn any_piece_equals_the_same_piece_of_the_whole() {
        let mut whole = vec![0; 100];
        Stream(7).fill(0, &mut whole);
        for offset in 0..40 {
            for length in [0, 1, 7, 8, 9, 60] {
                let mut piece = vec![0; length];
                Stream(7).fill(offset, &mut piece);
                assert_eq!(piece, whole[offset as usize..offset as usize + length], "{offset} {length}");
            }
        }
    }

    #[test]
    fn pieces_cover_the_background_and_later_ones_the_earlier() {
        let mut expected = Expected::background(Stream(1));
        expected.put(Piece { at: 10, length: 20, stream: Stream(2), from: 5 });
        expected.put(Piece { at: 20, length: 4, stream: Stream(3), from: 0 });
        let mut all = vec![0; 40];
        expected.fill(0, &mut all);
        let byte = |stream: Stream, at: u64| {
            let mut out = [0];
            stream.fill(at, &mut out);
            out[0]
        };
        assert_eq!(all[9], byte(Stream(1), 9));
        assert_eq!(all[10], byte(Stream(2), 5));
        assert_eq!(all[20], byte(Stream(3), 0));
        assert_eq!(all[24], byte(Stream(2), 19));
        assert_eq!(all[30], byte(Stream(1), 30));
        expected.check("whole", 0, &all).expect("equal to itself");
        expected.check("piece", 15, &all[15..25]).expect("a piece of it");
    }

    #[test]
    fn a_wrong_byte_is_named() {
        let expected = Expected::background(Stream(1));
        let mut found = vec![0; 64];
        expected.fill(32, &mut found);
        found[5] ^= 1;
        let error = expected.check("dst", 32, &found).expect_err("one bit differs").to_string();
        assert!(error.contains("byte 0x25"), "{error}");
        assert!(error.contains("1 of these 64"), "{error}");
    }
}
