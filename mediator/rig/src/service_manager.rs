//! A service manager for tests. It receives notifications from daemons (`sd_notify`), keeps the file descriptors that
//! they store, and passes these descriptors to the next daemon.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};
use parking_lot::{Condvar, Mutex};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Maximum number of stored descriptors.
const MAX_DESCRIPTORS: u32 = 1026;
/// Number of the first descriptor passed to a daemon.
const FIRST_PASSED_FD: i32 = 3;
/// Message that stops the service manager's own listening thread.
const STOP_MESSAGE: &[u8] = b"X_LAST=1";

/// Messages received so far.
#[derive(Debug, Default)]
pub struct Heard {
    /// Unread notification lines, except for those about stored descriptors.
    pub said: Vec<String>,
    /// Stored descriptors with their names, in order. Two descriptors may have the same name.
    pub kept: Vec<(String, OwnedFd)>,
    /// Number of received messages about stored descriptors.
    pub stored: u64,
}

impl Heard {
    /// Removes all lines through the first occurrence of `line`. Returns `None` if `line` was not received.
    pub fn take(&mut self, line: &str) -> Option<()> {
        let place = self.said.iter().position(|said| said == line)?;
        self.said.drain(..=place);
        Some(())
    }

    /// Returns true if exactly the descriptors with these names are stored. `names` must be sorted.
    #[must_use]
    pub fn keeps(&self, names: &[&str]) -> bool {
        let mut kept: Vec<_> = self.kept.iter().map(|(name, _)| name.as_str()).collect();
        kept.sort_unstable();
        kept == names
    }

    fn message(&mut self, text: &str, fds: Vec<OwnedFd>) {
        let Some(name) = text.lines().find_map(|line| line.strip_prefix("FDNAME=")) else {
            return self.said.extend(text.lines().map(str::to_owned));
        };
        self.stored += 1;
        if text.lines().any(|line| line == "FDSTOREREMOVE=1") {
            self.kept.retain(|(kept, _)| kept != name);
        }
        self.kept.extend(fds.into_iter().map(|fd| (name.to_owned(), fd)));
    }
}

/// Service manager, which listens until it is dropped.
#[derive(Debug)]
pub struct ServiceManager {
    path: PathBuf,
    heard: Arc<(Mutex<Heard>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl ServiceManager {
    /// Listens on `path`.
    ///
    /// # Errors
    /// Returns an error if listening on the path fails.
    pub fn new(path: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::bind(path)?;
        let heard = Arc::new((Mutex::default(), Condvar::new()));
        let shared = Arc::clone(&heard);
        let thread = std::thread::Builder::new().name("manager".into()).spawn(move || listen(&socket, &shared))?;
        Ok(Self { path: path.to_owned(), heard, thread: Some(thread) })
    }

    /// Returns a command that starts `program` as a service with all stored descriptors.
    ///
    /// # Errors
    /// Returns an error if a descriptor cannot be duplicated.
    pub fn command(&self, program: &Path) -> io::Result<Command> {
        // A service checks the process ID to verify that the descriptors are meant for it.
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(program);
        command.env("NOTIFY_SOCKET", &self.path).env("FDSTORE", MAX_DESCRIPTORS.to_string());
        for variable in ["LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID"] {
            command.env_remove(variable);
        }
        let heard = self.heard.0.lock();
        if !heard.kept.is_empty() {
            let names: Vec<_> = heard.kept.iter().map(|(name, _)| name.as_str()).collect();
            command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
            let mappings = heard.kept.iter().zip(FIRST_PASSED_FD..).map(|((_, fd), child_fd)| {
                let parent_fd = fd.try_clone()?;
                Ok(FdMapping { parent_fd, child_fd })
            });
            let mappings = mappings.collect::<io::Result<_>>()?;
            command.fd_mappings(mappings).map_err(io::Error::other)?;
        }
        Ok(command)
    }

    /// Calls `look` with the received messages, immediately and whenever further messages arrive, until it returns a
    /// value.
    ///
    /// # Errors
    /// Returns an error on timeout.
    pub fn wait<T>(&self, limit: Duration, mut look: impl FnMut(&mut Heard) -> Option<T>) -> io::Result<T> {
        let (heard, more) = &*self.heard;
        let mut found = None;
        let mut heard = heard.lock();
        more.wait_while_for(
            &mut heard,
            |heard| {
                found = look(heard);
                found.is_none()
            },
            limit,
        );
        found.ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, format!("the daemon only sent {heard:?}")))
    }
}

impl Drop for ServiceManager {
    fn drop(&mut self) {
        let told = UnixDatagram::unbound().and_then(|socket| socket.send_to(STOP_MESSAGE, &self.path));
        if let (Ok(_), Some(thread)) = (told, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

fn listen(socket: &UnixDatagram, shared: &(Mutex<Heard>, Condvar)) {
    loop {
        let mut text = [0; 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut text)];
        let Ok(received) = recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) else { return };
        let rights = |message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        };
        let fds = ancillary.drain().filter_map(rights).flatten().collect();
        let text = text.get(..received.bytes).unwrap_or_default();
        if text == STOP_MESSAGE {
            return;
        }
        shared.0.lock().message(&String::from_utf8_lossy(text), fds);
        shared.1.notify_all();
    }
}
