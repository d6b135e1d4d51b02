//! The integrity query of NVIDIA's runtime, for a program from which devices are hidden.
//!
//! The answer covers the identity of each device ([decision 143](../../../docs/decisions/143-integrity-answer.md)). The
//! driver would include the hidden devices, which the runtime does not find, so that each runtime call would fail with
//! error 103. The answer therefore comes from `cuda-exports`.
//!
//! UNSAFETY: calls the driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use cuda_driver::calls::{self as driver, NOT_INITIALIZED, NOT_SUPPORTED, SUCCESS};
use cuda_exports::{Device, INTEGRITY_UUID, RUNTIME_UUID};

use crate::calls::shown;

/// The attributes of a device's PCI domain, bus and device.
const ADDRESS: [c_int; 3] = [50, 33, 34];

/// The driver, restricted to the devices that the program sees.
struct Shown;

/// Converts a `CUresult` to a `Result`.
fn checked(result: c_int) -> Result<(), i32> {
    if result == SUCCESS { Ok(()) } else { Err(result) }
}

fn count() -> Result<c_int, i32> {
    let mut count = 0;
    // SAFETY: the pointer points to a local variable.
    checked(unsafe { driver::device_get_count(&raw mut count) }).map(|()| shown(count))
}

fn identity(ordinal: c_int) -> Result<Device, i32> {
    let (mut device, mut uuid, mut address) = (0, [0; 16], [0; 3]);
    // SAFETY: all pointers point to local variables.
    unsafe {
        checked(driver::device_get(&raw mut device, ordinal))?;
        checked(driver::device_get_uuid(&raw mut uuid, device))?;
        for (value, attribute) in address.iter_mut().zip(ADDRESS) {
            checked(driver::device_get_attribute(value, attribute, device))?;
        }
    }
    let [domain, bus, device] = address;
    Ok(Device { uuid, domain, bus, device })
}

impl cuda_exports::Driver for Shown {
    fn ready(&self) -> Result<(), i32> {
        match count() {
            Ok(0) => Err(NOT_INITIALIZED),
            known => known.map(drop),
        }
    }

    fn version(&self) -> u32 {
        let mut version = 0;
        // SAFETY: the pointer points to a local variable.
        unsafe { driver::driver_get_version(&raw mut version) };
        version
    }

    fn devices(&self) -> Vec<Device> {
        (0..count().unwrap_or(0)).map_while(|ordinal| identity(ordinal).ok()).collect()
    }

    // These functions serve other tables, which the program gets from the driver.

    fn primary_context(&self, _device: i32) -> Result<u64, i32> {
        Err(NOT_SUPPORTED)
    }

    fn current_context(&self) -> Result<u64, i32> {
        Err(NOT_SUPPORTED)
    }

    fn context_id(&self, _context: u64) -> Result<u64, i32> {
        Err(NOT_SUPPORTED)
    }

    fn load_module(&self, _image: *const c_void) -> Result<u64, i32> {
        Err(NOT_SUPPORTED)
    }

    fn refused(&self, _table: &str, _slot: usize) {}
}

/// Returns true if a UUID names the table of the integrity query.
#[must_use]
pub fn is_query(uuid: &[u8; 16]) -> bool {
    *uuid == INTEGRITY_UUID
}

/// Returns the table of the integrity query.
///
/// # Errors
/// Returns the driver's error if the driver lacks the table of the runtime's functions. The answer includes the address
/// of this table.
pub fn table() -> Result<*const c_void, i32> {
    let mut runtime = std::ptr::null();
    // SAFETY: the pointers point to a local variable and a constant.
    checked(unsafe { driver::get_export_table(&raw mut runtime, &RUNTIME_UUID) })?;
    cuda_exports::install(&Shown);
    Ok(cuda_exports::integrity_table_beside(runtime))
}
