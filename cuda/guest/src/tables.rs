//! Export tables, which the process answers itself (`cuda-exports`).

use std::ffi::c_void;

/// Returns the table of a UUID.
pub fn find(_uuid: &[u8; 16]) -> Option<*const c_void> {
    None
}
