//! NVML as tools call it.
//!
//! UNSAFETY: calls library functions with the signatures from NVML's header.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, c_int, c_void};

use crate::Failed;

type Device = *mut c_void;

fn check(call: &'static str, code: c_int) -> Result<(), Failed> {
    if code == 0 { Ok(()) } else { Err(Failed { call, code }) }
}

/// The library and its first card.
struct Nvml {
    library: *mut c_void,
    device: Device,
}

impl Nvml {
    fn load() -> Result<Self, Failed> {
        // SAFETY: the library is NVML or this project's replacement, and is never closed.
        let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(Failed { call: "dlopen", code: 12 });
        }
        let nvml = Self { library, device: std::ptr::null_mut() };
        let init = nvml.function(c"nvmlInit_v2")?;
        // SAFETY: NVML's header declares the symbol without arguments.
        check("nvmlInit_v2", unsafe {
            let init: unsafe extern "C" fn() -> c_int = std::mem::transmute(init);
            init()
        })?;
        Ok(nvml)
    }

    fn open() -> Result<Self, Failed> {
        let mut nvml = Self::load()?;
        let by_index = nvml.function(c"nvmlDeviceGetHandleByIndex_v2")?;
        // SAFETY: NVML's header declares the symbol with these arguments, and the pointer is valid.
        unsafe {
            let by_index: unsafe extern "C" fn(u32, *mut Device) -> c_int = std::mem::transmute(by_index);
            check("nvmlDeviceGetHandleByIndex_v2", by_index(0, &raw mut nvml.device))?;
        }
        Ok(nvml)
    }

    fn function(&self, name: &CStr) -> Result<*mut c_void, Failed> {
        // SAFETY: the handle is valid, and the name is NUL-terminated.
        let found = unsafe { libc::dlsym(self.library, name.as_ptr()) };
        if found.is_null() { Err(Failed { call: "dlsym", code: 13 }) } else { Ok(found) }
    }
}

fn text(function: *mut c_void, device: Device) -> Option<String> {
    let mut text = [0u8; 96];
    // SAFETY: NVML's header declares the symbol with these arguments, and the buffer has the given length.
    let code = unsafe {
        let function: unsafe extern "C" fn(Device, *mut u8, u32) -> c_int = std::mem::transmute(function);
        function(device, text.as_mut_ptr(), text.len() as u32)
    };
    let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?.to_owned();
    (code == 0).then_some(text)
}

/// UUIDs of cards, each with its NVML index.
pub type Shown = Vec<(String, u32)>;

/// Returns the UUID and the index of each card that NVML lists, and the results of looking up each of `addresses`,
/// which are UUIDs or PCI addresses.
pub fn cards(addresses: &[String]) -> Result<(Shown, Vec<c_int>), Failed> {
    let nvml = Nvml::load()?;
    let (count, by_index) =
        (nvml.function(c"nvmlDeviceGetCount_v2")?, nvml.function(c"nvmlDeviceGetHandleByIndex_v2")?);
    let (uuid, index) = (nvml.function(c"nvmlDeviceGetUUID")?, nvml.function(c"nvmlDeviceGetIndex")?);
    let (by_uuid, by_address) =
        (nvml.function(c"nvmlDeviceGetHandleByUUID")?, nvml.function(c"nvmlDeviceGetHandleByPciBusId_v2")?);
    let mut device = std::ptr::null_mut();
    // SAFETY: NVML's header declares the symbols with these arguments, and all pointers refer to local variables.
    unsafe {
        let count: unsafe extern "C" fn(*mut u32) -> c_int = std::mem::transmute(count);
        let by_index: unsafe extern "C" fn(u32, *mut Device) -> c_int = std::mem::transmute(by_index);
        let index: unsafe extern "C" fn(Device, *mut u32) -> c_int = std::mem::transmute(index);
        let mut number = 0;
        check("nvmlDeviceGetCount_v2", count(&raw mut number))?;
        let mut found = Vec::new();
        for at in 0..number {
            check("nvmlDeviceGetHandleByIndex_v2", by_index(at, &raw mut device))?;
            let mut own = u32::MAX;
            check("nvmlDeviceGetIndex", index(device, &raw mut own))?;
            found.push((text(uuid, device).unwrap_or_default(), own));
        }
        if by_index(number, &raw mut device) == 0 {
            found.push(("beyond".to_owned(), number));
        }
        let look = |address: &String| {
            let function = if address.starts_with("GPU-") { by_uuid } else { by_address };
            let function: unsafe extern "C" fn(*const std::ffi::c_char, *mut Device) -> c_int =
                std::mem::transmute(function);
            let mut device = std::ptr::null_mut();
            let address = std::ffi::CString::new(address.as_str()).unwrap_or_default();
            function(address.as_ptr(), &raw mut device)
        };
        Ok((found, addresses.iter().map(look).collect()))
    }
}

/// Returns the IDs of the processes that use the first card, in ascending order.
pub fn processes() -> Result<Vec<u32>, Failed> {
    let nvml = Nvml::open()?;
    let function = nvml.function(c"nvmlDeviceGetComputeRunningProcesses_v3")?;
    // An entry has 24 bytes, and begins with the process ID.
    let mut list = [[0u32; 6]; 64];
    let mut count = list.len() as u32;
    // SAFETY: NVML's header declares the symbol with these arguments, and the buffer has space for the given number of
    // entries.
    let code = unsafe {
        let function: unsafe extern "C" fn(Device, *mut u32, *mut [u32; 6]) -> c_int = std::mem::transmute(function);
        function(nvml.device, &raw mut count, list.as_mut_ptr())
    };
    check("nvmlDeviceGetComputeRunningProcesses_v3", code)?;
    let mut pids: Vec<u32> = list.iter().take(count as usize).map(|entry| entry[0]).collect();
    pids.sort_unstable();
    Ok(pids)
}

/// Queries the first card's memory with both versions of the call. Returns the free and total bytes from each.
pub fn memory() -> Result<[(u64, u64); 2], Failed> {
    let nvml = Nvml::open()?;
    let (info, info_v2) = (nvml.function(c"nvmlDeviceGetMemoryInfo")?, nvml.function(c"nvmlDeviceGetMemoryInfo_v2")?);
    // Total, free and used bytes.
    let mut first = [0u64; 3];
    // Version and length, then total, reserved, free and used bytes.
    let mut second = [0x0200_0028u64, 0, 0, 0, 0];
    // SAFETY: NVML's header declares the symbols with these arguments, and all pointers refer to local variables of the
    // structures' sizes.
    unsafe {
        let info: unsafe extern "C" fn(Device, *mut u64) -> c_int = std::mem::transmute(info);
        check("nvmlDeviceGetMemoryInfo", info(nvml.device, first.as_mut_ptr()))?;
        let info_v2: unsafe extern "C" fn(Device, *mut u64) -> c_int = std::mem::transmute(info_v2);
        check("nvmlDeviceGetMemoryInfo_v2", info_v2(nvml.device, second.as_mut_ptr()))?;
    }
    let [all, free, used] = first;
    let [_, all_v2, reserved, free_v2, used_v2] = second;
    if free + used != all || reserved + free_v2 + used_v2 != all_v2 {
        return Err(Failed { call: "the sum of free and used bytes", code: 999 });
    }
    Ok([(free, all), (free_v2, all_v2)])
}
