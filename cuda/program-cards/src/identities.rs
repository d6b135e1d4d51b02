//! The UUIDs of the devices that the driver sees.
//!
//! UNSAFETY: calls the driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;

use cuda_driver::calls::{self as driver, SUCCESS};

/// Returns the UUID of a device, or `None` if a driver call fails.
#[must_use]
pub fn uuid(ordinal: c_int) -> Option<[u8; 16]> {
    let (mut device, mut uuid) = (0, [0; 16]);
    // SAFETY: the pointers point to local variables.
    unsafe {
        (driver::device_get(&raw mut device, ordinal) == SUCCESS
            && driver::device_get_uuid(&raw mut uuid, device) == SUCCESS)
            .then_some(uuid)
    }
}

/// Returns the UUIDs of all devices that the driver sees. The UUID of a device is zero if a driver call for it fails.
#[must_use]
pub fn seen() -> Vec<[u8; 16]> {
    let mut count = 0;
    // SAFETY: the pointer points to a local variable. If the call fails, the count stays zero.
    unsafe { driver::device_get_count(&raw mut count) };
    (0..count).map(|ordinal| uuid(ordinal).unwrap_or_default()).collect()
}
