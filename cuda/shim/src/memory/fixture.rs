//! Test fixtures for memory.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use super::handles::Pages;
use crate::driver::{Access, Address, Handle, INVALID_VALUE, SUCCESS};

/// A mock driver that tracks all mappings and can be set to reject a mapping.
#[derive(Debug, Default)]
pub struct Model {
    /// Mappings, keyed by address, with their size in bytes, handle and access.
    pub mapped: BTreeMap<Address, (u64, Handle, Vec<Access>)>,
    /// Released handles.
    pub released: Vec<Handle>,
    /// Handles that were imported.
    pub imported: Vec<Handle>,
    /// Number of `map` calls that succeed before one fails, or `None` if none fails.
    pub left: Option<usize>,
    /// Number of `unmap` calls.
    pub unmaps: usize,
}

impl Pages for Model {
    fn import(&mut self, _: BorrowedFd<'_>) -> Option<Handle> {
        let handle = 1000 + self.imported.len() as Handle;
        self.imported.push(handle);
        Some(handle)
    }

    fn map(&mut self, at: Address, bytes: u64, handle: Handle) -> c_int {
        assert!(!self.released.contains(&handle), "mapped after its release");
        if let Some(left) = &mut self.left {
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => {
                    self.left = None;
                    return 2;
                }
            }
        }
        if self.mapped.range(..at + bytes).next_back().is_some_and(|(start, m)| start + m.0 > at) {
            return INVALID_VALUE;
        }
        self.mapped.insert(at, (bytes, handle, Vec::new()));
        SUCCESS
    }

    fn unmap(&mut self, at: Address, bytes: u64) -> c_int {
        let before = self.mapped.len();
        self.mapped.retain(|start, _| *start < at || *start >= at + bytes);
        assert!(self.mapped.len() < before, "nothing was mapped there");
        self.unmaps += 1;
        SUCCESS
    }

    fn allow(&mut self, at: Address, bytes: u64, access: &[Access]) -> c_int {
        let mut next = at;
        for (start, mapping) in self.mapped.range_mut(at..at + bytes) {
            assert_eq!(*start, next, "a gap in the range");
            next += mapping.0;
            mapping.2.retain(|known| access.iter().all(|new| !new.same_location(known)));
            mapping.2.extend(access);
        }
        assert_eq!(next, at + bytes, "a gap at the end");
        SUCCESS
    }

    fn release(&mut self, handle: Handle) {
        assert!(!self.released.contains(&handle), "released twice");
        self.released.push(handle);
    }
}
