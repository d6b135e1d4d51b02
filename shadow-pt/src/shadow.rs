//! One guest address space and its shadow.

use crate::table::{Runs, Table, read_entries};
use crate::translate::PageSize;
use crate::{Denial, Frames, GuestMemory, Place, ShadowMemory, SyncReport};
use nvspec::addr::{Gpa, GuestVramAddr, SMALL_PAGE, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, PD_BYTES, PD_ENTRIES, Pde, TableTarget};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// What a guest cannot exceed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Directory entries that are the host's; the guest's are ignored there.
    pub reserved: Range<u32>,
    /// Bytes of shadow tables in card memory, the directory excluded. The mirrors take twice as much host memory.
    pub table_bytes: u64,
}

/// The card has no memory for a shadow directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the card has no memory left for a shadow page directory")]
pub struct NoMemory;

/// A range of what the guest calls memory, that is taken away from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestRange {
    /// VRAM: first byte, bytes.
    Vram(GuestVramAddr, u64),
    /// RAM: first byte, bytes.
    Ram(Gpa, u64),
}

/// A guest table: directory entries that name the same bytes in the same sense share a shadow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct TableKey {
    place: Place,
    size: PageSize,
    entries: u32,
}

impl TableKey {
    /// The large-page and the small-page table that a directory entry names.
    fn both(pde: Pde) -> [Option<Self>; 2] {
        let large = place(pde.large_target(), pde.large_address());
        let small = place(pde.small_target(), pde.small_address());
        [
            large.map(|place| Self { place, size: PageSize::Large, entries: pde.large_entries() }),
            small.map(|place| Self { place, size: PageSize::Small, entries: pde.small_entries() }),
        ]
    }

    /// Bytes of its shadow on the card.
    fn bytes(&self) -> u64 {
        u64::from(self.entries).saturating_mul(ENTRY_BYTES).next_multiple_of(SMALL_PAGE)
    }
}

fn place(target: TableTarget, address: u64) -> Option<Place> {
    match target {
        TableTarget::None => None,
        TableTarget::Vram => Some(Place::Vram(GuestVramAddr(address))),
        TableTarget::SysCoherent | TableTarget::SysNonCoherent => Some(Place::Ram(Gpa(address))),
    }
}

/// The shadow of one guest page directory.
#[derive(Debug)]
pub struct Shadow {
    guest: Place,
    card: VramAddr,
    limits: Limits,
    /// What the guest's directory entries were when they were read last.
    guest_pdes: Box<[u64]>,
    /// What the card's directory entries are.
    shadow_pdes: Box<[u64]>,
    tables: BTreeMap<TableKey, Table>,
    table_bytes: u64,
    /// Shadow tables that nothing names any more, but that the card's TLBs may still know.
    unlinked: Vec<(VramAddr, u64)>,
    readable: bool,
}

impl Shadow {
    /// An empty shadow for the guest directory at `guest`: nothing is mapped before [`Self::sync`].
    ///
    /// # Errors
    /// [`NoMemory`].
    pub fn new(guest: Place, limits: Limits, memory: &mut impl ShadowMemory) -> Result<Self, NoMemory> {
        let card = memory.alloc(PD_BYTES).ok_or(NoMemory)?;
        Ok(Self {
            guest,
            card,
            limits,
            guest_pdes: vec![0; PD_ENTRIES as usize].into(),
            shadow_pdes: vec![0; PD_ENTRIES as usize].into(),
            tables: BTreeMap::new(),
            table_bytes: 0,
            unlinked: Vec::new(),
            readable: true,
        })
    }

    /// Where the guest's directory lies: the key by which a flush finds its shadow.
    #[must_use]
    pub fn guest_directory(&self) -> Place {
        self.guest
    }

    /// Where the shadow directory lies on the card: for instance blocks and for flushing the card's TLBs.
    #[must_use]
    pub fn directory(&self) -> VramAddr {
        self.card
    }

    /// Makes the shadow what the guest's tables say now, as far as `frames` grants it. Then flush the card's TLBs for
    /// [`Self::directory`] and call [`Self::flushed`].
    ///
    /// Writes go to the card in this order: what loses a permission, new tables, what gains one.
    pub fn sync(
        &mut self,
        guest: &mut impl GuestMemory,
        frames: &impl Frames,
        memory: &mut impl ShadowMemory,
    ) -> SyncReport {
        let mut report = SyncReport::default();
        let mut fresh = Vec::new();
        let readable = read_entries(guest, self.guest, PD_ENTRIES as usize, &mut fresh, &mut report);
        if !readable && self.readable {
            report.denied.add(Denial::Table);
        }
        self.readable = readable;
        let changed = self.take_directory(&fresh, &mut report);
        let changes = self.scan_tables(guest, frames, memory, &changed, &mut report);

        for (key, runs) in &changes {
            if let Some(table) = self.tables.get(key) {
                table.write(runs, true, memory, &mut report);
            }
        }
        let links = self.link();
        links.write(true, self.card, &self.shadow_pdes, memory, &mut report);
        for (key, runs) in &changes {
            if let Some(table) = self.tables.get(key) {
                table.write(runs, false, memory, &mut report);
            }
        }
        links.write(false, self.card, &self.shadow_pdes, memory, &mut report);
        report
    }

    /// Drops every entry that maps into `range`, which is about to be no longer the guest's. Then flush the card's TLBs
    /// and call [`Self::flushed`]. The entries come back at the next [`Self::sync`] if they are granted again.
    pub fn invalidate(&mut self, range: GuestRange, memory: &mut impl ShadowMemory) -> SyncReport {
        let mut report = SyncReport::default();
        for table in self.tables.values_mut() {
            let runs = table.invalidate(range);
            table.write(&runs, true, memory, &mut report);
        }
        report
    }

    /// The card's TLBs hold nothing older than the last [`Self::sync`] or [`Self::invalidate`]: tables that nothing names
    /// any more are freed.
    pub fn flushed(&mut self, memory: &mut impl ShadowMemory) {
        for (address, bytes) in self.unlinked.drain(..) {
            memory.free(address, bytes);
        }
    }

    /// Frees everything. No channel or aperture of the card uses the directory any more.
    pub fn destroy(mut self, memory: &mut impl ShadowMemory) {
        self.flushed(memory);
        for (key, table) in &self.tables {
            memory.free(table.card, key.bytes());
        }
        memory.free(self.card, PD_BYTES);
    }

    /// Bytes of card memory in use, the directory included.
    #[must_use]
    pub fn card_bytes(&self) -> u64 {
        let unlinked = self.unlinked.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        PD_BYTES.saturating_add(self.table_bytes).saturating_add(unlinked)
    }

    /// Takes in the guest's directory. Returns the tables that directory entries name which have changed: what is wrong
    /// with those is news.
    fn take_directory(&mut self, fresh: &[u64], report: &mut SyncReport) -> BTreeSet<TableKey> {
        let mut changed = BTreeSet::new();
        for ((index, old), &raw) in (0u32..).zip(self.guest_pdes.iter_mut()).zip(fresh) {
            if *old == raw {
                continue;
            }
            let tables = TableKey::both(Pde::from(raw));
            if self.limits.reserved.contains(&index) {
                if tables.iter().any(Option::is_some) {
                    report.denied.add(Denial::Reserved);
                }
            } else {
                changed.extend(tables.into_iter().flatten());
            }
            *old = raw;
        }
        changed
    }

    /// Brings `tables` to what the directory names, and their mirrors to what the guest's tables say. Returns what is
    /// to be written to each.
    fn scan_tables(
        &mut self,
        guest: &mut impl GuestMemory,
        frames: &impl Frames,
        memory: &mut impl ShadowMemory,
        changed: &BTreeSet<TableKey>,
        report: &mut SyncReport,
    ) -> Vec<(TableKey, Runs)> {
        let reserved = self.limits.reserved.clone();
        let named: BTreeSet<TableKey> = (0u32..)
            .zip(self.guest_pdes.iter())
            .filter(|(index, raw)| **raw != 0 && !reserved.contains(index))
            .flat_map(|(_, raw)| TableKey::both(Pde::from(*raw)))
            .flatten()
            .collect();
        self.retain_tables(|key| named.contains(key));

        let mut changes = Vec::new();
        let mut lost = BTreeSet::new();
        let mut fresh = Vec::new();
        for key in named {
            let known = self.tables.contains_key(&key);
            if !known && self.table_bytes.saturating_add(key.bytes()) > self.limits.table_bytes {
                if changed.contains(&key) {
                    report.denied.add(Denial::Limit);
                }
                continue;
            }
            if !read_entries(guest, key.place, key.entries as usize, &mut fresh, report) {
                if known || changed.contains(&key) {
                    report.denied.add(Denial::Table);
                }
                lost.insert(key);
                continue;
            }
            if !known {
                let Some(card) = memory.alloc(key.bytes()) else {
                    if changed.contains(&key) {
                        report.denied.add(Denial::Limit);
                    }
                    continue;
                };
                self.table_bytes = self.table_bytes.saturating_add(key.bytes());
                self.tables.insert(key, Table::new(card, key.size, key.entries as usize));
            }
            if let Some(table) = self.tables.get_mut(&key) {
                changes.push((key, table.scan(&fresh, frames, report)));
            }
        }
        self.retain_tables(|key| !lost.contains(key));
        changes
    }

    /// Unlinks the tables for which `keep` is false; their memory is freed after the next flush.
    fn retain_tables(&mut self, keep: impl Fn(&TableKey) -> bool) {
        let Self { tables, unlinked, table_bytes, .. } = self;
        tables.retain(|key, table| {
            let keep = keep(key);
            if !keep {
                unlinked.push((table.card, key.bytes()));
                *table_bytes = table_bytes.saturating_sub(key.bytes());
            }
            keep
        });
    }

    /// Brings the mirror of the shadow directory to what the guest's names and `tables` has.
    fn link(&mut self) -> Runs {
        let mut runs = Runs::default();
        let entries = self.guest_pdes.iter().zip(self.shadow_pdes.iter_mut()).enumerate();
        for (index, (raw, shadow)) in entries {
            let host = u32::try_from(index).is_ok_and(|index| self.limits.reserved.contains(&index));
            let new = if host || *raw == 0 { 0 } else { shadow_pde(Pde::from(*raw), &self.tables) };
            if new != *shadow {
                runs.push(index, *shadow != 0);
                *shadow = new;
            }
        }
        runs
    }
}

/// The shadow of a directory entry: the same size code, and our tables in the place of the guest's.
fn shadow_pde(guest: Pde, tables: &BTreeMap<TableKey, Table>) -> u64 {
    let [large, small] = TableKey::both(guest).map(|key| tables.get(&key?).and_then(|table| frame(table.card)));
    if large.is_none() && small.is_none() {
        return 0;
    }
    let mut pde = Pde::new().with_large_size(guest.large_size());
    if let Some(frame) = large {
        pde = pde.with_large_target(TableTarget::Vram).with_large_frame(frame);
    }
    if let Some(frame) = small {
        pde = pde.with_small_target(TableTarget::Vram).with_small_frame(frame);
    }
    pde.into()
}

/// The 28-bit frame number of a card address; `None` for one that no entry can hold.
fn frame(address: VramAddr) -> Option<u32> {
    u32::try_from(address.0 >> SMALL_PAGE.trailing_zeros()).ok().filter(|frame| frame >> 28 == 0)
}

#[cfg(test)]
#[path = "tests/shadow.rs"]
mod tests;
