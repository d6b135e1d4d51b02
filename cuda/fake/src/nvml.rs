//! NVML's functions that tell of the card, in the same library: a link by the name `libnvidia-ml.so.1` is enough.
//!
//! Processes are those with a context; how much each has is not told, as on some systems. A file `nvml-fails` in the card's
//! folder has the question for them fail.
//!
//! UNSAFETY: reads and writes what the program's pointers name, as the real library does.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::api::UUID;
use crate::card;

const SUCCESS: c_int = 0;
const UNINITIALIZED: c_int = 1;
const INVALID_ARGUMENT: c_int = 2;
const NOT_FOUND: c_int = 6;
const INSUFFICIENT_SIZE: c_int = 7;
const UNKNOWN: c_int = 999;

/// The one device.
const DEVICE: usize = 0xd0;
/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;
/// `nvmlMemory_v2`: version 2, and 40 bytes.
const MEMORY_V2: u32 = 0x0200_0028;

/// The process that has initialised NVML: its children do so again.
static READY: AtomicU32 = AtomicU32::new(0);

fn is_ready() -> bool {
    READY.load(Ordering::SeqCst) == std::process::id()
}

#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
struct Process {
    pid: u32,
    used: u64,
    instance: u32,
    compute_instance: u32,
}

fn name() -> String {
    let hex: String = UUID.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}\0", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn checked(device: *mut c_void) -> c_int {
    match is_ready() {
        false => UNINITIALIZED,
        true if device as usize != DEVICE => INVALID_ARGUMENT,
        true => SUCCESS,
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_int {
    READY.store(std::process::id(), Ordering::SeqCst);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: u32) -> c_int {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> c_int {
    READY.store(0, Ordering::SeqCst);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(_: c_int) -> *const c_char {
    c"an error of the fake NVML".as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut u32) -> c_int {
    unsafe { *count = 1 };
    if is_ready() { SUCCESS } else { UNINITIALIZED }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, to: *mut *mut c_void) -> c_int {
    unsafe { *to = DEVICE as *mut c_void };
    if index == 0 { checked(DEVICE as *mut c_void) } else { INVALID_ARGUMENT }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut *mut c_void) -> c_int {
    unsafe { *to = DEVICE as *mut c_void };
    let known = unsafe { CStr::from_ptr(uuid) }.to_bytes_with_nul() == name().as_bytes();
    if known { checked(DEVICE as *mut c_void) } else { NOT_FOUND }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(device: *mut c_void, to: *mut c_char, bytes: u32) -> c_int {
    let name = name();
    match checked(device) {
        SUCCESS if (bytes as usize) < name.len() => INSUFFICIENT_SIZE,
        SUCCESS => {
            unsafe { std::ptr::copy_nonoverlapping(name.as_ptr().cast(), to, name.len()) };
            SUCCESS
        }
        error => error,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: *mut c_void, to: *mut Memory) -> c_int {
    let (total, free) = (card::get().total(), card::get().free());
    unsafe { *to = Memory { total, free, used: total - free } };
    checked(device)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: *mut c_void, to: *mut MemoryV2) -> c_int {
    let version = unsafe { (*to).version };
    if version != MEMORY_V2 {
        return INVALID_ARGUMENT;
    }
    let (total, free) = (card::get().total(), card::get().free());
    unsafe { *to = MemoryV2 { version, total, reserved: 0, free, used: total - free } };
    checked(device)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: *mut c_void,
    count: *mut u32,
    to: *mut Process,
) -> c_int {
    let error = checked(device);
    if error != SUCCESS {
        return error;
    }
    if card::get().folder().join("nvml-fails").exists() {
        // A test looks for it.
        let _ = std::fs::write(card::get().folder().join("nvml-failed"), "");
        return UNKNOWN;
    }
    let pids = card::get().processes();
    unsafe {
        let room = *count as usize;
        *count = pids.len() as u32;
        if room < pids.len() {
            return INSUFFICIENT_SIZE;
        }
        for (at, pid) in pids.into_iter().enumerate() {
            let all = u32::MAX;
            *to.add(at) = Process { pid, used: NOT_AVAILABLE, instance: all, compute_instance: all };
        }
    }
    SUCCESS
}
