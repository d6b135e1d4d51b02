//! USERD: the page through which a channel's owner submits work, and the detection of submissions.
//!
//! A real card polls GP_PUT. The model detects every CPU write to VRAM, through any window, that covers GP_PUT of a
//! bound channel. It detects engine writes when the scheduler is next idle, and polls USERD pages in host memory while
//! their channels run.

use crate::clock::{CardNs, CardTime};
use nvspec::addr::VramAddr;
use nvspec::fifo::CHANNELS;
use nvspec::instance::userd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Value for a channel without a page in VRAM, or without a doorbell.
const NONE: u64 = u64::MAX;

/// The USERD pages of bound channels in VRAM, and a record of the pages that were written. CPU threads and the
/// scheduler share this object. They access single atomic words, and do not rely on the order of these accesses.
#[derive(Debug)]
pub(crate) struct Doorbells {
    pages: [AtomicU64; CHANNELS as usize],
    rung: [AtomicU64; CHANNELS as usize / 64],
    /// Card time of each channel's first doorbell since the last `take`.
    since: [AtomicU64; CHANNELS as usize],
    time: Arc<CardTime>,
}

impl Doorbells {
    pub(crate) fn new(time: Arc<CardTime>) -> Self {
        Self {
            pages: std::array::from_fn(|_| AtomicU64::new(NONE)),
            rung: std::array::from_fn(|_| AtomicU64::new(0)),
            since: std::array::from_fn(|_| AtomicU64::new(NONE)),
            time,
        }
    }

    /// Sets the page address of `channel`.
    pub(crate) fn set_page(&self, channel: u8, page: Option<VramAddr>) {
        if let Some(slot) = self.pages.get(usize::from(channel)) {
            slot.store(page.map_or(NONE, |page| page.0), Ordering::Release);
        }
    }

    /// Records a CPU write of `len` bytes at `address`. Returns true if the write covers GP_PUT of a channel.
    pub(crate) fn note_write(&self, address: VramAddr, len: u64) -> bool {
        let first = address.0;
        let Some(last) = first.checked_add(len.saturating_sub(1)) else { return false };
        // Find the first GP_PUT word at or after the first byte.
        let page =
            if first % userd::BYTES > userd::GP_PUT + 3 { address.page().0 + userd::BYTES } else { address.page().0 };
        if page + userd::GP_PUT > last {
            return false;
        }
        let mut rang = false;
        for (channel, slot) in self.pages.iter().enumerate() {
            let at = slot.load(Ordering::Acquire);
            if at != NONE && at + userd::GP_PUT <= last && at + userd::GP_PUT + 3 >= first {
                self.ring(channel);
                rang = true;
            }
        }
        rang
    }

    fn ring(&self, channel: usize) {
        if let (Some(word), Some(since)) = (self.rung.get(channel / 64), self.since.get(channel)) {
            // Keep the first time: a second doorbell only adds work to the first.
            let _first = since.compare_exchange(NONE, self.time.now(), Ordering::AcqRel, Ordering::Relaxed);
            word.fetch_or(1 << (channel % 64), Ordering::AcqRel);
        }
    }

    /// Returns the channels whose doorbells have rung since the last call, as a bit mask.
    pub(crate) fn take(&self) -> u128 {
        let mut channels = 0;
        for (index, word) in self.rung.iter().enumerate() {
            if word.load(Ordering::Acquire) != 0 {
                channels |= u128::from(word.swap(0, Ordering::AcqRel)) << (64 * index);
            }
        }
        channels
    }

    /// Returns the doorbell time of a channel that [`Self::take`] returned, if known. A doorbell that rings during
    /// `take` is reported again, although its time may already have been taken.
    pub(crate) fn take_since(&self, channel: usize) -> Option<CardNs> {
        let since = self.since.get(channel)?.swap(NONE, Ordering::AcqRel);
        (since != NONE).then_some(since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    #[test]
    fn only_writes_that_cover_gp_put_of_a_bound_page_ring() {
        let mut clock = Clock::manual();
        let doorbells = Doorbells::new(clock.time());
        doorbells.set_page(3, Some(VramAddr(0x20_3000)));
        assert!(!doorbells.note_write(VramAddr(0x20_3088), 4));
        assert!(!doorbells.note_write(VramAddr(0x20_3090), 4));
        assert!(!doorbells.note_write(VramAddr(0x20_408c), 4));
        assert_eq!(doorbells.take(), 0);
        clock.advance(70);
        assert!(doorbells.note_write(VramAddr(0x20_308c), 4));
        clock.advance(5);
        assert!(doorbells.note_write(VramAddr(0x20_3088), 8));
        assert!(doorbells.note_write(VramAddr(0x20_2f00), 0x400));
        assert_eq!((doorbells.take(), doorbells.take_since(3)), (1 << 3, Some(70)));
        assert_eq!((doorbells.take(), doorbells.take_since(3)), (0, None));
    }
}
