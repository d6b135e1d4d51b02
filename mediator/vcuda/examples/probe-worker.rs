//! A worker without CUDA, for tests of the device with real guests: `probe-worker --window-fd N --link-fd M`.
//!
//! At each doorbell, the worker copies the word `HEAD` of the control blob to `TAIL`, and sets the second word of each
//! pinned blob to its first word plus 1. The worker exits if `HEAD` is `u64::MAX`.
//!
//! UNSAFETY: takes ownership of descriptors by number.

#![expect(unsafe_code, reason = "descriptors as numbers")]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cuda_ring::{BlobKind, control};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};
use worker_link::{FromWorker, Link, ToWorker};

/// Time for which a worker keeps running without a daemon.
const ALONE: Duration = Duration::from_secs(30);

fn main() {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--window-fd").skip(1).step_by(2);
    let mut descriptor = || {
        let number = arguments.next().and_then(|text| text.parse().ok()).expect("--window-fd N --link-fd M");
        // SAFETY: the device passes these two descriptors, and no other code in this process owns them.
        unsafe { OwnedFd::from_raw_fd(number) }
    };
    let (window, mut link) = (File::from(descriptor()), Link::new(descriptor()));
    let mut rejoin = std::env::args_os().skip_while(|argument| argument != "--rejoin").skip(1);
    let rejoin = rejoin.next().map(std::path::PathBuf::from);
    let bytes = window.metadata().expect("a file").len();
    let region = MmapRegion::<()>::from_file(FileOffset::new(window, 0), bytes as usize).expect("a mapping");
    let memory = region.as_volatile_slice();
    let load = |at: u64| memory.load::<u64>(at as usize, Ordering::Acquire).expect("in the window");
    let store = |value: u64, at: u64| memory.store(value, at as usize, Ordering::Release).expect("in the window");
    let mut blobs: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
    let mut alone = None;
    loop {
        let Ok(message) = link.receive_in_worker() else {
            // The daemon has exited. The next daemon listens at this path.
            let since = *alone.get_or_insert_with(Instant::now);
            let Some(path) = rejoin.as_ref().filter(|_| since.elapsed() < ALONE) else { return };
            std::thread::sleep(Duration::from_millis(10));
            link = Link::connect(path).unwrap_or(link);
            continue;
        };
        alone = None;
        match message {
            ToWorker::Blob { id, kind, offset, .. } => drop(blobs.insert(id, (kind, offset))),
            ToWorker::Remove { id, serial } => {
                blobs.remove(&id);
                let _ = link.send_from_worker(FromWorker::Removed { id, serial });
            }
            ToWorker::Doorbell => {
                for &(_, at) in blobs.values().filter(|(kind, _)| *kind == BlobKind::Pinned.number()) {
                    store(load(at).wrapping_add(1), at + 8);
                }
                for &(_, at) in blobs.values().filter(|(kind, _)| *kind == BlobKind::Control.number()) {
                    let head = load(at + control::HEAD);
                    if head == u64::MAX {
                        return;
                    }
                    store(head, at + control::TAIL);
                }
                let _ = link.send_from_worker(FromWorker::Check);
            }
            ToWorker::Goodbye => return,
            // The test's daemon neither restarts nor moves workers.
            ToWorker::Save | ToWorker::Hold | ToWorker::Resume => {}
        }
    }
}
