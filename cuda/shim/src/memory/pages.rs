//! Driver functions that map memory.
//!
//! UNSAFETY: calls these functions with addresses and handles that the callers guarantee to be valid.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd as _, BorrowedFd};

use super::handles::Pages;
use crate::driver::{self, Access, Address, Handle, SUCCESS};
use crate::log::report;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const POSIX: c_int = 1;

/// The real driver.
#[derive(Clone, Copy, Debug)]
pub struct Driver;

impl Pages for Driver {
    fn import(&mut self, descriptor: BorrowedFd<'_>) -> Option<Handle> {
        let mut handle = 0;
        let source = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the descriptor is open. The driver expects its number in place of a pointer.
        let result = unsafe { driver::mem_import(&raw mut handle, source, POSIX) };
        if result != SUCCESS {
            report!("a chunk cannot be imported: error {result}");
        }
        (result == SUCCESS).then_some(handle)
    }

    fn map(&mut self, at: Address, bytes: u64, handle: Handle) -> c_int {
        // SAFETY: the call takes no pointers, and the driver rejects invalid arguments.
        unsafe { driver::mem_map(at, bytes as usize, 0, handle, 0) }
    }

    fn unmap(&mut self, at: Address, bytes: u64) -> c_int {
        // SAFETY: as above. The program does not use memory that it unmaps, and no work is in flight during a
        // relocation.
        unsafe { driver::mem_unmap(at, bytes as usize) }
    }

    fn allow(&mut self, at: Address, bytes: u64, access: &[Access]) -> c_int {
        // SAFETY: the list has the given length.
        unsafe { driver::mem_set_access(at, bytes as usize, access.as_ptr(), access.len()) }
    }

    fn release(&mut self, handle: Handle) {
        // SAFETY: this library imported or created the handle, and no longer uses it.
        unsafe { driver::mem_release(handle) };
    }
}
