//! Tracks guest VRAM pages that contain tables, their users, and the entries that make them writable by the GPU.

use crate::bits::{self, Set512, bit, members};
use crate::reverse::BLOCK_PAGES_SHIFT;
use crate::translate::LARGE_PAGES;
use std::collections::HashMap;

/// Number of 4 KiB pages in a 2 MiB block.
const PAGES: u32 = 1 << BLOCK_PAGES_SHIFT;
/// Number of large pages in a block.
const LARGES: usize = (PAGES / LARGE_PAGES) as usize;
/// Number of bits of the frame number in an entry.
const FRAME_BITS: u32 = 28;

/// A user of a guest VRAM page that contains tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum User {
    /// A page of a directory: the index of the space, and the number of the page within the directory.
    Directory(u32, u32),
    /// A page of a table: the number of the table within the VM, and the number of the page within the table.
    Table(u32, u32),
}

/// Consecutive guest VRAM pages that are writable by the GPU through shadow entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameRun {
    first: u32,
    pages: u32,
    large: bool,
}

impl FrameRun {
    /// Adds the page of an entry to a list of runs. Large pages are aligned to their size.
    pub(crate) fn push(runs: &mut Vec<Self>, frame: u32, large: bool) {
        let pages = if large { LARGE_PAGES } else { 1 };
        match runs.last_mut() {
            Some(run) if run.large == large && run.first.saturating_add(run.pages) == frame => {
                run.pages = run.pages.saturating_add(pages);
            }
            _ => runs.push(Self { first: frame, pages, large }),
        }
    }
}

/// State of one 2 MiB block of guest VRAM.
#[derive(Debug, Default)]
struct Block {
    /// Pages that contain tables.
    tables: Set512,
    /// Pages whose changes have been reported to all of their users.
    marked: Set512,
    /// Number of large entries that make each large page writable.
    large: [u32; LARGES],
    /// Number of small entries that make each small page writable. 32 bits suffice, because the table limit bounds the
    /// number of entries.
    small: Option<Box<[u32; PAGES as usize]>>,
    /// Number of nonzero counters in `large` and `small`.
    counted: u32,
}

impl Block {
    fn small(&self, page: u32) -> u32 {
        self.small.as_ref().and_then(|small| small.get(page as usize)).copied().unwrap_or(0)
    }

    fn large(&self, page: u32) -> u32 {
        self.large.get((page / LARGE_PAGES) as usize).copied().unwrap_or(0)
    }

    fn exposed(&self, page: u32) -> bool {
        self.large(page) != 0 || self.small(page) != 0
    }

    /// Increments the counter of a page if `up` is true, or decrements it otherwise. Returns true if the counter
    /// changes from or to zero.
    fn count(&mut self, page: u32, large: bool, up: bool) -> bool {
        let counter = if large {
            self.large.get_mut((page / LARGE_PAGES) as usize)
        } else {
            self.small.get_or_insert_with(|| Box::new([0; PAGES as usize])).get_mut(page as usize)
        };
        let Some(counter) = counter else { return false };
        let before = *counter;
        *counter = if up { before.saturating_add(1) } else { before.saturating_sub(1) };
        let turned = (before == 0) != (*counter == 0);
        if turned {
            self.counted = if up { self.counted.saturating_add(1) } else { self.counted.saturating_sub(1) };
        }
        turned
    }

    fn is_empty(&self) -> bool {
        self.counted == 0 && self.tables == [0; bits::WORDS]
    }
}

fn split(frame: u32) -> (usize, u32) {
    ((frame >> BLOCK_PAGES_SHIFT) as usize, frame & PAGES.wrapping_sub(1))
}

/// Index of a VM's guest VRAM pages that contain tables.
#[derive(Debug, Default)]
pub(crate) struct PageIndex {
    /// Blocks by number. The vector grows to 4 MiB if a guest places a table at the highest address that an entry can
    /// contain.
    blocks: Vec<Option<Box<Block>>>,
    users: HashMap<u32, Vec<User>>,
}

impl PageIndex {
    fn block(&self, frame: u32) -> Option<(&Block, u32)> {
        let (index, page) = split(frame);
        Some((self.blocks.get(index)?.as_deref()?, page))
    }

    fn block_mut(&mut self, frame: u32) -> Option<(&mut Block, u32)> {
        let (index, page) = split(frame);
        Some((self.blocks.get_mut(index)?.as_deref_mut()?, page))
    }

    fn make_block(&mut self, frame: u32) -> Option<(&mut Block, u32)> {
        let (index, page) = split(frame);
        if frame >> FRAME_BITS != 0 {
            return None;
        }
        if self.blocks.len() <= index {
            self.blocks.resize_with(index.saturating_add(1), || None);
        }
        Some((self.blocks.get_mut(index)?.get_or_insert_with(Box::default), page))
    }

    fn drop_empty(&mut self, frame: u32) {
        let (index, _) = split(frame);
        if let Some(slot) = self.blocks.get_mut(index)
            && slot.as_ref().is_some_and(|block| block.is_empty())
        {
            *slot = None;
        }
    }

    /// Returns the frame number of the page at `address`, or `None` if no entry can refer to it.
    pub(crate) fn frame(address: u64) -> Option<u32> {
        u32::try_from(address >> nvspec::addr::SMALL_PAGE.trailing_zeros())
            .ok()
            .filter(|frame| frame >> FRAME_BITS == 0)
    }

    /// Returns the number of the first page after the indexed blocks.
    pub(crate) fn end(&self) -> u64 {
        (self.blocks.len() as u64) << BLOCK_PAGES_SHIFT
    }

    /// Returns true if the page contains a table.
    pub(crate) fn is_table(&self, frame: u32) -> bool {
        self.block(frame).is_some_and(|(block, page)| bits::has(&block.tables, page))
    }

    /// Returns true if the page contains a table, and changes to it must be reported to its users.
    pub(crate) fn news(&self, frame: u32) -> bool {
        self.block(frame).is_some_and(|(block, page)| bits::has(&block.tables, page) && !bits::has(&block.marked, page))
    }

    /// Records that a change to the page has been reported to all of its users.
    pub(crate) fn set_marked(&mut self, frame: u32) {
        if let Some((block, page)) = self.block_mut(frame) {
            bits::insert(&mut block.marked, page);
        }
    }

    /// Records that a user has read the page.
    pub(crate) fn clear_marked(&mut self, frame: u32) {
        if let Some((block, page)) = self.block_mut(frame) {
            bits::remove(&mut block.marked, page);
        }
    }

    /// Returns the users of a page.
    pub(crate) fn users(&self, frame: u32) -> &[User] {
        self.users.get(&frame).map_or(&[], Vec::as_slice)
    }

    /// Returns those pages from `first` to `last` that contain tables.
    pub(crate) fn tables_in(&self, first: u32, last: u32) -> Vec<u32> {
        let (start, end) = (split(first).0, split(last).0);
        let blocks = (0u32..).zip(&self.blocks).take(end.saturating_add(1)).skip(start);
        blocks
            .filter_map(|(index, block)| Some((index.wrapping_shl(BLOCK_PAGES_SHIFT), block.as_deref()?)))
            .flat_map(|(base, block)| bits::members512(&block.tables).map(move |page| base | page))
            .filter(|frame| (first..=last).contains(frame))
            .collect()
    }

    /// Records that the page contains a table of `user`, which has not read the page yet. Returns true if the page is
    /// writable by the GPU.
    pub(crate) fn register(&mut self, frame: u32, user: User) -> bool {
        let Some((block, page)) = self.make_block(frame) else { return false };
        if !bits::has(&block.tables, page) {
            bits::insert(&mut block.tables, page);
            bits::insert(&mut block.marked, page);
        }
        let exposed = block.exposed(page);
        self.users.entry(frame).or_default().push(user);
        exposed
    }

    /// Records that `user` no longer uses the page.
    pub(crate) fn unregister(&mut self, frame: u32, user: User) {
        let Some(users) = self.users.get_mut(&frame) else { return };
        if let Some(position) = users.iter().position(|known| *known == user) {
            users.swap_remove(position);
        }
        if !users.is_empty() {
            return;
        }
        self.users.remove(&frame);
        if let Some((block, page)) = self.block_mut(frame) {
            bits::remove(&mut block.tables, page);
            bits::remove(&mut block.marked, page);
        }
        self.drop_empty(frame);
    }

    /// Counts shadow entries that make the pages of `run` writable if `up` is true, or stops counting them otherwise.
    /// Appends to `turned` the table pages that the GPU becomes able or unable to write.
    pub(crate) fn count(&mut self, run: FrameRun, up: bool, turned: &mut Vec<u32>) {
        let step = if run.large { LARGE_PAGES } else { 1 };
        let end = run.first.saturating_add(run.pages);
        let mut frame = run.first;
        while frame < end {
            let block = if up { self.make_block(frame) } else { self.block_mut(frame) };
            if let Some((block, page)) = block
                && block.count(page, run.large, up)
            {
                if run.large {
                    let word = block.tables.get((page >> 6) as usize).copied().unwrap_or(0);
                    let tables = word.wrapping_shr(page & 63) & bit(LARGE_PAGES).wrapping_sub(1);
                    let mine = members(tables).filter(|at| block.small(page | at) == 0);
                    turned.extend(mine.map(|at| frame | at));
                } else if bits::has(&block.tables, page) && block.large(page) == 0 {
                    turned.push(frame);
                }
                if !up {
                    self.drop_empty(frame);
                }
            }
            frame = frame.saturating_add(step);
        }
    }

    /// Returns the numbers of large and small entries that make the page writable. For tests only.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn counts(&self, frame: u32) -> (u32, u32) {
        self.block(frame).map_or((0, 0), |(block, page)| (block.large(page), block.small(page)))
    }

    /// Returns true if the index is empty. For tests only.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn is_empty(&self) -> bool {
        self.users.is_empty() && self.blocks.iter().all(Option::is_none)
    }
}
