//! `cuGetProcAddress`: the driver looks up a function, and this library replaces the result if it has its own version
//! of the function.
//!
//! UNSAFETY: reads and writes through the program's pointers, as the driver would.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::cmp::Ordering;
use std::ffi::{CStr, c_char, c_int, c_void};

use super::shim;
use super::stubs::{ENTRIES, get};
use crate::driver::{self, SUCCESS};
use crate::symbols::{COUNT, FAMILIES, at, real};

/// Flag that requests functions for the per-thread default stream.
const PER_THREAD: u64 = 1 << 1;

/// Sorts the real functions by address. Called once, before all other functions in this module.
pub fn prepare() {
    let mut addresses: Vec<_> = (0..COUNT).map(|index| (real(index) as usize, index)).filter(|a| a.0 != 0).collect();
    addresses.sort_unstable();
    let _ = shim().libraries.by_address.set(addresses);
}

/// Returns the table index of the symbol for a name, version and stream mode, if any.
fn symbol(name: &[u8], version: u32, per_thread: bool) -> Option<usize> {
    let at = FAMILIES.binary_search_by(|family| compare(family.0, name)).ok()?;
    let forms = FAMILIES.get(at)?.1;
    let newest = |kind: bool| forms.iter().rfind(|f| f.1 == kind && f.0 <= version).map(|f| f.2);
    per_thread.then(|| newest(true)).flatten().or_else(|| newest(false))
}

fn compare(a: &[u8], b: &[u8]) -> Ordering {
    a.cmp(b)
}

/// Replaces the driver's function with this library's version, if one exists.
///
/// # Safety
/// Same as for `cuGetProcAddress`, which has succeeded with these arguments.
unsafe fn substitute(name: *const c_char, function: *mut *mut c_void, version: c_int, per_thread: bool) {
    if name.is_null() || function.is_null() {
        return;
    }
    // SAFETY: the driver has written a function to this pointer.
    let found = unsafe { *function };
    if found.is_null() {
        return;
    }
    // SAFETY: the driver has read the name.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let addresses = shim().libraries.by_address.get().map_or(&[][..], |a| a.as_slice());
    let by_name = symbol(name, u32::try_from(version).unwrap_or(0), per_thread);
    let from = addresses.partition_point(|a| a.0 < found as usize);
    let same = addresses.get(from..).unwrap_or_default().iter().take_while(|a| a.0 == found as usize).map(|a| a.1);
    // A driver function may have several symbols, so prefer the requested one.
    let by_address = same.clone().find(|index| Some(*index) == by_name).or_else(|| same.clone().next());
    let Some(index) = by_address.or(by_name) else { return };
    let ours = get(index);
    if ours.is_null() || ours == real(index) {
        return;
    }
    // Return the exported stub instead of the function itself, because the program may call it in a child.
    if let Some(entry) = ENTRIES.get(index) {
        // SAFETY: as above.
        unsafe { *function = (*entry as *mut ()).cast() };
    }
}

/// The first version of `cuGetProcAddress`.
///
/// # Safety
/// Same as for the driver's function.
pub unsafe extern "C" fn get_proc_address(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::get_proc_address(name, function, version, flags) };
    if result == SUCCESS {
        // SAFETY: as above.
        unsafe { substitute(name, function, version, flags & PER_THREAD != 0) };
    }
    result
}

/// `cuGetProcAddress_v2`.
///
/// # Safety
/// Same as for the driver's function.
pub unsafe extern "C" fn get_proc_address_v2(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::get_proc_address_v2(name, function, version, flags, status) };
    if result == SUCCESS {
        // SAFETY: as above.
        unsafe { substitute(name, function, version, flags & PER_THREAD != 0) };
    }
    result
}

/// `cuGetProcAddress_v2_ptsz`.
///
/// # Safety
/// Same as for the driver's function.
pub unsafe extern "C" fn get_proc_address_v2_per_thread(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::get_proc_address_v2_per_thread(name, function, version, flags, status) };
    if result == SUCCESS {
        // SAFETY: as above.
        unsafe { substitute(name, function, version, true) };
    }
    result
}

pub fn ours(index: usize) -> Option<*mut ()> {
    match index {
        at::cuGetProcAddress => Some(get_proc_address as *mut ()),
        at::cuGetProcAddress_v2 => Some(get_proc_address_v2 as *mut ()),
        at::cuGetProcAddress_v2_ptsz => Some(get_proc_address_v2_per_thread as *mut ()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_follows_from_name_version_and_flags() {
        assert_eq!(symbol(b"cuMemAlloc", 12_000, false), Some(at::cuMemAlloc_v2));
        assert_eq!(symbol(b"cuMemAlloc", 2000, false), Some(at::cuMemAlloc));
        assert_eq!(symbol(b"cuLaunchKernel", 12_000, true), Some(at::cuLaunchKernel_ptsz));
        assert_eq!(symbol(b"cuMemAlloc", 12_000, true), Some(at::cuMemAlloc_v2));
        assert_eq!(symbol(b"cuNothing", 12_000, false), None);
    }
}
