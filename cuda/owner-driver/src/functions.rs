//! The driver's functions, looked up by name in a library that is loaded from a path.

// UNSAFETY: calls library functions through pointers with the types in NVIDIA's header.
#![allow(unsafe_code, reason = "calls a foreign library")]

use super::DriverError;
use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUstream, CUuuid};
use libloading::Library;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::Path;

/// A `CUmemGenericAllocationHandle`.
pub(super) type RawHandle = c_ulonglong;

/// Arguments of `cuCheckpointProcess...`: 64 bytes. All are zero, except for a lock timeout or the pairs of a restore.
pub(super) type CheckpointArgs = [u64; 8];

/// Declares a function table. Results are plain integers, because a newer driver may return codes that are not in the
/// header.
macro_rules! functions {
    (
        required { $($field:ident = $name:literal : fn($($argument:ty),*);)* }
        optional { $($may:ident = $may_name:literal : fn($($may_argument:ty),*);)* }
    ) => {
        /// The driver's functions that this crate uses. The library stays loaded for the lifetime of this value.
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            $(pub(super) $may: Option<unsafe extern "C" fn($($may_argument),*) -> c_int>,)*
            _library: Library,
        }

        impl Functions {
            /// Loads the library at `path`. If `path` is only a name, the loader searches for the library.
            pub(super) fn load(path: &Path) -> Result<Self, DriverError> {
                let library_error = |error: libloading::Error| DriverError::Library {
                    path: path.display().to_string(),
                    reason: error.to_string(),
                };
                // SAFETY: the operator chooses the library; the initializers of NVIDIA's library run in every program
                // that links it.
                let library = unsafe { Library::new(path) }.map_err(library_error)?;
                Ok(Self {
                    // SAFETY: each type matches the function of this name in NVIDIA's header, with the result
                    // enumeration as an int.
                    $($field: unsafe { *library.get(concat!($name, "\0").as_bytes()).map_err(library_error)? },)*
                    // SAFETY: as above.
                    $($may: unsafe { library.get(concat!($may_name, "\0").as_bytes()) }.ok().map(|symbol| *symbol),)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    required {
        init = "cuInit": fn(c_uint);
        device_get = "cuDeviceGet": fn(*mut CUdevice, c_int);
        device_name = "cuDeviceGetName": fn(*mut c_char, c_int, CUdevice);
        device_uuid = "cuDeviceGetUuid": fn(*mut CUuuid, CUdevice);
        device_total = "cuDeviceTotalMem_v2": fn(*mut usize, CUdevice);
        device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_uint, CUdevice);
        context_retain = "cuDevicePrimaryCtxRetain": fn(*mut CUcontext, CUdevice);
        context_set = "cuCtxSetCurrent": fn(CUcontext);
        memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
        granularity = "cuMemGetAllocationGranularity": fn(*mut usize, *const CUmemAllocationProp, c_uint);
        create = "cuMemCreate": fn(*mut RawHandle, usize, *const CUmemAllocationProp, c_ulonglong);
        release = "cuMemRelease": fn(RawHandle);
        reserve = "cuMemAddressReserve": fn(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        map = "cuMemMap": fn(CUdeviceptr, usize, usize, RawHandle, c_ulonglong);
        unmap = "cuMemUnmap": fn(CUdeviceptr, usize);
        set_access = "cuMemSetAccess": fn(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        export = "cuMemExportToShareableHandle": fn(*mut c_void, RawHandle, c_uint, c_ulonglong);
        import = "cuMemImportFromShareableHandle": fn(*mut RawHandle, *mut c_void, c_uint);
        stream_create = "cuStreamCreate": fn(*mut CUstream, c_uint);
        stream_finish = "cuStreamSynchronize": fn(CUstream);
        copy = "cuMemcpyAsync": fn(CUdeviceptr, CUdeviceptr, usize, CUstream);
        allocate = "cuMemAlloc_v2": fn(*mut CUdeviceptr, usize);
        zero = "cuMemsetD8Async": fn(CUdeviceptr, u8, usize, CUstream);
    }
    optional {
        device_by_address = "cuDeviceGetByPCIBusId": fn(*mut CUdevice, *const c_char);
        pointer_attribute = "cuPointerGetAttribute": fn(*mut c_void, c_uint, CUdeviceptr);
        checkpoint_lock = "cuCheckpointProcessLock": fn(c_int, *mut CheckpointArgs);
        checkpoint_take = "cuCheckpointProcessCheckpoint": fn(c_int, *mut CheckpointArgs);
        checkpoint_restore = "cuCheckpointProcessRestore": fn(c_int, *mut CheckpointArgs);
        checkpoint_unlock = "cuCheckpointProcessUnlock": fn(c_int, *mut CheckpointArgs);
        checkpoint_state = "cuCheckpointProcessGetState": fn(c_int, *mut c_int);
        version = "cuDriverGetVersion": fn(*mut c_int);
        device_count = "cuDeviceGetCount": fn(*mut c_int);
    }
}
