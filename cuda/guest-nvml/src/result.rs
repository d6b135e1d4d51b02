//! NVML result codes, from its header.

use std::ffi::CStr;

use crate::Failure;

/// The call succeeded.
pub const SUCCESS: i32 = 0;
/// `nvmlInit` has not been called.
pub const UNINITIALIZED: i32 = 1;
/// An argument is invalid.
pub const INVALID_ARGUMENT: i32 = 2;
/// The function is not available.
pub const NOT_SUPPORTED: i32 = 3;
/// The object does not exist.
pub const NOT_FOUND: i32 = 6;
/// The program's buffer is too small.
pub const INSUFFICIENT_SIZE: i32 = 7;
/// No worker can be started.
pub const DRIVER_NOT_LOADED: i32 = 9;
/// The library lacks the function.
const FUNCTION_NOT_FOUND: i32 = 13;
/// The worker has exited.
const GPU_IS_LOST: i32 = 15;
/// The structure has an unsupported version.
pub const ARGUMENT_VERSION_MISMATCH: i32 = 25;

/// Converts the outcome of a call to a result code.
pub fn code(answer: Result<i32, Failure>) -> i32 {
    match answer {
        // Programs handle an unsupported function better than a missing one.
        Ok(FUNCTION_NOT_FOUND) | Err(Failure::Missing) => NOT_SUPPORTED,
        Ok(code) => code,
        Err(Failure::Arguments) => INVALID_ARGUMENT,
        Err(Failure::Lost) => GPU_IS_LOST,
    }
}

/// Returns the description of a result code.
pub fn text(code: i32) -> &'static CStr {
    match code {
        SUCCESS => c"Success",
        UNINITIALIZED => c"Uninitialized",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        8 => c"Insufficient External Power",
        DRIVER_NOT_LOADED => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        FUNCTION_NOT_FOUND => c"Function Not Found",
        14 => c"Corrupted infoROM",
        GPU_IS_LOST => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"GPU access blocked by the operating system",
        18 => c"RM has detected an NVML/RM version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        ARGUMENT_VERSION_MISMATCH => c"Argument version mismatch",
        _ => c"Unknown Error",
    }
}
