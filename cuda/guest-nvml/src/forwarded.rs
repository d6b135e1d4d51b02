//! NVML functions that are forwarded to the worker's library.
//!
//! UNSAFETY: exports functions that write through the program's pointers, like NVML's functions.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]

use crate::devices::{forward, forward_of_device};
use crate::result::{ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT, SUCCESS};

/// Defines functions that pass their arguments to the worker's function of the same name.
macro_rules! forwarded {
    ($way:ident: $($name:ident($($argument:ident),*);)*) => { $(
        /// Calls the NVML function of this name in the worker's library.
        ///
        /// # Safety
        /// The arguments must match NVML's header.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: u64),*) -> i32 {
            // SAFETY: guaranteed by the caller.
            unsafe { $way(concat!(stringify!($name), "+"), &[$($argument),*]) }
        }
    )* };
}

forwarded! { forward:
    nvmlSystemGetDriverVersion(text, bytes);
    nvmlSystemGetNVMLVersion(text, bytes);
    nvmlSystemGetCudaDriverVersion(version);
    nvmlSystemGetCudaDriverVersion_v2(version);
}

forwarded! { forward_of_device:
    nvmlDeviceGetName(device, text, bytes);
    nvmlDeviceGetUUID(device, text, bytes);
    nvmlDeviceGetSerial(device, text, bytes);
    nvmlDeviceGetVbiosVersion(device, text, bytes);
    nvmlDeviceGetPciInfo_v3(device, info);
    nvmlDeviceGetMinorNumber(device, number);
    nvmlDeviceGetBrand(device, brand);
    nvmlDeviceGetArchitecture(device, architecture);
    nvmlDeviceGetCudaComputeCapability(device, major, minor);
    nvmlDeviceGetNumGpuCores(device, count);
    nvmlDeviceGetMemoryBusWidth(device, width);
    nvmlDeviceGetMemoryInfo(device, memory);
    nvmlDeviceGetBAR1MemoryInfo(device, memory);
    nvmlDeviceGetUtilizationRates(device, rates);
    nvmlDeviceGetTemperature(device, sensor, degrees);
    nvmlDeviceGetFanSpeed(device, percent);
    nvmlDeviceGetPerformanceState(device, state);
    nvmlDeviceGetPowerUsage(device, milliwatts);
    nvmlDeviceGetPowerManagementLimit(device, milliwatts);
    nvmlDeviceGetEnforcedPowerLimit(device, milliwatts);
    nvmlDeviceGetClockInfo(device, kind, mhz);
    nvmlDeviceGetMaxClockInfo(device, kind, mhz);
    nvmlDeviceGetComputeMode(device, mode);
    nvmlDeviceGetPersistenceMode(device, mode);
    nvmlDeviceGetDisplayMode(device, mode);
    nvmlDeviceGetDisplayActive(device, active);
    nvmlDeviceGetEccMode(device, current, pending);
    nvmlDeviceGetCurrPcieLinkGeneration(device, generation);
    nvmlDeviceGetMaxPcieLinkGeneration(device, generation);
    nvmlDeviceGetCurrPcieLinkWidth(device, width);
    nvmlDeviceGetMaxPcieLinkWidth(device, width);
}

/// `nvmlMemory_v2_t`, with sizes in bytes.
#[repr(C)]
#[derive(Debug)]
pub struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// Version field of the structure: version 2, and the structure's size in bytes.
const MEMORY_V2: u32 = 2 << 24 | size_of::<MemoryV2>() as u32;

/// Returns the tenant's memory. Reports no reserved memory.
///
/// # Safety
/// The arguments must match NVML's header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: u64, to: *mut MemoryV2) -> i32 {
    // SAFETY: guaranteed by the caller.
    let Some(to) = (unsafe { to.as_mut() }) else { return INVALID_ARGUMENT };
    if to.version != MEMORY_V2 {
        return ARGUMENT_VERSION_MISMATCH;
    }
    let mut memory = [0u64; 3];
    let arguments = [device, memory.as_mut_ptr().expose_provenance() as u64];
    // SAFETY: the second argument points to three 64-bit words: the total, free and used bytes.
    let result = unsafe { forward_of_device("nvmlDeviceGetMemoryInfo+", &arguments) };
    if result == SUCCESS {
        let [total, free, used] = memory;
        *to = MemoryV2 { version: MEMORY_V2, total, reserved: 0, free, used };
    }
    result
}
