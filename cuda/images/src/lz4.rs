//! Decompression of LZ4 blocks.

use crate::Unreadable;

/// Shortest match.
const MIN_MATCH: usize = 4;

/// The compressed bytes.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Result<u8, Unreadable> {
        let (first, rest) = self.0.split_first().ok_or(Unreadable::Malformed)?;
        self.0 = rest;
        Ok(*first)
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Unreadable> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(Unreadable::Malformed)?;
        self.0 = rest;
        Ok(bytes)
    }

    /// Reads the rest of a length, whose first four bits are in a token.
    fn length(&mut self, bits: u8) -> Result<usize, Unreadable> {
        let mut length = usize::from(bits);
        if bits < 15 {
            return Ok(length);
        }
        loop {
            let next = self.byte()?;
            length = length.checked_add(usize::from(next)).ok_or(Unreadable::Malformed)?;
            if next < u8::MAX {
                return Ok(length);
            }
        }
    }
}

/// Unpacks a block of `size` bytes.
///
/// # Errors
/// Returns an error if the input ends before this size, or a sequence exceeds it.
pub fn unpack(packed: &[u8], size: usize) -> Result<Vec<u8>, Unreadable> {
    let mut input = Input(packed);
    // A byte of input stands for at most 255 bytes of output.
    if size / 255 > packed.len() {
        return Err(Unreadable::Malformed);
    }
    let mut output = Vec::with_capacity(size);
    loop {
        let token = input.byte()?;
        let literals = input.length(token >> 4)?;
        if literals > size - output.len() {
            return Err(Unreadable::Malformed);
        }
        output.extend_from_slice(input.bytes(literals)?);
        // The last sequence has only literals.
        if output.len() == size {
            return Ok(output);
        }
        let distance = usize::from(input.byte()?) | usize::from(input.byte()?) << 8;
        let count = input.length(token & 15)?.checked_add(MIN_MATCH).ok_or(Unreadable::Malformed)?;
        if distance == 0 || distance > output.len() || count > size - output.len() {
            return Err(Unreadable::Malformed);
        }
        let mut rest = count;
        while rest > 0 {
            // The match may overlap its own copy.
            let first = output.len() - distance;
            let part = rest.min(distance);
            output.extend_from_within(first..first + part);
            rest -= part;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_with_literals_and_matches_are_unpacked() {
        assert_eq!(unpack(b"\x30abc", 3).as_deref(), Ok(&b"abc"[..]));
        // One literal, a match of ten bytes at distance one, and five literals.
        assert_eq!(unpack(b"\x16a\x01\x00\x50bcdef", 16).as_deref(), Ok(&b"aaaaaaaaaaabcdef"[..]));
        // 15 + 255 + 1 literals.
        let literals = [b'x'; 271];
        let long = [&[0xf0, 255, 1][..], &literals].concat();
        assert_eq!(unpack(&long, 271).as_deref(), Ok(&literals[..]));
        // A match of 4 + 15 + 3 bytes that overlaps its copy.
        let mut expected = b"ab".repeat(12);
        expected.extend(b"c");
        assert_eq!(unpack(b"\x2fab\x02\x00\x03\x10c", 25), Ok(expected));
    }

    #[test]
    fn blocks_of_another_size_are_malformed() {
        let block = b"\x16a\x01\x00\x50bcdef";
        for size in [0, 2, 10, 15, 17, 1000, usize::MAX] {
            assert_eq!(unpack(block, size), Err(Unreadable::Malformed), "{size}");
        }
        for length in 0..block.len() {
            assert_eq!(unpack(&block[..length], 16), Err(Unreadable::Malformed), "{length}");
        }
        assert_eq!(unpack(b"\x16a\x02\x00\x50bcdef", 16), Err(Unreadable::Malformed), "a distance before the start");
        assert_eq!(unpack(b"\x16a\x00\x00\x50bcdef", 16), Err(Unreadable::Malformed), "a distance of zero");
    }
}
