//! A program whose copies of pageable memory follow failed calls.

use crate::{Cuda, Failed};
use std::time::Duration;

/// Number of failed copies, which is larger than the number of staging buffers of the guest library.
const FAILURES: usize = 64;
/// Size of a copy that uses one staging buffer.
const PIECE: usize = 256 << 10;
/// Size of a copy that several threads copy. It is not a multiple of a staging buffer's size.
const LARGE: usize = (24 << 20) + (PIECE << 1);
/// Time in which the result of an earlier call arrives.
const RESULT_TIME: Duration = Duration::from_millis(1);

/// Copies memory to the card after calls that fail, and then large amounts in both directions. Returns the number of
/// copies that returned the error of the call before, and true if the large copies are right.
///
/// # Errors
/// Returns an error if a copy fails that must not fail.
pub fn after_failures(cuda: &Cuda) -> Result<(usize, bool), Failed> {
    let stream = cuda.stream()?;
    let at = cuda.alloc(LARGE as u64)?;
    let pinned = cuda.pin(PIECE)?;
    let (word, piece) = ([1u64], vec![2u64; PIECE / 8]);
    cuda.write(at, &piece)?;
    let mut failed = 0;
    for _ in 0..FAILURES {
        // Only the guest library rejects a copy beyond pinned memory. One of the thread's next calls returns the error.
        let _ = cuda.copy(pinned + (1 << 30), word.as_ptr().addr() as u64, 8, stream);
        std::thread::sleep(RESULT_TIME);
        failed += usize::from(cuda.write(at, &piece).is_err());
    }
    let large: Vec<u64> = (0..LARGE as u64 / 8).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    cuda.write(at, &large)?;
    let is_equal = cuda.read(at, LARGE / 8)? == large;
    Ok((failed, is_equal))
}
