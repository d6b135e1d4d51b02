//! NVML's state in this process: the initialization count, and the devices.
//!
//! UNSAFETY: calls the worker's functions with pointers to local variables.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_char;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use cuda_calls::{Kind, find, handle, index_of};

use crate::result::{INVALID_ARGUMENT, SUCCESS, UNINITIALIZED, code};
use crate::{Failure, worker};

/// Maximum number of devices in a guest.
const MAX_DEVICES: u32 = 64;

/// Number of `nvmlInit` calls without a matching `nvmlShutdown`.
static STARTS: AtomicU32 = AtomicU32::new(0);
/// ID of the process that has initialized NVML. Its children must initialize NVML again.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Bit mask of the devices with a handle in the worker. The worker keeps a handle until the process exits, and rejects
/// a second one. Not protected by a lock, because a child could inherit a held lock.
static HANDLES: AtomicU64 = AtomicU64::new(0);
/// Set while a thread requests a handle from the worker.
static ASKING: AtomicBool = AtomicBool::new(false);

/// Returns true between `nvmlInit` and `nvmlShutdown`.
pub fn is_ready() -> bool {
    PROCESS.load(Ordering::Acquire) == std::process::id() && STARTS.load(Ordering::Acquire) > 0
}

/// Initializes NVML in the worker. Returns the worker's result code.
///
/// # Errors
/// Returns an error if no worker is available.
pub fn start() -> Result<i32, Failure> {
    worker()?.start()?;
    // SAFETY: the function has no arguments.
    let result = unsafe { call("nvmlInit_v2+", &[]) }?;
    if result == SUCCESS {
        let own = std::process::id();
        if PROCESS.swap(own, Ordering::AcqRel) != own {
            // This is a child of the process that initialized NVML, so it has a new worker.
            STARTS.store(0, Ordering::Release);
            HANDLES.store(0, Ordering::Release);
            ASKING.store(false, Ordering::Release);
        }
        STARTS.fetch_add(1, Ordering::AcqRel);
    }
    Ok(result)
}

/// Reverts one initialization.
pub fn end() -> i32 {
    let decrement = |starts: u32| starts.checked_sub(1);
    let is_undone = is_ready() && STARTS.fetch_update(Ordering::AcqRel, Ordering::Acquire, decrement).is_ok();
    if is_undone { SUCCESS } else { UNINITIALIZED }
}

/// Calls one of the worker's functions by the name in its description.
///
/// # Safety
/// The arguments must match the function.
unsafe fn call(name: &str, arguments: &[u64]) -> Result<i32, Failure> {
    let number = find(name).ok_or(Failure::Missing)?;
    // SAFETY: guaranteed by the caller.
    unsafe { worker()?.call(number, arguments, 0) }
}

/// Calls one of the worker's functions for the program. Returns NVML's result code.
///
/// # Safety
/// The arguments must match the function.
pub unsafe fn forward(name: &str, arguments: &[u64]) -> i32 {
    if !is_ready() {
        return UNINITIALIZED;
    }
    // SAFETY: guaranteed by the caller.
    code(unsafe { call(name, arguments) })
}

/// Like [`forward`], for a function whose first argument is a device.
///
/// # Safety
/// Same as for [`forward`].
pub unsafe fn forward_of_device(name: &str, arguments: &[u64]) -> i32 {
    let device = arguments.first().copied().unwrap_or_default();
    match index_of(Kind::Gpu, device) {
        _ if !is_ready() => UNINITIALIZED,
        None => INVALID_ARGUMENT,
        // SAFETY: guaranteed by the caller.
        Some(_) => unsafe { forward(name, arguments) },
    }
}

/// Returns the number of devices.
///
/// # Errors
/// Returns NVML's result code on failure.
pub fn count() -> Result<u32, i32> {
    let mut count = 0u32;
    // SAFETY: the argument points to an integer.
    let result = unsafe { forward("nvmlDeviceGetCount_v2+", &[address(&raw mut count)]) };
    if result == SUCCESS { Ok(count) } else { Err(result) }
}

/// Returns the handle of a device.
///
/// # Errors
/// Returns NVML's result code on failure.
pub fn by_index(index: u32) -> Result<u64, i32> {
    if index >= count()? {
        return Err(INVALID_ARGUMENT);
    }
    let device = handle(Kind::Gpu, index + 1);
    let bit = 1u64.checked_shl(index).ok_or(INVALID_ARGUMENT)?;
    while HANDLES.load(Ordering::Acquire) & bit == 0 {
        if ASKING.swap(true, Ordering::AcqRel) {
            std::thread::yield_now();
            continue;
        }
        // Another thread may have requested the handle meanwhile.
        let result = if HANDLES.load(Ordering::Acquire) & bit == 0 { ask(index, device) } else { SUCCESS };
        if result == SUCCESS {
            HANDLES.fetch_or(bit, Ordering::AcqRel);
        }
        ASKING.store(false, Ordering::Release);
        if result != SUCCESS {
            return Err(result);
        }
    }
    Ok(device)
}

/// Requests a handle for a device from the worker.
fn ask(index: u32, device: u64) -> i32 {
    let number = find("nvmlDeviceGetHandleByIndex_v2+").ok_or(Failure::Missing);
    let mut made = 0u64;
    let arguments = [u64::from(index), address(&raw mut made)];
    // SAFETY: the arguments are an integer and a pointer to a handle.
    code(number.and_then(|number| unsafe { worker()?.call(number, &arguments, device) }))
}

/// Returns the handles of all devices.
///
/// # Errors
/// Returns NVML's result code on failure.
pub fn all() -> Result<Vec<u64>, i32> {
    (0..count()?.min(MAX_DEVICES)).map(by_index).collect()
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PciInfo {
    /// PCI address with a four-digit domain.
    pub legacy: [c_char; 16],
    /// Domain, bus and device numbers.
    pub place: [u32; 3],
    /// PCI IDs of the device and its subsystem.
    pub identifiers: [u32; 2],
    /// PCI address with an eight-digit domain.
    pub address: [c_char; 32],
}

/// Returns the device's PCI address.
///
/// # Errors
/// Returns NVML's result code on failure.
pub fn pci(device: u64) -> Result<PciInfo, i32> {
    let mut info = PciInfo::default();
    // SAFETY: the second argument points to the structure that the function fills.
    let result = unsafe { forward_of_device("nvmlDeviceGetPciInfo_v3+", &[device, address(&raw mut info)]) };
    if result == SUCCESS { Ok(info) } else { Err(result) }
}

/// Returns the device's UUID as text.
///
/// # Errors
/// Returns NVML's result code on failure.
pub fn uuid(device: u64) -> Result<String, i32> {
    let mut text = [0u8; 96];
    let arguments = [device, address(text.as_mut_ptr()), text.len() as u64];
    // SAFETY: the second argument points to a buffer of the size in the third argument.
    match unsafe { forward_of_device("nvmlDeviceGetUUID+", &arguments) } {
        SUCCESS => Ok(text.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect()),
        result => Err(result),
    }
}

/// Converts a pointer to an argument.
fn address<T>(pointer: *mut T) -> u64 {
    pointer.expose_provenance() as u64
}
