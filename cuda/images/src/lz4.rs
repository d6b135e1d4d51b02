//! Decompression of untrusted LZ4 blocks.

use crate::Unreadable;

/// Maximum compression ratio of LZ4, rounded up.
const MAX_RATIO: usize = 255;

/// Decompresses a block to `size` bytes.
///
/// # Errors
/// Returns an error if the block is malformed or does not decompress to `size` bytes.
pub fn unpack(packed: &[u8], size: usize) -> Result<Vec<u8>, Unreadable> {
    // A small block must not cause a large allocation.
    if size / MAX_RATIO > packed.len() {
        return Err(Unreadable::Malformed);
    }
    let unpacked = lz4_flex::block::decompress(packed, size).map_err(|_| Unreadable::Malformed)?;
    if unpacked.len() == size { Ok(unpacked) } else { Err(Unreadable::Malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_with_literals_and_matches_are_unpacked() {
        assert_eq!(unpack(b"\x30abc", 3).as_deref(), Ok(&b"abc"[..]));
        // One literal, a match of ten bytes at offset 1, and five literals.
        assert_eq!(unpack(b"\x16a\x01\x00\x50bcdef", 16).as_deref(), Ok(&b"aaaaaaaaaaabcdef"[..]));
        // 15 + 255 + 1 literals.
        let literals = [b'x'; 271];
        let long = [&[0xf0, 255, 1][..], &literals].concat();
        assert_eq!(unpack(&long, 271).as_deref(), Ok(&literals[..]));
        // A match of 4 + 15 + 3 bytes that overlaps its own output.
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
        assert_eq!(unpack(b"\x16a\x02\x00\x50bcdef", 16), Err(Unreadable::Malformed), "an offset before the start");
        assert_eq!(unpack(b"\x16a\x00\x00\x50bcdef", 16), Err(Unreadable::Malformed), "an offset of zero");
    }
}
