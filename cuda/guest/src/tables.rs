//! Export tables, which this process implements itself (`cuda-exports`).

use std::ffi::c_void;

use cuda_exports::Device;

use crate::call::{index, invoke, to};
use crate::devices::{attribute_of, device_count, driver_version, ready};
use crate::result::{INVALID_CONTEXT, INVALID_DEVICE, NOT_INITIALIZED};
use crate::{code, contexts, fork, report};

/// Device attribute with the PCI bus number.
const PCI_BUS: usize = 33;
/// Device attribute with the PCI device number.
const PCI_DEVICE: usize = 34;
const PCI_DOMAIN: usize = 50;

/// The library's functions for the export tables.
struct Guest;

impl cuda_exports::Driver for Guest {
    fn ready(&self) -> Result<(), i32> {
        if fork::is_child() { Err(NOT_INITIALIZED) } else { ready() }
    }

    fn version(&self) -> u32 {
        driver_version().map_or(0, i32::cast_unsigned)
    }

    fn devices(&self) -> Vec<Device> {
        let count = device_count().unwrap_or(0).cast_unsigned();
        (0..count as usize).filter_map(|device| identity(device).ok()).collect()
    }

    fn primary_context(&self, device: i32) -> Result<u64, i32> {
        contexts::primary_handle(u32::try_from(device).map_err(|_| INVALID_DEVICE)?)
    }

    fn current_context(&self) -> Result<u64, i32> {
        match contexts::current_handle() {
            0 => Err(INVALID_CONTEXT),
            handle => Ok(handle),
        }
    }

    fn context_id(&self, context: u64) -> Result<u64, i32> {
        contexts::number(context).map(u64::from)
    }

    fn load_module(&self, image: *const c_void) -> Result<u64, i32> {
        let mut module = 0u64;
        code::load(to(&mut module), image.addr() as u64)?;
        Ok(module)
    }

    fn refused(&self, table: &str, slot: usize) {
        report!("slot {slot} of the export table {table} is not supported in a virtual machine");
    }
}

fn identity(device: usize) -> Result<Device, i32> {
    let mut uuid = [0; 16];
    invoke(index!("cuDeviceGetUuid_v2"), &[to(&mut uuid), device as u64])?;
    let place = |attribute| attribute_of(attribute, device);
    Ok(Device { uuid, domain: place(PCI_DOMAIN)?, bus: place(PCI_BUS)?, device: place(PCI_DEVICE)? })
}

/// Returns the table with the given UUID.
pub fn find(uuid: &[u8; 16]) -> Option<*const c_void> {
    cuda_exports::install(&Guest);
    cuda_exports::table(uuid)
}
