//! Pages of the host for a slot of the pinned pool.
#![expect(unsafe_code, reason = "asks the kernel for the pages of a mapping")]
// UNSAFETY: `madvise` on all of a mapping that was made here and is nobody else's. Both kinds of advice leave its contents alone.

use super::HostError;
use card::DmaMemory;
use rustix::mm::{Advice, madvise};
use std::sync::Arc;
use vm_memory::MmapRegion;

/// Bytes of a huge page of x86-64.
const HUGE: usize = 2 << 20;

/// `bytes` bytes of zeros that the host has found pages for. It takes that long, so the caller holds no lock if it can.
///
/// # Errors
/// When the host has no memory for it.
pub(super) fn found(bytes: usize) -> Result<DmaMemory, HostError> {
    let refused = |why: String| HostError::Pinned { bytes, why };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let region = MmapRegion::<()>::build(None, bytes, libc::PROT_READ | libc::PROT_WRITE, flags)
        .map_err(|error| refused(error.to_string()))?;
    let start = region.as_ptr().cast();
    if bytes >= HUGE {
        // A kernel without huge pages has small ones.
        // SAFETY: the mapping has `bytes` bytes from `start` on, and lives until the end of this function at least.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxHugepage) };
    }
    // Before Linux 5.14 they are found when they are used.
    // SAFETY: as above.
    match unsafe { madvise(start, bytes, Advice::LinuxPopulateWrite) } {
        Ok(()) | Err(rustix::io::Errno::INVAL) => {}
        Err(errno) => return Err(refused(errno.to_string())),
    }
    DmaMemory::new(Arc::new(region), 0, bytes, true).map_err(|error| refused(error.to_string()))
}
