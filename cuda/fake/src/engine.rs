//! The card's engine. As on NVIDIA's cards, processes run kernels in time slices. Clients of one MPS server share
//! slices, and their kernels run concurrently.
//!
//! The end of the current slice is stored in a word of a file that all processes map. A process that is stopped or
//! killed during its slice holds the engine only until this time. On a real card, such a process does not block other
//! processes either.
//!
//! If the environment variable [`RECORD`] is set, each kernel that takes time adds a line to the file `kernels` in the
//! card's folder: process ID, number of its MPS server or 0, start and end in ns. The start is the time at which the
//! kernel becomes the first operation in its stream.
//!
//! UNSAFETY: maps the file.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::mps;

/// Environment variable that enables the recording of kernels if it is set to any value.
const RECORD: &str = "FAKE_CUDA_RECORD";
/// Number of low bits of the engine's word. They contain the number of the MPS server whose clients have the slice, or
/// 0 for any other process.
const TAG_BITS: u32 = 16;
/// Length of a slice.
const SLICE: Duration = Duration::from_millis(2);
/// Maximum duration of a slice that clients of one MPS server extend, so that other processes get the engine.
const LONGEST_SHARED: Duration = Duration::from_millis(8);
/// Length of the slice for a kernel that takes no card time in addition to its work.
const LONGEST_WORK: Duration = Duration::from_secs(1);
/// Interval at which a waiting process polls for a free engine. Short, because a process with short kernels frees the
/// engine only briefly.
const POLL: Duration = Duration::from_micros(20);
/// Pause between two slices of a kernel, so that a waiting process gets the next slice.
const PAUSE: Duration = Duration::from_micros(50);
/// Time after a process's last slice during which NVML reports that the process uses the card.
const RECENT: Duration = Duration::from_millis(500);

/// A card's engine, as mapped by this process.
#[derive(Debug)]
pub struct Engine {
    /// The engine's word: end of the current slice on the clock of [`now`] in microseconds (rounded up), and the MPS
    /// server of its holder.
    slice: &'static AtomicU64,
    /// Start of the current slice in ns.
    began: &'static AtomicU64,
    /// File with the time of this process's last slice.
    used: PathBuf,
    /// File that records kernels.
    record: Option<File>,
}

/// A slice acquired by this process.
struct Slice {
    /// Value of the engine's word during the slice.
    word: u64,
    /// Set if another client of the same server already had the engine.
    joined: bool,
}

impl Slice {
    fn end(&self) -> u64 {
        end_of(self.word)
    }
}

/// Returns the end of the slice that a word describes, in ns.
fn end_of(word: u64) -> u64 {
    (word >> TAG_BITS) * 1000
}

/// Returns the time in ns of a clock shared by all processes on the host.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the path of the file where the process with the given identity records its use of the engine.
fn used(folder: &Path, identity: &str) -> PathBuf {
    folder.join(format!("occupies.{identity}"))
}

/// Returns true if the process with the given identity is using the engine or has used it recently.
pub fn is_used_by(folder: &Path, identity: &str) -> bool {
    let text = fs::read_to_string(used(folder, identity)).unwrap_or_default();
    text.parse::<u64>().is_ok_and(|at| now().saturating_sub(at) < ns(RECENT))
}

impl Engine {
    /// Maps the engine of the card in `folder` for the process with the given identity.
    pub fn open(folder: &Path, identity: &str) -> Option<Self> {
        let path = folder.join("engine");
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path).ok()?;
        file.set_len(16).ok()?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: maps a page of the file at an address that the kernel chooses. It is never unmapped.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 16, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: the mapping is page-aligned, has two words, and is never unmapped.
        let [slice, began] = unsafe { &*at.cast::<[AtomicU64; 2]>() };
        let recorded = || OpenOptions::new().create(true).append(true).open(folder.join("kernels")).ok();
        let record = std::env::var_os(RECORD).and_then(|_| recorded());
        Some(Self { slice, began, used: used(folder, identity), record })
    }

    /// Runs a kernel that occupies the engine for `time`, and then executes `work`.
    pub fn run(&self, time: Duration, work: impl FnOnce()) {
        self.run_as(mps::tag(), time, work);
    }

    /// Runs a kernel for a client of the given MPS server, or for any other process if `server` is 0.
    fn run_as(&self, server: u16, time: Duration, work: impl FnOnce()) {
        let begin = now();
        let mut left = time;
        while left > SLICE {
            let slice = self.slice(server, SLICE);
            sleep_until(slice.end());
            left -= SLICE;
            std::thread::sleep(PAUSE);
        }
        // A slice that another client has joined is not released early, so it must be short.
        let length = match server {
            0 if time.is_zero() => LONGEST_WORK,
            0 => SLICE,
            _ => left.max(PAUSE),
        };
        let slice = self.slice(server, length);
        std::thread::sleep(left);
        work();
        self.note_use();
        if !slice.joined {
            // This fails if another client has joined, or if another process got the engine while this one was stopped.
            let ended = (now() / 1000) << TAG_BITS;
            let _ = self.slice.compare_exchange(slice.word, ended, Ordering::SeqCst, Ordering::SeqCst);
        }
        if let Some(mut record) = self.record.as_ref().filter(|_| !time.is_zero()) {
            // One write of a short line to a file in append mode is atomic.
            let line = format!("{} {server} {begin} {}\n", std::process::id(), now());
            let _ = record.write_all(line.as_bytes());
        }
    }

    /// Waits for a slice of the given length. A client of an MPS server may join and extend the slice of another
    /// client.
    fn slice(&self, server: u16, length: Duration) -> Slice {
        loop {
            let (present, begin) = (self.slice.load(Ordering::SeqCst), now());
            let is_busy = end_of(present) > begin;
            let joined = is_busy && server != 0 && present & ((1 << TAG_BITS) - 1) == u64::from(server);
            let longest = self.began.load(Ordering::SeqCst) + ns(LONGEST_SHARED);
            if is_busy && (!joined || begin + ns(length) > longest) {
                sleep_until(end_of(present).min(begin + ns(POLL)));
                continue;
            }
            let end = ((begin + ns(length)).div_ceil(1000)).max((present >> TAG_BITS) + 1);
            let word = (end << TAG_BITS) | u64::from(server);
            if self.slice.compare_exchange(present, word, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                if !joined {
                    self.began.store(begin, Ordering::SeqCst);
                }
                self.note_use();
                return Slice { word, joined };
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
        let end = engines[0].slice(0, Duration::from_millis(30)).end();
        engines[1].run(Duration::ZERO, || ());
        assert!(now() >= end);
        assert!(!is_used_by(folder.path(), "c") && is_used_by(folder.path(), "b"));
    }

    #[test]
    fn clients_of_one_server_share_a_slice() {
        let folder = tempfile::tempdir().expect("a folder");
        let engines = ["a", "b", "c"].map(|name| Engine::open(folder.path(), name).expect("opens"));
        // Repeat: longer slices cannot be joined, and on a busy host, a short slice may end before the join.
        let joined = (0..10_000).find_map(|_| {
            let first = engines[0].slice(7, Duration::from_millis(3));
            let second = engines[1].slice(7, Duration::from_millis(3));
            (!first.joined && second.joined && second.end() > first.end()).then(|| second.end())
        });
        let end = joined.expect("one of them had the engine with the other");
        engines[2].run_as(8, Duration::from_millis(1), || ());
        assert!(now() >= end, "a client of another server waits");
    }
}
