//! Requests to move programs to another card.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use crate::worker::Launcher;

/// Default time limit for all programs to have a worker on the other card.
// TIMEOUT: each program waits for its work for at most 10 s, and copies its memory to the host and to the other card.
pub const CARRY_LIMIT: Duration = Duration::from_secs(300);

/// A completed move to another card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Number of programs that have moved.
    pub programs: usize,
    /// Time for which the first program has waited.
    pub pause: Duration,
}

/// A request for a move.
pub(crate) struct MoveRequest {
    /// Starts workers on the other card.
    pub(crate) launcher: Box<dyn Launcher>,
    /// Maximum total size of one program's memory and images, in bytes.
    pub(crate) state_bytes: u64,
    /// Deadline for all programs to have a worker on the other card.
    pub(crate) until: Instant,
    pub(crate) reply: Sender<Result<Carried, String>>,
}

impl std::fmt::Debug for MoveRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoveRequest").field("until", &self.until).finish_non_exhaustive()
    }
}
