//! Tests NVML from a program's perspective, with a worker in the same process.

use std::ffi::{CStr, CString, c_char};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use cuda_calls::{CALLS, Kind, handle};

use crate::answers::*;
use crate::devices::PciInfo;
use crate::forwarded::*;
use crate::{Failure, Worker, install, result};

/// A worker with two devices.
struct Two;

/// Set to simulate a worker that has exited.
static IS_LOST: AtomicBool = AtomicBool::new(false);
/// Handles created so far.
static MADE: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Writes a result to the program's buffer.
unsafe fn give<T>(to: u64, value: T) {
    // SAFETY: the tests pass pointers to local variables.
    unsafe { (to as *mut T).write(value) };
}

/// Writes a string to the program's buffer.
unsafe fn give_text(arguments: &[u64], text: &str) {
    let bytes = [text.as_bytes(), &[0]].concat();
    assert!(arguments[1] >= bytes.len() as u64);
    // SAFETY: the buffer is large enough.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), arguments[0] as *mut u8, bytes.len()) };
}

impl Worker for Two {
    fn start(&self) -> Result<(), Failure> {
        if IS_LOST.load(Ordering::SeqCst) { Err(Failure::Lost) } else { Ok(()) }
    }

    unsafe fn call(&self, number: usize, arguments: &[u64], new: u64) -> Result<i32, Failure> {
        if IS_LOST.load(Ordering::SeqCst) {
            return Err(Failure::Lost);
        }
        let device = arguments.first().copied().unwrap_or_default();
        let index = u32::from(device == handle(Kind::Gpu, 2));
        // SAFETY: the arguments match the described function.
        unsafe {
            match CALLS[number].name {
                "nvmlInit_v2+" => {}
                "nvmlDeviceGetCount_v2+" => give(arguments[0], 2u32),
                "nvmlDeviceGetHandleByIndex_v2+" => {
                    assert!(arguments[0] < 2);
                    MADE.lock().expect("no panic").push(new);
                    give(arguments[1], new);
                }
                "nvmlDeviceGetUUID+" => give_text(&arguments[1..], &format!("GPU-{index}")),
                "nvmlDeviceGetName+" => give_text(&arguments[1..], "a card"),
                "nvmlDeviceGetPciInfo_v3+" => {
                    give(arguments[1], PciInfo { place: [0, 0x41 + index, 0], ..PciInfo::default() });
                }
                "nvmlDeviceGetMemoryInfo+" => give(arguments[1], [100u64, 70, 30]),
                "nvmlDeviceGetComputeRunningProcesses_v3+" => {
                    give(arguments[1], 2u32);
                    give(arguments[2], [[7u64, 30, 0], [8, 40, 0]]);
                }
                "nvmlDeviceGetPowerUsage+" => return Ok(13),
                name => panic!("{name}"),
            }
        }
        Ok(0)
    }
}

/// Serializes the tests, because their state is per process. Each test starts after `nvmlInit`.
fn started() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    static FIRST: Once = Once::new();
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    FIRST.call_once(|| install(&Two));
    IS_LOST.store(false, Ordering::SeqCst);
    // SAFETY: no arguments.
    while unsafe { nvmlShutdown() } == 0 {}
    // SAFETY: as above.
    assert_eq!(unsafe { nvmlInit_v2() }, 0);
    guard
}

fn device(index: u32) -> u64 {
    let mut device = 0;
    // SAFETY: the pointer refers to a local variable.
    assert_eq!(unsafe { nvmlDeviceGetHandleByIndex_v2(index, &raw mut device) }, 0);
    device
}

fn by(function: unsafe extern "C" fn(*const c_char, *mut u64) -> i32, text: &str) -> Result<u64, i32> {
    let text = CString::new(text).expect("no NUL");
    let mut device = 0;
    // SAFETY: the pointers refer to local variables.
    match unsafe { function(text.as_ptr(), &raw mut device) } {
        0 => Ok(device),
        error => Err(error),
    }
}

#[test]
fn devices_are_found_by_index_uuid_and_address() {
    let _guard = started();
    let (first, second) = (device(0), device(1));
    assert_eq!((first, second), (handle(Kind::Gpu, 1), handle(Kind::Gpu, 2)));
    assert_eq!(device(0), first, "the second search does not create a handle");
    assert_eq!(MADE.lock().expect("no panic").len(), 2);
    assert_eq!(by(nvmlDeviceGetHandleByUUID, "GPU-1"), Ok(second));
    assert_eq!(by(nvmlDeviceGetHandleByUUID, "GPU-2"), Err(result::NOT_FOUND));
    for address in ["0000:42:00.0", "00000000:42:00.0", "42:00.0", "42:0"] {
        assert_eq!(by(nvmlDeviceGetHandleByPciBusId_v2, address), Ok(second), "{address}");
    }
    assert_eq!(by(nvmlDeviceGetHandleByPciBusId_v2, "0000:43:00.0"), Err(result::NOT_FOUND));
    assert_eq!(by(nvmlDeviceGetHandleByPciBusId_v2, "nowhere"), Err(result::INVALID_ARGUMENT));
    let mut number = 7;
    // SAFETY: the pointer refers to a local variable.
    unsafe {
        assert_eq!(nvmlDeviceGetHandleByIndex_v2(2, &raw mut number as *mut u64), result::INVALID_ARGUMENT);
        assert_eq!(nvmlDeviceGetIndex(second, (&raw mut number).cast()), 0);
        assert_eq!(nvmlDeviceGetCount_v2(null_mut()), result::INVALID_ARGUMENT);
    }
    assert_eq!(number as u32, 1);
}

#[test]
fn memory_in_version_2_is_the_workers_answer() {
    let _guard = started();
    let device = device(0);
    let mut memory = [u64::from(2u32 << 24 | 40), 0, 0, 0, 0];
    // SAFETY: the structure has the size in its version field.
    assert_eq!(unsafe { nvmlDeviceGetMemoryInfo_v2(device, memory.as_mut_ptr().cast()) }, 0);
    assert_eq!(memory[1..], [100, 0, 70, 30]);
    memory[0] = 0;
    // SAFETY: as above.
    let wrong = unsafe { nvmlDeviceGetMemoryInfo_v2(device, memory.as_mut_ptr().cast()) };
    assert_eq!(wrong, result::ARGUMENT_VERSION_MISMATCH);
    // SAFETY: the function does not dereference the pointer.
    let none = unsafe { nvmlDeviceGetName(0x1234, memory.as_mut_ptr() as u64, 40) };
    assert_eq!(none, result::INVALID_ARGUMENT, "not a handle");
}

#[test]
fn lists_of_processes_report_their_length() {
    let _guard = started();
    let device = device(0);
    let (mut count, mut room) = (1, [[0u64; 3]; 3]);
    // SAFETY: the buffer has space for `count` entries.
    unsafe {
        let list = room.as_mut_ptr().cast();
        let result = nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, list);
        assert_eq!((result, count), (result::INSUFFICIENT_SIZE, 2));
        assert_eq!(room[0], [0; 3]);
        count = 3;
        assert_eq!(nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, room.as_mut_ptr().cast()), 0);
        assert_eq!((count, room), (2, [[7, 30, 0], [8, 40, 0], [0; 3]]));
        room = [[0; 3]; 3];
        assert_eq!(nvmlDeviceGetComputeRunningProcesses(device, &raw mut count, room.as_mut_ptr().cast()), 0);
        // Only the lower 32 bits of the word contain the process ID.
        assert_eq!((count, room[0][0] as u32, room[0][1]), (2, 7, 30));
        assert_eq!((room[0][2] as u32, room[1][0]), (8, 40));
        assert_eq!(nvmlDeviceGetGraphicsRunningProcesses_v3(device, &raw mut count, null_mut()), 0);
        assert_eq!(count, 0);
    }
}

#[test]
fn calls_outside_a_start_and_unknown_functions_fail() {
    let _guard = started();
    let device = device(1);
    let mut value = 0u32;
    let at = (&raw mut value) as u64;
    // SAFETY: the pointers refer to local variables.
    unsafe {
        assert_eq!(nvmlDeviceGetPowerUsage(device, at), result::NOT_SUPPORTED, "the worker's NVML lacks it");
        assert_eq!(crate::refused::nvmlDeviceGetGpuFabricInfo(), result::NOT_SUPPORTED);
        assert_eq!(nvmlInit_v2(), 0);
        assert_eq!(nvmlShutdown(), 0);
        assert_eq!(nvmlDeviceGetCount_v2(&raw mut value), 0, "the first initialization still applies");
        assert_eq!(nvmlShutdown(), 0);
        assert_eq!(nvmlDeviceGetCount_v2(&raw mut value), result::UNINITIALIZED);
        assert_eq!(nvmlDeviceGetPowerUsage(device, at), result::UNINITIALIZED);
        assert_eq!(crate::refused::nvmlDeviceGetGpuFabricInfo(), result::UNINITIALIZED);
        assert_eq!(nvmlShutdown(), result::UNINITIALIZED);
    }
}

#[test]
fn lost_worker_is_reported() {
    let _guard = started();
    let mut count = 0;
    IS_LOST.store(true, Ordering::SeqCst);
    // SAFETY: the pointer refers to a local variable, and the text is static.
    unsafe {
        assert_eq!(nvmlDeviceGetCount_v2(&raw mut count), 15);
        assert_eq!(nvmlShutdown(), 0);
        assert_eq!(nvmlInit_v2(), result::DRIVER_NOT_LOADED);
        assert_eq!(CStr::from_ptr(nvmlErrorString(result::DRIVER_NOT_LOADED)), c"Driver Not Loaded");
    }
}

#[test]
fn own_process_has_a_name() {
    let _guard = started();
    let mut text = [0; 4096];
    // SAFETY: the pointers refer to local variables of this size.
    unsafe {
        assert_eq!(nvmlSystemGetProcessName(std::process::id(), text.as_mut_ptr(), 4096), 0);
        let name = CStr::from_ptr(text.as_ptr()).to_string_lossy();
        assert!(name.contains("guest_nvml"), "{name}");
        assert_eq!(nvmlSystemGetProcessName(std::process::id(), text.as_mut_ptr(), 3), result::INSUFFICIENT_SIZE);
        assert_eq!(nvmlSystemGetProcessName(u32::MAX, text.as_mut_ptr(), 4096), result::NOT_FOUND);
    }
}
