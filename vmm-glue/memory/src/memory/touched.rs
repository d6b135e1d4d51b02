//! Counts the pages of client memory that this process touches first.
//!
//! The kernel charges a page to the control group of the process that touches it first. If a client maps untouched
//! memory (a sparse file), pages that this process touches are charged to this process. Such pages are therefore
//! counted, and this process touches them only up to the operator's limit. Each page of a mapping is checked once,
//! before its first access.
//!
//! The check does not detect pages that the client later removes by punching holes in its file.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::PAGE_SIZE;

/// Page size in bytes, as a `usize`.
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_SIZE);

/// The size of one client's memory that this process touched first, and the limit on this size, in bytes.
#[derive(Debug)]
pub struct FirstTouches {
    bytes: AtomicU64,
    limit: AtomicU64,
    refused: AtomicU64,
}

impl Default for FirstTouches {
    fn default() -> Self {
        Self { bytes: AtomicU64::new(0), limit: AtomicU64::new(u64::MAX), refused: AtomicU64::new(0) }
    }
}

impl FirstTouches {
    /// Returns the number of bytes that this process was the first to touch since the client connected.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of accesses rejected because of the limit.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Sets the limit in bytes for future accesses.
    pub fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// Resets the count, because the client and its memory are gone.
    pub fn forget(&self) {
        self.bytes.store(0, Ordering::Relaxed);
    }

    /// Counts a page. Returns true if the page may be touched.
    fn add(&self) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        let more = |bytes: u64| bytes.checked_add(PAGE_SIZE).filter(|sum| *sum <= limit);
        let added = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        if !added && self.refused.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                limit,
                "dropping an access to RAM that its VM never touched: the limit on memory that the daemon may touch \
                 first is reached (`memory.ram.touch_mib`); `mediatorctl vm show` shows which VM"
            );
        }
        added
    }

    /// Subtracts a page that another thread has also counted.
    fn take_back(&self) {
        let less = |bytes: u64| Some(bytes.saturating_sub(PAGE_SIZE));
        let _ = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

/// The set of checked pages of one mapping.
#[derive(Debug)]
pub(super) struct Looked {
    /// Bitmap of the checked pages.
    words: Box<[AtomicU64]>,
    touches: Arc<FirstTouches>,
}

impl Looked {
    /// Creates the set for a mapping of `len` bytes.
    pub fn new(len: usize, touches: Arc<FirstTouches>) -> Self {
        let pages = len.div_ceil(PAGE);
        Self { words: (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(), touches }
    }

    /// Returns true if `len` bytes at `offset` may be accessed. `data` returns the first page at or after a given page
    /// that has data, or a page after the last one.
    pub fn may_touch(&self, offset: usize, len: usize, data: impl Fn(usize) -> usize) -> bool {
        let pages = offset / PAGE..offset.saturating_add(len).div_ceil(PAGE);
        let mut page = pages.start;
        while page < pages.end {
            if self.is_known(page) {
                page = page.saturating_add(1);
                continue;
            }
            let found = data(page).clamp(page, pages.end);
            if !self.touch(page..found) {
                return false;
            }
            if found < pages.end {
                self.set(found);
            }
            page = found.saturating_add(1);
        }
        true
    }

    /// Counts the pages in `holes`, which have no data. Returns false if the limit was reached.
    fn touch(&self, holes: Range<usize>) -> bool {
        for page in holes {
            if self.is_known(page) {
                continue;
            }
            if !self.touches.add() {
                return false;
            }
            if self.set(page) {
                self.touches.take_back();
            }
        }
        true
    }

    fn is_known(&self, page: usize) -> bool {
        self.words.get(page / 64).is_none_or(|word| word.load(Ordering::Relaxed) & bit(page) != 0)
    }

    /// Marks a page as checked. Returns true if it was already marked.
    fn set(&self, page: usize) -> bool {
        let bit = bit(page);
        self.words.get(page / 64).is_none_or(|word| word.fetch_or(bit, Ordering::Relaxed) & bit != 0)
    }
}

/// Returns a page's bit in its bitmap word.
fn bit(page: usize) -> u64 {
    u32::try_from(page % 64).map_or(0, |bit| 1u64.rotate_left(bit))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates data in every other page, starting at page 4.
    fn data(page: usize) -> usize {
        page.max(4).next_multiple_of(2)
    }

    #[test]
    fn each_page_without_data_counts_once() {
        let touches = Arc::<FirstTouches>::default();
        let looked = Looked::new(100 * PAGE, Arc::clone(&touches));
        assert!(looked.may_touch(PAGE / 2, PAGE, data), "two pages without data");
        assert_eq!(touches.bytes(), 2 * PAGE_SIZE);
        assert!(looked.may_touch(0, 8 * PAGE, data));
        assert_eq!(touches.bytes(), 6 * PAGE_SIZE, "0 to 3, 5 and 7");
        assert!(looked.may_touch(0, 8 * PAGE, |_| unreachable!("all pages are already checked")));
        assert!(looked.may_touch(99 * PAGE, PAGE, |_| usize::MAX), "no data up to the end");
        assert_eq!((touches.bytes(), touches.refused()), (7 * PAGE_SIZE, 0));
    }

    #[test]
    fn no_more_is_touched_than_is_allowed() {
        let touches = Arc::<FirstTouches>::default();
        let looked = Looked::new(100 * PAGE, Arc::clone(&touches));
        touches.set_limit(3 * PAGE_SIZE);
        assert!(!looked.may_touch(0, 4 * PAGE, data));
        assert_eq!((touches.bytes(), touches.refused()), (3 * PAGE_SIZE, 1));
        assert!(looked.may_touch(0, 3 * PAGE, data), "counted pages stay allowed");
        assert!(looked.may_touch(4 * PAGE, PAGE, data), "pages with data are allowed too");
        assert!(!looked.may_touch(5 * PAGE, PAGE, data));
        touches.set_limit(4 * PAGE_SIZE);
        assert!(looked.may_touch(5 * PAGE, PAGE, data), "the operator raises the limit");
        touches.forget();
        assert_eq!(touches.bytes(), 0);
    }
}
