//! Allocates host pages for the slots of the pinned pool, either anonymous or in a file that another process can take
//! over.
#![expect(unsafe_code, reason = "makes the kernel allocate the pages of a mapping")]
// UNSAFETY: calls `madvise` on a whole mapping that this module created and that no other code uses yet. Both kinds of
// advice preserve the contents.

use crate::ManagerError;
use card::DmaMemory;
use rustix::mm::{Advice, madvise};
use std::fs::File;
use std::num::NonZero;
use std::sync::{Arc, LazyLock};
use std::thread;
use vm_memory::{FileOffset, MmapRegion};

/// Size of a huge page on x86-64, in bytes.
const HUGE: usize = 2 << 20;

/// Maximum number of threads that allocate pages, so that the other host CPUs stay available to VMs.
const THREADS: usize = 4;

/// Memory to allocate.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Size in bytes.
    pub bytes: usize,
    /// File that contains the memory, and the offset in it, or `None` for anonymous memory.
    pub file: Option<(Arc<File>, u64)>,
}

impl Wanted {
    /// Allocates the memory. See [`found`].
    pub fn find(&self) -> Result<DmaMemory, ManagerError> {
        match &self.file {
            None => found(self.bytes),
            Some((file, offset)) => populated(mapped(file, *offset, self.bytes)?),
        }
    }
}

/// Allocates all of the `wanted` memory in parallel.
pub fn allocate_parallel(wanted: &[Wanted]) -> Vec<Result<DmaMemory, ManagerError>> {
    // Cache this number, because the standard library reads the control group's files for each query.
    static PROCESSORS: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get));
    let threads = if wanted.len() < 2 { 1 } else { PROCESSORS.min(THREADS).min(wanted.len()) };
    if threads < 2 {
        return wanted.iter().map(Wanted::find).collect();
    }
    let work = |wanted: &[Wanted]| wanted.iter().map(Wanted::find).collect::<Vec<_>>();
    thread::scope(|scope| {
        let start = |wanted| {
            let thread = thread::Builder::new().name("find-pages".into()).spawn_scoped(scope, move || work(wanted));
            (wanted, thread.ok())
        };
        let started: Vec<_> = wanted.chunks(wanted.len().div_ceil(threads)).map(start).collect();
        // If a thread cannot be started, do its work here.
        let ended = started
            .into_iter()
            .map(|(wanted, thread)| thread.and_then(|it| it.join().ok()).unwrap_or_else(|| work(wanted)));
        ended.flatten().collect()
    })
}

/// Returns `bytes` zeroed bytes whose pages the host has allocated. This takes a long time, so the caller should not
/// hold a lock.
///
/// # Errors
/// Returns an error if the host has too little memory.
pub fn found(bytes: usize) -> Result<DmaMemory, ManagerError> {
    let refused = |why: String| ManagerError::Pinned { bytes, why };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let region = MmapRegion::<()>::build(None, bytes, libc::PROT_READ | libc::PROT_WRITE, flags)
        .map_err(|error| refused(error.to_string()))?;
    populated(region)
}

/// Maps `bytes` bytes of `file` from `offset` on, keeping their contents.
///
/// # Errors
/// Returns an error if the host cannot create the mapping.
pub fn mapped(file: &Arc<File>, offset: u64, bytes: usize) -> Result<MmapRegion, ManagerError> {
    let at = FileOffset::from_arc(Arc::clone(file), offset);
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    MmapRegion::<()>::build(Some(at), bytes, libc::PROT_READ | libc::PROT_WRITE, flags)
        .map_err(|error| ManagerError::Pinned { bytes, why: error.to_string() })
}

/// Makes the host allocate all pages of a mapping.
fn populated(region: MmapRegion) -> Result<DmaMemory, ManagerError> {
    let bytes = region.size();
    let refused = |why: String| ManagerError::Pinned { bytes, why };
    let start = region.as_ptr().cast();
    if bytes >= HUGE {
        // If the kernel has no huge pages, it uses small ones. SAFETY: the mapping is `bytes` bytes long, starts at
        // `start`, and outlives this function.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxHugepage) };
    }
    // Kernels before Linux 5.14 do not support this advice, and allocate pages on first use. SAFETY: as above.
    match unsafe { madvise(start, bytes, Advice::LinuxPopulateWrite) } {
        Ok(()) | Err(rustix::io::Errno::INVAL) => {}
        Err(errno) => return Err(refused(errno.to_string())),
    }
    DmaMemory::new(Arc::new(region), 0, bytes, true).map_err(|error| refused(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    fn anonymous(bytes: usize) -> Wanted {
        Wanted { bytes, file: None }
    }

    #[test]
    fn all_sizes_are_found_in_their_order_and_are_zeros() {
        let sizes = [1 << 20, 128 << 10, 2 << 20, 4 << 10, 64 << 10, 8 << 10, 256 << 10];
        for count in 0..=sizes.len() {
            let wanted: Vec<_> = sizes[..count].iter().copied().map(anonymous).collect();
            let found = allocate_parallel(&wanted);
            let lengths: Vec<_> = found.iter().map(|memory| memory.as_ref().unwrap().len()).collect();
            assert_eq!(lengths, sizes[..count]);
            for memory in found.into_iter().flatten() {
                let mut data = vec![1; memory.len()];
                memory.slice(0, data.len()).unwrap().read_slice(&mut data, 0).unwrap();
                assert!(data.iter().all(|&byte| byte == 0));
            }
        }
    }

    #[test]
    fn size_that_the_host_does_not_have_fails_alone() {
        let found = allocate_parallel(&[4 << 10, 1 << 60, 4 << 10].map(anonymous));
        assert!(found[0].is_ok() && found[2].is_ok());
        assert!(matches!(&found[1], Err(ManagerError::Pinned { bytes, .. }) if *bytes == 1 << 60));
    }
}
