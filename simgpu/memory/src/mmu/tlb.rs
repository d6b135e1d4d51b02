//! A TLB: caches translations until they are flushed or evicted.
//!
//! The TLB consists of two direct-mapped tables, one per page size, divided into sets with their own locks. It is far
//! larger than a real card's TLB, so that a missing flush is more likely to have an effect.
//!
//! A flush of a directory usually only increments a counter. A line is valid only while the counter has the value in
//! the line.

use crate::memory::BusAddr;
use nvspec::addr::{GpuVa, LARGE_PAGE, SMALL_PAGE};
use nvspec::mmu::Pte;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of sets.
const SETS: usize = 64;
/// Number of small pages per set.
const SMALL_LINES: usize = 128;
/// Number of large pages per set.
const LARGE_LINES: usize = 16;
/// Number of groups of directories.
const DIRECTORY_GROUPS: usize = 1024;
/// Value of [`Group::owner`] if lines of several directories may be valid.
const SHARED: u64 = u64::MAX;

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
    /// Number of flushes of the directory before the line was stored. A later flush invalidates the line.
    flushes: u64,
}

#[derive(Debug)]
struct Set {
    small: [Option<Line>; SMALL_LINES],
    large: [Option<Line>; LARGE_LINES],
    hits: u64,
    misses: u64,
}

/// A TLB. All functions may be called from any thread.
#[derive(Debug)]
pub struct Tlb {
    sets: Box<[Mutex<Set>]>,
    /// Number of flushes of all directories.
    full_flushes: AtomicU64,
    groups: Box<[Group]>,
    /// Number of flushes of any type.
    flushes: AtomicU64,
}

impl Default for Tlb {
    fn default() -> Self {
        let empty = || Set { small: [None; SMALL_LINES], large: [None; LARGE_LINES], hits: 0, misses: 0 };
        Self {
            sets: (0..SETS).map(|_| Mutex::new(empty())).collect(),
            full_flushes: AtomicU64::new(0),
            groups: (0..DIRECTORY_GROUPS).map(|_| Group::default()).collect(),
            flushes: AtomicU64::new(0),
        }
    }
}

/// Returns a per-directory offset, so that equal addresses in two address spaces do not collide.
fn spread(directory: BusAddr) -> u64 {
    let (BusAddr::Vram(nvspec::addr::VramAddr(address)) | BusAddr::System(nvspec::addr::Iova(address))) = directory;
    (address >> 12).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48
}

/// Directories with the same hash. Their flushes have one counter while lines of only one of them are valid.
#[derive(Debug, Default)]
struct Group {
    /// Number of flushes of all lines.
    flushes: AtomicU64,
    /// Number of the directory with valid lines, 0 if there is none, or [`SHARED`].
    owner: AtomicU64,
}

impl Group {
    /// Records that a line of the directory with this number is stored.
    fn store(&self, number: u64) {
        if let Err(owner) = self.owner.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire)
            && owner != number
        {
            self.owner.store(SHARED, Ordering::Release);
        }
    }

    /// Invalidates all lines if they belong to the directory with this number. Returns false otherwise.
    fn flush(&self, number: u64) -> bool {
        let owner = self.owner.load(Ordering::Acquire);
        if owner == number {
            self.flushes.fetch_add(1, Ordering::Release);
            self.owner.store(0, Ordering::Release);
        }
        owner == number || owner == 0
    }
}

/// Returns a directory's number, which is neither 0 nor [`SHARED`]. Directories are aligned to 4 KiB.
fn number(directory: BusAddr) -> u64 {
    match directory {
        BusAddr::Vram(address) => address.0 | 1,
        BusAddr::System(address) => address.0 | 2,
    }
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
        let flushes = self.flushes_of(key.directory);
        let mut set = self.set(key).lock();
        let is_current = |line: &Line| line.directory == key.directory && line.flushes == flushes;
        let small = set.small[Self::small_line(key)]
            .filter(|line| line.page == key.va.0 / SMALL_PAGE && is_current(line))
            .map(|line| TlbEntry { pte: line.pte, large: false });
        let found = small.or_else(|| {
            set.large[Self::large_line(key)]
                .filter(|line| line.page == key.va.0 / LARGE_PAGE && is_current(line))
                .map(|line| TlbEntry { pte: line.pte, large: true })
        });
        match found {
            Some(_) => set.hits += 1,
            None => set.misses += 1,
        }
        found
    }

    /// Stores a translation.
    pub fn insert(&self, key: TlbKey, entry: TlbEntry) {
        let flushes = self.flushes_of(key.directory);
        let mut set = self.set(key).lock();
        self.group(key.directory).store(number(key.directory));
        let page = key.va.0 / entry.page_bytes();
        let line = Some(Line { directory: key.directory, page, pte: entry.pte, flushes });
        if entry.large {
            set.large[Self::large_line(key)] = line;
        } else {
            set.small[Self::small_line(key)] = line;
        }
    }

    /// Drops the translations of the page at `page` in `directory`. `None` selects all pages or all directories.
    pub fn flush(&self, directory: Option<BusAddr>, page: Option<GpuVa>) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        match (directory, page) {
            (directory, Some(va)) => {
                for set in &self.sets {
                    let mut set = set.lock();
                    drop_lines(&mut set.small, directory, Some(va.0 / SMALL_PAGE));
                    drop_lines(&mut set.large, directory, Some(va.0 / LARGE_PAGE));
                }
            }
            (Some(directory), None) => {
                if self.group(directory).flush(number(directory)) {
                    return;
                }
                for set in &self.sets {
                    let mut set = set.lock();
                    drop_lines(&mut set.small, Some(directory), None);
                    drop_lines(&mut set.large, Some(directory), None);
                }
            }
            (None, None) => {
                self.full_flushes.fetch_add(1, Ordering::Release);
                self.groups.iter().for_each(|group| group.owner.store(0, Ordering::Release));
            }
        }
    }

    /// Returns the number of flushes that invalidated all translations of a directory.
    fn flushes_of(&self, directory: BusAddr) -> u64 {
        let full = self.full_flushes.load(Ordering::Acquire);
        full.wrapping_add(self.group(directory).flushes.load(Ordering::Acquire))
    }

    fn group(&self, directory: BusAddr) -> &Group {
        &self.groups[(spread(directory) % DIRECTORY_GROUPS as u64) as usize]
    }

    /// Returns the TLB's counters: hits, misses and flushes.
    #[must_use]
    pub fn counters(&self) -> TlbCounters {
        let flushes = self.flushes.load(Ordering::Relaxed);
        self.sets.iter().fold(TlbCounters { flushes, ..TlbCounters::default() }, |sum, set| {
            let set = set.lock();
            TlbCounters { hits: sum.hits + set.hits, misses: sum.misses + set.misses, flushes }
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
