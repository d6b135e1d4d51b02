//! Touches of VRAM by the card's engines in the order in which they were made, for who asks what could have been evicted when.

use super::BusAddr;
use card::AccessCounts;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Bytes that were moved from and to a block of VRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Moved from it.
    pub read: u64,
    /// Moved to it.
    pub written: u64,
}

impl Touched {
    fn add(&mut self, other: Self) {
        self.read += other.read;
        self.written += other.written;
    }
}

/// A little of an engine's work, about a block of a grid: blocks of VRAM of [`AccessCounts::BLOCK_BYTES`] that it touched, by their
/// number.
pub type Touches = BTreeMap<u64, Touched>;

/// Nothing, until somebody asks.
#[derive(Debug, Default)]
pub(super) struct Log(Mutex<Option<State>>);

#[derive(Debug, Default)]
struct State {
    ended: Vec<Touches>,
    /// The piece under way.
    open: Touches,
}

impl Log {
    /// Bytes were moved from or to the page at `address`.
    pub(super) fn add(&self, address: BusAddr, bytes: u64, write: bool) {
        let (BusAddr::Vram(address), Some(state)) = (address, &mut *self.0.lock()) else { return };
        let touched = if write { Touched { read: 0, written: bytes } } else { Touched { read: bytes, written: 0 } };
        state.open.entry(address.0 / AccessCounts::BLOCK_BYTES).or_default().add(touched);
    }

    /// A little of the work is done. What touches no block that the piece before it did not belongs to that.
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

    /// Returns what was touched since the last call, and goes on; the first call begins.
    pub(super) fn take(&self) -> Vec<Touches> {
        self.0.lock().replace(State::default()).map_or_else(Vec::new, |state| state.ended)
    }
}
