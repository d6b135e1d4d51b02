//! The owner's process and its pipes.

use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuda_control::Answer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{ENDS, POLL_INTERVAL, PROGRAM, beside};

/// Maximum size of a response in bytes. The largest response is a recording of the scheduler.
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// Maximum number of bytes per read.
const READ_BYTES: usize = 64 << 10;
/// Maximum number of bytes per write. A writable pipe accepts this many without blocking (`PIPE_BUF` in pipe(7)).
const WRITE_BYTES: usize = 4 << 10;

/// A process started by this daemon or by an earlier one.
pub(super) struct Handle {
    /// Child process, or `None` if an earlier daemon started it. The exit status is then unknown.
    child: Option<Child>,
    /// Process file descriptor, which becomes readable when the process has exited.
    pidfd: OwnedFd,
}

impl Handle {
    /// Returns a description of the process's exit if it has exited.
    pub(super) fn end(&mut self) -> Option<String> {
        match &mut self.child {
            Some(child) => child.try_wait().ok().flatten().map(|status| status.to_string()),
            None => is_ready(&self.pidfd, PollFlags::IN, Duration::ZERO).then(|| "its process has exited".to_owned()),
        }
    }

    /// Returns the exit status, if known.
    fn code(&mut self) -> Option<i32> {
        self.child.as_mut()?.try_wait().ok().flatten()?.code()
    }

    /// Kills the process if it is still running.
    pub(super) fn killed(self) -> Self {
        self.kill();
        self
    }

    fn kill(&self) {
        // The process may already have exited.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

/// Waits until a file descriptor is ready or closed, for at most `limit`.
fn is_ready(fd: &OwnedFd, event: PollFlags, limit: Duration) -> bool {
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    let mut fds = [PollFd::new(fd, event)];
    poll(&mut fds, Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// A running and responsive owner process.
pub(super) struct Process {
    pub(super) handle: Handle,
    input: OwnedFd,
    output: OwnedFd,
    /// Bytes of an incomplete response.
    received: Vec<u8>,
    pub(super) since: Instant,
}

impl Process {
    pub(super) fn spawn() -> Result<Self, String> {
        let program = beside(PROGRAM, PROGRAM);
        let failed = |error: io::Error| format!("{} cannot be started: {error}", program.display());
        let mut command = std::process::Command::new(&program);
        let mut child = command.arg("work").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pidfd = pid.ok_or(Errno::INVAL).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let (Some(input), Some(output), Ok(pidfd)) = (child.stdin.take(), child.stdout.take(), pidfd) else {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("{} has no input or output", program.display()));
        };
        Ok(Self::from_parts(Handle { child: Some(child), pidfd }, input.into(), output.into()))
    }

    /// Takes over a process that another daemon started, given its input, output, and process file descriptor.
    pub(super) fn adopted([input, output, pidfd]: [OwnedFd; 3]) -> Self {
        Self::from_parts(Handle { child: None, pidfd }, input, output)
    }

    fn from_parts(handle: Handle, input: OwnedFd, output: OwnedFd) -> Self {
        Self { handle, input, output, received: Vec::new(), since: Instant::now() }
    }

    /// Duplicates the descriptors for another daemon. Must be called between requests, when no response is outstanding.
    pub(super) fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        [&self.input, &self.output, &self.handle.pidfd].into_iter().map(OwnedFd::try_clone).collect()
    }

    /// Sends a line and waits for the response. After an error, the process must not be used again, because it may have
    /// received part of the line.
    pub(super) fn exchange(
        &mut self,
        line: &impl serde::Serialize,
        limit: Duration,
        stop: &AtomicBool,
    ) -> Result<Answer, String> {
        let ended = |error: Errno| format!("{PROGRAM} has exited: {error}");
        let mut text = serde_json::to_vec(line).map_err(|error| error.to_string())?;
        text.push(b'\n');
        let asked = Instant::now();
        let check = |failure: &str| {
            if stop.load(Ordering::Relaxed) {
                return Err("the daemon is exiting".to_owned());
            }
            if asked.elapsed() >= limit {
                return Err(format!("{PROGRAM} did not {failure} within {} s and was killed", limit.as_secs()));
            }
            Ok(())
        };
        for part in text.chunks(WRITE_BYTES) {
            // A stopped process does not read its input, so its pipe fills up.
            while !is_ready(&self.input, PollFlags::OUT, POLL_INTERVAL.min(limit)) {
                check("read its request")?;
            }
            let mut rest = part;
            while !rest.is_empty() {
                let written = rustix::io::retry_on_intr(|| rustix::io::write(&self.input, rest)).map_err(ended)?;
                rest = rest.get(written..).unwrap_or_default();
            }
        }
        while !is_ready(&self.output, PollFlags::IN, POLL_INTERVAL.min(limit)) || !self.receive()? {
            check("answer")?;
        }
        let line = std::mem::take(&mut self.received);
        serde_json::from_slice(&line).map_err(|error| format!("{PROGRAM} has a different version: {error}"))
    }

    /// Receives part of a response. Returns true if the response is complete.
    fn receive(&mut self) -> Result<bool, String> {
        let before = self.received.len();
        self.received.resize(before + READ_BYTES, 0);
        let place = self.received.get_mut(before..).unwrap_or_default();
        let read = rustix::io::retry_on_intr(|| rustix::io::read(&self.output, &mut *place)).unwrap_or(0);
        self.received.truncate(before + read);
        if read == 0 {
            return Err(format!("{PROGRAM} has exited"));
        }
        if self.received.len() > MAX_ANSWER_BYTES {
            return Err(format!("{PROGRAM} sent an unterminated response"));
        }
        Ok(self.received.last() == Some(&b'\n'))
    }

    /// Returns true if the process exited because it lost its card.
    pub(super) fn has_lost_card(&mut self) -> bool {
        // The process closes its output shortly before it exits.
        is_ready(&self.handle.pidfd, PollFlags::IN, ENDS) && self.handle.code() == Some(cuda_control::CARD_LOST)
    }

    /// Closes the process's input, so that it exits.
    pub(super) fn close(self) -> Handle {
        self.handle
    }

    /// Kills the process, which may take a while to exit.
    pub(super) fn kill(self) -> Handle {
        self.handle.kill();
        self.handle
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::kill_process;

    /// Starts a program instead of an owner.
    fn started(program: &str, arguments: &[&str]) -> Process {
        let mut command = std::process::Command::new(program);
        let mut child =
            command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let (input, output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        let pidfd = pidfd_open(pid(&child), PidfdFlags::empty()).expect("it runs");
        Process::from_parts(Handle { child: Some(child), pidfd }, input.into(), output.into())
    }

    fn pid(child: &Child) -> Pid {
        i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a number")
    }

    fn end(process: Process) {
        let mut handle = process.kill();
        handle.child.as_mut().expect("the process was started here").wait().expect("it exits");
    }

    #[test]
    fn stopped_process_is_given_up_while_its_pipe_is_full() {
        let mut process = started("sleep", &["1000"]);
        kill_process(pid(process.handle.child.as_ref().expect("started")), Signal::STOP).expect("it runs");
        // The request exceeds the pipe capacity, so even the write blocks.
        let request = "x".repeat(1 << 20);
        let failed = process.exchange(&request, Duration::from_millis(50), &AtomicBool::new(false));
        assert_eq!(failed, Err(format!("{PROGRAM} did not read its request within 0 s and was killed")));
        let stopped = process.exchange(&request, Duration::from_secs(600), &AtomicBool::new(true));
        assert_eq!(stopped, Err("the daemon is exiting".to_owned()), "an exiting daemon does not wait for the process");
        end(process);
    }

    #[test]
    fn request_larger_than_a_pipe_is_sent_whole() {
        // Like an owner, the program reads a whole line before it responds.
        let mut process = started("sed", &["-u", "p;d"]);
        let request = Answer::Record("x".repeat(200 << 10));
        let answer = process.exchange(&request, Duration::from_secs(600), &AtomicBool::new(false));
        assert_eq!(answer, Ok(request));
        end(process);
    }
}
