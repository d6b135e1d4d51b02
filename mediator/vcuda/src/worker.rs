//! Workers as the device sees them: a process and a link.

use std::collections::VecDeque;
use std::io::{self, BufRead as _, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Stdio};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use worker_link::{FromWorker, LinkError, ToWorker, WorkerOptions};

/// Maximum number of messages that wait for a worker. The socket itself takes some hundred.
const MAX_OUTBOX: usize = 4096;

/// Maximum number of lines of a worker that are logged.
const MAX_LOGGED_LINES: usize = 64;
/// Maximum length of such a line in bytes; the rest is another line.
const MAX_LINE_BYTES: u64 = 512;
/// Maximum number of bytes of all lines.
const MAX_LOGGED_BYTES: u64 = 32 << 10;

/// Starts workers.
pub trait Launcher: Send {
    /// Starts a worker that maps the window `window`.
    ///
    /// # Errors
    /// The reason that none runs.
    fn launch(&mut self, window: OwnedFd) -> Result<Started, String>;
}

/// A process that serves a context.
pub trait Process: Send {
    /// Returns a descriptor that is readable once the process has ended.
    fn ended(&self) -> BorrowedFd<'_>;

    /// Kills the process, without waiting for its end.
    fn kill(&mut self);

    /// Releases the process after its end.
    fn reap(&mut self);
}

/// A worker that was started.
pub struct Started {
    /// The connection.
    pub link: worker_link::Link,
    /// The process.
    pub process: Box<dyn Process>,
}

/// Starts the program `cuda-worker`.
#[derive(Clone, Debug)]
pub struct ProgramLauncher(pub WorkerOptions);

/// Copies a worker's messages to the log: the first ones, because a guest may control the worker. Later ones fail.
fn relay(pid: u32, messages: impl Read) {
    let mut reader = BufReader::new(messages.take(MAX_LOGGED_BYTES));
    for _ in 0..MAX_LOGGED_LINES {
        let mut line = Vec::new();
        match reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let line = String::from_utf8_lossy(&line);
                tracing::info!(worker = pid, text = ?line.trim_end(), "a worker reports");
            }
        }
    }
    tracing::info!(worker = pid, "further messages of this worker are not logged");
}

impl Launcher for ProgramLauncher {
    fn launch(&mut self, window: OwnedFd) -> Result<Started, String> {
        let (link, theirs) = worker_link::Link::pair().map_err(|error| error.to_string())?;
        let child = self.0.start_with(window, theirs, Stdio::piped());
        let mut child = child.map_err(|error| error.to_string())?;
        if let Some(messages) = child.stderr.take() {
            let (span, pid) = (tracing::Span::current(), child.id());
            let thread = std::thread::Builder::new().name("cuda-messages".to_owned());
            // Without the thread, the worker's messages are lost.
            drop(thread.spawn(move || span.in_scope(|| relay(pid, messages))));
        }
        let process = ChildProcess::new(child).map_err(|error| format!("cannot watch the worker: {error}"))?;
        Ok(Started { link, process: Box::new(process) })
    }
}

/// A child process with the descriptor of its end.
#[derive(Debug)]
struct ChildProcess {
    child: Child,
    ended: OwnedFd,
}

impl ChildProcess {
    fn new(mut child: Child) -> io::Result<Self> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let ended = pid
            .ok_or(io::ErrorKind::InvalidInput.into())
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from));
        match ended {
            Ok(ended) => Ok(Self { child, ended }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }
}

impl Process for ChildProcess {
    fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    fn kill(&mut self) {
        // It may have ended already.
        let _ = pidfd_send_signal(&self.ended, Signal::KILL);
    }

    fn reap(&mut self) {
        match self.child.try_wait() {
            Ok(Some(status)) if !status.success() => tracing::info!(%status, "a worker has ended"),
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "a worker that has ended cannot be reaped"),
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
        // A killed process ends when the driver lets it; this thread does not wait for that.
        let _ = self.child.try_wait();
    }
}

/// A worker of the device.
pub(crate) struct Worker {
    started: Started,
    outbox: VecDeque<ToWorker>,
    /// The link is closed, or the worker does not follow the protocol.
    is_deaf: bool,
}

impl Worker {
    pub(crate) fn new(started: Started) -> Self {
        Self { started, outbox: VecDeque::new(), is_deaf: false }
    }

    /// Returns the link's descriptor, if messages are expected from it.
    pub(crate) fn link(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_deaf).then(|| self.started.link.as_fd())
    }

    /// Returns the descriptor of the process's end.
    pub(crate) fn ended(&self) -> BorrowedFd<'_> {
        self.started.process.ended()
    }

    /// Returns true if messages wait.
    pub(crate) fn has_output(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends a message, now or when the worker has read others. A worker that does not read is killed.
    pub(crate) fn send(&mut self, message: ToWorker) {
        if message == ToWorker::Doorbell && self.outbox.back() == Some(&message) {
            return;
        }
        if self.outbox.len() >= MAX_OUTBOX {
            tracing::warn!("a worker does not read its messages and is killed");
            self.kill();
        }
        self.outbox.push_back(message);
        self.flush();
    }

    /// Sends messages that wait.
    pub(crate) fn flush(&mut self) {
        while let Some(&message) = self.outbox.front().filter(|_| !self.is_deaf) {
            match self.started.link.send_to_worker(message) {
                Ok(()) => self.outbox.pop_front(),
                Err(LinkError::WouldBlock) => return,
                Err(_) => return self.kill(),
            };
        }
    }

    /// Receives a message, if one has arrived. A worker that has closed its link is killed.
    pub(crate) fn receive(&mut self) -> Option<FromWorker> {
        if self.is_deaf {
            return None;
        }
        match self.started.link.receive_from_worker() {
            Ok(message) => Some(message),
            Err(LinkError::WouldBlock) => None,
            Err(LinkError::Closed) => {
                self.kill();
                None
            }
            Err(error) => {
                tracing::warn!(%error, "a worker is killed");
                self.kill();
                None
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        self.is_deaf = true;
        self.outbox.clear();
        self.started.process.kill();
    }

    pub(crate) fn reap(&mut self) {
        self.started.process.reap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_a_worker_are_bounded_and_lines_are_cut() {
        let mut endless = std::io::repeat(b'x');
        relay(1, &mut endless);
        let mut lines = std::io::Cursor::new(b"a\nb\n".repeat(1000));
        relay(1, &mut lines);
        assert!(lines.position() <= MAX_LOGGED_BYTES, "it reads no more than it logs");
    }
}
