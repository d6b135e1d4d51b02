//! NVML's functions for the card. They are in the same library as the driver's functions, so that a symbolic link named
//! `libnvidia-ml.so.1` suffices.
//!
//! Reports the processes that have a context and a process ID in the caller's namespace. Files in the first card's
//! folder change the results: if `nvml-fails` exists, process queries fail. If `nvml-without-bytes` exists, the memory
//! sizes of processes are unavailable, as on some real systems.
//!
//! UNSAFETY: reads and writes through the program's pointers, like the real library.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::card::{self, Card};

pub const SUCCESS: c_int = 0;
const UNINITIALIZED: c_int = 1;
pub const INVALID_ARGUMENT: c_int = 2;
const NOT_FOUND: c_int = 6;
pub const INSUFFICIENT_SIZE: c_int = 7;
const UNKNOWN: c_int = 999;

/// The first device's handle. The handles of the other devices follow.
const DEVICE: usize = 0xd0;
/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;
/// Version field of `nvmlMemory_v2_t`: version 2 and size 40.
const MEMORY_V2: u32 = 0x0200_0028;

/// ID of the process that has initialized NVML. Its children must initialize NVML again.
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

/// Returns an error if this process has not initialized NVML.
pub fn ready() -> c_int {
    if is_ready() { SUCCESS } else { UNINITIALIZED }
}

/// Returns the card of a device. NVML sees all cards, regardless of `CUDA_VISIBLE_DEVICES`.
pub fn card(device: *mut c_void) -> Result<&'static Card, c_int> {
    match ready() {
        SUCCESS => (device as usize).checked_sub(DEVICE).and_then(|at| card::all().get(at)).ok_or(INVALID_ARGUMENT),
        error => Err(error),
    }
}

unsafe fn give(to: *mut *mut c_void, found: Option<&Card>, missing: c_int) -> c_int {
    match (ready(), found) {
        (SUCCESS, Some(_)) if to.is_null() => INVALID_ARGUMENT,
        (SUCCESS, Some(card)) => {
            unsafe { *to = (DEVICE + card.number()) as *mut c_void };
            SUCCESS
        }
        (SUCCESS, None) => missing,
        (error, _) => error,
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
    unsafe { *count = card::all().len() as u32 };
    ready()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, to: *mut *mut c_void) -> c_int {
    unsafe { give(to, card::all().get(index as usize), INVALID_ARGUMENT) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut *mut c_void) -> c_int {
    let uuid = unsafe { CStr::from_ptr(uuid) }.to_string_lossy();
    unsafe { give(to, card::all().iter().find(|card| card.name() == uuid), NOT_FOUND) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, to: *mut *mut c_void) -> c_int {
    let address = unsafe { CStr::from_ptr(address) }.to_string_lossy().to_lowercase();
    unsafe { give(to, card::all().iter().find(|card| card.bus_id() == address), NOT_FOUND) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetIndex(device: *mut c_void, to: *mut u32) -> c_int {
    match card(device) {
        Ok(card) => {
            unsafe { *to = card.number() as u32 };
            SUCCESS
        }
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(device: *mut c_void, to: *mut c_char, bytes: u32) -> c_int {
    let name = match card(device) {
        Ok(card) => card.name() + "\0",
        Err(error) => return error,
    };
    if (bytes as usize) < name.len() {
        return INSUFFICIENT_SIZE;
    }
    unsafe { std::ptr::copy_nonoverlapping(name.as_ptr().cast(), to, name.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: *mut c_void, to: *mut Memory) -> c_int {
    match card(device).map(|card| (card.total(), card.free())) {
        Ok((total, free)) => {
            unsafe { *to = Memory { total, free, used: total - free } };
            SUCCESS
        }
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: *mut c_void, to: *mut MemoryV2) -> c_int {
    let version = unsafe { (*to).version };
    if version != MEMORY_V2 {
        return INVALID_ARGUMENT;
    }
    match card(device).map(|card| (card.total(), card.free())) {
        Ok((total, free)) => {
            unsafe { *to = MemoryV2 { version, total, reserved: 0, free, used: total - free } };
            SUCCESS
        }
        Err(error) => error,
    }
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
struct Utilization {
    pid: u32,
    timestamp: u64,
    sm: u32,
    memory: u32,
    encoder: u32,
    decoder: u32,
}

/// Returns one current sample. A process whose kernel occupies the card is reported with full utilization.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    device: *mut c_void,
    to: *mut Utilization,
    count: *mut u32,
    _since: u64,
) -> c_int {
    let occupants = match card(device) {
        Ok(card) => card.occupants(),
        Err(error) => return error,
    };
    let timestamp =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64);
    unsafe {
        let room = if to.is_null() { 0 } else { *count as usize };
        // As in NVIDIA's library, a first call without a buffer queries the number of samples.
        *count = 1 + occupants.len() as u32;
        if to.is_null() {
            return INSUFFICIENT_SIZE;
        }
        let told = room.min(occupants.len());
        *count = told as u32;
        for (at, pid) in occupants.into_iter().take(told).enumerate() {
            *to.add(at) = Utilization { pid, timestamp, sm: 100, memory: 0, encoder: 0, decoder: 0 };
        }
        if told == 0 { NOT_FOUND } else { SUCCESS }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: *mut c_void,
    count: *mut u32,
    to: *mut Process,
) -> c_int {
    let card = match card(device) {
        Ok(card) => card,
        Err(error) => return error,
    };
    if card::root().join("nvml-fails").exists() {
        // A test waits for this file.
        let _ = std::fs::write(card::root().join("nvml-failed"), "");
        return UNKNOWN;
    }
    let told = !card::root().join("nvml-without-bytes").exists();
    let processes = card.processes();
    unsafe {
        let room = *count as usize;
        *count = processes.len() as u32;
        if room < processes.len() {
            return INSUFFICIENT_SIZE;
        }
        for (at, (pid, bytes)) in processes.into_iter().enumerate() {
            let (all, used) = (u32::MAX, if told { bytes } else { NOT_AVAILABLE });
            *to.add(at) = Process { pid, used, instance: all, compute_instance: all };
        }
    }
    SUCCESS
}
