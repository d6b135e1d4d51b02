//! Libraries loaded from files, and the names and parameter counts of their functions.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use super::{Cuda, Failed, check};

/// Function names, each with the function's number of parameters.
type Named = Vec<(String, usize)>;
type Count = unsafe extern "C" fn(*mut usize, u64) -> c_int;

/// Returns a function that the library exports, but that `cuGetProcAddress` of a CUDA 13.0 driver does not return.
fn count(name: &CStr) -> Result<Count, Failed> {
    // SAFETY: the library is already loaded, and the call only adds a reference. NVIDIA's header declares the function
    // with these arguments.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        let found = libc::dlsym(library, name.as_ptr());
        if found.is_null() {
            return Err(Failed { call: "dlsym", code: 500 });
        }
        Ok(std::mem::transmute::<*mut c_void, Count>(found))
    }
}

impl Cuda {
    /// Loads a library from a file. Returns the names and parameter counts of some of its kernels and of the kernels'
    /// functions, and the results of invalid calls.
    pub fn name_functions(&self, file: &Path) -> Result<(Named, Vec<c_int>), Failed> {
        let load = function!(
            self,
            c"cuLibraryLoadFromFile",
            12_000,
            fn(*mut u64, *const c_char, u64, u64, u32, u64, u64, u32)
        );
        let kernel = function!(self, c"cuLibraryGetKernel", 12_000, fn(*mut u64, u64, *const c_char));
        let function_of = function!(self, c"cuKernelGetFunction", 12_000, fn(*mut u64, u64));
        let kernel_name = function!(self, c"cuKernelGetName", 12_030, fn(*mut *const c_char, u64));
        let function_name = function!(self, c"cuFuncGetName", 12_030, fn(*mut *const c_char, u64));
        let (kernel_count, function_count) = (count(c"cuKernelGetParamCount")?, count(c"cuFuncGetParamCount")?);
        let path = CString::new(file.as_os_str().as_encoded_bytes()).map_err(|_| Failed { call: "path", code: 1 })?;
        let (mut library, mut found) = (0u64, Vec::new());
        // SAFETY: the pointers refer to local variables, and the strings are NUL-terminated.
        unsafe {
            check("cuLibraryLoadFromFile", load(&raw mut library, path.as_ptr(), 0, 0, 0, 0, 0, 0))?;
            for wanted in [c"checksum", c"fill", c"checksum"] {
                let (mut of, mut function) = (0, 0);
                check("cuLibraryGetKernel", kernel(&raw mut of, library, wanted.as_ptr()))?;
                check("cuKernelGetFunction", function_of(&raw mut function, of))?;
                for (name, count, of) in [(kernel_name, kernel_count, of), (function_name, function_count, function)] {
                    let (mut text, mut parameters) = (std::ptr::null(), 0);
                    check("name", name(&raw mut text, of))?;
                    check("count", count(&raw mut parameters, of))?;
                    found.push((CStr::from_ptr(text).to_string_lossy().into_owned(), parameters));
                }
            }
            let mut text = std::ptr::null();
            let codes = vec![
                kernel_name(&raw mut text, 7),
                function_name(&raw mut text, 0),
                load(&raw mut library, std::ptr::null(), 0, 0, 0, 0, 0, 0),
                load(&raw mut library, c"/none/at/all".as_ptr(), 0, 0, 0, 0, 0, 0),
            ];
            Ok((found, codes))
        }
    }
}
