//! Results of the driver API.

use std::ffi::{CStr, c_char, c_int};

use gdev::Error;

/// Result code of a driver API function (`CUresult`).
pub type Status = c_int;

/// Result codes that this library returns, with their values in `cuda.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    InvalidValue = 1,
    OutOfMemory = 2,
    NotInitialized = 3,
    NoDevice = 100,
    InvalidDevice = 101,
    InvalidImage = 200,
    InvalidContext = 201,
    NoBinaryForGpu = 209,
    FileNotFound = 301,
    InvalidHandle = 400,
    NotFound = 500,
    NotReady = 600,
    LaunchFailed = 719,
    NotSupported = 801,
    Unknown = 999,
}

impl Code {
    const ALL: [Self; 15] = [
        Self::InvalidValue,
        Self::OutOfMemory,
        Self::NotInitialized,
        Self::NoDevice,
        Self::InvalidDevice,
        Self::InvalidImage,
        Self::InvalidContext,
        Self::NoBinaryForGpu,
        Self::FileNotFound,
        Self::InvalidHandle,
        Self::NotFound,
        Self::NotReady,
        Self::LaunchFailed,
        Self::NotSupported,
        Self::Unknown,
    ];

    fn texts(self) -> (&'static CStr, &'static CStr) {
        match self {
            Self::InvalidValue => (c"CUDA_ERROR_INVALID_VALUE", c"an argument is invalid"),
            Self::OutOfMemory => (c"CUDA_ERROR_OUT_OF_MEMORY", c"no memory is left"),
            Self::NotInitialized => (c"CUDA_ERROR_NOT_INITIALIZED", c"cuInit was not called"),
            Self::NoDevice => (c"CUDA_ERROR_NO_DEVICE", c"no render node of nouveau can be opened"),
            Self::InvalidDevice => (c"CUDA_ERROR_INVALID_DEVICE", c"no device has this number"),
            Self::InvalidImage => (c"CUDA_ERROR_INVALID_IMAGE", c"the image is corrupt or of an unknown type"),
            Self::InvalidContext => (c"CUDA_ERROR_INVALID_CONTEXT", c"the thread has no context, or it was destroyed"),
            Self::NoBinaryForGpu => (c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"the image has no code for sm_20"),
            Self::FileNotFound => (c"CUDA_ERROR_FILE_NOT_FOUND", c"the file cannot be read"),
            Self::InvalidHandle => (c"CUDA_ERROR_INVALID_HANDLE", c"the handle does not belong to this context"),
            Self::NotFound => (c"CUDA_ERROR_NOT_FOUND", c"the name does not exist"),
            Self::NotReady => (c"CUDA_ERROR_NOT_READY", c"the work has not completed"),
            Self::LaunchFailed => (c"CUDA_ERROR_LAUNCH_FAILED", c"work was aborted; the context is lost"),
            Self::NotSupported => (c"CUDA_ERROR_NOT_SUPPORTED", c"this library does not support the function"),
            Self::Unknown => (c"CUDA_ERROR_UNKNOWN", c"the driver reports an error"),
        }
    }
}

/// Result of a function inside this library.
pub(crate) type Outcome<T> = Result<T, Code>;

impl From<Error> for Code {
    fn from(error: Error) -> Self {
        // The program receives only a number, so log the reason.
        if std::env::var_os("GDEV_VERBOSE").is_some() {
            eprintln!("libcuda (gdev): {error}");
        }
        match error {
            Error::Allocation { .. } => Self::OutOfMemory,
            Error::Unsupported { .. } => Self::NotSupported,
            Error::Open { .. } => Self::NoDevice,
            Error::Kernel(_) => Self::NotFound,
            Error::Image(_) => Self::InvalidImage,
            Error::Lost(_) => Self::LaunchFailed,
            Error::Driver { .. } | Error::Cuda { .. } => Self::Unknown,
            _ => Self::InvalidValue,
        }
    }
}

/// Returns the `CUresult` value of an outcome.
pub(crate) fn status(outcome: Outcome<()>) -> Status {
    outcome.map_or_else(|code| code as Status, |()| 0)
}

fn find(number: Status) -> Option<(&'static CStr, &'static CStr)> {
    if number == 0 {
        return Some((c"CUDA_SUCCESS", c"no error"));
    }
    Code::ALL.into_iter().find(|code| *code as Status == number).map(Code::texts)
}

/// Stores the name of a result code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(number: Status, name: *mut *const c_char) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    status(find(number).ok_or(Code::InvalidValue).and_then(|(text, _)| unsafe { store(name, text.as_ptr()) }))
}

/// Stores the description of a result code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(number: Status, text: *mut *const c_char) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    status(find(number).ok_or(Code::InvalidValue).and_then(|(_, found)| unsafe { store(text, found.as_ptr()) }))
}

/// Stores a value at the program's pointer.
pub(crate) unsafe fn store<T>(to: *mut T, value: T) -> Outcome<()> {
    if to.is_null() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
    unsafe { to.write_unaligned(value) };
    Ok(())
}
