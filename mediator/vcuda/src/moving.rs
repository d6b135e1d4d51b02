//! Moves of programs to another card, as the daemon requests them.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use crate::worker::Launcher;

/// Usual time limit until all programs have a worker on the other card.
// TIMEOUT: each program waits for its work for at most 10 s, and copies its memory to the host and to the other card.
pub const CARRY_LIMIT: Duration = Duration::from_secs(300);

/// Programs that continue on another card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Number of programs.
    pub programs: usize,
    /// Time for which the first program has waited.
    pub pause: Duration,
}

/// A request for a move.
pub(crate) struct MoveRequest {
    /// Starts workers on the other card.
    pub(crate) launcher: Box<dyn Launcher>,
    /// Limit of the memory and images of one program, in bytes.
    pub(crate) state_bytes: u64,
    /// Time until which all programs must have a worker on the other card.
    pub(crate) until: Instant,
    pub(crate) reply: Sender<Result<Carried, String>>,
}

impl std::fmt::Debug for MoveRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoveRequest").field("until", &self.until).finish_non_exhaustive()
    }
}
