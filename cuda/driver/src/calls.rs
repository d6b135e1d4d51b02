//! Functions of the real driver that the shim calls directly.
//!
//! UNSAFETY: calls functions with the signatures in NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::symbols::{at, real};

/// `CUDA_SUCCESS`.
pub const SUCCESS: c_int = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub const INVALID_VALUE: c_int = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`.
pub const NOT_INITIALIZED: c_int = 3;
/// `CUDA_ERROR_NO_DEVICE`.
pub const NO_DEVICE: c_int = 100;
/// `CUDA_ERROR_INVALID_DEVICE`.
pub const INVALID_DEVICE: c_int = 101;
/// `CUDA_ERROR_INVALID_CONTEXT`.
pub const INVALID_CONTEXT: c_int = 201;
/// `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: c_int = 600;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub const NOT_SUPPORTED: c_int = 801;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
pub const CAPTURE_UNSUPPORTED: c_int = 900;
/// `CUDA_ERROR_STREAM_CAPTURE_...`: results of calls that are not permitted during a capture.
pub const CAPTURE_FORBIDS: std::ops::RangeInclusive<c_int> = 900..=908;
/// `CUDA_ERROR_CAPTURED_EVENT`.
pub const CAPTURED_EVENT: c_int = 907;
/// `CUDA_ERROR_SYSTEM_NOT_READY`.
pub const SYSTEM_NOT_READY: c_int = 802;

/// Address in the card's address space.
pub type Address = u64;
/// Handle of a mappable allocation.
pub type Handle = u64;
/// Handle of a stream, event or context.
pub type Object = *mut c_void;

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Ipc(pub [u8; 64]);

/// `CUmemAccessDesc`: a location and its access to a mapping.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    kind: c_int,
    id: c_int,
    flags: c_int,
}

impl Access {
    /// Returns a descriptor that gives the card `device` read and write access.
    pub fn all(device: c_int) -> Self {
        Self { kind: 1, id: device, flags: 3 }
    }

    /// Returns a descriptor that denies the card `device` access.
    pub fn none_of(device: c_int) -> Self {
        Self::none(1, device)
    }

    /// Returns the card if the location is a card.
    pub fn device(&self) -> Option<c_int> {
        self.is_device().then_some(self.id)
    }

    /// Returns a descriptor that denies a location access.
    pub fn none(kind: c_int, id: c_int) -> Self {
        Self { kind, id, flags: 0 }
    }

    /// Returns true if the location is a card.
    pub fn is_device(&self) -> bool {
        self.kind == 1
    }

    /// Returns true if both values describe the same location.
    pub fn same_location(&self, other: &Self) -> bool {
        (self.kind, self.id) == (other.kind, other.id)
    }

    /// Returns the access flags.
    pub fn flags(&self) -> c_int {
        self.flags
    }
}

/// Stub for functions that do not exist in the real driver.
pub extern "C" fn not_supported() -> c_int {
    NOT_SUPPORTED
}

/// Stub for calls that refer to a device that is not visible to the program.
pub extern "C" fn invalid_device() -> c_int {
    INVALID_DEVICE
}

/// Stub for calls that grant access to a device that is not visible to the program.
pub extern "C" fn invalid_value() -> c_int {
    INVALID_VALUE
}

/// Stub for all functions in the child of a process that had initialized the driver.
pub extern "C" fn not_initialized() -> c_int {
    NOT_INITIALIZED
}

/// Stub for all functions if no driver was found.
pub extern "C" fn no_driver() -> c_int {
    NO_DEVICE
}

macro_rules! calls {
    ($($name:ident = $symbol:ident($($arg:ident: $ty:ty),*);)*) => { $(
        /// Calls this function of the driver API.
        ///
        /// # Safety
        /// Same as for the driver's function.
        #[inline]
        pub unsafe fn $name($($arg: $ty),*) -> c_int {
            let function = real(at::$symbol);
            if function.is_null() {
                return NOT_SUPPORTED;
            }
            // SAFETY: the headers declare the symbol with these arguments.
            let function: unsafe extern "C" fn($($ty),*) -> c_int = unsafe { std::mem::transmute(function) };
            // SAFETY: guaranteed by the caller.
            unsafe { function($($arg),*) }
        }
    )* };
}

calls! {
    init = cuInit(flags: u32);
    get_proc_address = cuGetProcAddress(name: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64);
    get_proc_address_v2 = cuGetProcAddress_v2(
        name: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int);
    get_proc_address_v2_per_thread = cuGetProcAddress_v2_ptsz(
        name: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int);
    device_get_count = cuDeviceGetCount(count: *mut c_int);
    device_get = cuDeviceGet(device: *mut c_int, ordinal: c_int);
    device_get_attribute = cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    driver_get_version = cuDriverGetVersion(version: *mut u32);
    get_export_table = cuGetExportTable(table: *mut *const c_void, uuid: *const [u8; 16]);
    device_get_by_address = cuDeviceGetByPCIBusId(device: *mut c_int, address: *const c_char);
    device_get_uuid = cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    device_total_mem = cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    primary_ctx_retain = cuDevicePrimaryCtxRetain(context: *mut Object, device: c_int);
    primary_ctx_release = cuDevicePrimaryCtxRelease_v2(device: c_int);
    primary_ctx_release_first = cuDevicePrimaryCtxRelease(device: c_int);
    primary_ctx_reset = cuDevicePrimaryCtxReset_v2(device: c_int);
    primary_ctx_reset_first = cuDevicePrimaryCtxReset(device: c_int);
    green_ctx_destroy = cuGreenCtxDestroy(context: Object);
    ctx_destroy_first = cuCtxDestroy(context: Object);
    ctx_create = cuCtxCreate_v2(context: *mut Object, flags: u32, device: c_int);
    ctx_create_v3 = cuCtxCreate_v3(
        context: *mut Object, affinity: *const c_void, count: c_int, flags: u32, device: c_int);
    ctx_create_v4 = cuCtxCreate_v4(context: *mut Object, parameters: *const c_void, flags: u32, device: c_int);
    ctx_destroy = cuCtxDestroy_v2(context: Object);
    ctx_get_current = cuCtxGetCurrent(context: *mut Object);
    ctx_set_current = cuCtxSetCurrent(context: Object);
    ctx_get_device = cuCtxGetDevice(device: *mut c_int);
    ctx_enable_peer_access = cuCtxEnablePeerAccess(peer: Object, flags: u32);
    ctx_disable_peer_access = cuCtxDisablePeerAccess(peer: Object);
    ctx_synchronize = cuCtxSynchronize();
    mem_get_info = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    mem_free = cuMemFree_v2(address: Address);
    mem_free_async = cuMemFreeAsync(address: Address, stream: Object);
    mem_free_async_per_thread = cuMemFreeAsync_ptsz(address: Address, stream: Object);
    mem_alloc_async = cuMemAllocAsync(address: *mut Address, bytes: usize, stream: Object);
    mem_alloc_async_per_thread = cuMemAllocAsync_ptsz(address: *mut Address, bytes: usize, stream: Object);
    mem_alloc_from_pool = cuMemAllocFromPoolAsync(address: *mut Address, bytes: usize, pool: Object, stream: Object);
    mem_alloc_from_pool_per_thread =
        cuMemAllocFromPoolAsync_ptsz(address: *mut Address, bytes: usize, pool: Object, stream: Object);
    mem_alloc_managed = cuMemAllocManaged(address: *mut Address, bytes: usize, flags: u32);
    mem_get_address_range = cuMemGetAddressRange_v2(base: *mut Address, bytes: *mut usize, address: Address);
    mem_host_alloc = cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: u32);
    mem_alloc_host = cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize);
    mem_free_host = cuMemFreeHost(address: *mut c_void);
    mem_host_register = cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: u32);
    mem_host_unregister = cuMemHostUnregister(address: *mut c_void);
    mem_create = cuMemCreate(handle: *mut Handle, bytes: usize, property: *const c_void, flags: u64);
    mem_release = cuMemRelease(handle: Handle);
    mem_pool_create = cuMemPoolCreate(pool: *mut Object, property: *const c_void);
    mem_pool_destroy = cuMemPoolDestroy(pool: Object);
    mem_pool_set_access = cuMemPoolSetAccess(pool: Object, access: *const Access, count: usize);
    mem_address_reserve = cuMemAddressReserve(address: *mut Address, bytes: usize, align: usize, at: Address, flags: u64);
    mem_address_free = cuMemAddressFree(address: Address, bytes: usize);
    mem_map = cuMemMap(address: Address, bytes: usize, offset: usize, handle: Handle, flags: u64);
    mem_unmap = cuMemUnmap(address: Address, bytes: usize);
    mem_set_access = cuMemSetAccess(address: Address, bytes: usize, access: *const Access, count: usize);
    mem_import = cuMemImportFromShareableHandle(handle: *mut Handle, source: *mut c_void, kind: c_int);
    mem_export = cuMemExportToShareableHandle(target: *mut c_void, handle: Handle, kind: c_int, flags: u64);
    mem_get_access = cuMemGetAccess(flags: *mut u64, location: *const [c_int; 2], address: Address);
    mem_get_granularity = cuMemGetAllocationGranularity(bytes: *mut usize, property: *const c_void, option: c_int);
    mem_get_property = cuMemGetAllocationPropertiesFromHandle(property: *mut c_void, handle: Handle);
    mem_retain = cuMemRetainAllocationHandle(handle: *mut Handle, address: *mut c_void);
    mem_map_array = cuMemMapArrayAsync(list: *const c_void, count: u32, stream: Object);
    mem_map_array_per_thread = cuMemMapArrayAsync_ptsz(list: *const c_void, count: u32, stream: Object);
    multicast_bind_mem = cuMulticastBindMem(
        multicast: Handle, at: usize, handle: Handle, offset: usize, bytes: usize, flags: u64);
    multicast_bind_mem_v2 = cuMulticastBindMem_v2(
        multicast: Handle, device: c_int, at: usize, handle: Handle, offset: usize, bytes: usize, flags: u64);
    multicast_unbind = cuMulticastUnbind(multicast: u64, device: c_int, at: usize, bytes: usize);
    endpoint_unbind = cuLogicalEndpointUnbind(endpoint: u64, device: c_int, at: usize, bytes: usize);
    endpoint_bind_mem = cuLogicalEndpointBindMem(
        endpoint: u64, device: c_int, at: usize, handle: Handle, offset: usize, bytes: usize, flags: u64);
    pointer_get_attribute = cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: Address);
    pointer_get_attributes =
        cuPointerGetAttributes(count: u32, attributes: *const c_int, data: *mut *mut c_void, address: Address);
    ipc_get_mem_handle = cuIpcGetMemHandle(handle: *mut Ipc, address: Address);
    ipc_open_mem_handle = cuIpcOpenMemHandle(address: *mut Address, handle: Ipc, flags: u32);
    ipc_open_mem_handle_v2 = cuIpcOpenMemHandle_v2(address: *mut Address, handle: Ipc, flags: u32);
    ipc_close_mem_handle = cuIpcCloseMemHandle(address: Address);
    memcpy_dtod = cuMemcpyDtoD_v2(to: Address, from: Address, bytes: usize);
    array_create = cuArrayCreate_v2(array: *mut Object, descriptor: *const c_void);
    array_3d_create = cuArray3DCreate_v2(array: *mut Object, descriptor: *const c_void);
    array_destroy = cuArrayDestroy(array: Object);
    mipmapped_array_create = cuMipmappedArrayCreate(array: *mut Object, descriptor: *const c_void, levels: u32);
    mipmapped_array_destroy = cuMipmappedArrayDestroy(array: Object);
    graph_get_nodes = cuGraphGetNodes(graph: Object, nodes: *mut Object, count: *mut usize);
    graph_node_get_type = cuGraphNodeGetType(node: Object, kind: *mut c_int);
    graph_alloc_get_params = cuGraphMemAllocNodeGetParams(node: Object, parameters: *mut c_void);
    graph_child_get_graph = cuGraphChildGraphNodeGetGraph(node: Object, graph: *mut Object);
    graph_instantiate = cuGraphInstantiate(
        made: *mut Object, graph: Object, failed: *mut Object, log: *mut c_void, bytes: usize);
    graph_instantiate_v2 = cuGraphInstantiate_v2(
        made: *mut Object, graph: Object, failed: *mut Object, log: *mut c_void, bytes: usize);
    graph_instantiate_with_flags = cuGraphInstantiateWithFlags(made: *mut Object, graph: Object, flags: u64);
    graph_instantiate_with_params = cuGraphInstantiateWithParams(
        made: *mut Object, graph: Object, parameters: *mut c_void);
    graph_instantiate_with_params_per_thread = cuGraphInstantiateWithParams_ptsz(
        made: *mut Object, graph: Object, parameters: *mut c_void);
    graph_exec_destroy = cuGraphExecDestroy(graph: Object);
    graph_mem_attribute = cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: *mut c_void);
    graph_mem_trim = cuDeviceGraphMemTrim(device: c_int);
    stream_is_capturing = cuStreamIsCapturing(stream: Object, status: *mut c_int);
    stream_get_ctx = cuStreamGetCtx(stream: Object, context: *mut Object);
    stream_query = cuStreamQuery(stream: Object);
    stream_query_per_thread = cuStreamQuery_ptsz(stream: Object);
    stream_destroy = cuStreamDestroy_v2(stream: Object);
    stream_destroy_first = cuStreamDestroy(stream: Object);
    stream_begin_capture_first = cuStreamBeginCapture(stream: Object);
    stream_begin_capture_first_per_thread = cuStreamBeginCapture_ptsz(stream: Object);
    stream_begin_recapture_to_graph = cuStreamBeginRecaptureToGraph(
        stream: Object, mode: c_int, graph: Object, callback: *const c_void, data: *const c_void);
    stream_begin_recapture_to_graph_per_thread = cuStreamBeginRecaptureToGraph_ptsz(
        stream: Object, mode: c_int, graph: Object, callback: *const c_void, data: *const c_void);
    stream_begin_capture_to_cig = cuStreamBeginCaptureToCig(stream: Object, parameters: *const c_void);
    stream_begin_capture_to_cig_per_thread = cuStreamBeginCaptureToCig_ptsz(stream: Object, parameters: *const c_void);
    stream_end_capture_to_cig = cuStreamEndCaptureToCig(stream: Object);
    stream_end_capture_to_cig_per_thread = cuStreamEndCaptureToCig_ptsz(stream: Object);
    primary_ctx_get_state = cuDevicePrimaryCtxGetState(device: c_int, flags: *mut u32, active: *mut c_int);
    stream_begin_capture = cuStreamBeginCapture_v2(stream: Object, mode: c_int);
    stream_begin_capture_per_thread = cuStreamBeginCapture_v2_ptsz(stream: Object, mode: c_int);
    stream_begin_capture_to_graph = cuStreamBeginCaptureToGraph(
        stream: Object, graph: Object, nodes: *const c_void, data: *const c_void, count: usize, mode: c_int);
    stream_begin_capture_to_graph_per_thread = cuStreamBeginCaptureToGraph_ptsz(
        stream: Object, graph: Object, nodes: *const c_void, data: *const c_void, count: usize, mode: c_int);
    stream_end_capture = cuStreamEndCapture(stream: Object, graph: *mut Object);
    stream_end_capture_per_thread = cuStreamEndCapture_ptsz(stream: Object, graph: *mut Object);
    exchange_capture_mode = cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
    event_create = cuEventCreate(event: *mut Object, flags: u32);
    event_record = cuEventRecord(event: Object, stream: Object);
    event_record_per_thread = cuEventRecord_ptsz(event: Object, stream: Object);
    event_query = cuEventQuery(event: Object);
    event_elapsed = cuEventElapsedTime(milliseconds: *mut f32, from: Object, to: Object);
}

/// Returns this thread's current context, or null.
pub fn current_context() -> Object {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is valid.
    let result = unsafe { ctx_get_current(&raw mut context) };
    if result == SUCCESS { context } else { std::ptr::null_mut() }
}

/// Returns the card of this thread's current context.
pub fn current_device() -> Result<c_int, c_int> {
    let mut device = 0;
    // SAFETY: the pointer is valid.
    match unsafe { ctx_get_device(&raw mut device) } {
        SUCCESS => Ok(device),
        error => Err(error),
    }
}

/// Runs `work` with this thread in relaxed capture mode, in which it can make calls that are otherwise not permitted
/// during another thread's capture.
pub fn relaxed<T>(work: impl FnOnce() -> T) -> T {
    let mut mode: c_int = 2;
    // SAFETY: the pointer is valid. The call swaps the given mode with the thread's mode.
    unsafe { exchange_capture_mode(&raw mut mode) };
    let result = work();
    // SAFETY: as above; this call restores the thread's mode.
    unsafe { exchange_capture_mode(&raw mut mode) };
    result
}

/// Environment variable with the address range that the library requests for card memory, as two hexadecimal numbers
/// separated by a hyphen. The worker of a VM uses the same addresses as the guest.
pub const ADDRESSES_VARIABLE: &str = "GPU_MEDIATOR_CUDA_ADDRESSES";

/// Part of the range in [`ADDRESSES_VARIABLE`] that has not been requested yet. Static, because the reservations of all
/// cards share the range.
static REQUESTED: OnceLock<Mutex<Range<Address>>> = OnceLock::new();

fn parse_range(text: &str) -> Option<Range<Address>> {
    let (first, end) = text.split_once('-')?;
    let parse = |text: &str| Address::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    Some(parse(first)?..parse(end)?)
}

/// Returns the address to request for a reservation of `bytes`, or 0 if no range is set or the range is exhausted.
fn address_to_request(bytes: usize, align: usize) -> Address {
    let range = REQUESTED.get_or_init(|| {
        Mutex::new(std::env::var(ADDRESSES_VARIABLE).ok().and_then(|text| parse_range(&text)).unwrap_or(0..0))
    });
    let mut range = range.lock().unwrap_or_else(PoisonError::into_inner);
    let at = range.start.checked_next_multiple_of((align as u64).max(GRANULE));
    let end = at.and_then(|at| at.checked_add(bytes as u64)).filter(|end| *end <= range.end);
    let (Some(at), Some(end)) = (at, end) else { return 0 };
    range.start = end;
    at
}

/// Minimum alignment of requested addresses, in bytes.
const GRANULE: u64 = 2 << 20;

/// Reserves addresses. Requests addresses in the range in [`ADDRESSES_VARIABLE`] if it is set and not exhausted.
/// Returns the driver's result.
pub fn reserve_addresses(base: &mut Address, bytes: usize, align: usize) -> c_int {
    // SAFETY: the pointer is valid.
    unsafe { mem_address_reserve(base, bytes, align, address_to_request(bytes, align), 0) }
}

#[cfg(test)]
mod tests {
    use super::parse_range;

    #[test]
    fn range_of_addresses_is_parsed_or_ignored() {
        assert_eq!(parse_range("0x200000000000-300000000000"), Some(0x2000_0000_0000..0x3000_0000_0000));
        assert_eq!((parse_range("1000"), parse_range("a-q"), parse_range("")), (None, None, None));
    }
}
