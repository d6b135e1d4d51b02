//! Memory registered by the program. It is outside the window, so the card cannot access it. Copies treat it as
//! pageable, which is always correct. Calls that need its device address are rejected.
//!
//! UNSAFETY: queries the kernel for mapped pages.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::addresses::{Place, place};
use crate::call::{code, report_refused};
use crate::frame::{Frame, Handler};
use crate::result::{ALREADY_REGISTERED, INVALID_CONTEXT, INVALID_VALUE, NOT_REGISTERED, NOT_SUPPORTED, OUT_OF_MEMORY};
use crate::{devices, thread};

pub const HANDLERS: &[(&str, Handler)] = &[("cuMemHostRegister_v2", register), ("cuMemHostUnregister", unregister)];

/// Accepted registration flags: `CU_MEMHOSTREGISTER_PORTABLE` and `.._READ_ONLY`.
const ACCEPTED_FLAGS: u32 = 1 | 8;
/// Rejected registration flags: `CU_MEMHOSTREGISTER_DEVICEMAP` and `.._IOMEMORY`, which require access by the card.
const REFUSED_FLAGS: u32 = 2 | 4;
/// Maximum number of registered ranges.
const MAX_RANGES: usize = 1 << 16;
/// Size of a page in bytes.
const PAGE: u64 = 4096;

/// A range of registered host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Start address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Flags of the registration.
    pub flags: u32,
}

/// Registered ranges, keyed by start address. Static, because exported functions cannot receive state as an argument.
static RANGES: Mutex<BTreeMap<u64, Registered>> = Mutex::new(BTreeMap::new());

fn lock() -> MutexGuard<'static, BTreeMap<u64, Registered>> {
    RANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the registered range that contains an address.
pub fn find(address: u64) -> Option<Registered> {
    let ranges = lock();
    let (_, found) = ranges.range(..=address).next_back()?;
    (address - found.address < found.bytes).then_some(*found)
}

/// Returns true if all pages of a range are mapped.
fn is_mapped(address: u64, end: u64) -> bool {
    /// Number of pages per query.
    const PAGES: u64 = 4096;
    let mut states = [0u8; PAGES as usize];
    let mut at = address / PAGE * PAGE;
    while at < end {
        let bytes = (end - at).min(PAGES * PAGE);
        // SAFETY: the kernel writes one byte per page, and returns an error if pages are unmapped.
        if unsafe { libc::mincore(at as *mut libc::c_void, bytes as usize, states.as_mut_ptr()) } != 0 {
            return false;
        }
        at += bytes;
    }
    true
}

/// Adds a range to `ranges`, if it is mapped and does not overlap another range.
fn add(ranges: &mut BTreeMap<u64, Registered>, new: Registered) -> Result<(), i32> {
    let end = new.address.checked_add(new.bytes).ok_or(INVALID_VALUE)?;
    let before = ranges.range(..end).next_back();
    if before.is_some_and(|(_, other)| other.address + other.bytes > new.address) {
        return Err(ALREADY_REGISTERED);
    }
    if ranges.len() >= MAX_RANGES {
        return Err(OUT_OF_MEMORY);
    }
    if !is_mapped(new.address, end) {
        return Err(INVALID_VALUE);
    }
    ranges.insert(new.address, new);
    Ok(())
}

fn register(frame: &Frame) -> i32 {
    let new = Registered { address: frame.arg(0), bytes: frame.arg(1), flags: frame.int(2) };
    let register = || {
        devices::ready()?;
        if thread::current() == 0 {
            return Err(INVALID_CONTEXT);
        }
        if new.address == 0 || new.bytes == 0 || new.flags & !(ACCEPTED_FLAGS | REFUSED_FLAGS) != 0 {
            return Err(INVALID_VALUE);
        }
        if place(new.address) == Place::Pinned {
            return Err(ALREADY_REGISTERED);
        }
        if new.flags & REFUSED_FLAGS != 0 {
            report_refused("cuMemHostRegister for access by kernels");
            return Err(NOT_SUPPORTED);
        }
        add(&mut lock(), new)
    };
    code(register())
}

fn unregister(frame: &Frame) -> i32 {
    let unregister = || {
        devices::ready()?;
        // No copy is pending, because each copy call accesses the memory before it returns.
        lock().remove(&frame.arg(0)).map(drop).ok_or(NOT_REGISTERED)
    };
    code(unregister())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_is_registered_once_and_only_if_it_is_mapped() {
        let own = vec![0u8; 3 * PAGE as usize];
        let at = own.as_ptr().addr() as u64;
        let range = |address, bytes| Registered { address, bytes, flags: 0 };
        let mut ranges = BTreeMap::new();
        assert_eq!(add(&mut ranges, range(at + 100, 5000)), Ok(()));
        for (address, bytes) in [(at, 101), (at + 5000, 5000), (at + 200, 1), (at, 3 * PAGE)] {
            assert_eq!(add(&mut ranges, range(address, bytes)), Err(ALREADY_REGISTERED), "{address:#x} {bytes}");
        }
        assert_eq!(add(&mut ranges, range(at + 5100, 100)), Ok(()), "adjacent");
        assert_eq!(add(&mut ranges, range(0x1000, 8)), Err(INVALID_VALUE), "nothing is mapped there");
        assert_eq!(add(&mut ranges, range(u64::MAX, 8)), Err(INVALID_VALUE));
    }
}
