//! Loads the driver library, and calls its functions according to the descriptions of their arguments.
//!
//! UNSAFETY: loads a library and calls its functions. All arguments are integers or pointers, which the x86-64 ABI
//! passes in the same way, in registers and on the stack. Therefore, one function type suffices for all functions, and
//! surplus arguments are ignored.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};

use cuda_calls::{CALLS, MAX_ARGUMENTS, Treatment};

/// `CUDA_ERROR_NOT_SUPPORTED`.
pub const NOT_SUPPORTED: i32 = 801;
/// `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: i32 = 600;
/// `CUDA_ERROR_INVALID_VALUE`.
pub const INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_INVALID_HANDLE`.
pub const INVALID_HANDLE: i32 = 400;

type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> i32;

/// Reason why a library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The library cannot be loaded.
    #[error("cannot load the CUDA driver library {0}")]
    Library(PathBuf),
    /// A function that the worker needs is missing.
    #[error("the CUDA driver library has no {0}")]
    Function(&'static str),
}

macro_rules! needed {
    ($($name:ident = $symbol:literal,)*) => {
        /// Function that the worker itself calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(non_camel_case_types, reason = "one variant for each function")]
        pub enum Needed { $($name,)* }

        const NEEDED: &[&str] = &[$($symbol,)*];
    };
}

needed! {
    Init = "cuInit",
    SetCurrent = "cuCtxSetCurrent",
    Synchronize = "cuCtxSynchronize",
    StreamQuery = "cuStreamQuery",
    StreamSynchronize = "cuStreamSynchronize",
    IsCapturing = "cuStreamIsCapturing",
    EventCreate = "cuEventCreate",
    EventRecord = "cuEventRecord",
    EventQuery = "cuEventQuery",
    EventSynchronize = "cuEventSynchronize",
    Copy = "cuMemcpyAsync",
    CopyBox = "cuMemcpy3DAsync_v2",
    Launch = "cuLaunchKernel",
    LaunchEx = "cuLaunchKernelEx",
    LaunchCooperative = "cuLaunchCooperativeKernel",
    MaxClusters = "cuOccupancyMaxActiveClusters",
    FunctionParameter = "cuFuncGetParamInfo",
    KernelParameter = "cuKernelGetParamInfo",
    Register = "cuMemHostRegister_v2",
    Unregister = "cuMemHostUnregister",
    HostFunction = "cuLaunchHostFunc",
    CaptureMode = "cuThreadExchangeStreamCaptureMode",
    AddKernelNode = "cuGraphAddKernelNode_v2",
    SetKernelNode = "cuGraphKernelNodeSetParams_v2",
    SetExecKernelNode = "cuGraphExecKernelNodeSetParams_v2",
    AddHostNode = "cuGraphAddHostNode",
    SetHostNode = "cuGraphHostNodeSetParams",
    SetExecHostNode = "cuGraphExecHostNodeSetParams",
    LinkComplete = "cuLinkComplete",
    FunctionName = "cuFuncGetName",
    KernelName = "cuKernelGetName",
    DeviceAttribute = "cuDeviceGetAttribute",
    ModuleVariable = "cuModuleGetGlobal_v2",
    LibraryVariable = "cuLibraryGetGlobal",
}

/// The functions of a loaded driver library.
#[derive(Debug)]
pub struct Driver {
    described: Vec<Option<Function>>,
    needed: Vec<Option<Function>>,
    /// The shim's function that allocates memory at a given address, or `None` with other libraries.
    allocate_at: Option<Function>,
}

/// Returns the symbol of a described call: its name without the suffix that marks calls completed by the guest library.
fn symbol(name: &str) -> &str {
    name.trim_end_matches(['+', '-'])
}

impl Driver {
    /// Loads a library. `path` is a path, or a name that the loader searches for.
    ///
    /// # Errors
    /// Returns an error if the library cannot be loaded, or lacks a function that every driver has.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let missing = || LoadError::Library(path.to_owned());
        let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| missing())?;
        // SAFETY: the operator selects the library, and it is never closed.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(missing());
        }
        let find = |symbol: &str| {
            let name = CString::new(symbol).ok()?;
            // SAFETY: the library is loaded.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            // SAFETY: the symbol is a function of the driver API, whose arguments are integers and pointers.
            (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Function>(found) })
        };
        let described = CALLS.iter().map(|call| match call.treatment {
            Treatment::Guest => None,
            Treatment::Posted | Treatment::Answered => find(symbol(call.name)),
        });
        let described = described.collect();
        let needed: Vec<_> = NEEDED.iter().map(|symbol| find(symbol)).collect();
        for always in [Needed::Init, Needed::SetCurrent, Needed::Copy, Needed::Launch] {
            if needed.get(always as usize).copied().flatten().is_none() {
                return Err(LoadError::Function(NEEDED.get(always as usize).copied().unwrap_or_default()));
            }
        }
        Ok(Self { described, needed, allocate_at: find("gpu_mediator_allocate_at") })
    }

    /// Returns a driver whose functions only return success, except the queries for parameters and variables.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn accepting() -> Self {
        unsafe extern "C" fn accept(
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
        ) -> i32 {
            0
        }
        /// Replaces the parameter query: reports that functions have no parameters.
        unsafe extern "C" fn none(
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
        ) -> i32 {
            INVALID_VALUE
        }
        /// Replaces the variable lookup: finds every variable, with a size of 8 bytes.
        unsafe extern "C" fn variable(
            address: u64,
            bytes: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
            _: u64,
        ) -> i32 {
            // SAFETY: the worker passes pointers to two words.
            unsafe {
                *(address as *mut u64) = 0x7000;
                *(bytes as *mut u64) = 8;
            }
            0
        }
        let mut needed: Vec<Option<Function>> = vec![Some(accept); NEEDED.len()];
        for variables in [Needed::ModuleVariable, Needed::LibraryVariable] {
            needed[variables as usize] = Some(variable);
        }
        for parameters in [Needed::FunctionParameter, Needed::KernelParameter] {
            needed[parameters as usize] = Some(none);
        }
        Self { described: vec![Some(accept); CALLS.len()], needed, allocate_at: Some(accept) }
    }

    /// Calls `cuInit`. Ignores the result, because the program's own call returns it too.
    pub fn start(&self) {
        self.invoke(Needed::Init, &[0]);
    }

    /// Calls a described function. Returns `NOT_SUPPORTED` if the library lacks it.
    pub fn call(&self, index: usize, values: &[u64; MAX_ARGUMENTS]) -> i32 {
        self.described.get(index).copied().flatten().map_or(NOT_SUPPORTED, |function| invoke(function, values))
    }

    /// Allocates memory in the current context, at an address that an allocation of the same size had in another
    /// worker. With a size of 0, only checks that the library supports this. Returns `NOT_SUPPORTED` if it does not.
    pub fn allocate_at(&self, address: u64, bytes: u64) -> i32 {
        let mut values = [0; MAX_ARGUMENTS];
        values[..2].copy_from_slice(&[address, bytes]);
        self.allocate_at.map_or(NOT_SUPPORTED, |function| invoke(function, &values))
    }

    /// Calls a function that the worker itself needs, with up to 12 arguments. Returns `NOT_SUPPORTED` if the library
    /// lacks it.
    pub fn invoke(&self, function: Needed, arguments: &[u64]) -> i32 {
        let mut values = [0; MAX_ARGUMENTS];
        for (value, argument) in values.iter_mut().zip(arguments) {
            *value = *argument;
        }
        self.needed.get(function as usize).copied().flatten().map_or(NOT_SUPPORTED, |found| invoke(found, &values))
    }
}

fn invoke(function: Function, values: &[u64; MAX_ARGUMENTS]) -> i32 {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *values;
    // SAFETY: each pointer refers to the arena of decoded arguments, or to memory that was checked to belong to the
    // guest.
    unsafe { function(a, b, c, d, e, f, g, h, i, j, k, l) }
}
