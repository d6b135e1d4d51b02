//! Requests and results of worker restarts.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Default time limit for the restarts of a request.
// TIMEOUT: a worker waits at most 10 s for its program's work, and its memory is copied to the host and back. A worker
// controlled by the guest may not respond at all.
pub const RESTART_LIMIT: Duration = Duration::from_secs(120);

/// Result of the restart of one program's worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restart {
    /// Name of the program, if the guest's kernel sends it.
    pub name: String,
    /// The program's process ID in the guest, if its library has sent the ID. The ID is not checked.
    pub pid: Option<u32>,
    /// Time from the request until the program continued in the new worker, or the reason why the worker was not
    /// restarted.
    pub result: Result<Duration, String>,
}

/// A request for restarts.
#[derive(Debug)]
pub(crate) struct RestartRequest {
    /// Process ID of the program in the guest, or `None` for all programs.
    pub(crate) pid: Option<u32>,
    /// Time of the request.
    pub(crate) begin: Instant,
    /// Deadline for the results. Until then, the restarts prevent a handover.
    pub(crate) until: Instant,
    /// Channel on which the executor reports the number of results that it will send.
    pub(crate) counts: Sender<usize>,
    pub(crate) results: Sender<Restart>,
}

/// Reason why the results of restarts are not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestartError {
    /// The function is not executing commands.
    #[error("its CUDA function is not being served")]
    NotServed,
    /// A worker has not responded in time.
    #[error("a worker has not responded within {0:?}")]
    TimedOut(Duration),
}
