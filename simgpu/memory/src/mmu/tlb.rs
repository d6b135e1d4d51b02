//! A TLB: caches translations until they are flushed or evicted.
//!
//! The TLB consists of two direct-mapped tables, one per page size, divided into sets with their own locks. It is far
//! larger than a real card's TLB, so that a missing flush is more likely to have an effect.

use crate::memory::BusAddr;
use nvspec::addr::{GpuVa, LARGE_PAGE, SMALL_PAGE};
use nvspec::mmu::Pte;
use parking_lot::Mutex;

/// Number of sets.
const SETS: usize = 64;
/// Number of small pages per set.
const SMALL_LINES: usize = 128;
/// Number of large pages per set.
const LARGE_LINES: usize = 16;

/// Key of an entry: a directory and a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlbKey {
    /// Bus address of the page directory.
    pub directory: BusAddr,
    /// An address within the page.
    pub va: GpuVa,
}

/// A translation from the page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlbEntry {
    /// The page table entry of the page.
    pub pte: Pte,
    /// Set for a large page.
    pub large: bool,
}

impl TlbEntry {
    /// Returns the page size in bytes.
    #[must_use]
    pub const fn page_bytes(self) -> u64 {
        if self.large { LARGE_PAGE } else { SMALL_PAGE }
    }
}

/// Counters of a TLB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TlbCounters {
    /// Number of lookups that found a translation.
    pub hits: u64,
    /// Number of lookups that required a walk.
    pub misses: u64,
    /// Number of flushes.
    pub flushes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Line {
    directory: BusAddr,
    page: u64,
    pte: Pte,
}

#[derive(Debug)]
struct Set {
    small: [Option<Line>; SMALL_LINES],
    large: [Option<Line>; LARGE_LINES],
    /// Set if no entry was added since the last full flush, so that another flush is a no-op.
    empty: bool,
    counters: TlbCounters,
}

/// A TLB. All functions may be called from any thread.
#[derive(Debug)]
pub struct Tlb {
    sets: Box<[Mutex<Set>]>,
}

impl Default for Tlb {
    fn default() -> Self {
        let empty = || Set {
            small: [None; SMALL_LINES],
            large: [None; LARGE_LINES],
            empty: true,
            counters: TlbCounters::default(),
        };
        Self { sets: (0..SETS).map(|_| Mutex::new(empty())).collect() }
    }
}

/// Returns a per-directory offset, so that equal addresses in two address spaces do not collide.
fn spread(directory: BusAddr) -> u64 {
    let (BusAddr::Vram(nvspec::addr::VramAddr(address)) | BusAddr::System(nvspec::addr::Iova(address))) = directory;
    (address >> 12).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48
}

impl Tlb {
    /// Returns the set of a page. A large page and its small pages share a set, so that a lookup acquires only one
    /// lock.
    fn set(&self, key: TlbKey) -> &Mutex<Set> {
        let which = (key.va.0 / LARGE_PAGE).wrapping_add(spread(key.directory));
        &self.sets[(which % SETS as u64) as usize]
    }

    fn small_line(key: TlbKey) -> usize {
        let page = key.va.0 / SMALL_PAGE;
        // Include the bits above the set index, so that addresses 8 MiB apart do not always collide.
        ((page ^ (page >> 11)).wrapping_add(spread(key.directory) >> 6) % SMALL_LINES as u64) as usize
    }

    fn large_line(key: TlbKey) -> usize {
        let page = key.va.0 / LARGE_PAGE / SETS as u64;
        (page.wrapping_add(spread(key.directory) >> 6) % LARGE_LINES as u64) as usize
    }

    /// Returns the cached translation, if any.
    #[must_use]
    pub fn lookup(&self, key: TlbKey) -> Option<TlbEntry> {
        let mut set = self.set(key).lock();
        let small = set.small[Self::small_line(key)]
            .filter(|line| line.page == key.va.0 / SMALL_PAGE && line.directory == key.directory)
            .map(|line| TlbEntry { pte: line.pte, large: false });
        let found = small.or_else(|| {
            set.large[Self::large_line(key)]
                .filter(|line| line.page == key.va.0 / LARGE_PAGE && line.directory == key.directory)
                .map(|line| TlbEntry { pte: line.pte, large: true })
        });
        match found {
            Some(_) => set.counters.hits += 1,
            None => set.counters.misses += 1,
        }
        found
    }

    /// Stores a translation.
    pub fn insert(&self, key: TlbKey, entry: TlbEntry) {
        let mut set = self.set(key).lock();
        let line = Some(Line { directory: key.directory, page: key.va.0 / entry.page_bytes(), pte: entry.pte });
        set.empty = false;
        if entry.large {
            set.large[Self::large_line(key)] = line;
        } else {
            set.small[Self::small_line(key)] = line;
        }
    }

    /// Drops the translations of the page at `page` in `directory`. `None` selects all pages or all directories.
    pub fn flush(&self, directory: Option<BusAddr>, page: Option<GpuVa>) {
        for (index, set) in self.sets.iter().enumerate() {
            let mut set = set.lock();
            let Set { small, large, empty, counters } = &mut *set;
            if !*empty {
                drop_lines(small, directory, page.map(|va| va.0 / SMALL_PAGE));
                drop_lines(large, directory, page.map(|va| va.0 / LARGE_PAGE));
                *empty = directory.is_none() && page.is_none();
            }
            if index == 0 {
                counters.flushes += 1;
            }
        }
    }

    /// Returns the TLB's counters: hits, misses and flushes.
    #[must_use]
    pub fn counters(&self) -> TlbCounters {
        self.sets.iter().fold(TlbCounters::default(), |sum, set| {
            let TlbCounters { hits, misses, flushes } = set.lock().counters;
            TlbCounters { hits: sum.hits + hits, misses: sum.misses + misses, flushes: sum.flushes + flushes }
        })
    }
}

fn drop_lines(lines: &mut [Option<Line>], directory: Option<BusAddr>, page: Option<u64>) {
    for slot in lines {
        let matches = slot.is_some_and(|line| {
            directory.is_none_or(|wanted| wanted == line.directory) && page.is_none_or(|wanted| wanted == line.page)
        });
        if matches {
            *slot = None;
        }
    }
}
