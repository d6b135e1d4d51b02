//! Tables as lists of entries that refer to each other. Unreachable tables are removed.

use super::wire::Raw;
use crate::abi::Status;
use std::collections::{BTreeMap, BTreeSet};

/// Number of a table, in the order of creation.
pub(crate) type Nth = u64;

/// A directory entry: an optional small-page table and an optional large-page table.
pub(crate) type Names = (Option<Nth>, Option<Nth>);

#[derive(Clone, Debug)]
pub(crate) struct Table {
    /// Type: 1 for a directory, 2 for a small-page table, 3 for a large-page table.
    pub(crate) kind: u32,
    /// Entries, empty for a directory.
    pub(crate) entries: Vec<u64>,
    /// Nonempty entries of a directory, by index.
    pub(crate) names: BTreeMap<u32, Names>,
}

/// Number of entries of a table, by type.
const ENTRIES: [u32; 4] = [0, 8192, 32768, 1024];

impl Table {
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(ENTRIES[self.kind as usize]) * 8
    }
}

/// Tables of a virtual machine.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) limit: u64,
    /// End of guest VRAM.
    pub(crate) vram: u64,
    made: Nth,
    pub(crate) live: BTreeMap<Nth, Table>,
    pub(crate) handles: BTreeMap<u32, Nth>,
    pub(crate) bindings: BTreeMap<u64, Nth>,
}

impl Model {
    pub(crate) fn new(vram: u64, limit: u64) -> Self {
        Self { limit, vram, made: 0, live: BTreeMap::new(), handles: BTreeMap::new(), bindings: BTreeMap::new() }
    }

    pub(crate) fn used(&self) -> u64 {
        self.live.values().map(Table::bytes).sum()
    }

    pub(crate) fn clear(&mut self) {
        self.live.clear();
        self.handles.clear();
        self.bindings.clear();
    }

    fn kind(&self, handle: u32) -> Option<u32> {
        self.handles.get(&handle).map(|nth| self.live[nth].kind)
    }

    /// Returns the error of an operation that requires a table of one of these types, or `None` if `handle` refers to
    /// one.
    fn against(&self, handle: u32, kinds: &[u32]) -> Option<Status> {
        match self.kind(handle) {
            None => Some(Status::NoObject),
            Some(kind) if !kinds.contains(&kind) => Some(Status::WrongType),
            Some(_) => None,
        }
    }

    /// Returns all reasons to reject an operation.
    pub(crate) fn refusals(&self, raw: &Raw) -> Vec<Status> {
        let handle = raw.handle;
        let mut all = Vec::new();
        match raw.code {
            0x01 => {
                all.extend(self.handles.contains_key(&handle).then_some(Status::Exists));
                let bytes = u64::from(ENTRIES[raw.word(0) as usize]) * 8;
                all.extend((self.used() + bytes > self.limit).then_some(Status::Limit));
            }
            0x02 => all.extend(self.against(handle, &[1, 2, 3])),
            0x03 => {
                all.extend(self.against(handle, &[1]));
                all.extend((raw.word(0) >= 8192).then_some(Status::Range));
                for (named, kind) in [(raw.word(1), 2), (raw.word(2), 3)] {
                    all.extend((named != 0).then(|| self.against(named, &[kind])).flatten());
                }
            }
            0x04..=0x06 => {
                all.extend(self.against(handle, &[2, 3]));
                let entries = ENTRIES[self.kind(handle).unwrap_or(0) as usize];
                let end = u64::from(raw.word(0)) + u64::from(raw.word(1));
                all.extend((end > u64::from(entries)).then_some(Status::Range));
            }
            0x07 if handle != 0 => {
                all.extend(self.against(handle, &[1]));
                all.extend((raw.wide(0) >= self.vram).then_some(Status::Range));
            }
            0x08 if handle != 0 => all.extend(self.against(handle, &[1])),
            _ => {}
        }
        all
    }

    /// Applies an operation that must not be rejected.
    pub(crate) fn apply(&mut self, raw: &Raw) {
        let table = self.handles.get(&raw.handle).copied();
        match raw.code {
            0x01 => {
                self.made += 1;
                let kind = raw.word(0);
                let entries = vec![0; if kind == 1 { 0 } else { ENTRIES[kind as usize] as usize }];
                let table = Table { kind, entries, names: BTreeMap::new() };
                self.live.insert(self.made, table);
                self.handles.insert(raw.handle, self.made);
            }
            0x02 => {
                self.handles.remove(&raw.handle);
            }
            0x03 => {
                let names = (self.handles.get(&raw.word(1)).copied(), self.handles.get(&raw.word(2)).copied());
                self.directory(table).insert(raw.word(0), names);
            }
            0x04..=0x06 => {
                let entries = &mut self.live.get_mut(&table.unwrap()).unwrap().entries;
                let mut grown = if raw.code == 0x04 { raw.wide(1) } else { 0 };
                for nth in 0..raw.word(1) as usize {
                    entries[raw.word(0) as usize + nth] = if raw.code == 0x05 { raw.wide(1 + nth) } else { grown };
                    grown = grown.wrapping_add(if raw.code == 0x04 { raw.wide(2) } else { 0 });
                }
            }
            0x07 if raw.handle != 0 => {
                self.bindings.insert(raw.wide(0), table.unwrap());
            }
            0x07 => {
                self.bindings.remove(&raw.wide(0));
            }
            _ => {}
        }
        self.sweep();
    }

    fn directory(&mut self, table: Option<Nth>) -> &mut BTreeMap<u32, Names> {
        &mut self.live.get_mut(&table.unwrap()).unwrap().names
    }

    /// Removes unreachable tables.
    fn sweep(&mut self) {
        let mut reached: BTreeSet<Nth> = self.handles.values().chain(self.bindings.values()).copied().collect();
        for nth in reached.clone() {
            for (small, large) in self.live[&nth].names.values() {
                reached.extend(small.iter().chain(large));
            }
        }
        self.live.retain(|nth, _| reached.contains(nth));
    }
}
