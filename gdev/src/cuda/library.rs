//! The functions of `libcuda.so.1` that the backend calls.
//!
//! UNSAFETY: calls functions through pointers. [`functions`] pairs each name with the signature in CUDA's header
//! `cuda.h`. Callers pass addresses that are valid for the call.

#![expect(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libloading::os::unix::Library as File;

use crate::{Error, Result};

/// Name of the library.
const NAME: &str = "libcuda.so.1";

/// Declares the functions, each with its method name, its symbol in the library, and its arguments.
macro_rules! functions {
    ($($method:ident = $symbol:literal ($($argument:ident: $type:ty),*);)*) => {
        /// The loaded library.
        pub struct Library {
            $($method: unsafe extern "C" fn($($type),*) -> c_int,)*
            error_name: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
            parameter: Option<unsafe extern "C" fn(u64, usize, *mut usize, *mut usize) -> c_int>,
            _file: File,
        }

        impl Library {
            /// Loads the library and resolves its functions.
            ///
            /// # Errors
            /// Returns an error if the library or a function is missing.
            pub fn load() -> Result<Self> {
                let missing = |error: libloading::Error| Error::Open {
                    device: NAME.to_owned(),
                    why: error.to_string(),
                    remedy: "install NVIDIA's driver, or run the program as a tenant",
                };
                // SAFETY: the library is NVIDIA's driver or a stand-in for it. Its initializers have no preconditions.
                let file = unsafe { File::new(NAME) }.map_err(missing)?;
                // SAFETY: the types are the same as in `cuda.h`. The pointers are valid as long as `_file` exists.
                unsafe {
                    Ok(Self {
                        $($method: *file.get(concat!($symbol, "\0").as_bytes()).map_err(missing)?,)*
                        error_name: *file.get(b"cuGetErrorName\0").map_err(missing)?,
                        parameter: file.get(b"cuFuncGetParamInfo\0").ok().map(|symbol| *symbol),
                        _file: file,
                    })
                }
            }

            $(
                /// Calls the function of the same name.
                ///
                /// # Safety
                /// All addresses must be valid for the function.
                ///
                /// # Errors
                /// Returns an error if the result is not `CUDA_SUCCESS`.
                #[allow(clippy::too_many_arguments, reason = "those of the driver's function")]
                pub unsafe fn $method(&self, $($argument: $type),*) -> Result<()> {
                    // SAFETY: guaranteed by the caller.
                    let code = unsafe { (self.$method)($($argument),*) };
                    self.check($symbol, code)
                }
            )*
        }
    };
}

functions! {
    init = "cuInit"(flags: c_uint);
    device_count = "cuDeviceGetCount"(count: *mut c_int);
    device_memory = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: c_int);
    device = "cuDeviceGet"(device: *mut c_int, number: c_int);
    retain = "cuDevicePrimaryCtxRetain"(context: *mut u64, device: c_int);
    release = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
    set_current = "cuCtxSetCurrent"(context: u64);
    create_stream = "cuStreamCreate"(stream: *mut u64, flags: c_uint);
    destroy_stream = "cuStreamDestroy_v2"(stream: u64);
    synchronize_stream = "cuStreamSynchronize"(stream: u64);
    create_event = "cuEventCreate"(event: *mut u64, flags: c_uint);
    destroy_event = "cuEventDestroy_v2"(event: u64);
    record = "cuEventRecord"(event: u64, stream: u64);
    synchronize = "cuEventSynchronize"(event: u64);
    query = "cuEventQuery"(event: u64);
    allocate = "cuMemAlloc_v2"(address: *mut u64, bytes: usize);
    free = "cuMemFree_v2"(address: u64);
    allocate_pinned = "cuMemHostAlloc"(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    free_pinned = "cuMemFreeHost"(address: *mut c_void);
    copy = "cuMemcpyAsync"(to: u64, from: u64, bytes: usize, stream: u64);
    copy_to = "cuMemcpyHtoD_v2"(to: u64, from: *const c_void, bytes: usize);
    copy_from = "cuMemcpyDtoH_v2"(to: *mut c_void, from: u64, bytes: usize);
    load_module = "cuModuleLoadData"(module: *mut u64, image: *const c_void);
    unload_module = "cuModuleUnload"(module: u64);
    function = "cuModuleGetFunction"(function: *mut u64, module: u64, name: *const c_char);
    launch = "cuLaunchKernel"(
        function: u64, x: c_uint, y: c_uint, z: c_uint, threads_x: c_uint, threads_y: c_uint, threads_z: c_uint,
        shared_bytes: c_uint, stream: u64, parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
}

impl Library {
    fn check(&self, function: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the pointer is valid. The function stores the address of a static string, or NULL.
        let name = unsafe {
            if (self.error_name)(code, &raw mut text) == 0 && !text.is_null() {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            } else {
                "an unknown result".to_owned()
            }
        };
        Err(Error::Cuda { function, name, code })
    }

    /// Returns the offset and size of a kernel parameter in bytes. Returns `None` after the last parameter, and
    /// `Some(None)` if the driver does not support the query.
    pub fn parameter(&self, function: u64, index: usize) -> Option<Option<(usize, usize)>> {
        let Some(call) = self.parameter else { return Some(None) };
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: both pointers are valid. The driver rejects an invalid function or index.
        let code = unsafe { call(function, index, &raw mut offset, &raw mut bytes) };
        match code {
            0 => Some(Some((offset, bytes))),
            INVALID_VALUE => None,
            _ => Some(None),
        }
    }
}

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: c_int = 1;

impl std::fmt::Debug for Library {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(NAME)
    }
}
