//! The xenstore protocol, through the kernel's device.
//!
//! A request and its answer have the same number. Watch events may arrive in between. The protocol limits the size of
//! answers.
//!
//! Source: `io/xs_wire.h`, `docs/misc/xenstore.txt`.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The xenstore device for a domain's own processes.
pub(crate) const DEVICE: &str = "/dev/xen/xenbus";
/// Maximum size of a message's payload in bytes.
const MAX_PAYLOAD: usize = 4096;
/// TIMEOUT: xenstored answers from memory, so a longer wait means that it hangs.
const ANSWER: Duration = Duration::from_secs(10);

/// Message types.
pub(crate) mod kind {
    pub const DIRECTORY: u32 = 1;
    pub const READ: u32 = 2;
    pub const WATCH: u32 = 4;
    pub const WRITE: u32 = 11;
    pub const SET_PERMISSIONS: u32 = 14;
    pub const WATCH_EVENT: u32 = 15;
    pub const ERROR: u32 = 16;
    pub const IS_INTRODUCED: u32 = 17;
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    kind: u32,
    request: u32,
    transaction: u32,
    len: u32,
}

/// A connection to xenstore.
#[derive(Debug)]
pub(crate) struct Connection {
    device: File,
    received: VecDeque<u8>,
    next: u32,
    /// Set if watch events have arrived and have not been handled.
    events: bool,
}

impl Connection {
    pub fn open() -> io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE)?;
        Ok(Self { device, received: VecDeque::new(), next: 1, events: false })
    }

    /// Returns a descriptor that is readable while it has unread data. A request may already have read an event, so
    /// call [`Self::changed`] before waiting.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// Sends a request and waits for the answer. Returns `Ok(None)` if xenstore replies `ENOENT` (the node does not
    /// exist) or `EINVAL`.
    pub fn ask(&mut self, kind: u32, words: &[&str]) -> io::Result<Option<Vec<u8>>> {
        self.ask_with(kind, words, "")
    }

    /// Sends a request like [`Self::ask`], with an additional last word, which is not NUL-terminated.
    pub fn ask_with(&mut self, kind: u32, words: &[&str], last: &str) -> io::Result<Option<Vec<u8>>> {
        let words = words.iter().flat_map(|word| word.bytes().chain([0]));
        let payload: Vec<u8> = words.chain(last.bytes()).collect();
        let request = self.next;
        self.next = request.wrapping_add(1);
        let len = u32::try_from(payload.len()).ok().filter(|_| payload.len() <= MAX_PAYLOAD);
        let len = len.ok_or_else(|| io::Error::other("a request to xenstore is too long"))?;
        let header = Header { kind, request, transaction: 0, len };
        (&self.device).write_all(&[header.as_bytes(), &payload].concat())?;
        loop {
            self.wait()?;
            while let Some((header, payload)) = self.message()? {
                match header.kind {
                    kind::WATCH_EVENT => self.events = true,
                    _ if header.request != request => {}
                    kind::ERROR if payload.starts_with(b"ENOENT") || payload.starts_with(b"EINVAL") => return Ok(None),
                    kind::ERROR => {
                        let text = String::from_utf8_lossy(&payload);
                        return Err(io::Error::other(format!("xenstore replied {}", text.trim_end_matches('\0'))));
                    }
                    _ => return Ok(Some(payload)),
                }
            }
        }
    }

    /// Consumes the watch events that have arrived. Returns true if there were any.
    pub fn changed(&mut self) -> io::Result<bool> {
        self.receive()?;
        while let Some((header, _)) = self.message()? {
            self.events |= header.kind == kind::WATCH_EVENT;
        }
        Ok(std::mem::take(&mut self.events))
    }

    fn wait(&mut self) -> io::Result<()> {
        let timeout = Timespec { tv_sec: i64::try_from(ANSWER.as_secs()).unwrap_or(i64::MAX), tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.device, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::TimedOut, "xenstored does not answer; is it running?")),
            Ok(_) => self.receive(),
            Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn receive(&mut self) -> io::Result<()> {
        let mut bytes = [0; MAX_PAYLOAD];
        loop {
            // Stop reading until the received messages have been handled, so that the buffer stays small.
            if self.received.len() > MAX_PAYLOAD.saturating_mul(4) {
                return Ok(());
            }
            match (&self.device).read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(len) => self.received.extend(bytes.iter().take(len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Removes the first message from the received bytes, if it is complete.
    fn message(&mut self) -> io::Result<Option<(Header, Vec<u8>)>> {
        let bytes = self.received.make_contiguous();
        let Ok((header, rest)) = Header::read_from_prefix(bytes) else { return Ok(None) };
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        if len > MAX_PAYLOAD {
            return Err(io::Error::other(format!(
                "a message from xenstore has {len} bytes, but the maximum is {MAX_PAYLOAD}"
            )));
        }
        let Some(payload) = rest.get(..len).map(<[u8]>::to_vec) else { return Ok(None) };
        self.received.drain(..size_of::<Header>().saturating_add(len));
        Ok(Some((header, payload)))
    }
}
