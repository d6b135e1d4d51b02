//! The driver's functions that map memory.
//!
//! UNSAFETY: calls them with addresses and handles that the callers answer for.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;

use super::handles::Pages;
use crate::driver::{self, Access, Address, Handle};

/// The driver.
#[derive(Clone, Copy, Debug)]
pub struct Driver;

impl Pages for Driver {
    fn map(&mut self, at: Address, bytes: u64, handle: Handle) -> c_int {
        // SAFETY: no pointers; the driver refuses what is not right.
        unsafe { driver::mem_map(at, bytes as usize, 0, handle, 0) }
    }

    fn unmap(&mut self, at: Address, bytes: u64) -> c_int {
        // SAFETY: as above. What the program unmaps it does not use, and for a relocation nothing is in flight.
        unsafe { driver::mem_unmap(at, bytes as usize) }
    }

    fn allow(&mut self, at: Address, bytes: u64, access: &[Access]) -> c_int {
        // SAFETY: the list is as long as is said.
        unsafe { driver::mem_set_access(at, bytes as usize, access.as_ptr(), access.len()) }
    }

    fn release(&mut self, handle: Handle) {
        // SAFETY: a handle of ours that was imported or created, and that nothing names any more.
        unsafe { driver::mem_release(handle) };
    }
}
