//! Libraries, kernels and functions, and launches.
//!
//! Every image contains all [`KERNELS`], regardless of its contents.
//!
//! UNSAFETY: reads and writes through the program's pointers, like the real driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::api::{any, api, context, current_card, initialised, put};
use crate::current::{current_device, device_of};
use crate::kernels::{KERNELS, Kernel};
use crate::modules;
use crate::result::{FILE_NOT_FOUND, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, SUCCESS};
use crate::work::{self, Op};

/// Handle of the first kernel's function in modules. The handles of the other kernels follow.
const FUNCTION: u64 = 1;
/// Handle of the first kernel in libraries.
const KERNEL: u64 = 0x1000;

/// Maximum number of threads per block of each kernel.
const MAX_THREADS: c_int = 1024;

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: u64,
    attributes: *const c_void,
    attribute_count: u32,
}

/// Returns a handle's kernel, given the handle of the first kernel.
fn kernel(handle: u64, first: u64) -> Option<&'static Kernel> {
    KERNELS.get(usize::try_from(modules::kernel(handle)?.checked_sub(first)?).ok()?)
}

/// Returns the kernel of a function handle or kernel handle, both of which can be launched.
fn either(handle: u64) -> Option<&'static Kernel> {
    kernel(handle, FUNCTION).or_else(|| kernel(handle, KERNEL))
}

/// Looks up a module's kernel by name, and returns its handle.
unsafe fn named(module: u64, name: *const c_char, first: u64) -> Result<u64, i32> {
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let found = KERNELS.iter().position(|kernel| kernel.name.as_bytes() == name);
    found.map(|at| modules::handle(module, at as u64 + first)).ok_or(NOT_FOUND)
}

/// Converts a launch into an operation. The kernel's parameters are 64-bit numbers.
pub unsafe fn operation(function: u64, parameters: *const *const u64) -> Result<Op, i32> {
    let kernel = either(function).ok_or(INVALID_HANDLE)?;
    if parameters.is_null() {
        return Err(INVALID_VALUE);
    }
    let arguments = (0..kernel.arguments).map(|n| unsafe { **parameters.add(n) });
    // A kernel's code contains the address of its variable.
    let variable = kernel.variable.map(|name| modules::used(function, name));
    Ok(Op::Kernel(*kernel, arguments.chain(variable).collect()))
}

/// Launches a kernel.
unsafe fn launch(function: u64, stream: u64, parameters: *const *const u64) -> i32 {
    // As with NVIDIA's driver, a kernel runs only on the current device.
    match work::context_of(stream) {
        Ok(context) if device_of(context).is_some_and(|device| device != current_device()) => return INVALID_HANDLE,
        _ => {}
    }
    unsafe { operation(function, parameters) }.map_or_else(|error| error, |kernel| work::submit(stream, kernel))
}

/// Concatenated inputs of each link, which are also the result of the link. The driver keeps a result until the link is
/// destroyed.
static LINKS: Mutex<Vec<(u64, Vec<u8>)>> = Mutex::new(Vec::new());

/// Calls `work` with a link's bytes.
fn linked(link: u64, work: impl FnOnce(&mut Vec<u8>)) -> i32 {
    let mut links = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    match links.iter_mut().find(|(known, _)| *known == link) {
        Some((_, bytes)) => {
            work(bytes);
            SUCCESS
        }
        None => INVALID_HANDLE,
    }
}

/// Returns the value of a kernel's `CUfunction_attribute`.
fn attribute(attribute: c_int, kernel: Option<&Kernel>) -> Result<c_int, i32> {
    if kernel.is_none() {
        return Err(INVALID_HANDLE);
    }
    match attribute {
        0 => Ok(MAX_THREADS),
        // Number of registers per thread.
        4 => Ok(32),
        // PTX version and binary version.
        5 | 6 => Ok(90),
        1..=15 => Ok(0),
        _ => Err(INVALID_VALUE),
    }
}

/// Stores the offset and size of a parameter.
unsafe fn parameter(kernel: Option<&Kernel>, index: usize, offset: *mut usize, bytes: *mut usize) -> i32 {
    let Some(kernel) = kernel else { return INVALID_HANDLE };
    if index >= kernel.arguments {
        return INVALID_VALUE;
    }
    if !bytes.is_null() {
        unsafe { *bytes = 8 };
    }
    unsafe { put(offset, Ok(8 * index)) }
}

/// Returns the number of blocks that fit on a multiprocessor with 2048 threads.
fn blocks(function: u64, threads: c_int) -> Result<c_int, i32> {
    match either(function) {
        None => Err(INVALID_HANDLE),
        Some(_) if !(1..=MAX_THREADS).contains(&threads) => Err(INVALID_VALUE),
        Some(_) => Ok(2048 / threads),
    }
}

/// Returns the maximum number of concurrently active clusters. Their dimensions are in launch attribute 4.
unsafe fn clusters(function: u64, config: *const LaunchConfig) -> Result<c_int, i32> {
    let config = unsafe { config.as_ref() }.ok_or(INVALID_VALUE)?;
    either(function).ok_or(INVALID_HANDLE)?;
    let count = if config.attributes.is_null() { 0 } else { config.attribute_count as usize };
    // Each attribute has 72 bytes: its number at byte 0, and its value (here three dimensions) from byte 8 on.
    let attributes = (0..count).map(|n| unsafe { config.attributes.cast::<[u32; 18]>().add(n).as_ref() });
    let sizes = attributes.flatten().find(|words| words[0] == 4).ok_or(INVALID_VALUE)?;
    let blocks = sizes[2..5].iter().product::<u32>();
    if (1..=8).contains(&blocks) { Ok((132 / blocks) as c_int) } else { Err(INVALID_VALUE) }
}

/// Returns the address of a kernel's name.
fn name_of(kernel: Option<&Kernel>) -> Result<*const c_char, i32> {
    /// Names of all kernels. Static, because the program receives the names' addresses.
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    let kernel = kernel.ok_or(INVALID_HANDLE)?;
    let names = NAMES.get_or_init(|| KERNELS.iter().filter_map(|kernel| CString::new(kernel.name).ok()).collect());
    names.iter().find(|name| name.to_bytes() == kernel.name.as_bytes()).map(|name| name.as_ptr()).ok_or(NOT_FOUND)
}

/// Returns the number of a kernel's parameters.
fn parameters_of(kernel: Option<&Kernel>) -> Result<usize, i32> {
    kernel.map(|kernel| kernel.arguments).ok_or(INVALID_HANDLE)
}

api! {
    any cuModuleGetLoadingMode(mode: *mut c_int) { put(mode, Ok(2)) }
    context cuModuleLoadData(module: *mut u64, image: *const c_char) { load(module, image) }
    context cuModuleLoadDataEx(
        module: *mut u64, image: *const c_char, _count: u32, _options: *const c_int, _values: *mut *mut c_void
    ) { load(module, image) }
    context cuModuleLoadFatBinary(module: *mut u64, image: *const c_char) { load(module, image) }
    context cuModuleUnload(module: u64) { modules::unload(module) }
    context cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) {
        put(function, named(module, name, FUNCTION))
    }
    context cuModuleGetGlobal_v2(at: *mut u64, bytes: *mut usize, module: u64, name: *const c_char) {
        variable(at, bytes, module, name)
    }

    initialised cuLibraryLoadData(
        library: *mut u64, image: *const c_char, _options: *const c_int, _values: *const *mut c_void, _count: u32,
        _library_options: *const c_int, _library_values: *const *mut c_void, _library_count: u32
    ) {
        if image.is_null() {
            return INVALID_VALUE;
        }
        put(library, modules::load(current_card(), image))
    }
    initialised cuLibraryLoadFromFile(
        library: *mut u64, path: *const c_char, _options: *const c_int, _values: *const *mut c_void, _count: u32,
        _library_options: *const c_int, _library_values: *const *mut c_void, _library_count: u32
    ) {
        if path.is_null() {
            return INVALID_VALUE;
        }
        match std::fs::read(OsStr::from_bytes(CStr::from_ptr(path).to_bytes())) {
            Ok(_) => put(library, modules::load_plain(current_card())),
            Err(_) => FILE_NOT_FOUND,
        }
    }
    initialised cuLibraryUnload(library: u64) { modules::unload(library) }
    initialised cuLibraryGetModule(module: *mut u64, library: u64) { put(module, Ok(library)) }
    initialised cuLibraryGetKernelCount(count: *mut u32, _library: u64) { put(count, Ok(KERNELS.len() as u32)) }
    initialised cuLibraryGetKernel(to: *mut u64, library: u64, name: *const c_char) {
        put(to, named(library, name, KERNEL))
    }
    context cuLibraryGetGlobal(at: *mut u64, bytes: *mut usize, library: u64, name: *const c_char) {
        variable(at, bytes, library, name)
    }
    context cuKernelGetFunction(function: *mut u64, of: u64) {
        put(function, kernel(of, KERNEL).map(|_| of - KERNEL + FUNCTION).ok_or(INVALID_HANDLE))
    }
    initialised cuKernelGetAttribute(value: *mut c_int, which: c_int, of: u64, _device: c_int) {
        put(value, attribute(which, kernel(of, KERNEL)))
    }
    initialised cuKernelSetAttribute(which: c_int, _value: c_int, of: u64, _device: c_int) {
        attribute(which, kernel(of, KERNEL)).err().unwrap_or(SUCCESS)
    }
    initialised cuKernelGetParamInfo(of: u64, index: usize, offset: *mut usize, bytes: *mut usize) {
        parameter(kernel(of, KERNEL), index, offset, bytes)
    }
    initialised cuKernelGetParamCount(count: *mut usize, of: u64) { put(count, parameters_of(kernel(of, KERNEL))) }
    context cuFuncGetParamCount(count: *mut usize, of: u64) { put(count, parameters_of(kernel(of, FUNCTION))) }
    initialised cuKernelGetName(name: *mut *const c_char, of: u64) { put(name, name_of(kernel(of, KERNEL))) }
    context cuFuncGetName(name: *mut *const c_char, of: u64) { put(name, name_of(kernel(of, FUNCTION))) }
    context cuFuncGetAttribute(value: *mut c_int, which: c_int, function: u64) {
        put(value, attribute(which, either(function)))
    }
    context cuFuncSetAttribute(function: u64, which: c_int, _value: c_int) {
        attribute(which, either(function)).err().unwrap_or(SUCCESS)
    }
    // This call accepts only functions of modules, and `cuKernelGetParamInfo` accepts only kernels of libraries.
    context cuFuncGetParamInfo(function: u64, index: usize, offset: *mut usize, bytes: *mut usize) {
        parameter(kernel(function, FUNCTION), index, offset, bytes)
    }
    context cuOccupancyMaxActiveBlocksPerMultiprocessor(
        count: *mut c_int, function: u64, threads: c_int, _shared_bytes: usize
    ) { put(count, blocks(function, threads)) }
    context cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        count: *mut c_int, function: u64, threads: c_int, _shared_bytes: usize, _flags: u32
    ) { put(count, blocks(function, threads)) }

    context cuOccupancyMaxActiveClusters(count: *mut c_int, function: u64, config: *const LaunchConfig) {
        put(count, clusters(function, config))
    }
    context cuOccupancyMaxPotentialClusterSize(size: *mut c_int, function: u64, config: *const LaunchConfig) {
        put(size, clusters(function, config).map(|_| 8))
    }
    // In this fake, a tensor map is a copy of the call's arguments.
    any cuTensorMapEncodeTiled(
        map: *mut [u64; 16], kind: c_int, rank: u32, at: u64, sizes: *const u64, strides: *const u64,
        block: *const u32, steps: *const u32, interleave: c_int, swizzle: c_int, promotion: c_int, fill: c_int
    ) {
        let dimensions = rank as usize;
        if !(1..=5).contains(&dimensions) || sizes.is_null() || block.is_null() || steps.is_null() {
            return INVALID_VALUE;
        }
        let mut words = [0; 16];
        words[0] = at;
        words[1] = kind as u64 | u64::from(rank) << 32;
        words[2] = [interleave, swizzle, promotion, fill].iter().fold(0, |all, part| all << 16 | *part as u64);
        for n in 0..dimensions {
            words[3 + n] = *sizes.add(n);
            words[12] = words[12] << 8 | u64::from(*block.add(n));
            words[13] = words[13] << 8 | u64::from(*steps.add(n));
        }
        for n in 0..dimensions - 1 {
            words[8 + n] = *strides.add(n);
        }
        put(map, Ok(words))
    }
    any cuTensorMapReplaceAddress(map: *mut [u64; 16], at: u64) {
        let Some(map) = map.as_mut() else { return INVALID_VALUE };
        map[0] = at;
        SUCCESS
    }

    // Linking concatenates the inputs.
    context cuLinkCreate_v2(_count: u32, _options: *const c_int, _values: *mut *mut c_void, link: *mut u64) {
        let mut links = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
        let made = 0x700_0000 + 16 * (links.len() as u64 + 1);
        links.push((made, Vec::new()));
        put(link, Ok(made))
    }
    context cuLinkAddData_v2(
        link: u64, _kind: c_int, data: *const u8, bytes: usize, _name: *const c_char, _count: u32,
        _options: *const c_int, _values: *mut *mut c_void
    ) {
        if data.is_null() || bytes == 0 {
            return INVALID_VALUE;
        }
        linked(link, |all| all.extend_from_slice(std::slice::from_raw_parts(data, bytes)))
    }
    context cuLinkComplete(link: u64, result: *mut *const u8, bytes: *mut usize) {
        linked(link, |all| {
            *result = all.as_ptr();
            if !bytes.is_null() {
                *bytes = all.len();
            }
        })
    }
    context cuLinkDestroy(link: u64) { linked(link, |bytes| *bytes = Vec::new()) }

    context cuLaunchKernel(
        function: u64, _gx: u32, _gy: u32, _gz: u32, _bx: u32, _by: u32, _bz: u32, _shared: u32, stream: u64,
        parameters: *const *const u64, _extra: *const c_void
    ) { launch(function, stream, parameters) }
    context cuLaunchKernelEx(
        config: *const LaunchConfig, function: u64, parameters: *const *const u64, _extra: *const c_void
    ) {
        let Some(config) = config.as_ref() else { return INVALID_VALUE };
        launch(function, config.stream, parameters)
    }
}

/// Loads an image. A null image stands for a module without variables.
unsafe fn load(module: *mut u64, image: *const c_char) -> i32 {
    if image.is_null() {
        return unsafe { put(module, Ok(modules::PLAIN)) };
    }
    unsafe { put(module, modules::load(current_card(), image)) }
}

/// Stores the address and the size of a variable.
unsafe fn variable(at: *mut u64, bytes: *mut usize, module: u64, name: *const c_char) -> i32 {
    let (address, size) = match unsafe { modules::variable(module, name) } {
        Ok(found) => found,
        Err(error) => return error,
    };
    if !at.is_null() {
        unsafe { *at = address };
    }
    if !bytes.is_null() {
        unsafe { *bytes = size as usize };
    }
    SUCCESS
}
