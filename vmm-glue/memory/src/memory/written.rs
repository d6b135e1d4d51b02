//! Log of the client memory written by this process, for a client that copies its memory while the device runs.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// Granularity of the log in bytes. It is coarse, to keep the log small.
pub const LOG_BLOCK: u64 = 2 << 20;

/// The write log of one client's memory.
#[derive(Debug, Default)]
pub struct WriteLog {
    on: AtomicBool,
    blocks: Mutex<BTreeSet<u64>>,
}

impl WriteLog {
    /// Clears the log, and starts or stops it.
    pub fn set(&self, on: bool) {
        let mut blocks = self.blocks.lock();
        blocks.clear();
        self.on.store(on, Ordering::SeqCst);
    }

    /// Records a write of `len` bytes. Must be called after the write, so that a reader of the log finds the new data.
    pub(super) fn note(&self, gpa: u64, len: usize) {
        if !self.on.load(Ordering::SeqCst) {
            return;
        }
        let last = gpa.saturating_add(super::len64(len).saturating_sub(1));
        let mut blocks = self.blocks.lock();
        blocks.extend(gpa / LOG_BLOCK..=last / LOG_BLOCK);
    }

    /// Calls `each` with the written blocks that overlap `range`, and removes the blocks inside `range` from the log.
    pub fn take(&self, range: &Range<u64>, mut each: impl FnMut(Range<u64>)) {
        let first = range.start / LOG_BLOCK;
        let last = range.end.saturating_sub(1) / LOG_BLOCK;
        let mut blocks = self.blocks.lock();
        let touched: Vec<u64> = blocks.range(first..=last.max(first)).copied().collect();
        for block in touched {
            let start = block.saturating_mul(LOG_BLOCK);
            let all = start..start.saturating_add(LOG_BLOCK);
            if range.start <= all.start && all.end <= range.end {
                blocks.remove(&block);
            }
            each(all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(log: &WriteLog, range: Range<u64>) -> Vec<u64> {
        let mut all = Vec::new();
        log.take(&range, |block| all.push(block.start / LOG_BLOCK));
        all
    }

    #[test]
    fn written_blocks_are_reported_until_range_covers_them() {
        let log = WriteLog::default();
        log.note(0, 100);
        assert_eq!(taken(&log, 0..u64::MAX), [0u64; 0], "it is off");
        log.set(true);
        log.note(LOG_BLOCK - 1, 2);
        log.note(5 * LOG_BLOCK, 1);
        assert_eq!(taken(&log, 0..LOG_BLOCK / 2), [0]);
        assert_eq!(taken(&log, 0..2 * LOG_BLOCK), [0, 1]);
        assert_eq!(taken(&log, 0..u64::MAX), [5]);
        assert_eq!(taken(&log, 0..u64::MAX), [0u64; 0]);
        log.note(u64::MAX, 9);
        assert_eq!(taken(&log, u64::MAX - 1..u64::MAX), [u64::MAX / LOG_BLOCK]);
    }
}
