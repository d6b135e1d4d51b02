//! Reports of synchronizations: the work done, and the denied entries.

/// Reason why a guest entry has no counterpart in the shadow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Denial {
    /// Part of the VRAM page is not owned by the VM.
    Vram,
    /// Part of the RAM page is not registered.
    Ram,
    /// The page is in peer memory.
    Peer,
    /// The chip does not support the storage kind.
    Kind,
    /// The guest address of the large page is not a multiple of 128 KiB.
    Unaligned,
    /// The directory or table is outside the guest's memory.
    Table,
    /// The directory entry is reserved for the mediator.
    Reserved,
    /// The table would exceed the VM's limit.
    Limit,
}

impl Denial {
    /// Number of reasons.
    pub const COUNT: usize = 8;
    /// All reasons.
    pub const ALL: [Self; Self::COUNT] =
        [Self::Vram, Self::Ram, Self::Peer, Self::Kind, Self::Unaligned, Self::Table, Self::Reserved, Self::Limit];

    /// Returns the name of the reason in metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vram => "vram",
            Self::Ram => "ram",
            Self::Peer => "peer",
            Self::Kind => "kind",
            Self::Unaligned => "unaligned",
            Self::Table => "table",
            Self::Reserved => "reserved",
            Self::Limit => "limit",
        }
    }
}

/// Number of denied entries for each reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Denials {
    counts: [u64; Denial::COUNT],
}

impl Denials {
    /// Returns the number of denied entries for one reason.
    #[must_use]
    pub fn count_of(&self, reason: Denial) -> u64 {
        self.counts.get(reason as usize).copied().unwrap_or(0)
    }

    /// Returns the total number of denied entries.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    pub(crate) fn add(&mut self, reason: Denial) {
        if let Some(count) = self.counts.get_mut(reason as usize) {
            *count = count.saturating_add(1);
        }
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count = count.saturating_add(more);
        }
    }
}

/// Report of a synchronization.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyncReport {
    /// Number of guest tables, including directories, with at least one page read.
    pub tables_scanned: u64,
    /// Number of guest table pages read. Tables shorter than 4 KiB count as one page.
    pub pages: u64,
    /// Number of guest table bytes read.
    pub bytes_scanned: u64,
    /// Number of table entries checked and translated. Excludes directory entries.
    pub translated: u64,
    /// Number of shadow entries written, including unchanged entries between changed ones.
    pub entries_written: u64,
    /// Number of write operations for shadow entries.
    pub writes: u64,
    /// Number of guest table pages that may have changed and will be read by [`crate::AddressSpaces::prepare`].
    pub deferred: u64,
    /// Number of tables that could not be created because card memory is exhausted. Each call that may create tables
    /// tries to create them again. Until these tables exist, their pages are unmapped, and work that needs these pages
    /// must not start.
    pub waiting: u64,
    /// Newly denied entries.
    pub denied: Denials,
    /// True if an entry has lost a permission or changed its frame. The card's TLBs must then be flushed before the
    /// guest continues, or withdrawn memory would remain accessible.
    pub lost_permission: bool,
}

impl SyncReport {
    /// Returns true if any entry was written. The card's TLBs must then be flushed before the new state is used.
    #[must_use]
    pub const fn changed(&self) -> bool {
        self.entries_written != 0
    }

    /// Adds another report to this one.
    pub fn merge(&mut self, other: &Self) {
        self.tables_scanned = self.tables_scanned.saturating_add(other.tables_scanned);
        self.pages = self.pages.saturating_add(other.pages);
        self.bytes_scanned = self.bytes_scanned.saturating_add(other.bytes_scanned);
        self.translated = self.translated.saturating_add(other.translated);
        self.entries_written = self.entries_written.saturating_add(other.entries_written);
        self.writes = self.writes.saturating_add(other.writes);
        self.deferred = self.deferred.saturating_add(other.deferred);
        self.waiting = self.waiting.saturating_add(other.waiting);
        self.denied.merge(&other.denied);
        self.lost_permission |= other.lost_permission;
    }
}
