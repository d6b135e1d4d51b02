//! NVML, as a tool has it.
//!
//! UNSAFETY: calls functions of a library by the signatures that NVML's header gives them.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, c_int, c_void};

use crate::Failed;

/// What both versions of the question answer about the first card's memory: free and all bytes.
pub fn memory() -> Result<[(u64, u64); 2], Failed> {
    // SAFETY: the library is NVML or stands for it; it is never closed.
    let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(Failed { call: "dlopen", code: 12 });
    }
    let function = |name: &CStr| {
        // SAFETY: the handle is valid and the name ends with a zero byte.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        if found.is_null() { Err(Failed { call: "dlsym", code: 13 }) } else { Ok(found) }
    };
    let (init, by_index) = (function(c"nvmlInit_v2")?, function(c"nvmlDeviceGetHandleByIndex_v2")?);
    let (info, info_v2) = (function(c"nvmlDeviceGetMemoryInfo")?, function(c"nvmlDeviceGetMemoryInfo_v2")?);
    let mut device: *mut c_void = std::ptr::null_mut();
    // All, free, used.
    let mut first = [0u64; 3];
    // The version with the length, all, reserved, free, used.
    let mut second = [0x0200_0028u64, 0, 0, 0, 0];
    let check = |call, code: c_int| if code == 0 { Ok(()) } else { Err(Failed { call, code }) };
    // SAFETY: the header declares the symbols with these arguments; all pointers are to locals of the structures' lengths.
    unsafe {
        let init: unsafe extern "C" fn() -> c_int = std::mem::transmute(init);
        check("nvmlInit_v2", init())?;
        let by_index: unsafe extern "C" fn(u32, *mut *mut c_void) -> c_int = std::mem::transmute(by_index);
        check("nvmlDeviceGetHandleByIndex_v2", by_index(0, &raw mut device))?;
        let info: unsafe extern "C" fn(*mut c_void, *mut u64) -> c_int = std::mem::transmute(info);
        check("nvmlDeviceGetMemoryInfo", info(device, first.as_mut_ptr()))?;
        let info_v2: unsafe extern "C" fn(*mut c_void, *mut u64) -> c_int = std::mem::transmute(info_v2);
        check("nvmlDeviceGetMemoryInfo_v2", info_v2(device, second.as_mut_ptr()))?;
    }
    let [all, free, used] = first;
    let [_, all_v2, reserved, free_v2, used_v2] = second;
    if free + used != all || reserved + free_v2 + used_v2 != all_v2 {
        return Err(Failed { call: "the sum of free and used bytes", code: 999 });
    }
    Ok([(free, all), (free_v2, all_v2)])
}
