//! The card's engine, which kernels of all processes share in time slices, as on NVIDIA's cards.
//!
//! The end of the current slice is stored in a word of a file that all processes map. A process that is stopped or
//! killed in its slice keeps the engine only until that end: on a real card, its kernels do not make other processes
//! wait either.
//!
//! UNSAFETY: maps the file.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::fs::{self, OpenOptions};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Length of a slice.
const SLICE: Duration = Duration::from_millis(2);
/// Maximum time of a kernel that takes only the time of its work.
const LONGEST_WORK: Duration = Duration::from_secs(1);
/// Interval in which a waiting process polls for a free engine: a process with short kernels frees the engine only
/// briefly.
const POLL: Duration = Duration::from_micros(20);
/// Pause between two slices of a kernel, so that a waiting process gets the next one.
const PAUSE: Duration = Duration::from_micros(50);
/// Time after a process's last slice in which NVML counts it as using the card.
const RECENT: Duration = Duration::from_millis(500);

/// The engine of a card, as mapped by one process.
#[derive(Debug)]
pub struct Engine {
    /// End of the current slice, in ns of [`now`].
    slice_end: &'static AtomicU64,
    /// File with the time of this process's last slice.
    used: PathBuf,
}

/// Returns the time in ns of the clock that all processes of the host share.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the file in which the process of an identity records its use of the engine.
fn used(folder: &Path, identity: &str) -> PathBuf {
    folder.join(format!("occupies.{identity}"))
}

/// Returns true if the process of an identity has used the engine recently, or uses it now.
pub fn is_used_by(folder: &Path, identity: &str) -> bool {
    let text = fs::read_to_string(used(folder, identity)).unwrap_or_default();
    text.parse::<u64>().is_ok_and(|at| now().saturating_sub(at) < ns(RECENT))
}

impl Engine {
    /// Maps the engine of the card in `folder`, for the process of this identity.
    pub fn open(folder: &Path, identity: &str) -> Option<Self> {
        let path = folder.join("engine");
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path).ok()?;
        file.set_len(8).ok()?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: maps a page of the file, which stays mapped until the process ends.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 8, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: the mapping is page-aligned, has eight bytes, and is never unmapped.
        let slice_end = unsafe { &*at.cast::<AtomicU64>() };
        Some(Self { slice_end, used: used(folder, identity) })
    }

    /// Runs a kernel that takes `time` of the engine, and then does `work`.
    pub fn run(&self, time: Duration, work: impl FnOnce()) {
        let mut left = time;
        while left > SLICE {
            let end = self.slice(SLICE);
            sleep_until(end);
            left -= SLICE;
            std::thread::sleep(PAUSE);
        }
        let end = self.slice(if time.is_zero() { LONGEST_WORK } else { SLICE });
        std::thread::sleep(left);
        work();
        self.note_use();
        // If this process was stopped, another one may have taken the engine.
        let _ = self.slice_end.compare_exchange(end, now(), Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Waits for a slice of this length. Returns its end.
    fn slice(&self, length: Duration) -> u64 {
        loop {
            let (present, begin) = (self.slice_end.load(Ordering::SeqCst), now());
            let end = begin + ns(length);
            if present > begin {
                sleep_until(present.min(begin + ns(POLL)));
            } else if self.slice_end.compare_exchange(present, end, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                self.note_use();
                return end;
            }
        }
    }

    fn note_use(&self) {
        let _ = fs::write(&self.used, now().to_string());
    }
}

fn sleep_until(at: u64) {
    std::thread::sleep(Duration::from_nanos(at.saturating_sub(now())));
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn long_kernels_share_the_engine() {
        let folder = tempfile::tempdir().expect("a folder");
        let engines = ["a", "b"].map(|name| Engine::open(folder.path(), name).expect("opens"));
        let [long, short] = &engines;
        let ended = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                long.run(Duration::from_secs(2), || ());
                ended.store(1, Ordering::SeqCst);
            });
            while !is_used_by(folder.path(), "a") {
                std::thread::yield_now();
            }
            for _ in 0..20 {
                short.run(Duration::from_millis(1), || ());
            }
            assert_eq!(ended.load(Ordering::SeqCst), 0, "it waited for the end of the long one");
        });
    }

    #[test]
    fn kernel_takes_its_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let engine = Engine::open(folder.path(), "a").expect("opens");
        let (began, mut done) = (Instant::now(), false);
        engine.run(Duration::from_millis(11), || done = true);
        assert!(done && began.elapsed() >= Duration::from_millis(11));
    }

    #[test]
    fn slice_of_a_stopped_process_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let engines = ["a", "b"].map(|name| Engine::open(folder.path(), name).expect("opens"));
        let end = engines[0].slice(Duration::from_millis(30));
        engines[1].run(Duration::ZERO, || ());
        assert!(now() >= end);
        assert!(!is_used_by(folder.path(), "c") && is_used_by(folder.path(), "b"));
    }
}
