//! Functions of NVML that the guest answers, or completes.
//!
//! UNSAFETY: exports functions that read and write through the program's pointers, as NVML's do.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]

use std::ffi::{CStr, c_char};

use cuda_calls::{Kind, index_of};

use crate::Failure;
use crate::devices::{self, PciInfo, forward_of_device};
use crate::result::{
    DRIVER_NOT_LOADED, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, SUCCESS, UNINITIALIZED, code, text,
};

/// Most processes in a list.
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

/// The same of version 1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FirstProcess {
    pid: u32,
    used: u64,
}

/// Defines exported functions; all have the same promise.
macro_rules! exported {
    ($($(#[$about:meta])* fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => { $(
        $(#[$about])*
        ///
        /// # Safety
        /// The arguments are those of NVML's header.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result $body
    )* };
}

exported! {
    /// Starts NVML.
    fn nvmlInit() -> i32 { start() }
    /// Starts NVML.
    fn nvmlInit_v2() -> i32 { start() }
    /// Starts NVML. A guest without a card fails, whatever the flags say.
    fn nvmlInitWithFlags(_flags: u32) -> i32 { start() }
    /// Ends a start.
    fn nvmlShutdown() -> i32 { devices::end() }
    /// The text of a result.
    fn nvmlErrorString(result: i32) -> *const c_char { text(result).as_ptr() }

    /// Number of devices.
    fn nvmlDeviceGetCount(to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, devices::count()) }
    }
    /// Number of devices.
    fn nvmlDeviceGetCount_v2(to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, devices::count()) }
    }
    /// A device by its number.
    fn nvmlDeviceGetHandleByIndex(index: u32, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, devices::by_index(index)) }
    }
    /// A device by its number.
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, devices::by_index(index)) }
    }
    /// A device by its UUID.
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        let Some(wanted) = (unsafe { read(uuid) }) else { return INVALID_ARGUMENT };
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, search(|device| Ok(devices::uuid(device)? == wanted))) }
    }
    /// A device by its place on the bus.
    fn nvmlDeviceGetHandleByPciBusId(address: *const c_char, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { by_address(address, to) }
    }
    /// A device by its place on the bus.
    fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, to: *mut u64) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { by_address(address, to) }
    }
    /// The number of a device: the guest's.
    fn nvmlDeviceGetIndex(device: u64, to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, known(device)) }
    }

    /// MIG is off, because a guest has a share of a card and no instance.
    fn nvmlDeviceGetMigMode(device: u64, current: *mut u32, pending: *mut u32) -> i32 {
        let off = known(device).map(|_| 0);
        // SAFETY: guaranteed by the caller.
        unsafe { both(put(current, off), put(pending, off)) }
    }
    /// No device is a MIG instance.
    fn nvmlDeviceIsMigDeviceHandle(device: u64, to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, known(device).map(|_| 0)) }
    }
    /// No device has MIG instances.
    fn nvmlDeviceGetMaxMigDeviceCount(device: u64, to: *mut u32) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { put(to, known(device).map(|_| 0)) }
    }

    /// The tenant's programs on a device.
    fn nvmlDeviceGetComputeRunningProcesses(device: u64, count: *mut u32, to: *mut FirstProcess) -> i32 {
        let short = |process: &Process| FirstProcess { pid: process.pid, used: process.used };
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, processes(device).map(|all| all.iter().map(short).collect())) }
    }
    /// The tenant's programs on a device.
    fn nvmlDeviceGetComputeRunningProcesses_v2(device: u64, count: *mut u32, to: *mut Process) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, processes(device)) }
    }
    /// The tenant's programs on a device.
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: u64, count: *mut u32, to: *mut Process) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, processes(device)) }
    }
    /// Guests have no programs with graphics.
    fn nvmlDeviceGetGraphicsRunningProcesses(device: u64, count: *mut u32, to: *mut FirstProcess) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, known(device).map(|_| Vec::new())) }
    }
    /// Guests have no programs with graphics.
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: u64, count: *mut u32, to: *mut Process) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, known(device).map(|_| Vec::new())) }
    }
    /// Guests have no programs with graphics.
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: u64, count: *mut u32, to: *mut Process) -> i32 {
        // SAFETY: guaranteed by the caller.
        unsafe { list(count, to, known(device).map(|_| Vec::new())) }
    }
    /// The command of a process of this guest.
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

/// The number of a device, if the handle is one.
fn known(device: u64) -> Result<u32, i32> {
    match index_of(Kind::Gpu, device) {
        _ if !devices::is_ready() => Err(UNINITIALIZED),
        Some(number) => Ok(number - 1),
        None => Err(INVALID_ARGUMENT),
    }
}

/// The first device for which `matches` returns true.
fn search(matches: impl Fn(u64) -> Result<bool, i32>) -> Result<u64, i32> {
    for device in devices::all()? {
        if matches(device)? {
            return Ok(device);
        }
    }
    Err(NOT_FOUND)
}

/// Writes the device at an address such as `0000:41:00.0`; the domain may have eight digits, or be missing.
///
/// # Safety
/// As for the functions that use it.
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

/// Domain, bus and device of an address.
fn place(text: &str) -> Option<[u32; 3]> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let (rest, last) = text.rsplit_once(':')?;
    let device = last.split_once('.').map_or(last, |(device, _)| device);
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    Some([number(domain)?, number(bus)?, number(device)?])
}

/// The tenant's programs on a device, as the worker's library lists them. The worker has replaced their process numbers
/// by those in the guest.
fn processes(device: u64) -> Result<Vec<Process>, i32> {
    let mut count = MAX_PROCESSES as u32;
    let mut all = [Process::default(); MAX_PROCESSES];
    let address = all.as_mut_ptr().expose_provenance() as u64;
    let arguments = [device, (&raw mut count).expose_provenance() as u64, address];
    // SAFETY: the arguments are pointers to a number and to room for as many entries as the message has.
    match unsafe { forward_of_device("nvmlDeviceGetComputeRunningProcesses_v3+", &arguments) } {
        SUCCESS => Ok(all.into_iter().take(count as usize).collect()),
        result => Err(result),
    }
}

/// Writes a list to the program's room, as many entries as `count` says before; afterwards it is their number.
///
/// # Safety
/// As for the functions that use it.
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
    // SAFETY: the program has room for as many entries, and an empty list writes nothing.
    unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), to, all.len()) };
    SUCCESS
}

/// Reads the program's text.
///
/// # Safety
/// It is null, or ends with a zero byte.
unsafe fn read(text: *const c_char) -> Option<String> {
    // SAFETY: guaranteed by the caller.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Writes text with a zero byte to the program's room.
///
/// # Safety
/// The room is null or has `bytes` bytes.
unsafe fn write(text: &[u8], to: *mut c_char, bytes: u32) -> i32 {
    if to.is_null() {
        return INVALID_ARGUMENT;
    }
    if text.len() >= bytes as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the room is larger than the text.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    SUCCESS
}

/// Writes a result, or returns its error.
///
/// # Safety
/// `to` is null or can be written.
unsafe fn put<T>(to: *mut T, value: Result<T, i32>) -> i32 {
    match value {
        _ if to.is_null() => INVALID_ARGUMENT,
        Ok(value) => {
            // SAFETY: `to` is not null, and the caller can write it.
            unsafe { to.write(value) };
            SUCCESS
        }
        Err(error) => error,
    }
}

/// The first error of two.
fn both(first: i32, second: i32) -> i32 {
    if first == SUCCESS { second } else { first }
}
