//! The exported functions.
//!
//! UNSAFETY: reads and writes through the program's pointers, like the real driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::card::{self, Tier};
use crate::checkpoint::{self, Order};
use crate::current::{CONTEXT, CONTEXT_STRIDE, CURRENT, current_device, device_of};
use crate::further;
use crate::memory;
use crate::mps;
use crate::result::*;
use crate::space::GRANULE;
use crate::work::{self, Op};

/// `CUipcMemHandle`.
#[repr(C)]
struct Ipc([u64; 8]);

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
struct CheckpointRestore {
    pairs: *const checkpoint::Pair,
    count: u32,
    _reserved: [u32; 13],
}

/// ID of the process that has initialized the driver. Its children must initialize the driver again.
static READY: AtomicU32 = AtomicU32::new(0);

/// Returns the card with the given device number.
pub fn named(device: c_int) -> Result<&'static card::Card, i32> {
    card::of_device(device).ok_or(INVALID_DEVICE)
}

pub fn current_card() -> &'static card::Card {
    named(current_device()).unwrap_or(&card::all()[0])
}

pub fn initialised() -> i32 {
    if READY.load(Ordering::SeqCst) != std::process::id() {
        return NOT_INITIALIZED;
    }
    checkpoint::pass();
    let is_reset = |at: &usize| card::all().get(*at).is_some_and(card::Card::is_reset);
    if card::visible().iter().any(is_reset) { ECC_UNCORRECTABLE } else { mps::lost() }
}

/// Returns an error if the driver is not initialized or this thread has no current context.
pub fn context() -> i32 {
    match initialised() {
        SUCCESS if device_of(CURRENT.get()).is_none() => INVALID_CONTEXT,
        result => result,
    }
}

/// Like [`context`], for calls that are not permitted during a capture.
fn disturbing() -> i32 {
    match context() {
        SUCCESS => work::unsafe_call(),
        error => error,
    }
}

fn done(result: Result<(), i32>) -> i32 {
    result.err().unwrap_or(SUCCESS)
}

pub unsafe fn put<T>(to: *mut T, value: Result<T, i32>) -> i32 {
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
pub(crate) use api;

pub fn any() -> i32 {
    SUCCESS
}

api! {
    any cuInit(_flags: u32) {
        if card::visible().is_empty() {
            return NO_DEVICE;
        }
        let own = std::process::id();
        match READY.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst) {
            Err(other) if other != own => NOT_INITIALIZED,
            Err(_) => SUCCESS,
            Ok(_) => {
                let connected = mps::connect();
                if connected.is_err() {
                    // Let the next call to `cuInit` try again to connect.
                    READY.store(0, Ordering::SeqCst);
                }
                done(connected)
            }
        }
    }

    initialised cuDeviceGetCount(count: *mut c_int) { put(count, Ok(card::visible().len() as c_int)) }
    initialised cuDeviceGet(device: *mut c_int, ordinal: c_int) { put(device, named(ordinal).map(|_| ordinal)) }
    initialised cuDeviceGetByPCIBusId(device: *mut c_int, address: *const c_char) {
        if address.is_null() {
            return INVALID_VALUE;
        }
        let address = CStr::from_ptr(address).to_string_lossy().to_lowercase();
        let is_it = |at: &usize| card::all().get(*at).is_some_and(|card| card.bus_id() == address);
        put(device, card::visible().iter().position(is_it).map(|at| at as c_int).ok_or(INVALID_DEVICE))
    }
    initialised cuDeviceGetPCIBusId(address: *mut c_char, bytes: c_int, device: c_int) {
        let Ok(card) = named(device) else { return INVALID_DEVICE };
        text(address, bytes, &card.bus_id())
    }
    initialised cuDeviceGetName(name: *mut c_char, bytes: c_int, device: c_int) {
        if named(device).is_err() {
            return INVALID_DEVICE;
        }
        text(name, bytes, "Fake CUDA card")
    }
    initialised cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) { put(uuid, named(device).map(card::Card::uuid)) }
    initialised cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) { put(uuid, named(device).map(card::Card::uuid)) }
    initialised cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        put(bytes, named(device).map(|card| card.total() as usize))
    }
    initialised cuDevicePrimaryCtxRetain(to: *mut u64, device: c_int) {
        let Ok(card) = named(device) else { return INVALID_DEVICE };
        if card.is_broken() {
            return ECC_UNCORRECTABLE;
        }
        if !card.enter() {
            return OUT_OF_MEMORY;
        }
        checkpoint::listen();
        put(to, Ok(CONTEXT + device as u64))
    }
    initialised cuCtxCreate_v2(to: *mut u64, _flags: u32, device: c_int) {
        let Ok(card) = named(device) else { return INVALID_DEVICE };
        if !card.enter() {
            return OUT_OF_MEMORY;
        }
        match further::create(card) {
            Ok(number) => {
                CURRENT.set(CONTEXT + device as u64 + CONTEXT_STRIDE * number);
                put(to, Ok(CURRENT.get()))
            }
            Err(error) => error,
        }
    }
    initialised cuCtxDestroy_v2(context: u64) {
        let Some(_) = device_of(context) else { return INVALID_CONTEXT };
        if CURRENT.get() == context {
            CURRENT.set(0);
        }
        further::destroy((context - CONTEXT) / CONTEXT_STRIDE)
    }
    context cuCtxSetLimit(limit: c_int, value: usize) { further::limit(current_card(), limit, value as u64) }
    initialised cuDevicePrimaryCtxRelease_v2(_device: c_int) { SUCCESS }
    initialised cuCtxGetCurrent(to: *mut u64) { put(to, Ok(CURRENT.get())) }
    initialised cuCtxSetCurrent(new: u64) {
        if new != 0 && device_of(new).is_none() {
            return INVALID_CONTEXT;
        }
        CURRENT.set(new);
        SUCCESS
    }
    context cuCtxGetDevice(device: *mut c_int) { put(device, Ok(current_device())) }
    context cuCtxSynchronize() { work::finish_all() }
    any cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        if mode.is_null() {
            return INVALID_VALUE;
        }
        *mode = work::exchange(*mode);
        SUCCESS
    }

    context cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        put(free, Ok(current_card().free() as usize));
        put(total, Ok(current_card().total() as usize))
    }
    disturbing cuMemAlloc_v2(at: *mut u64, bytes: usize) { put(at, memory::allocate(bytes as u64)) }
    disturbing cuMemFree_v2(at: u64) {
        work::finish_all();
        done(memory::free(at))
    }
    context cuMemAllocManaged(at: *mut u64, bytes: usize, _flags: u32) {
        put(at, memory::allocate_managed(bytes as u64))
    }
    disturbing cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, _flags: u32) {
        put(at, Ok(libc::calloc(bytes, 1)))
    }
    disturbing cuMemFreeHost(at: *mut c_void) {
        libc::free(at);
        SUCCESS
    }
    context cuMemAllocAsync(at: *mut u64, bytes: usize, stream: u64) {
        put(at, match work::capturing(stream) {
            Ok(0) => memory::allocate(bytes as u64),
            Ok(_) => work::capture_alloc(stream, bytes as u64),
            Err(error) => Err(error),
        })
    }
    context cuMemFreeAsync(at: u64, stream: u64) {
        if work::capturing(stream).is_ok_and(|status| status != 0) {
            return work::submit(stream, Op::Free);
        }
        match work::finish(stream) {
            SUCCESS => done(memory::free(at)),
            error => error,
        }
    }
    initialised cuMemGetAllocationGranularity(bytes: *mut usize, _property: *const c_int, _option: c_int) {
        put(bytes, Ok(GRANULE as usize))
    }
    initialised cuMemCreate(handle: *mut u64, bytes: usize, property: *const c_int, flags: u64) {
        if property.is_null() || *property != 1 || flags != 0 {
            return INVALID_VALUE;
        }
        let tier = match (*property.add(2), *property.add(3)) {
            (1, device) if named(device).is_ok() => Tier::Device,
            (1, _) => return INVALID_DEVICE,
            (3, _) => Tier::Host,
            (0, _) => return INVALID_VALUE,
            _ => return NOT_SUPPORTED,
        };
        let device = if tier == Tier::Device { *property.add(3) } else { current_device() };
        put(handle, memory::create(device, tier, bytes as u64, *property.add(1)))
    }
    initialised cuMemRetainAllocationHandle(handle: *mut u64, at: u64) { put(handle, memory::retain(at)) }
    initialised cuMemGetAllocationPropertiesFromHandle(property: *mut [i32; 8], handle: u64) {
        put(property, memory::property(handle))
    }
    initialised cuMemRelease(handle: u64) { done(memory::release(handle)) }
    initialised cuMemAddressReserve(at: *mut u64, bytes: usize, align: usize, wish: u64, _flags: u64) {
        put(at, memory::reserve(bytes as u64, align as u64, wish))
    }
    initialised cuMemAddressFree(at: u64, bytes: usize) { done(memory::unreserve(at, bytes as u64)) }
    initialised cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) {
        match work::unsafe_call() {
            SUCCESS => done(memory::map(at, bytes as u64, offset as u64, handle)),
            error => error,
        }
    }
    initialised cuMemUnmap(at: u64, bytes: usize) { done(memory::unmap_own(at, bytes as u64)) }
    initialised cuMemSetAccess(at: u64, bytes: usize, access: *const [c_int; 3], count: usize) {
        if access.is_null() || count == 0 {
            return INVALID_VALUE;
        }
        for &[kind, device, flags] in std::slice::from_raw_parts(access, count) {
            let result = match (kind, device) {
                (1, device) if named(device).is_ok() => memory::allow(device, at, bytes as u64, flags),
                (1, _) => Err(INVALID_VALUE),
                _ => Err(NOT_SUPPORTED),
            };
            if result.is_err() {
                return done(result);
            }
        }
        SUCCESS
    }
    initialised cuMemGetAccess(flags: *mut u64, location: *const [c_int; 2], at: u64) {
        let Some(&[1, device]) = location.as_ref() else { return INVALID_VALUE };
        if named(device).is_err() {
            return INVALID_VALUE;
        }
        put(flags, memory::access_of(at, device).map(|(_, access)| access as u64).ok_or(INVALID_VALUE))
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
    // Memory from `cuMemAlloc` cannot be shared in this fake.
    context cuIpcGetMemHandle(_handle: *mut c_void, _at: u64) { NOT_SUPPORTED }
    context cuIpcOpenMemHandle_v2(_at: *mut u64, _handle: Ipc, _flags: u32) { INVALID_VALUE }
    context cuIpcCloseMemHandle(_at: u64) { INVALID_VALUE }
    context cuPointerGetAttribute(to: *mut c_void, kind: c_int, at: u64) {
        memory::find(at).map_or(INVALID_VALUE, |found| attribute(to, kind, at, &found))
    }
    context cuPointerGetAttributes(count: u32, kinds: *const c_int, to: *mut *mut c_void, at: u64) {
        for n in 0..count as usize {
            match memory::find(at) {
                Some(found) if attribute(*to.add(n), *kinds.add(n), at, &found) == SUCCESS => {}
                // Attributes that do not apply to an address are zero.
                _ => *(*to.add(n)).cast::<u32>() = 0,
            }
        }
        SUCCESS
    }
    context cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, at: u64) {
        let Some(found) = memory::find(at) else { return NOT_FOUND };
        put(base, Ok(found.mapping.0));
        put(bytes, Ok(found.mapping.1 as usize))
    }

    context cuStreamCreate(stream: *mut u64, flags: u32) { put(stream, Ok(work::create(flags & 1 == 0))) }
    context cuStreamDestroy_v2(stream: u64) { work::destroy(stream) }
    context cuStreamSynchronize(stream: u64) { work::finish(stream) }
    context cuStreamWaitEvent(stream: u64, event: u64, _flags: u32) { work::wait(stream, event) }
    context cuStreamIsCapturing(stream: u64, status: *mut c_int) { put(status, work::capturing(stream)) }
    context cuStreamGetCaptureInfo_v2(
        stream: u64, status: *mut c_int, id: *mut u64, _graph: *mut u64, _nodes: *mut *const u64, _count: *mut usize
    ) {
        if !id.is_null() {
            *id = stream;
        }
        put(status, work::capturing(stream))
    }
    context cuStreamBeginCapture_v2(stream: u64, mode: c_int) { work::begin(stream, mode) }
    context cuStreamEndCapture(stream: u64, graph: *mut u64) { put(graph, work::end(stream)) }
    context cuGraphInstantiateWithFlags(made: *mut u64, graph: u64, _flags: u64) {
        put(made, work::instantiate(graph))
    }
    context cuGraphUpload(graph: u64, _stream: u64) { work::upload(graph) }
    initialised cuGraphGetNodes(graph: u64, nodes: *mut u64, count: *mut usize) {
        let Ok(all) = work::nodes(graph) else { return INVALID_VALUE };
        if !nodes.is_null() {
            let room = (*count).min(all.len());
            std::ptr::copy_nonoverlapping(all.as_ptr(), nodes, room);
        }
        put(count, Ok(all.len()))
    }
    initialised cuGraphNodeGetType(node: u64, kind: *mut c_int) { put(kind, work::node(node).map(|(kind, _)| kind)) }
    initialised cuGraphMemAllocNodeGetParams(node: u64, parameters: *mut [u64; 15]) {
        let Ok((10, bytes)) = work::node(node) else { return INVALID_VALUE };
        let mut all = [0; 15];
        all[13] = bytes;
        put(parameters, Ok(all))
    }
    initialised cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: *mut u64) {
        match attribute {
            0 | 2 => put(value, Ok(work::reserved(device, false))),
            1 | 3 => put(value, Ok(work::reserved(device, true))),
            _ => INVALID_VALUE,
        }
    }
    initialised cuDeviceGraphMemTrim(device: c_int) { work::trim(device) }
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

    any cuCheckpointProcessLock(pid: c_int, _arguments: *const c_void) { checkpoint::order(pid, Order::Lock, &[]).0 }
    any cuCheckpointProcessCheckpoint(pid: c_int, _arguments: *const c_void) {
        checkpoint::order(pid, Order::Checkpoint, &[]).0
    }
    any cuCheckpointProcessRestore(pid: c_int, arguments: *const CheckpointRestore) {
        let pairs = match arguments.as_ref() {
            Some(arguments) if !arguments.pairs.is_null() => {
                std::slice::from_raw_parts(arguments.pairs, arguments.count as usize)
            }
            _ => &[],
        };
        checkpoint::order(pid, Order::Restore, pairs).0
    }
    any cuCheckpointProcessUnlock(pid: c_int, _arguments: *const c_void) { checkpoint::order(pid, Order::Unlock, &[]).0 }
    any cuCheckpointProcessGetState(pid: c_int, state: *mut c_int) {
        let (result, found) = checkpoint::order(pid, Order::Ask, &[]);
        put(state, if result == SUCCESS { Ok(found) } else { Err(result) })
    }

    context cuMemPoolCreate(pool: *mut u64, property: *const c_int) {
        if property.is_null() {
            return INVALID_VALUE;
        }
        put(pool, Ok(further::POOL))
    }
    context cuMemPoolDestroy(_pool: u64) { SUCCESS }
    context cuMemAllocFromPoolAsync(at: *mut u64, bytes: usize, pool: u64, stream: u64) {
        if pool != further::POOL {
            return INVALID_VALUE;
        }
        put(at, match work::capturing(stream) {
            Ok(0) => memory::allocate(bytes as u64),
            Ok(_) => NOT_SUPPORTED_IN_CAPTURE,
            Err(error) => Err(error),
        })
    }
    context cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) {
        work::submit(stream, Op::Copy(to, from, bytes as u64))
    }
    context cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) { work::synchronous(Op::Copy(to, from, bytes as u64)) }
    context cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) { work::synchronous(Op::Copy(to, from, bytes as u64)) }
    context cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) { work::synchronous(Op::Copy(to, from, bytes as u64)) }
    context cuMemsetD8_v2(at: u64, value: u8, bytes: usize) { work::synchronous(Op::Set(at, bytes as u64, value)) }
    context cuMemsetD8Async(at: u64, value: u8, bytes: usize, stream: u64) {
        work::submit(stream, Op::Set(at, bytes as u64, value))
    }
}

/// Result of pool allocations during a capture, which the fake does not support.
const NOT_SUPPORTED_IN_CAPTURE: Result<u64, i32> = Err(NOT_SUPPORTED);

/// Writes a string to the program's buffer if the buffer is large enough.
unsafe fn text(to: *mut c_char, bytes: c_int, text: &str) -> c_int {
    if to.is_null() || (bytes as usize) <= text.len() {
        return INVALID_VALUE;
    }
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        *to.add(text.len()) = 0;
    }
    SUCCESS
}

/// Stores an attribute of an address, as NVIDIA's driver 580 does.
unsafe fn attribute(to: *mut c_void, kind: c_int, at: u64, found: &memory::Found) -> c_int {
    let host = found.tier == Tier::Host;
    unsafe {
        match kind {
            2 => *to.cast::<u32>() = if host { 1 } else { 2 },
            3 => *to.cast::<u64>() = at,
            4 if host => *to.cast::<u64>() = at,
            4 => return INVALID_VALUE,
            7 | 20 => *to.cast::<u64>() = found.id,
            9 => *to.cast::<c_int>() = if host { -1 } else { found.device },
            10 => *to.cast::<bool>() = found.plain,
            11 => *to.cast::<u64>() = found.range.0,
            12 => *to.cast::<u64>() = found.range.1,
            14 => *to.cast::<c_int>() = found.kinds,
            16 => *to.cast::<c_int>() = found.access,
            18 => *to.cast::<u64>() = found.mapping.1,
            19 => *to.cast::<u64>() = found.mapping.0,
            _ => return NOT_SUPPORTED,
        }
    }
    SUCCESS
}
