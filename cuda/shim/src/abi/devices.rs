//! Driver functions that count, find or name devices. A program does not see the cards that the driver shows only for a
//! later move (`program-cards`).
//!
//! UNSAFETY: forwards calls, including calls with unknown signatures.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_char, c_int, c_void};

use program_cards::{calls, integrity};

use super::stubs::DEVICES;
use super::{shim, start};
use crate::agent;
use crate::driver::{self, INVALID_DEVICE, SUCCESS};
use crate::symbols::{Arguments, at, real};

/// `cuDeviceGetCount`.
unsafe extern "C" fn count(to: *mut c_int) -> c_int {
    // SAFETY: guaranteed by the caller; the driver has written the number if it returned success.
    unsafe {
        let result = driver::device_get_count(to);
        if result == SUCCESS {
            *to = calls::shown(*to);
        }
        result
    }
}

/// `cuDeviceGetByPCIBusId`.
unsafe extern "C" fn by_address(to: *mut c_int, address: *const c_char) -> c_int {
    // SAFETY: guaranteed by the caller; the driver has written the number if it returned success.
    unsafe {
        match driver::device_get_by_address(to, address) {
            SUCCESS if calls::is_hidden(*to) => INVALID_DEVICE,
            result => result,
        }
    }
}

/// `cuGetExportTable`.
unsafe extern "C" fn export_table(to: *mut *const c_void, uuid: *const [u8; 16]) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let is_query = !to.is_null() && uuid.as_ref().is_some_and(integrity::is_query);
        if !is_query || !agent::may_hide_cards(shim()) {
            return driver::get_export_table(to, uuid);
        }
        match integrity::table() {
            Ok(table) => {
                *to = table;
                SUCCESS
            }
            Err(error) => error,
        }
    }
}

/// Returns the function that executes a call: the driver's or this library's, or one that rejects a hidden device.
pub extern "C" fn target(index: usize, registers: *const u64, stack: *const u64) -> *mut () {
    // SAFETY: the stub passes the arguments of a call of this function.
    match unsafe { calls::refusal(index, Arguments::new(registers, stack)) } {
        None => start::within(index).unwrap_or_else(|| real(index)),
        Some(INVALID_DEVICE) => driver::invalid_device as *mut (),
        Some(_) => driver::invalid_value as *mut (),
    }
}

pub fn ours(index: usize) -> Option<*mut ()> {
    match index {
        at::cuDeviceGetCount => Some(count as *mut ()),
        at::cuDeviceGetByPCIBusId => Some(by_address as *mut ()),
        at::cuGetExportTable => Some(export_table as *mut ()),
        _ if calls::names_devices(index) => DEVICES.get(index).map(|stub| *stub as *mut ()),
        _ => None,
    }
}
