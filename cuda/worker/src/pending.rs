//! Records of calls that are answered later.

use std::collections::VecDeque;

use cuda_calls::own::Route;
use cuda_ring::{Header, control};

/// Header and route of the message that is being executed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub header: Header,
    pub route: Route,
}

/// Maximum number of waits of a program: one for each thread's slot.
pub(crate) const MAX_WAITS: usize = control::SLOT_COUNT as usize;

/// Work for which a call waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// A stream of the driver.
    Stream(u64),
    /// An event of the driver.
    Event(u64),
    /// Several streams.
    Context(Vec<u64>),
}

/// A use of a staging piece: the event after the copy that reads the piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceUse {
    pub piece: u64,
    pub event: u64,
    pub context: u32,
}

/// The result of the last completed link, which the guest reads in parts.
#[derive(Debug, Default)]
pub(crate) struct Linked {
    pub handle: u64,
    pub words: Vec<u64>,
}

/// All waits of a program.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    pub calls: Vec<(Origin, Wait)>,
    pub pieces: VecDeque<PieceUse>,
    /// Events for pieces that are not in use, by their context.
    pub events: Vec<(u32, u64)>,
}

impl Waits {
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.pieces.is_empty()
    }
}
