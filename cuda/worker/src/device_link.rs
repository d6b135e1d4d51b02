//! The connection to the device, which is re-established after a change of daemons.

use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use worker_link::{FromWorker, Link, LinkError, Rejoin, ToWorker};

/// Interval between attempts to connect to the next daemon.
const REJOIN_INTERVAL: Duration = Duration::from_millis(50);

/// Connection to the device.
#[derive(Debug)]
pub struct DeviceLink {
    link: Mutex<Arc<Link>>,
    rejoin: Option<Rejoin>,
}

impl DeviceLink {
    /// Wraps a connection. If `rejoin` is set, a closed connection is replaced.
    pub fn new(link: Link, rejoin: Option<Rejoin>) -> Self {
        Self { link: Mutex::new(Arc::new(link)), rejoin }
    }

    fn current(&self) -> Arc<Link> {
        Arc::clone(&self.link.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sends a message. Without a daemon, the message is lost, and the next daemon requests the information again.
    pub(crate) fn send(&self, message: FromWorker) {
        let _ = self.current().send_from_worker(message);
    }

    /// Waits until a message has arrived, or the connection is closed.
    pub(crate) fn wait(&self) {
        let link = self.current();
        let mut descriptors = [PollFd::new(&*link, PollFlags::IN)];
        // Ignore errors, because the caller tries to receive and waits again.
        let _ = poll(&mut descriptors, None);
    }

    /// Returns the next message, and its file, if any.
    pub(crate) fn try_receive(&self) -> Result<(ToWorker, Option<OwnedFd>), LinkError> {
        self.current().try_receive_in_worker()
    }

    /// Connects to the next daemon. `lost` is the time when the previous daemon's connection was found closed. Returns
    /// false if no daemon listens within the time limit, or if the connection must not be replaced.
    pub(crate) fn rejoin(&self, lost: Instant) -> bool {
        let Some(Rejoin { socket, limit }) = &self.rejoin else { return false };
        while lost.elapsed() < *limit {
            // Also sleep before the first attempt, so that a daemon that closes each connection does not cause a busy
            // loop.
            std::thread::sleep(REJOIN_INTERVAL);
            if let Ok(link) = Link::connect(socket) {
                crate::sandbox::report_at(link.as_fd());
                *self.link.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(link);
                return true;
            }
        }
        // Ignore errors, because the reader of standard error may have exited with the daemon.
        let _ = writeln!(std::io::stderr(), "cuda-worker: no daemon has started within {limit:?}: ending the program");
        false
    }
}
