//! The library's file descriptors in the program's process, for chunks and for the connection.
//!
//! The library keeps each chunk's descriptor for the next owner, because the driver cannot export imported handles. A
//! process may therefore have thousands of these descriptors, with numbers above the program's own descriptors and
//! above its open file limit. The library does not raise the limit, because every child would inherit it. Instead,
//! [`raised`] creates descriptors above the limit (decision 121), which work like any other descriptors. All of them
//! are closed on `exec`, and in a child after `fork`.
//!
//! UNSAFETY: duplicates and closes descriptors by number, partly in a separate process that shares this process's
//! memory.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cuda_protocol::{FromOwner, FromTenant, Link, LinkError, Received};

use crate::process::Blocked;

/// Lowest number of a kept descriptor. Programs that use `select` need the lower numbers.
const LOWEST: i32 = 1024;
/// Number of words in a bitmap with one bit per descriptor.
const WORDS: usize = 1 << 14;
/// Size of the stack of [`raised`] in bytes.
const STACK_BYTES: usize = 64 << 10;

/// Timeout for sending a message with descriptors.
// TIMEOUT: a healthy owner receives messages within milliseconds; otherwise, the library reconnects.
const SENDING: Duration = Duration::from_secs(5);

/// Bitmap of the library's descriptors. A static variable, because the `fork` handler, which closes these descriptors,
/// may neither allocate nor lock.
static OURS: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
/// Number of leading words of [`OURS`] that were ever used. A static variable, because the `fork` handler reads it.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Marks a descriptor as the library's. The mark is removed before the descriptor is closed, so that a child never
/// closes a descriptor of the program.
#[derive(Debug)]
struct Mark(i32);

impl Mark {
    fn new(number: i32) -> Self {
        if let Some((word, bit)) = place(number) {
            USED.fetch_max(word + 1, Ordering::SeqCst);
            OURS[word].fetch_or(bit, Ordering::SeqCst);
        }
        Self(number)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some((word, bit)) = place(self.0) {
            OURS[word].fetch_and(!bit, Ordering::SeqCst);
        }
    }
}

fn place(number: i32) -> Option<(usize, u64)> {
    let number = usize::try_from(number).ok()?;
    (number / 64 < WORDS).then_some((number / 64, 1 << (number % 64)))
}

#[derive(Debug)]
struct Inner {
    mark: Mark,
    descriptor: OwnedFd,
}

/// A chunk's file descriptor.
#[derive(Clone, Debug)]
pub struct ChunkDescriptor(Arc<Inner>);

impl ChunkDescriptor {
    /// Returns the descriptor if it may be kept while the chunk exists, or `None` if the program may need its number.
    pub fn lasting(&self) -> Option<Self> {
        (self.0.mark.0 >= LOWEST).then(|| self.clone())
    }
}

impl AsFd for ChunkDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.descriptor.as_fd()
    }
}

/// A connection to the owner.
#[derive(Debug)]
pub struct Connection {
    _mark: Mark,
    link: Link,
}

impl Connection {
    /// Connects to the owner's socket at `path`.
    pub fn open(path: &Path) -> Result<Self, LinkError> {
        let descriptor = OwnedFd::from(Link::connect(path)?);
        let mark = Mark::new(descriptor.as_raw_fd());
        let moved = moved(vec![(mark, descriptor)]).into_iter().next();
        let (mark, descriptor) = moved.ok_or(LinkError::Closed)?;
        Ok(Self { _mark: mark, link: Link::new(descriptor) })
    }

    /// Sends a message with descriptors. If the sender's open file limit, which also limits the user's descriptors in
    /// flight, is too low, sends without the limit.
    pub fn send_many(&self, message: &FromTenant, descriptors: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        let until = Instant::now() + SENDING;
        let is_crowded =
            |result: &Result<(), LinkError>| matches!(result, Err(LinkError::Crowded | LinkError::WouldBlock));
        let mut sent = self.link.send(message, descriptors);
        while is_crowded(&sent) && Instant::now() < until {
            // Do not block inside `raised`, because the separate process could outlive this one.
            raised(&mut || sent = self.link.send_now(message, descriptors));
            if is_crowded(&sent) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        sent
    }

    /// Waits for a message, and moves its descriptors to numbers that the program does not need. Set `expects` if
    /// descriptors may arrive.
    pub fn receive_with_descriptors(&self, expects: bool) -> Result<(FromOwner, Vec<ChunkDescriptor>), LinkError> {
        let mut received = None;
        // Receive without the limit: the program may use all lower numbers, and descriptors without a free number would
        // be lost.
        if expects && limit().is_some_and(|limit| limit.rlim_cur < limit.rlim_max) {
            raised(&mut || received = Some(self.link.receive()));
        }
        let Received { message, descriptors } = received.unwrap_or_else(|| self.link.receive())?;
        let marked = descriptors.into_iter().map(|descriptor| (Mark::new(descriptor.as_raw_fd()), descriptor));
        let kept = moved(marked.collect()).into_iter();
        Ok((message, kept.map(|(mark, descriptor)| ChunkDescriptor(Arc::new(Inner { mark, descriptor }))).collect()))
    }
}

impl Deref for Connection {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

/// Moves descriptors to numbers of at least [`LOWEST`], if possible.
fn moved(descriptors: Vec<(Mark, OwnedFd)>) -> Vec<(Mark, OwnedFd)> {
    let copy = |number: i32| {
        if number >= LOWEST {
            return -1;
        }
        // SAFETY: the descriptor is open, and the call only duplicates it.
        unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, LOWEST) }
    };
    let numbers: Vec<i32> = descriptors.iter().map(|(mark, _)| mark.0).collect();
    let mut copies: Vec<i32> = numbers.iter().map(|number| copy(*number)).collect();
    let is_low = |(number, made): (&i32, &i32)| *number < LOWEST && *made < 0;
    if numbers.iter().zip(&copies).any(is_low) {
        raised(&mut || {
            for (number, made) in numbers.iter().zip(&mut copies).filter(|(number, made)| is_low((*number, &**made))) {
                *made = copy(*number);
            }
        });
    }
    let replace = |((mark, descriptor), made): ((Mark, OwnedFd), i32)| {
        if made < 0 {
            return (mark, descriptor);
        }
        // SAFETY: the duplicate is new and has no other owner.
        (Mark::new(made), unsafe { OwnedFd::from_raw_fd(made) })
    };
    descriptors.into_iter().zip(copies).map(replace).collect()
}

/// Returns the process's open file limits.
fn limit() -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer refers to a local variable.
    (unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0).then_some(limit)
}

/// Runs `work` with this process's descriptors and memory, but without its soft limit on open files. Does nothing if
/// this is impossible. Limits apply to a whole process, and the program may read, set or inherit this process's limit.
/// Therefore, a separate process runs `work` and exits before this function returns. The calling thread waits, as in
/// `posix_spawn`.
fn raised(work: &mut dyn FnMut()) {
    extern "C" fn run(work: *mut c_void) -> c_int {
        // SAFETY: the pointer refers to an argument of `raised`, which waits. The limit belongs to the separate
        // process.
        unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
                limit.rlim_cur = limit.rlim_max;
                libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
            }
            (*work.cast::<&mut dyn FnMut()>())();
        }
        0
    }
    let mut work = work;
    let mut stack: Vec<MaybeUninit<u8>> = Vec::with_capacity(STACK_BYTES);
    // The program's signal handlers must not run in the other process.
    let _blocked = Blocked::new();
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::CLONE_FS;
    // SAFETY: the stack outlives the other process, because `CLONE_VFORK` waits for its exit. That process sends no
    // exit signal and is reaped by its process ID here, so the program's own waits do not see it.
    unsafe {
        let top = stack.as_mut_ptr().add(STACK_BYTES).map_addr(|address| address & !63);
        let process = libc::clone(run, top.cast(), flags, (&raw mut work).cast());
        if process > 0 {
            let mut status = 0;
            while libc::waitpid(process, &raw mut status, libc::__WALL) < 0
                && std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted
            {}
        }
    }
}

/// Closes all of the library's descriptors in a child after `fork`. Otherwise, they would keep memory alive that the
/// program frees, and would hide the program's exit from the owner.
pub fn forked() {
    for (at, word) in OURS.iter().enumerate().take(USED.load(Ordering::SeqCst)) {
        let mut bits = word.swap(0, Ordering::SeqCst);
        while bits != 0 {
            let number = at * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // SAFETY: this is the child's copy of a descriptor that only this module uses.
            unsafe { libc::close(number as i32) };
        }
    }
}

#[cfg(test)]
pub mod tests;
