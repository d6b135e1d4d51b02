//! NVML functions that the guest implements or completes itself.
//!
//! UNSAFETY: exports functions that read and write through the program's pointers, like NVML's functions.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]

use std::ffi::{CStr, c_char};

use cuda_calls::{Kind, index_of};

use crate::Failure;
use crate::devices::{self, PciInfo, forward_of_device};
use crate::result::{
    DRIVER_NOT_LOADED, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, SUCCESS, UNINITIALIZED, code, text,
};

/// Maximum number of processes in a list.
const MAX_PROCESSES: usize = 64;

/// `nvmlProcessInfo_t` of versions 2 and 3.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Process {
    pid: u32,
    used: u64,
    instance: u32,
    compute_instance: u32,
}

/// `nvmlProcessInfo_t` of version 1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FirstProcess {
    pid: u32,
    used: u64,
}

/// Defines exported functions with the same safety requirement.
macro_rules! exported {
    ($($(#[$about:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => { $(
        $(#[$about])*
        ///
        /// # Safety
        /// The arguments must match NVML's header.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result $body
    )* };
}

exported! {
    /// Initializes NVML.
    fn nvmlInit() -> i32 { start() }
    /// Initializes NVML.
    fn nvmlInit_v2() -> i32 { start() }
    /// Initializes NVML. Fails in a guest without a card, regardless of the flags.
    fn nvmlInitWithFlags(_flags: u32) -> i32 { start() }
    /// Reverts one initialization of NVML.
    fn nvmlShutdown() -> i32 { devices::end() }
    /// Returns the description of a result code.
    fn nvmlErrorString(result: i32) -> *const c_char { text(result).as_ptr() }

    /// Returns the number of devices.
    fn nvmlDeviceGetCount(to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, devices::count()) }
    }
    /// Returns the number of devices.
    fn nvmlDeviceGetCount_v2(to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, devices::count()) }
    }
    /// Returns a device by index.
    fn nvmlDeviceGetHandleByIndex(index: u32, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, devices::by_index(index)) }
    }
    /// Returns a device by index.
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, devices::by_index(index)) }
    }
    /// Returns a device by UUID.
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        let Some(wanted) = (unsafe { read(uuid) }) else { return INVALID_ARGUMENT };
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, search(|device| Ok(devices::uuid(device)? == wanted))) }
    }
    /// Returns a device by PCI bus ID.
    fn nvmlDeviceGetHandleByPciBusId(address: *const c_char, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { by_address(address, to) }
    }
    /// Returns a device by PCI bus ID.
    fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { by_address(address, to) }
    }
    /// Returns a device's index in the guest.
    fn nvmlDeviceGetIndex(device: u64, to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, known(device)) }
    }

    /// Reports that MIG is disabled, because guests have a share of a card instead of a MIG instance.
    fn nvmlDeviceGetMigMode(device: u64, current: *mut u32, pending: *mut u32) -> i32 {
        let off = known(device).map(|_| 0);
        // SAFETY: guaranteed by the caller.
        unsafe { both(put(current, off), put(pending, off)) }
    }
    /// Reports that the device is not a MIG instance.
    fn nvmlDeviceIsMigDeviceHandle(device: u64, to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, known(device).map(|_| 0)) }
    }
    /// Reports that the device has no MIG instances.
    fn nvmlDeviceGetMaxMigDeviceCount(device: u64, to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, known(device).map(|_| 0)) }
    }

    /// Returns the tenant's processes on a device.
    fn nvmlDeviceGetComputeRunningProcesses(device: u64, count: *mut u32, to: *mut FirstProcess) -> i32 {
        let short = |process: &Process| FirstProcess { pid: process.pid, used: process.used };
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, processes(device).map(|all| all.iter().map(short).collect())) }
    }
    /// Returns the tenant's processes on a device.
    fn nvmlDeviceGetComputeRunningProcesses_v2(device: u64, count: *mut u32, to: *mut Process) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, processes(device)) }
    }
    /// Returns the tenant's processes on a device.
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: u64, count: *mut u32, to: *mut Process) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, processes(device)) }
    }
    /// Returns an empty list, because guests have no graphics programs.
    fn nvmlDeviceGetGraphicsRunningProcesses(device: u64, count: *mut u32, to: *mut FirstProcess) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, known(device).map(|_| Vec::new())) }
    }
    /// Returns an empty list, because guests have no graphics programs.
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: u64, count: *mut u32, to: *mut Process) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, known(device).map(|_| Vec::new())) }
    }
    /// Returns an empty list, because guests have no graphics programs.
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: u64, count: *mut u32, to: *mut Process) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, known(device).map(|_| Vec::new())) }
    }
    /// Returns the command name of a process in this guest.
    fn nvmlSystemGetProcessName(pid: u32, to: *mut c_char, bytes: u32) -> i32 {
        if !devices::is_ready() {
            return UNINITIALIZED;
        }
        let Ok(command) = std::fs::read(format!("/proc/{pid}/cmdline")) else { return NOT_FOUND };
        let name: Vec<u8> = command.into_iter().take_while(|byte| *byte != 0).collect();
        // SAFETY: guaranteed by the caller.
        unsafe { write(&name, to, bytes) }
    }
}

fn start() -> i32 {
    match devices::start() {
        Err(Failure::Lost) => DRIVER_NOT_LOADED,
        other => code(other),
    }
}

/// Returns the index of a device, or an error if the handle is invalid.
fn known(device: u64) -> Result<u32, i32> {
    match index_of(Kind::Gpu, device) {
        _ if !devices::is_ready() => Err(UNINITIALIZED),
        Some(number) => Ok(number - 1),
        None => Err(INVALID_ARGUMENT),
    }
}

/// Returns the first device accepted by `matches`.
fn search(matches: impl Fn(u64) -> Result<bool, i32>) -> Result<u64, i32> {
    for device in devices::all()? {
        if matches(device)? {
            return Ok(device);
        }
    }
    Err(NOT_FOUND)
}

/// Stores the handle of the device at a PCI address such as `0000:41:00.0`. The domain may have eight digits, or be
/// absent.
///
/// # Safety
/// The arguments must match NVML's header.
unsafe fn by_address(text: *const c_char, to: *mut u64) -> i32 {
    // SAFETY: guaranteed by the caller.
    let Some(text) = (unsafe { read(text) }) else { return INVALID_ARGUMENT };
    let Some(wanted) = place(&text) else { return INVALID_ARGUMENT };
    let found = search(|device| {
        let PciInfo { place, .. } = devices::pci(device)?;
        Ok(place == wanted)
    });
    // SAFETY: guaranteed by the caller.
    unsafe { put(to, found) }
}

/// Parses the domain, bus and device numbers of an address.
fn place(text: &str) -> Option<[u32; 3]> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let (rest, last) = text.rsplit_once(':')?;
    let device = last.split_once('.').map_or(last, |(device, _)| device);
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    Some([number(domain)?, number(bus)?, number(device)?])
}

/// Returns the tenant's processes on a device, as listed by the worker's library. The worker has translated their
/// process IDs to guest process IDs.
fn processes(device: u64) -> Result<Vec<Process>, i32> {
    let mut count = MAX_PROCESSES as u32;
    let mut all = [Process::default(); MAX_PROCESSES];
    let address = all.as_mut_ptr().expose_provenance() as u64;
    let arguments = [device, (&raw mut count).expose_provenance() as u64, address];
    // SAFETY: the arguments point to an integer, and to a buffer with space for the maximum number of entries.
    match unsafe { forward_of_device("nvmlDeviceGetComputeRunningProcesses_v3+", &arguments) } {
        SUCCESS => Ok(all.into_iter().take(count as usize).collect()),
        result => Err(result),
    }
}

/// Writes a list to the program's buffer. On entry, `count` is the buffer's capacity in entries; on return, it is the
/// number of entries.
///
/// # Safety
/// The arguments must match NVML's header.
unsafe fn list<T>(count: *mut u32, to: *mut T, all: Result<Vec<T>, i32>) -> i32 {
    // SAFETY: guaranteed by the caller.
    let Some(count) = (unsafe { count.as_mut() }) else { return INVALID_ARGUMENT };
    let all = match all {
        Ok(all) => all,
        Err(error) => return error,
    };
    let room = *count as usize;
    *count = all.len() as u32;
    if room < all.len() {
        return INSUFFICIENT_SIZE;
    }
    if to.is_null() && !all.is_empty() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the program's buffer has space for all entries, and copying an empty list does not write any entry.
    unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), to, all.len()) };
    SUCCESS
}

/// Reads a string from the program's memory.
///
/// # Safety
/// The pointer must be null, or point to a NUL-terminated string.
unsafe fn read(text: *const c_char) -> Option<String> {
    // SAFETY: guaranteed by the caller.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Writes a NUL-terminated string to the program's buffer.
///
/// # Safety
/// The buffer must be null, or have a size of `bytes` bytes.
unsafe fn write(text: &[u8], to: *mut c_char, bytes: u32) -> i32 {
    if to.is_null() {
        return INVALID_ARGUMENT;
    }
    if text.len() >= bytes as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the buffer has space for the text and a terminating NUL.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    SUCCESS
}

/// Stores the value and returns success, or returns the error in `value`.
///
/// # Safety
/// `to` must be null or writable.
unsafe fn put<T>(to: *mut T, value: Result<T, i32>) -> i32 {
    match value {
        _ if to.is_null() => INVALID_ARGUMENT,
        Ok(value) => {
            // SAFETY: `to` is not null, so the caller guarantees that it is writable.
            unsafe { to.write(value) };
            SUCCESS
        }
        Err(error) => error,
    }
}

/// Returns the first of two results that is an error, or success.
fn both(first: i32, second: i32) -> i32 {
    if first == SUCCESS { second } else { first }
}
