//! The device's interface to its workers. Each worker has a process and a link.

use std::collections::VecDeque;
use std::io::{self, BufRead as _, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Stdio};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use worker_link::{FromWorker, LinkError, Rejoin, ToWorker, WorkerFiles, WorkerOptions};

use crate::saved::ProcessId;

/// Maximum number of queued messages to a worker. The socket itself buffers a few hundred messages.
const MAX_OUTBOX: usize = 4096;

/// Maximum number of logged lines per worker.
const MAX_LOGGED_LINES: usize = 64;
/// Maximum length of a line in bytes. The rest of a longer line counts as a separate line.
const MAX_LINE_BYTES: u64 = 512;
/// Maximum total size of a worker's logged lines in bytes.
const MAX_LOGGED_BYTES: u64 = 32 << 10;

/// Starts workers.
pub trait Launcher: Send {
    /// Starts a worker that maps the window `window`.
    ///
    /// # Errors
    /// Returns an error if the worker cannot be started. The error contains the reason.
    fn launch(&mut self, window: OwnedFd) -> Result<Started, String>;

    /// Starts a worker that continues the program of another worker, from the state in the file `state`. With
    /// `is_held`, the worker waits until the device resumes it.
    ///
    /// # Errors
    /// Returns an error if the worker cannot be started. The error contains the reason.
    fn launch_next(&mut self, window: OwnedFd, state: OwnedFd, is_held: bool) -> Result<Started, String> {
        let _ = (window, state, is_held);
        Err("workers of this launcher cannot continue programs".to_owned())
    }

    /// Returns the process of a worker that an earlier daemon started, or `None` if it has exited.
    fn adopt(&mut self, id: ProcessId) -> Option<Box<dyn Process>>;

    /// Returns the socket that workers of an earlier daemon use to connect to this one, and their time limit, or `None`
    /// if they cannot connect.
    fn rejoin(&self) -> Option<&Rejoin> {
        None
    }

    /// Returns the name of the card that the workers use.
    fn card(&self) -> &str {
        ""
    }
}

/// A process that serves a context.
pub trait Process: Send {
    /// Returns a descriptor that becomes readable once the process has exited.
    fn ended(&self) -> BorrowedFd<'_>;

    /// Kills the process without waiting for it to exit.
    fn kill(&mut self);

    /// Reaps the exited process.
    fn reap(&mut self);

    /// Returns the identity of the process for another daemon, or `None` if the process cannot be adopted.
    fn id(&self) -> Option<ProcessId>;

    /// Releases the process to another daemon, so that dropping this value does not kill it.
    fn leave(&mut self);
}

/// A newly started worker.
pub struct Started {
    /// Link to the worker.
    pub link: worker_link::Link,
    /// Process of the worker.
    pub process: Box<dyn Process>,
}

/// Starts the program `cuda-worker`.
#[derive(Clone, Debug)]
pub struct ProgramLauncher {
    /// Name of the card that the workers use.
    pub card: String,
    /// Options of the workers.
    pub options: WorkerOptions,
}

/// Copies a worker's first messages to the log, and returns their size in bytes. Their size is limited, because a guest
/// may control the worker. The worker's later writes must not fail, so further messages are read and dropped.
fn relay(pid: u32, messages: impl Read) -> u64 {
    let mut reader = BufReader::new(messages);
    let mut logged: u64 = 0;
    for _ in 0..MAX_LOGGED_LINES {
        let (mut line, left) = (Vec::new(), MAX_LOGGED_BYTES.saturating_sub(logged));
        if left == 0 {
            break;
        }
        match reader.by_ref().take(MAX_LINE_BYTES.min(left)).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return logged,
            Ok(bytes) => {
                logged = logged.saturating_add(bytes as u64);
                let line = String::from_utf8_lossy(&line);
                tracing::info!(worker = pid, text = ?line.trim_end(), "a worker reports");
            }
        }
    }
    tracing::info!(worker = pid, "further messages of this worker are not logged");
    // If reading fails, the worker's writes fail as well.
    let _ = io::copy(&mut reader, &mut io::sink());
    logged
}

impl Launcher for ProgramLauncher {
    fn launch(&mut self, window: OwnedFd) -> Result<Started, String> {
        self.start(window, None, false)
    }

    fn launch_next(&mut self, window: OwnedFd, state: OwnedFd, is_held: bool) -> Result<Started, String> {
        self.start(window, Some(state), is_held)
    }

    fn adopt(&mut self, id: ProcessId) -> Option<Box<dyn Process>> {
        let ended = pidfd_open(Pid::from_raw(id.pid)?, PidfdFlags::empty()).ok()?;
        // If the start time matches, the process already had this ID when the descriptor was opened, so the descriptor
        // refers to it.
        (start_time(id.pid) == Some(id.started))
            .then(|| Box::new(WorkerProcess::adopted(id, ended)) as Box<dyn Process>)
    }

    fn rejoin(&self) -> Option<&Rejoin> {
        self.options.rejoin.as_ref()
    }

    fn card(&self) -> &str {
        &self.card
    }
}

impl ProgramLauncher {
    fn start(&self, window: OwnedFd, restore: Option<OwnedFd>, is_held: bool) -> Result<Started, String> {
        let (link, theirs) = worker_link::Link::pair().map_err(|error| error.to_string())?;
        let files = WorkerFiles { window, link: theirs, starter: None, restore, is_held };
        let child = self.options.start_of(files, Stdio::piped());
        let mut child = child.map_err(|error| error.to_string())?;
        if let Some(messages) = child.stderr.take() {
            let (span, pid) = (tracing::Span::current(), child.id());
            let thread = std::thread::Builder::new().name("cuda-messages".to_owned());
            // If the thread cannot be created, the worker's messages are lost.
            drop(thread.spawn(move || span.in_scope(|| relay(pid, messages))));
        }
        let process = WorkerProcess::new(child).map_err(|error| format!("cannot watch the worker: {error}"))?;
        Ok(Started { link, process: Box::new(process) })
    }
}

/// Returns the start time of a process in clock ticks since boot. Source: proc(5), field 22.
fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program name may contain spaces and parentheses.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// A process and its process file descriptor. Dropping this value kills the process.
#[derive(Debug)]
struct WorkerProcess {
    /// Child process, or `None` if another process started the worker.
    child: Option<Child>,
    ended: OwnedFd,
    id: Option<ProcessId>,
    is_left: bool,
}

impl WorkerProcess {
    fn adopted(id: ProcessId, ended: OwnedFd) -> Self {
        Self { child: None, ended, id: Some(id), is_left: false }
    }

    fn new(mut child: Child) -> io::Result<Self> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let ended = pid
            .ok_or(io::ErrorKind::InvalidInput.into())
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from));
        match ended {
            Ok(ended) => {
                let pid = i32::try_from(child.id()).unwrap_or(0);
                let id = start_time(pid).map(|started| ProcessId { pid, started });
                if id.is_none() {
                    tracing::warn!(pid, "a worker cannot outlive this daemon: cannot read its start time in /proc");
                }
                Ok(Self { child: Some(child), ended, id, is_left: false })
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }
}

impl Process for WorkerProcess {
    fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    fn kill(&mut self) {
        // The process may already have exited.
        let _ = pidfd_send_signal(&self.ended, Signal::KILL);
    }

    fn reap(&mut self) {
        let Some(child) = &mut self.child else { return };
        match child.try_wait() {
            Ok(Some(status)) if !status.success() => tracing::info!(%status, "a worker has exited"),
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "cannot reap an exited worker"),
        }
    }

    fn id(&self) -> Option<ProcessId> {
        self.id
    }

    fn leave(&mut self) {
        self.is_left = true;
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        self.kill();
        // Do not wait, because a killed process may be stuck in the driver.
        if let Some(child) = &mut self.child {
            let _ = child.try_wait();
        }
    }
}

/// A worker of the device.
pub(crate) struct Worker {
    /// Link, or `None` if the worker of an earlier daemon has not connected to this one yet.
    link: Option<worker_link::Link>,
    process: Box<dyn Process>,
    outbox: VecDeque<ToWorker>,
    /// Set once the worker was killed. Its link is not used afterwards.
    is_deaf: bool,
    /// Time at which a worker without a link will be killed, in ns.
    pub(crate) rejoins_until: Option<u64>,
}

impl Worker {
    pub(crate) fn new(Started { link, process }: Started) -> Self {
        Self { link: Some(link), process, outbox: VecDeque::new(), is_deaf: false, rejoins_until: None }
    }

    /// Creates the worker of an earlier daemon. Without a link, the worker may connect until `until`.
    pub(crate) fn adopted(process: Box<dyn Process>, link: Option<worker_link::Link>, until: u64) -> Self {
        let rejoins_until = link.is_none().then_some(until);
        Self { link, process, outbox: VecDeque::new(), is_deaf: false, rejoins_until }
    }

    /// Assigns a link from process `pid` to this worker. Returns the link if the worker is another process, or if it
    /// does not wait for a link.
    pub(crate) fn rejoin(&mut self, pid: i32, link: worker_link::Link) -> Result<(), worker_link::Link> {
        if self.link.is_some() || self.is_deaf || self.process.id().is_none_or(|id| id.pid != pid) {
            return Err(link);
        }
        (self.link, self.rejoins_until) = (Some(link), None);
        Ok(())
    }

    /// Returns the identity of the process for another daemon.
    pub(crate) fn id(&self) -> Option<ProcessId> {
        self.process.id()
    }

    /// Releases the process to another daemon.
    pub(crate) fn leave(&mut self) {
        self.process.leave();
    }

    /// Returns the link's descriptor if messages are expected on it.
    pub(crate) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().filter(|_| !self.is_deaf).map(AsFd::as_fd)
    }

    /// Returns the descriptor that becomes readable once the process has exited.
    pub(crate) fn ended(&self) -> BorrowedFd<'_> {
        self.process.ended()
    }

    /// Returns true if messages are waiting to be sent.
    pub(crate) fn has_output(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends a message immediately, or queues it behind messages that the worker has not read yet. Kills a worker that
    /// does not read its messages. Drops a doorbell directly after a queued one. Without a link, drops the message,
    /// because everything is repeated when the worker connects.
    pub(crate) fn send(&mut self, message: ToWorker) {
        if self.link.is_none() {
            return;
        }
        if message == ToWorker::Doorbell && self.outbox.back() == Some(&message) {
            return;
        }
        if self.outbox.len() >= MAX_OUTBOX {
            tracing::warn!("killing a worker that does not read its messages");
            self.kill();
        }
        self.outbox.push_back(message);
        self.flush();
    }

    /// Requests that the worker save its state to a file, unless earlier messages are still queued. `message` is `Save`
    /// or `Hold`. Returns true if the request was sent.
    pub(crate) fn send_save(&mut self, message: ToWorker, file: BorrowedFd<'_>) -> bool {
        self.flush();
        let link = self.link.as_ref().filter(|_| !self.is_deaf && self.outbox.is_empty());
        link.is_some_and(|link| link.send_save(message, file).is_ok())
    }

    /// Sends queued messages.
    pub(crate) fn flush(&mut self) {
        let Some(link) = self.link.as_ref().filter(|_| !self.is_deaf) else { return };
        while let Some(&message) = self.outbox.front() {
            match link.send_to_worker(message) {
                Ok(()) => self.outbox.pop_front(),
                Err(LinkError::WouldBlock) => return,
                Err(_) => return self.kill(),
            };
        }
    }

    /// Receives a message if one has arrived. Kills a worker that has closed its link or violated the protocol.
    pub(crate) fn receive(&mut self) -> Option<FromWorker> {
        let link = self.link.as_ref().filter(|_| !self.is_deaf)?;
        match link.receive_from_worker() {
            Ok(message) => Some(message),
            Err(LinkError::WouldBlock) => None,
            Err(LinkError::Closed) => {
                self.kill();
                None
            }
            Err(error) => {
                tracing::warn!(%error, "killing a worker");
                self.kill();
                None
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        self.is_deaf = true;
        self.outbox.clear();
        self.process.kill();
    }

    pub(crate) fn reap(&mut self) {
        self.process.reap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_a_worker_are_bounded_and_lines_are_cut() {
        let mut long = io::repeat(b'x').take(1 << 20);
        assert_eq!(relay(1, &mut long), MAX_LOGGED_BYTES);
        assert_eq!(long.limit(), 0, "the worker's last write failed");
        let mut lines = io::Cursor::new(b"a\nb\n".repeat(10_000));
        assert_eq!(relay(1, &mut lines), 2 * MAX_LOGGED_LINES as u64);
        assert_eq!(lines.position(), 40_000, "the worker's last write failed");
        assert_eq!(relay(1, io::Cursor::new(b"a\n")), 2);
    }
}
