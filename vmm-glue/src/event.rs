//! A client's event descriptor, which the client cannot use to block a thread of this process.
//!
//! The client shares the open file description. It can fill the counter and clear `O_NONBLOCK` at any time, so a write
//! can block despite earlier checks. The kernel itself therefore adds the 1, as the completion event
//! (`IOCB_FLAG_RESFD`) of an empty asynchronous read. This never waits, a full counter stays full, and the kernel
//! checks on each signal that the descriptor is an eventfd. Reads use `RWF_NOWAIT`, which applies to a single read
//! regardless of the file flags.
//!
//! Sources: `io_submit(2)`, `eventfd(2)`, `preadv2(2)`, `linux/aio_abi.h`.
#![expect(unsafe_code, reason = "the kernel's asynchronous I/O has no safe wrapper")]
// UNSAFETY: makes three system calls whose arguments are local structures of this module.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::io::{Errno, ReadWriteFlags};

/// Number of concurrent requests to reserve. The kernel reserves more. Each request completes before its `io_submit`
/// returns.
const REQUESTS: libc::c_long = 64;
/// Maximum number of completions removed from the ring per call.
const REAPED: usize = 16;
/// Maximum number of attempts while other threads' completions fill the ring. Each attempt removes some completions.
const MAX_ATTEMPTS: u32 = 64;
/// `IOCB_CMD_PREAD` from `linux/aio_abi.h`.
const PREAD: u16 = 0;
/// `IOCB_FLAG_RESFD` from `linux/aio_abi.h`.
const RESFD: u32 = 1;

/// `struct iocb` from `linux/aio_abi.h`, on a little-endian machine.
#[repr(C)]
#[derive(Debug, Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

/// `struct io_event` from `linux/aio_abi.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Completion {
    words: [u64; 4],
}

/// The process's asynchronous I/O context, used concurrently by all threads.
#[derive(Debug)]
struct Context {
    id: libc::c_ulong,
    /// An empty file.
    nothing: File,
}

impl Context {
    fn open() -> io::Result<Self> {
        let nothing = File::open("/dev/null")?;
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word, which fits in `id`.
        let done = unsafe { libc::syscall(libc::SYS_io_setup, REQUESTS, &raw mut id) };
        if done == 0 { Ok(Self { id, nothing }) } else { Err(io::Error::last_os_error()) }
    }

    /// Adds 1 to an eventfd.
    fn add(&self, event: BorrowedFd<'_>) -> Result<(), Errno> {
        let number = |fd: BorrowedFd<'_>| u32::try_from(fd.as_raw_fd()).map_err(|_| Errno::BADF);
        let mut request = Request {
            opcode: PREAD,
            file: number(self.nothing.as_fd())?,
            flags: RESFD,
            result_fd: number(event)?,
            ..Request::default()
        };
        for _ in 0..MAX_ATTEMPTS {
            let mut list = [&raw mut request];
            // SAFETY: the list contains one pointer to one request, both of which are local variables. The request
            // reads 0 bytes, so it uses no buffer.
            let sent = unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1 as libc::c_long, list.as_mut_ptr()) };
            let errno = (sent != 1).then(|| io::Error::last_os_error().raw_os_error().unwrap_or(0));
            self.reap();
            match errno.map(Errno::from_raw_os_error) {
                None => return Ok(()),
                Some(Errno::AGAIN | Errno::INTR) => (),
                Some(errno) => return Err(errno),
            }
        }
        Err(Errno::AGAIN)
    }

    /// Removes completions from the ring without waiting.
    fn reap(&self) {
        let mut completions = [Completion::default(); REAPED];
        let mut no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes at most `REAPED` completions, for which there is space, and only reads the timeout.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.id,
                0 as libc::c_long,
                REAPED as libc::c_long,
                completions.as_mut_ptr(),
                &raw mut no_time,
            )
        };
    }
}

fn context() -> Result<&'static Context, &'static io::Error> {
    static CONTEXT: OnceLock<io::Result<Context>> = OnceLock::new();
    CONTEXT.get_or_init(Context::open).as_ref()
}

/// Checks that clients' event descriptors can be signalled.
///
/// # Errors
/// Returns an error if this process cannot use the kernel's asynchronous I/O.
pub fn check() -> io::Result<()> {
    let explain = |error: &io::Error| {
        let what = format!(
            "interrupts need the kernel's asynchronous I/O, io_setup(2): {error}; see CONFIG_AIO, fs.aio-max-nr and \
             SystemCallFilter=@aio"
        );
        io::Error::new(error.kind(), what)
    };
    context().map(drop).map_err(explain)
}

/// A client's eventfd. Its calls never block and never change the file flags.
#[derive(Debug)]
pub struct ClientEvent(OwnedFd);

impl ClientEvent {
    /// Wraps a client's descriptor. Returns `None` if the descriptor is not an eventfd.
    pub fn new(fd: OwnedFd) -> Option<Self> {
        // The client chooses the file name, but the link of a named file starts with a slash. Even without a mounted
        // /proc, the kernel does not signal a file that is not an eventfd.
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventfd]").then_some(Self(fd))
    }

    /// Adds 1 to the counter. Returns true even if the counter is full, because the client then has an event to read.
    pub fn signal(&self) -> bool {
        context().is_ok_and(|context| context.add(self.0.as_fd()).is_ok())
    }

    /// Clears the counter. Returns false if the counter was 0.
    pub fn take(&self) -> bool {
        // The offset -1 reads at the file position, which eventfds do not have.
        let mut count = [0u8; 8];
        rustix::io::preadv2(&self.0, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
    }

    /// Returns the descriptor for polling.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
    use rustix::fs::{Mode, OFlags};

    use super::*;

    fn pair() -> (ClientEvent, OwnedFd) {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        (ClientEvent::new(fd.try_clone().unwrap()).expect("it is an eventfd"), fd)
    }

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn signals_add_up_and_are_taken_at_once() {
        let (event, theirs) = pair();
        assert!(event.signal() && event.signal());
        assert_eq!(count(&theirs), 2);
        assert!(event.signal());
        assert!(event.take());
        assert!(!event.take(), "the counter is 0, and the read does not wait");
    }

    #[test]
    fn full_counter_of_blocking_descriptor_does_not_block_signal() {
        let (event, theirs) = pair();
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(event.signal(), "a write would block here");
        assert!(event.signal());
        let flags = rustix::fs::fcntl_getfl(&theirs).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK), "the client's file flags do not matter here");
    }

    #[test]
    fn fifo_named_as_an_eventfd_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("anon_inode:[eventfd]");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        let fifo = rustix::fs::open(&path, OFlags::RDWR | OFlags::NONBLOCK, Mode::empty()).unwrap();
        assert!(ClientEvent::new(fifo.try_clone().unwrap()).is_none());
        // The kernel does not write to the FIFO, even if /proc reports it as an eventfd.
        assert!(!ClientEvent(fifo.try_clone().unwrap()).signal());
        let mut readable = [PollFd::new(&fifo, PollFlags::IN)];
        assert_eq!(poll(&mut readable, Some(&rustix::time::Timespec::default())), Ok(0));
    }

    #[test]
    fn many_threads_signal_at_the_same_time() {
        let (event, theirs) = pair();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..500).for_each(|_| assert!(event.signal())));
            }
        });
        assert_eq!(count(&theirs), 8 * 500);
    }
}
