//! Copies large amounts of memory with non-temporal stores. An ordinary store first reads the cache line that it
//! overwrites, which costs large copies from the card a third of the memory bandwidth.
//!
//! UNSAFETY: copies between addresses that the callers pass.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

/// Minimum size in bytes of a copy that should use this module. Ordinary copies of this size would evict most of the
/// program's data from the caches.
pub const MIN_BYTES: u64 = 8 << 20;

/// Size of a vector in bytes.
const VECTOR: usize = size_of::<__m128i>();
/// Number of vectors per cache line.
const VECTORS: usize = 4;

/// Copies bytes between non-overlapping ranges.
///
/// # Safety
/// Both ranges must be valid for `bytes` bytes.
pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    let head = to.align_offset(VECTOR * VECTORS).min(bytes);
    let lines = (bytes - head) / (VECTOR * VECTORS);
    let tail = head + lines * VECTOR * VECTORS;
    // SAFETY: the parts are within the ranges. The destination of each vector is aligned.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for line in 0..lines {
            let at = head + line * VECTOR * VECTORS;
            let (source, place) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
            let vectors: [__m128i; VECTORS] = std::array::from_fn(|n| _mm_loadu_si128(source.add(n)));
            for (n, vector) in vectors.into_iter().enumerate() {
                _mm_stream_si128(place.add(n), vector);
            }
        }
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), bytes - tail);
        // Order the copied bytes before this thread's later stores, which may publish them.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_any_length_and_alignment_are_copied() {
        let source: Vec<u8> = (0..1000u32).map(|at| (at * 7) as u8).collect();
        for (offset, bytes) in [(0, 0), (1, 10), (0, 64), (3, 63), (5, 200), (63, 900), (64, 128), (17, 983)] {
            let mut place = vec![0xee_u8; 1100];
            // SAFETY: both ranges are within the vectors.
            unsafe { copy(source.as_ptr().add(1000 - bytes), place.as_mut_ptr().add(offset), bytes) };
            assert_eq!(place[offset..offset + bytes], source[1000 - bytes..], "{offset} {bytes}");
            let around = place[..offset].iter().chain(&place[offset + bytes..]);
            assert!(around.into_iter().all(|byte| *byte == 0xee), "{offset} {bytes}: other bytes are unchanged");
        }
    }
}
