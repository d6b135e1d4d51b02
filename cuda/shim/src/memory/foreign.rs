//! Handles of memory that only the driver can provide: compressed, sparse, host, or shared memory.
//!
//! Such memory exists, and stays in the accounts, until its last reference, mapping and binding are gone.

use std::collections::{BTreeMap, HashMap};

use crate::driver::{Address, Handle};

/// An object to which memory can be bound, other than an address range: an array, or an offset in a multicast object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Handle of a sparse array.
    Array(u64),
    /// Number of a multicast object or endpoint, and an offset in it, in bytes.
    Multicast(u64, u64),
}

#[derive(Debug)]
struct Known<T> {
    counted: T,
    references: u32,
    mappings: u32,
}

/// A program's driver handles, each with its accounting entry.
#[derive(Debug)]
pub struct Foreign<T> {
    known: HashMap<Handle, Known<T>>,
    mapped: BTreeMap<Address, (u64, Handle)>,
    bound: HashMap<Target, Vec<Handle>>,
}

impl<T> Default for Foreign<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), mapped: BTreeMap::new(), bound: HashMap::new() }
    }
}

impl<T> Foreign<T> {
    /// Records a new driver handle. Returns the entry of a released handle with the same number, if any.
    #[must_use]
    pub fn add(&mut self, handle: Handle, counted: T) -> Option<T> {
        let known = Known { counted, references: 1, mappings: 0 };
        self.known.insert(handle, known).map(|old| old.counted)
    }

    /// Returns true if a handle is recorded.
    pub fn knows(&self, handle: Handle) -> bool {
        self.known.contains_key(&handle)
    }

    /// Records another reference by the program to a handle.
    pub fn retain(&mut self, handle: Handle) {
        if let Some(known) = self.known.get_mut(&handle) {
            known.references += 1;
        }
    }

    /// Records that the program has released a reference. Returns the entry if the memory is now free.
    #[must_use]
    pub fn release(&mut self, handle: Handle) -> Option<T> {
        let known = self.known.get_mut(&handle)?;
        known.references = known.references.saturating_sub(1);
        self.end(handle)
    }

    /// Records that the memory is mapped at an address.
    pub fn map(&mut self, at: Address, bytes: u64, handle: Handle) {
        if let Some(known) = self.known.get_mut(&handle) {
            known.mappings += 1;
            self.mapped.insert(at, (bytes, handle));
        }
    }

    /// Records that a range is no longer mapped. Returns the entries of the freed memory.
    #[must_use]
    pub fn unmap(&mut self, at: Address, bytes: u64) -> Vec<T> {
        let starts: Vec<Address> = self.mapped.range(at..at.saturating_add(bytes)).map(|(start, _)| *start).collect();
        let handles = starts.into_iter().filter_map(|start| self.mapped.remove(&start)).map(|(_, handle)| handle);
        let handles: Vec<Handle> = handles.collect();
        handles.into_iter().filter_map(|handle| self.unmapped(handle)).collect()
    }

    /// Records that the memory is bound to an object until that object is destroyed.
    pub fn bind(&mut self, target: Target, handle: Handle) {
        if let Some(known) = self.known.get_mut(&handle) {
            known.mappings += 1;
            self.bound.entry(target).or_default().push(handle);
        }
    }

    /// Removes all memory bindings of the targets that match `is_it`. Returns the entries of the freed memory.
    #[must_use]
    pub fn unbind(&mut self, is_it: impl Fn(Target) -> bool) -> Vec<T> {
        let handles: Vec<Handle> = self.bound.extract_if(|target, _| is_it(*target)).flat_map(|(_, all)| all).collect();
        handles.into_iter().filter_map(|handle| self.unmapped(handle)).collect()
    }

    fn unmapped(&mut self, handle: Handle) -> Option<T> {
        let known = self.known.get_mut(&handle)?;
        known.mappings = known.mappings.saturating_sub(1);
        self.end(handle)
    }

    fn end(&mut self, handle: Handle) -> Option<T> {
        self.known.get(&handle).filter(|known| known.references == 0 && known.mappings == 0)?;
        self.known.remove(&handle).map(|known| known.counted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_memory_counts_until_its_last_use_ends() {
        let mut foreign = Foreign::default();
        assert_eq!(foreign.add(7, "seven"), None);
        foreign.map(0x1000, 0x100, 7);
        foreign.map(0x2000, 0x100, 7);
        foreign.bind(Target::Array(3), 7);
        assert_eq!(foreign.release(7), None, "it is mapped");
        foreign.retain(7);
        assert_eq!(foreign.unmap(0x1000, 0x2000), [""; 0], "it is bound, and has a reference again");
        assert_eq!(foreign.unbind(|target| target == Target::Array(4)), [""; 0]);
        assert_eq!(foreign.unbind(|target| target == Target::Array(3)), [""; 0]);
        assert_eq!(foreign.release(7), Some("seven"));
        assert_eq!(foreign.release(7), None);
    }

    #[test]
    fn only_mappings_within_the_range_end() {
        let mut foreign = Foreign::default();
        for (handle, at) in [(1, 0x1000), (2, 0x1100), (3, 0x1200)] {
            assert_eq!(foreign.add(handle, handle), None);
            foreign.map(at, 0x100, handle);
            assert_eq!(foreign.release(handle), None);
        }
        assert_eq!(foreign.unmap(0x1100, 0x100), [2]);
        assert_eq!(foreign.unmap(0x1000, 0x1000), [1, 3]);
        foreign.map(0x1000, 0x100, 99);
        assert_eq!(foreign.unmap(0x1000, 0x100), [0; 0], "unknown handles are ignored");
    }

    #[test]
    fn reused_number_refers_to_new_memory() {
        let mut foreign = Foreign::default();
        assert_eq!(foreign.add(1, "old"), None);
        assert_eq!(foreign.add(1, "new"), Some("old"));
        assert_eq!(foreign.release(1), Some("new"));
    }
}
