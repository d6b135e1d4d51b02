//! The shared address range, and card memory that the driver placed outside it.
//!
//! UNSAFETY: reserves addresses with inaccessible mappings.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use cuda_calls::FIRST_HANDLE;
use cuda_ring::{ADDRESSES, PINNED_ADDRESSES};

/// Size of a page in bytes.
const PAGE: u64 = 4096;
/// Size of the address range reserved for handles, in bytes.
const HANDLE_BYTES: u64 = 1 << 40;

/// Card memory outside the shared range.
#[derive(Debug, Default)]
struct Outside {
    /// Sizes of the allocations in bytes, keyed by address.
    ranges: BTreeMap<u64, u64>,
    /// Page ranges that this library keeps inaccessible: their ends, keyed by start.
    reserved: BTreeMap<u64, u64>,
}

/// The program's card memory outside the shared range. Static, because exported functions cannot receive state as an
/// argument.
static OUTSIDE: RwLock<Outside> = RwLock::new(Outside { ranges: BTreeMap::new(), reserved: BTreeMap::new() });
/// Number of allocations in [`OUTSIDE`]. Most calls check it instead of acquiring the lock.
static OUTSIDE_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Type of memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Card memory.
    Card,
    /// The program's pinned memory, which the card accesses at the same address.
    Pinned,
    /// The program's other memory.
    Pageable,
}

fn reserve_range(at: u64, bytes: u64) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the mapping is new; the kernel rejects the address if it is already in use.
    let found = unsafe { libc::mmap(at as *mut libc::c_void, bytes as usize, libc::PROT_NONE, flags, -1, 0) };
    if found == libc::MAP_FAILED {
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::AlreadyExists {
            return Err(io::Error::other(
                "this process already uses the library's addresses; if it loads copies of the library under several \
                 names, make these names links to one file",
            ));
        }
        return Err(error);
    }
    if found as u64 == at { Ok(()) } else { Err(io::ErrorKind::AddrInUse.into()) }
}

/// Reserves the shared range and the handle addresses. Needed only once, because children inherit the mappings.
///
/// # Errors
/// Returns an error if the program already uses the addresses.
pub fn reserve() -> io::Result<()> {
    /// Set once the ranges are reserved. Static, because the mappings belong to the process.
    static RESERVED: AtomicBool = AtomicBool::new(false);
    if RESERVED.load(Ordering::Acquire) {
        return Ok(());
    }
    reserve_range(ADDRESSES.start, ADDRESSES.end - ADDRESSES.start)?;
    reserve_range(FIRST_HANDLE, HANDLE_BYTES)?;
    RESERVED.store(true, Ordering::Release);
    Ok(())
}

/// Returns the type of memory at an address.
pub fn place(address: u64) -> Place {
    if (ADDRESSES.start..PINNED_ADDRESSES).contains(&address) {
        return Place::Card;
    }
    if ADDRESSES.contains(&address) {
        return Place::Pinned;
    }
    if OUTSIDE_COUNT.load(Ordering::Acquire) > 0 {
        let outside = OUTSIDE.read().unwrap_or_else(PoisonError::into_inner);
        if outside.ranges.range(..=address).next_back().is_some_and(|(start, bytes)| address - start < *bytes) {
            return Place::Card;
        }
    }
    Place::Pageable
}

/// Records allocated card memory. Returns false if the program uses the addresses for other memory.
pub fn add(address: u64, bytes: u64) -> bool {
    if ADDRESSES.contains(&address) || bytes == 0 {
        return true;
    }
    let mut outside = OUTSIDE.write().unwrap_or_else(PoisonError::into_inner);
    let (mut at, end) = (address / PAGE * PAGE, (address + bytes).next_multiple_of(PAGE));
    while at < end {
        // Pages shared with an earlier allocation are already reserved.
        let before = outside.reserved.range(..=at).next_back().map(|(_, end)| *end).filter(|end| *end > at);
        if let Some(reserved) = before {
            at = reserved;
            continue;
        }
        let next = outside.reserved.range(at..end).next().map_or(end, |(start, _)| *start);
        if reserve_range(at, next - at).is_err() {
            return false;
        }
        outside.reserved.insert(at, next);
        at = next;
    }
    outside.ranges.insert(address, bytes);
    OUTSIDE_COUNT.store(outside.ranges.len(), Ordering::Release);
    true
}

/// Removes freed card memory. Its addresses remain reserved, because the driver may reuse them.
pub fn remove(address: u64) {
    if ADDRESSES.contains(&address) || OUTSIDE_COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    let mut outside = OUTSIDE.write().unwrap_or_else(PoisonError::into_inner);
    outside.ranges.remove(&address);
    OUTSIDE_COUNT.store(outside.ranges.len(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn card_memory_outside_the_range_is_told_from_the_programs() {
        reserve().expect("the range is free");
        let own = Box::new([0u8; 64]);
        let own = own.as_ptr().addr() as u64;
        assert_eq!(place(own), Place::Pageable);
        assert!(!add(own, 64), "the program's own pages are refused");
        let free = 0x1234_5678_0000;
        assert!(add(free + 100, 5000));
        assert!(add(free + 6000, 5000), "two allocations may share a page");
        let places = [free + 99, free + 100, free + 5099, free + 5100, free + 6000, ADDRESSES.start, PINNED_ADDRESSES];
        let expected =
            [Place::Pageable, Place::Card, Place::Card, Place::Pageable, Place::Card, Place::Card, Place::Pinned];
        assert_eq!(places.map(place), expected);
        remove(free + 100);
        assert_eq!(place(free + 100), Place::Pageable);
    }
}
