//! A log of the engines' VRAM accesses in order, for studying eviction policies.

use super::BusAddr;
use card::AccessCounts;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Amount of data that engines transferred to and from one VRAM block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Number of bytes read from the block.
    pub read: u64,
    /// Number of bytes written to the block.
    pub written: u64,
}

impl Touched {
    fn add(&mut self, other: Self) {
        self.read += other.read;
        self.written += other.written;
    }
}

/// The VRAM blocks ([`AccessCounts::BLOCK_BYTES`] each) accessed by one step of an engine's work, by block number. A
/// step covers about one block of a grid.
pub type Touches = BTreeMap<u64, Touched>;

/// The recorded accesses, or `None` until they are first requested.
#[derive(Debug, Default)]
pub(super) struct Log(Mutex<Option<State>>);

#[derive(Debug, Default)]
struct State {
    ended: Vec<Touches>,
    /// Accesses of the current step.
    open: Touches,
}

impl Log {
    /// Records bytes read from the page at `address`, or written to it if `write` is true.
    pub(super) fn add(&self, address: BusAddr, bytes: u64, write: bool) {
        let (BusAddr::Vram(address), Some(state)) = (address, &mut *self.0.lock()) else { return };
        let touched = if write { Touched { read: 0, written: bytes } } else { Touched { read: bytes, written: 0 } };
        state.open.entry(address.0 / AccessCounts::BLOCK_BYTES).or_default().add(touched);
    }

    /// Ends a step. Merges it into the previous step if it accessed only blocks that the previous step accessed, and
    /// wrote only blocks that the previous step wrote.
    pub(super) fn end(&self) {
        let Some(State { ended, open }) = &mut *self.0.lock() else { return };
        let open = std::mem::take(open);
        let is_known = |last: &Touches| {
            open.iter().all(|(block, new)| last.get(block).is_some_and(|old| new.written == 0 || old.written != 0))
        };
        match ended.last_mut() {
            Some(last) if is_known(last) => {
                open.into_iter().for_each(|(block, new)| last.entry(block).or_default().add(new));
            }
            _ if open.is_empty() => {}
            _ => ended.push(open),
        }
    }

    /// Returns the accesses since the last call. The first call starts the recording.
    pub(super) fn take(&self) -> Vec<Touches> {
        self.0.lock().replace(State::default()).map_or_else(Vec::new, |state| state.ended)
    }
}
