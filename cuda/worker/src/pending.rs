//! Records of calls with deferred replies.

use std::collections::VecDeque;

use cuda_calls::own::Route;
use cuda_ring::{Header, control};

/// Header and route of the message being executed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub header: Header,
    pub route: Route,
}

/// Maximum number of waits per program: one for each thread's slot.
pub(crate) const MAX_WAITS: usize = control::SLOT_COUNT as usize;

/// Work that a call waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// A stream, by the driver's handle.
    Stream(u64),
    /// An event, by the driver's handle.
    Event(u64),
    /// All streams of a context, by the driver's handles.
    Context(Vec<u64>),
}

/// A copy's use of a staging buffer, with the event recorded after the copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceUse {
    pub piece: u64,
    pub event: u64,
    pub context: u32,
}

/// Result of the last completed link. The guest reads it in parts.
#[derive(Debug, Default)]
pub(crate) struct Linked {
    pub handle: u64,
    pub words: Vec<u64>,
}

/// All pending waits of a program.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    pub calls: Vec<(Origin, Wait)>,
    pub pieces: VecDeque<PieceUse>,
    /// Unused events for staging buffers, each with its context.
    pub events: Vec<(u32, u64)>,
}

impl Waits {
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.pieces.is_empty()
    }
}
