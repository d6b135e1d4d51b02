//! Contents of a table.

mod saved;

pub(crate) use saved::SavedPage;

use crate::operation::Kind;
use nvspec::addr::SMALL_PAGE;
use nvspec::mmu::ENTRY_BYTES;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Number of entries in a page.
const PAGE_ENTRIES: u32 = 512;
const _: () = assert!(PAGE_ENTRIES as u64 * ENTRY_BYTES == SMALL_PAGE);

type Page = [U64; PAGE_ENTRIES as usize];
/// Size of a page in bytes.
const PAGE_BYTES: usize = size_of::<Page>();

/// Entries of a table. Empty 4 KiB pages use no memory.
#[derive(Debug)]
pub(super) struct Contents {
    pages: Box<[Option<Box<Page>>]>,
}

impl Contents {
    /// Creates empty contents.
    pub(super) fn new(kind: Kind) -> Self {
        Self { pages: (0..kind.entries() / PAGE_ENTRIES).map(|_| None).collect() }
    }

    /// Returns an entry, or `None` if the index is beyond the end.
    pub(super) fn entry(&self, index: u32) -> Option<u64> {
        let page = self.pages.get((index / PAGE_ENTRIES) as usize)?.as_ref();
        Some(page.and_then(|page| page.get((index % PAGE_ENTRIES) as usize)).map_or(0, |entry| entry.get()))
    }

    /// Returns the nonzero entries.
    pub(super) fn entries(&self) -> impl Iterator<Item = u64> {
        self.pages.iter().flatten().flat_map(|page| page.iter()).map(|entry| entry.get()).filter(|entry| *entry != 0)
    }

    /// Writes `count` entries starting at `first`, with the values `value(0)`, `value(1)`, and so on. Ignores entries
    /// beyond the end. Returns the changed pages as a bit mask.
    pub(super) fn write(&mut self, first: u32, count: u32, value: impl Fn(u32) -> u64) -> u64 {
        let mut changed = 0;
        let mut nth = 0;
        while nth < count {
            let index = first.saturating_add(nth);
            let (page, at) = (index / PAGE_ENTRIES, index % PAGE_ENTRIES);
            let next = nth.saturating_add(PAGE_ENTRIES.saturating_sub(at)).min(count);
            let Some(slot) = self.pages.get_mut(page as usize) else { break };
            if write_page(slot, at, (nth..next).map(&value)) {
                changed |= 1u64.checked_shl(page).unwrap_or(0);
            }
            nth = next;
        }
        changed
    }

    /// Fills `data` with the bytes starting at `offset`. Returns true if the whole range exists.
    pub(super) fn read(&self, offset: usize, data: &mut [u8]) -> bool {
        let size = self.pages.len().saturating_mul(PAGE_BYTES);
        if offset.checked_add(data.len()).is_none_or(|end| end > size) {
            return false;
        }
        let mut at = offset;
        let mut left = data;
        while !left.is_empty() {
            let within = at % PAGE_BYTES;
            let bytes = left.len().min(PAGE_BYTES.saturating_sub(within));
            let Some((part, rest)) = left.split_at_mut_checked(bytes) else { return false };
            let page = self.pages.get(at / PAGE_BYTES).and_then(Option::as_deref);
            match page.and_then(|page| page.as_bytes().get(within..within.saturating_add(bytes))) {
                Some(from) => part.copy_from_slice(from),
                None => part.fill(0),
            }
            at = at.saturating_add(bytes);
            left = rest;
        }
        true
    }

    /// Returns a bit mask of all pages.
    pub(super) fn all_pages(&self) -> u64 {
        1u64.checked_shl(u32::try_from(self.pages.len()).unwrap_or(u32::MAX))
            .map_or(u64::MAX, |bit| bit.wrapping_sub(1))
    }

    /// Returns a bit mask of the allocated pages.
    pub(super) fn resident_pages(&self) -> u64 {
        self.pages.iter().rev().fold(0, |bits, page| bits << 1 | u64::from(page.is_some()))
    }

    /// Returns the total size of the allocated pages in bytes.
    pub(super) fn resident_bytes(&self) -> u64 {
        u64::from(self.resident_pages().count_ones()).saturating_mul(SMALL_PAGE)
    }
}

/// Writes entries of a page, starting at index `at`. Returns true if the page was changed.
fn write_page(slot: &mut Option<Box<Page>>, at: u32, values: impl Iterator<Item = u64> + Clone) -> bool {
    let empty = values.clone().all(|value| value == 0);
    if empty && slot.is_none() {
        return false;
    }
    let page = slot.get_or_insert_with(|| Box::new([U64::ZERO; PAGE_ENTRIES as usize]));
    let mut changed = false;
    for (entry, value) in page.iter_mut().skip(at as usize).zip(values) {
        changed |= entry.get() != value;
        entry.set(value);
    }
    if empty && page.iter().all(|entry| entry.get() == 0) {
        *slot = None;
    }
    changed
}
