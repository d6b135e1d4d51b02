//! Restarts of workers, as the daemon requests them.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Usual time limit for the restarts of a request.
// TIMEOUT: a worker waits for the work of its program for at most 10 s, and copies its memory to the host and back. A
// worker that is under the guest's control may not respond at all.
pub const RESTART_LIMIT: Duration = Duration::from_secs(120);

/// Result of the restart of one program's worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restart {
    /// Name of the program, if the guest's kernel sends it.
    pub name: String,
    /// The program's process ID in the guest, if its library has sent the ID. The ID is not checked.
    pub pid: Option<u32>,
    /// Time from the request until the program continued in the new worker, or the reason against the restart.
    pub result: Result<Duration, String>,
}

/// A request for restarts.
#[derive(Debug)]
pub(crate) struct RestartRequest {
    /// Process ID of the program in the guest; all programs if `None`.
    pub(crate) pid: Option<u32>,
    /// Time of the request.
    pub(crate) begin: Instant,
    /// Time until which the requester waits, and the restarts prevent a handover.
    pub(crate) until: Instant,
    /// Receives the number of restarts, and then the result of each.
    pub(crate) counts: Sender<usize>,
    pub(crate) results: Sender<Restart>,
}

/// Reasons for which restarts have no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestartError {
    /// The function does not execute commands.
    #[error("its CUDA function is not served now")]
    NotServed,
    /// The workers have not responded in time.
    #[error("a worker has not responded within {0:?}")]
    TimedOut(Duration),
}
