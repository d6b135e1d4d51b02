//! The program's live allocations from `cuMemAlloc` and `cuMemAllocPitch`. With these records, the library answers some
//! queries, and frees memory without waiting for the worker.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

/// An allocation of card memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Size in bytes.
    pub bytes: u64,
    /// Number of the context that owns the allocation.
    pub context: u32,
    /// Index of the allocation's device.
    pub device: u32,
}

/// Allocations, keyed by start address. Static, because exported functions cannot receive state as an argument.
static ALLOCATED: RwLock<BTreeMap<u64, Allocation>> = RwLock::new(BTreeMap::new());

fn lock() -> RwLockWriteGuard<'static, BTreeMap<u64, Allocation>> {
    ALLOCATED.write().unwrap_or_else(PoisonError::into_inner)
}

/// Adds an allocation.
pub fn add(address: u64, allocation: Allocation) {
    lock().insert(address, allocation);
}

/// Removes the allocation with the given start address. Returns false if none exists.
pub fn remove(address: u64) -> bool {
    lock().remove(&address).is_some()
}

/// Removes the allocations of a destroyed context.
pub fn end_context(context: u32) {
    lock().retain(|_, allocation| allocation.context != context);
}

/// Returns the allocation that contains an address.
pub fn find(address: u64) -> Option<Allocation> {
    let allocations = ALLOCATED.read().unwrap_or_else(PoisonError::into_inner);
    let (start, found) = allocations.range(..=address).next_back()?;
    (address - start < found.bytes).then_some(*found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_is_known_until_it_or_its_context_ends() {
        let [first, second] = [1, 2].map(|context| Allocation { bytes: 100, context, device: 0 });
        add(0x1000, first);
        add(0x2000, second);
        let found = [0xfff, 0x1000, 0x1063, 0x1064, 0x2001].map(find);
        assert_eq!(found, [None, Some(first), Some(first), None, Some(second)]);
        end_context(1);
        assert_eq!([0x1000, 0x2000].map(find), [None, Some(second)]);
        assert!(!remove(0x2001), "not its first address");
        assert!(remove(0x2000));
        assert!(!remove(0x2000));
    }
}
