//! USERD: the page through which a channel's owner submits, and how the card notices.
//!
//! A real card polls GP_PUT. Here every CPU write to VRAM that covers a GP_PUT word of a bound channel's page is seen,
//! by whichever window it comes; writes by engines are seen when the scheduler next has nothing to do; pages in host
//! memory are polled while their channel runs.

use nvspec::addr::VramAddr;
use nvspec::fifo::CHANNELS;
use nvspec::instance::userd;
use std::sync::atomic::{AtomicU64, Ordering};

/// Marks a channel without a page in VRAM.
const NONE: u64 = u64::MAX;

/// The bound channels' USERD pages in VRAM, and which of them were written. Shared by the CPU's threads and the
/// scheduler; both only use single atomic words, in any order.
#[derive(Debug)]
pub(crate) struct Doorbells {
    pages: [AtomicU64; CHANNELS as usize],
    rung: [AtomicU64; CHANNELS as usize / 64],
}

impl Doorbells {
    pub(crate) fn new() -> Self {
        Self { pages: std::array::from_fn(|_| AtomicU64::new(NONE)), rung: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Channel `channel`'s page lies at `page` now.
    pub(crate) fn set_page(&self, channel: u8, page: Option<VramAddr>) {
        if let Some(slot) = self.pages.get(usize::from(channel)) {
            slot.store(page.map_or(NONE, |page| page.0), Ordering::Release);
        }
    }

    /// Says that the CPU has written `len` bytes at `address`. Returns whether a doorbell was among them.
    pub(crate) fn note_write(&self, address: VramAddr, len: u64) -> bool {
        let first = address.0;
        let Some(last) = first.checked_add(len.saturating_sub(1)) else { return false };
        // The first GP_PUT word at or after the first byte.
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
        if let Some(word) = self.rung.get(channel / 64) {
            word.fetch_or(1 << (channel % 64), Ordering::AcqRel);
        }
    }

    /// The channels that were rung since the last call.
    pub(crate) fn take(&self) -> u128 {
        let mut channels = 0;
        for (index, word) in self.rung.iter().enumerate() {
            if word.load(Ordering::Acquire) != 0 {
                channels |= u128::from(word.swap(0, Ordering::AcqRel)) << (64 * index);
            }
        }
        channels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_writes_that_cover_gp_put_of_a_bound_page_ring() {
        let doorbells = Doorbells::new();
        doorbells.set_page(3, Some(VramAddr(0x20_3000)));
        assert!(!doorbells.note_write(VramAddr(0x20_3088), 4));
        assert!(!doorbells.note_write(VramAddr(0x20_3090), 4));
        assert!(!doorbells.note_write(VramAddr(0x20_408c), 4));
        assert_eq!(doorbells.take(), 0);
        assert!(doorbells.note_write(VramAddr(0x20_308c), 4));
        assert!(doorbells.note_write(VramAddr(0x20_3088), 8));
        assert!(doorbells.note_write(VramAddr(0x20_2f00), 0x400));
        assert_eq!(doorbells.take(), 1 << 3);
        assert_eq!(doorbells.take(), 0);
    }
}
