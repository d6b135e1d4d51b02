//! Splits accesses into naturally aligned parts of at most 8 bytes.

/// Maximum size of an access passed to a device, in bytes.
const MAX_PIECE: usize = 8;

/// Returns the length of the first part of `len` bytes at `offset`: the largest power of two up to 8 that fits and that
/// divides the offset.
pub fn piece(offset: u64, len: usize) -> usize {
    let aligned = 1usize << offset.trailing_zeros().min(3);
    let fits = 1usize << len.max(1).ilog2();
    aligned.min(fits).min(MAX_PIECE)
}

/// Returns the offset after `len` bytes at `offset`.
pub fn next(offset: u64, len: usize) -> u64 {
    offset.saturating_add(u64::try_from(len).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(offset: u64, len: usize) -> Vec<(u64, usize)> {
        let (mut at, mut rest, mut all) = (offset, len, vec![]);
        while rest != 0 {
            let piece = piece(at, rest);
            all.push((at, piece));
            at = next(at, piece);
            rest -= piece;
        }
        all
    }

    #[test]
    fn aligned_accesses_stay_whole() {
        for len in [1, 2, 4, 8] {
            assert_eq!(pieces(0x18, len), [(0x18, len)]);
        }
    }

    #[test]
    fn unaligned_and_odd_accesses_are_cut_into_aligned_pieces() {
        assert_eq!(pieces(3, 4), [(3, 1), (4, 2), (6, 1)]);
        assert_eq!(pieces(4, 8), [(4, 4), (8, 4)]);
        assert_eq!(pieces(0, 7), [(0, 4), (4, 2), (6, 1)]);
        assert_eq!(pieces(0, 20), [(0, 8), (8, 8), (16, 4)]);
    }
}
