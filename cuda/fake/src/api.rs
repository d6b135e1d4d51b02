//! The exported functions.
//!
//! UNSAFETY: reads and writes what the program's pointers name, as the real driver does.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::card::{self, Tier};
use crate::kernels::KERNELS;
use crate::memory;
use crate::result::*;
use crate::space::GRANULE;
use crate::work::{self, Op};

/// The one context.
const CONTEXT: u64 = 0x7700;
/// `cuDeviceGetUuid` of the card.
const UUID: [u8; 16] = *b"fake cuda card 0";

static READY: AtomicBool = AtomicBool::new(false);

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

fn initialised() -> i32 {
    if READY.load(Ordering::SeqCst) { SUCCESS } else { NOT_INITIALIZED }
}

/// Fails without a context that is current to this thread.
fn context() -> i32 {
    match initialised() {
        SUCCESS if CURRENT.get() != CONTEXT => INVALID_CONTEXT,
        result => result,
    }
}

/// As [`context`], for calls that a capture forbids.
fn disturbing() -> i32 {
    match context() {
        SUCCESS => work::unsafe_call(),
        error => error,
    }
}

fn done(result: Result<(), i32>) -> i32 {
    result.err().unwrap_or(SUCCESS)
}

unsafe fn put<T>(to: *mut T, value: Result<T, i32>) -> i32 {
    match value {
        _ if to.is_null() => INVALID_VALUE,
        Ok(value) => {
            unsafe { *to = value };
            SUCCESS
        }
        Err(error) => error,
    }
}

macro_rules! api {
    ($($check:ident $name:ident($($arg:ident: $ty:ty),*) $body:block)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
            #[allow(unused_unsafe, reason = "not every function has a pointer")]
            match $check() {
                SUCCESS => unsafe { $body },
                error => error,
            }
        }
    )* };
}

fn any() -> i32 {
    SUCCESS
}

api! {
    any cuInit(_flags: u32) {
        READY.store(true, Ordering::SeqCst);
        SUCCESS
    }
    any cuDriverGetVersion(version: *mut c_int) { put(version, Ok(13_000)) }
    any cuGetProcAddress(name: *const c_char, to: *mut *mut c_void, _version: c_int, flags: u64) {
        look_up(name, to, flags)
    }
    any cuGetProcAddress_v2(
        name: *const c_char, to: *mut *mut c_void, _version: c_int, flags: u64, status: *mut c_int
    ) {
        let result = look_up(name, to, flags);
        if !status.is_null() {
            *status = i32::from(result != SUCCESS);
        }
        result
    }

    initialised cuDeviceGetCount(count: *mut c_int) { put(count, Ok(1)) }
    initialised cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        put(device, if ordinal == 0 { Ok(0) } else { Err(INVALID_DEVICE) })
    }
    initialised cuDeviceGetName(name: *mut c_char, bytes: c_int, _device: c_int) {
        let text = c"Fake CUDA card";
        if bytes < 16 {
            return INVALID_VALUE;
        }
        std::ptr::copy_nonoverlapping(text.as_ptr(), name, text.to_bytes_with_nul().len());
        SUCCESS
    }
    initialised cuDeviceGetUuid(uuid: *mut [u8; 16], _device: c_int) { put(uuid, Ok(UUID)) }
    initialised cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: c_int) { put(uuid, Ok(UUID)) }
    initialised cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { put(bytes, Ok(card::get().total() as usize)) }
    initialised cuDeviceGetAttribute(value: *mut c_int, _attribute: c_int, _device: c_int) { put(value, Ok(0)) }
    initialised cuDevicePrimaryCtxRetain(to: *mut u64, _device: c_int) { put(to, Ok(CONTEXT)) }
    initialised cuDevicePrimaryCtxRelease_v2(_device: c_int) { SUCCESS }
    initialised cuCtxGetCurrent(to: *mut u64) { put(to, Ok(CURRENT.get())) }
    initialised cuCtxSetCurrent(new: u64) {
        if new != 0 && new != CONTEXT {
            return INVALID_CONTEXT;
        }
        CURRENT.set(new);
        SUCCESS
    }
    context cuCtxGetDevice(device: *mut c_int) { put(device, Ok(0)) }
    context cuCtxSynchronize() { work::finish_all() }
    any cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        if mode.is_null() {
            return INVALID_VALUE;
        }
        *mode = work::exchange(*mode);
        SUCCESS
    }

    context cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        put(free, Ok(card::get().free() as usize));
        put(total, Ok(card::get().total() as usize))
    }
    disturbing cuMemAlloc_v2(at: *mut u64, bytes: usize) { put(at, memory::allocate(bytes as u64)) }
    disturbing cuMemFree_v2(at: u64) {
        work::finish_all();
        done(memory::free(at))
    }
    context cuMemAllocManaged(at: *mut u64, bytes: usize, _flags: u32) { put(at, memory::allocate(bytes as u64)) }
    disturbing cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, _flags: u32) {
        put(at, Ok(libc::calloc(bytes, 1)))
    }
    disturbing cuMemFreeHost(at: *mut c_void) {
        libc::free(at);
        SUCCESS
    }
    context cuMemAllocAsync(at: *mut u64, bytes: usize, _stream: u64) { put(at, memory::allocate(bytes as u64)) }
    context cuMemFreeAsync(at: u64, stream: u64) {
        match work::finish(stream) {
            SUCCESS => done(memory::free(at)),
            error => error,
        }
    }
    initialised cuMemGetAllocationGranularity(bytes: *mut usize, _property: *const c_int, _option: c_int) {
        put(bytes, Ok(GRANULE as usize))
    }
    initialised cuMemCreate(handle: *mut u64, bytes: usize, property: *const c_int, _flags: u64) {
        if property.is_null() || *property != 1 {
            return INVALID_VALUE;
        }
        let tier = match *property.add(2) {
            1 => Tier::Device,
            3 => Tier::Host,
            _ => return NOT_SUPPORTED,
        };
        put(handle, memory::create(tier, bytes as u64))
    }
    initialised cuMemRelease(handle: u64) { done(memory::release(handle)) }
    initialised cuMemAddressReserve(at: *mut u64, bytes: usize, align: usize, _wish: u64, _flags: u64) {
        put(at, memory::reserve(bytes as u64, align as u64))
    }
    initialised cuMemAddressFree(at: u64, bytes: usize) { done(memory::unreserve(at, bytes as u64)) }
    initialised cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) {
        match work::unsafe_call() {
            SUCCESS => done(memory::map(at, bytes as u64, offset as u64, handle)),
            error => error,
        }
    }
    initialised cuMemUnmap(at: u64, bytes: usize) { done(memory::unmap(at, bytes as u64)) }
    initialised cuMemSetAccess(at: u64, bytes: usize, access: *const c_int, count: usize) {
        if access.is_null() || count != 1 || *access != 1 || *access.add(2) != 3 {
            return INVALID_VALUE;
        }
        done(memory::open(at, bytes as u64))
    }
    initialised cuMemExportToShareableHandle(to: *mut c_int, handle: u64, kind: c_int, _flags: u64) {
        if kind != 1 {
            return NOT_SUPPORTED;
        }
        put(to, memory::export(handle))
    }
    initialised cuMemImportFromShareableHandle(handle: *mut u64, from: usize, kind: c_int) {
        if kind != 1 {
            return NOT_SUPPORTED;
        }
        put(handle, memory::import(i32::try_from(from).unwrap_or(-1)))
    }
    context cuPointerGetAttribute(to: *mut c_void, attribute: c_int, at: u64) {
        let Some((start, bytes, tier)) = memory::find(at) else { return INVALID_VALUE };
        match attribute {
            2 => *to.cast::<u32>() = if tier == Tier::Host { 1 } else { 2 },
            10 => *to.cast::<bool>() = true,
            11 => *to.cast::<u64>() = start,
            12 => *to.cast::<u64>() = bytes,
            _ => return NOT_SUPPORTED,
        }
        SUCCESS
    }
    context cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, at: u64) {
        let Some((start, length, _)) = memory::find(at) else { return NOT_FOUND };
        put(base, Ok(start));
        put(bytes, Ok(length as usize))
    }

    context cuStreamCreate(stream: *mut u64, _flags: u32) { put(stream, Ok(work::create())) }
    context cuStreamDestroy_v2(stream: u64) { work::destroy(stream) }
    context cuStreamSynchronize(stream: u64) { work::finish(stream) }
    context cuStreamWaitEvent(stream: u64, event: u64, _flags: u32) { work::wait(stream, event) }
    context cuStreamIsCapturing(stream: u64, status: *mut c_int) { put(status, work::capturing(stream)) }
    context cuStreamBeginCapture_v2(stream: u64, mode: c_int) { work::begin(stream, mode) }
    context cuStreamEndCapture(stream: u64, graph: *mut u64) { put(graph, work::end(stream)) }
    context cuGraphInstantiateWithFlags(made: *mut u64, graph: u64, _flags: u64) {
        put(made, work::instantiate(graph))
    }
    context cuGraphLaunch(graph: u64, stream: u64) { work::launch(graph, stream) }
    context cuGraphDestroy(graph: u64) { work::destroy_graph(graph) }
    context cuGraphExecDestroy(graph: u64) { work::destroy_graph(graph) }

    context cuEventCreate(event: *mut u64, _flags: u32) { put(event, Ok(work::event())) }
    context cuEventDestroy_v2(event: u64) { work::destroy_event(event) }
    context cuEventRecord(event: u64, stream: u64) { work::record(event, stream) }
    disturbing cuEventQuery(event: u64) { work::query(event) }
    disturbing cuEventSynchronize(event: u64) { work::synchronize(event) }
    context cuEventElapsedTime(milliseconds: *mut f32, from: u64, to: u64) {
        put(milliseconds, work::elapsed(from, to))
    }

    context cuModuleLoadData(module: *mut u64, _image: *const c_void) { put(module, Ok(1)) }
    context cuModuleGetFunction(function: *mut u64, _module: u64, name: *const c_char) {
        let name = CStr::from_ptr(name).to_bytes();
        let found = KERNELS.iter().position(|kernel| kernel.name.as_bytes() == name);
        put(function, found.map(|at| at as u64 + 1).ok_or(NOT_FOUND))
    }
    context cuLaunchKernel(
        function: u64, _gx: u32, _gy: u32, _gz: u32, _bx: u32, _by: u32, _bz: u32, _shared: u32, stream: u64,
        parameters: *const *const u64, _extra: *const c_void
    ) {
        let Some(kernel) = function.checked_sub(1).and_then(|at| KERNELS.get(at as usize)) else {
            return INVALID_HANDLE;
        };
        if parameters.is_null() {
            return INVALID_VALUE;
        }
        let arguments = (0..kernel.arguments).map(|n| **parameters.add(n)).collect();
        work::submit(stream, Op::Kernel(*kernel, arguments))
    }
    context cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) {
        work::submit(stream, Op::Copy(to, from, bytes as u64))
    }
    context cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) { work::synchronous(Op::Copy(to, from, bytes as u64)) }
    context cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) { work::synchronous(Op::Copy(to, from, bytes as u64)) }
    context cuMemsetD8_v2(at: u64, value: u8, bytes: usize) { work::synchronous(Op::Set(at, bytes as u64, value)) }
    context cuMemsetD8Async(at: u64, value: u8, bytes: usize, stream: u64) {
        work::submit(stream, Op::Set(at, bytes as u64, value))
    }
}

/// Finds an exported function by its name without endings: the newest form, as versions do not differ here.
unsafe fn look_up(name: *const c_char, to: *mut *mut c_void, _flags: u64) -> c_int {
    let plain = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let own = look_up as *const c_void;
    if unsafe { libc::dladdr(own, &raw mut info) } == 0 {
        return NOT_FOUND;
    }
    let library = unsafe { libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    for suffix in ["_v2", ""] {
        let Ok(symbol) = CString::new(format!("{plain}{suffix}")) else { return INVALID_VALUE };
        let found = unsafe { libc::dlsym(library, symbol.as_ptr()) };
        if !found.is_null() {
            unsafe { *to = found };
            return SUCCESS;
        }
    }
    NOT_FOUND
}
