//! The driver API as programs call it.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

/// Looks up a function by its name and API version, and casts it to the given signature.
macro_rules! function {
    ($cuda:expr, $name:literal, $version:literal, fn($($argument:ty),* $(,)?)) => {{
        let found = $cuda.find($name, $version)?;
        // SAFETY: NVIDIA's header declares the function with these arguments.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(found) }
    }};
}

mod arrays;
mod names;
mod nodes;
mod objects;
mod peers;
mod registered;
mod variables;

pub use objects::Objects;

use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt;

/// A `CUmemLocation`.
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// `CUmemLocationType`.
    pub kind: i32,
    /// Number of the location within its kind, such as a device number.
    pub id: i32,
}

impl Location {
    /// The first card's memory.
    pub const FIRST_CARD: Self = Self { kind: 1, id: 0 };
}

/// A driver call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Name of the function.
    pub call: &'static str,
    /// Result code of the call.
    pub code: i32,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}", self.call, self.code)
    }
}

impl std::error::Error for Failed {}

/// `CUipcMemHandle`: a handle that lets another process open the memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipc(pub [u64; 8]);

macro_rules! functions {
    ($($name:ident = $symbol:ident($($arg:ident: $ty:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct Functions {
            $($name: unsafe extern "C" fn($($ty),*) -> c_int,)*
        }

        impl Functions {
            unsafe fn load(library: *mut c_void) -> Result<Self, Failed> {
                Ok(Self { $($name: {
                    let name = concat!(stringify!($symbol), "\0");
                    // SAFETY: the name is NUL-terminated, and the symbol has this signature.
                    unsafe {
                        let found = libc::dlsym(library, name.as_ptr().cast());
                        if found.is_null() {
                            return Err(Failed { call: stringify!($symbol), code: 500 });
                        }
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> c_int>(found)
                    }
                },)* })
            }
        }

        impl Cuda {
            $(#[allow(clippy::too_many_arguments, reason = "the driver's own signature")]
            fn $name(&self, $($arg: $ty),*) -> Result<(), Failed> {
                // SAFETY: the callers in this file pass valid pointers and handles.
                match unsafe { (self.functions.$name)($($arg),*) } {
                    0 => Ok(()),
                    code => Err(Failed { call: stringify!($symbol), code }),
                }
            })*
        }
    };
}

/// The driver, with one context.
#[derive(Clone, Copy)]
pub struct Cuda {
    functions: Functions,
    context: u64,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("context", &self.context).finish_non_exhaustive()
    }
}

functions! {
    raw_init = cuInit(flags: u32);
    raw_count = cuDeviceGetCount(count: *mut c_int);
    raw_device = cuDeviceGet(device: *mut c_int, ordinal: c_int);
    raw_bus_id = cuDeviceGetPCIBusId(text: *mut std::ffi::c_char, bytes: c_int, device: c_int);
    raw_by_bus_id = cuDeviceGetByPCIBusId(device: *mut c_int, text: *const std::ffi::c_char);
    raw_context = cuCtxCreate_v2(context: *mut u64, flags: u32, device: c_int);
    raw_limit = cuCtxSetLimit(limit: c_int, value: usize);
    raw_pool = cuMemPoolCreate(pool: *mut u64, property: *const [i32; 22]);
    raw_alloc_pool = cuMemAllocFromPoolAsync(at: *mut u64, bytes: usize, pool: u64, stream: u64);
    raw_uuid = cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    raw_total = cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    raw_retain = cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int);
    raw_current = cuCtxSetCurrent(context: u64);
    raw_finish = cuCtxSynchronize();
    raw_info = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    raw_alloc = cuMemAlloc_v2(at: *mut u64, bytes: usize);
    raw_managed = cuMemAllocManaged(at: *mut u64, bytes: usize, flags: u32);
    raw_free = cuMemFree_v2(at: u64);
    raw_alloc_async = cuMemAllocAsync(at: *mut u64, bytes: usize, stream: u64);
    raw_free_async = cuMemFreeAsync(at: u64, stream: u64);
    raw_create = cuMemCreate(handle: *mut u64, bytes: usize, property: *const [i32; 8], flags: u64);
    raw_release = cuMemRelease(handle: u64);
    raw_reserve = cuMemAddressReserve(at: *mut u64, bytes: usize, align: usize, wish: u64, flags: u64);
    raw_unreserve = cuMemAddressFree(at: u64, bytes: usize);
    raw_map = cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    raw_unmap = cuMemUnmap(at: u64, bytes: usize);
    raw_access = cuMemSetAccess(at: u64, bytes: usize, access: *const [i32; 3], count: usize);
    raw_export = cuMemExportToShareableHandle(to: *mut c_int, handle: u64, kind: c_int, flags: u64);
    raw_import = cuMemImportFromShareableHandle(handle: *mut u64, from: usize, kind: c_int);
    raw_ipc_get = cuIpcGetMemHandle(handle: *mut Ipc, at: u64);
    raw_ipc_open = cuIpcOpenMemHandle_v2(at: *mut u64, handle: Ipc, flags: u32);
    raw_ipc_close = cuIpcCloseMemHandle(at: u64);
    raw_reference = cuMemRetainAllocationHandle(handle: *mut u64, at: u64);
    raw_property = cuMemGetAllocationPropertiesFromHandle(property: *mut [i32; 8], handle: u64);
    raw_granularity = cuMemGetAllocationGranularity(bytes: *mut usize, property: *const [i32; 8], option: c_int);
    raw_may = cuMemGetAccess(flags: *mut u64, location: *const [i32; 2], at: u64);
    raw_attribute = cuPointerGetAttribute(to: *mut c_void, kind: c_int, at: u64);
    raw_attributes = cuPointerGetAttributes(count: u32, kinds: *const c_int, to: *const *mut u64, at: u64);
    raw_range = cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, at: u64);
    raw_stream = cuStreamCreate(stream: *mut u64, flags: u32);
    raw_event = cuEventCreate(event: *mut u64, flags: u32);
    raw_record = cuEventRecord(event: u64, stream: u64);
    raw_wait = cuStreamWaitEvent(stream: u64, event: u64, flags: u32);
    raw_destroy = cuStreamDestroy_v2(stream: u64);
    raw_stream_finish = cuStreamSynchronize(stream: u64);
    raw_begin = cuStreamBeginCapture_v2(stream: u64, mode: c_int);
    raw_end = cuStreamEndCapture(stream: u64, graph: *mut u64);
    raw_instantiate = cuGraphInstantiateWithFlags(made: *mut u64, graph: u64, flags: u64);
    raw_graph = cuGraphLaunch(graph: u64, stream: u64);
    raw_trim = cuDeviceGraphMemTrim(device: c_int);
    raw_copy = cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64);
    raw_read = cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    raw_write = cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    raw_set = cuMemsetD8_v2(at: u64, value: u8, bytes: usize);
    raw_set_async = cuMemsetD8Async(at: u64, value: u8, bytes: usize, stream: u64);
    raw_module = cuModuleLoadData(module: *mut u64, image: *const c_void);
    raw_function = cuModuleGetFunction(function: *mut u64, module: u64, name: *const std::ffi::c_char);
    raw_launch = cuLaunchKernel(
        function: u64, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: u64,
        parameters: *const *const u64, extra: *const c_void);
    raw_lookup = cuGetProcAddress_v2(
        name: *const std::ffi::c_char, to: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int);
}

fn check(call: &'static str, code: c_int) -> Result<(), Failed> {
    if code == 0 { Ok(()) } else { Err(Failed { call, code }) }
}

impl Cuda {
    fn find(&self, name: &'static CStr, version: c_int) -> Result<*mut c_void, Failed> {
        let (mut found, mut status) = (std::ptr::null_mut(), 0);
        self.raw_lookup(name.as_ptr(), &raw mut found, version, 0, &raw mut status)?;
        if found.is_null() { Err(Failed { call: "cuGetProcAddress_v2", code: 500 }) } else { Ok(found) }
    }

    /// Loads the driver's library from `path`. If `path` is only a name, the loader searches for it.
    pub fn load(path: &str) -> Result<Self, Failed> {
        let missing = Failed { call: "dlopen", code: 100 };
        let name = CString::new(path).map_err(|_| missing)?;
        // SAFETY: the library is the driver's or a test's, and is never closed.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(missing);
        }
        // SAFETY: the handle is valid.
        let functions = unsafe { Functions::load(library)? };
        Ok(Self { functions, context: 0 })
    }

    /// Initializes the driver and makes the first card's primary context current.
    pub fn open(path: &str) -> Result<Self, Failed> {
        let mut cuda = Self::load(path)?;
        cuda.raw_init(0)?;
        let mut context = 0;
        cuda.raw_retain(&raw mut context, 0)?;
        cuda.context = context;
        cuda.enter()?;
        Ok(cuda)
    }

    /// Initializes the driver without making a context current.
    pub fn init(&self) -> Result<(), Failed> {
        self.raw_init(0)
    }

    /// Makes the context current on this thread.
    pub fn enter(&self) -> Result<(), Failed> {
        self.raw_current(self.context)
    }

    /// Returns the number of devices that the driver reports.
    pub fn count(&self) -> Result<i32, Failed> {
        let mut count = 0;
        self.raw_count(&raw mut count).map(|()| count)
    }

    /// Returns the device with the given ordinal.
    pub fn device(&self, ordinal: i32) -> Result<i32, Failed> {
        let mut device = 0;
        self.raw_device(&raw mut device, ordinal).map(|()| device)
    }

    /// Returns a device's UUID.
    pub fn uuid_of(&self, device: i32) -> Result<[u8; 16], Failed> {
        let mut uuid = [0; 16];
        self.raw_uuid(&raw mut uuid, device).map(|()| uuid)
    }

    /// Returns a device's PCI address.
    pub fn bus_id(&self, device: i32) -> Result<String, Failed> {
        let mut text = [0u8; 32];
        self.raw_bus_id(text.as_mut_ptr().cast(), 32, device)?;
        Ok(text.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect())
    }

    /// Returns the device with this PCI address.
    pub fn by_bus_id(&self, address: &str) -> Result<i32, Failed> {
        let (mut device, address) = (0, CString::new(address).unwrap_or_default());
        self.raw_by_bus_id(&raw mut device, address.as_ptr()).map(|()| device)
    }

    /// Creates another context on the first card and makes it current.
    pub fn another_context(&self) -> Result<u64, Failed> {
        let mut context = 0;
        self.raw_context(&raw mut context, 0, 0).map(|()| context)
    }

    /// Sets the context's limit with the given `CUlimit` number.
    pub fn limit(&self, limit: i32, value: u64) -> Result<(), Failed> {
        self.raw_limit(limit, value as usize)
    }

    /// Creates a memory pool that can be exported as a descriptor.
    pub fn shared_pool(&self) -> Result<u64, Failed> {
        let (mut pool, mut property) = (0, [0; 22]);
        property[..4].copy_from_slice(&[1, 1, 1, 0]);
        self.raw_pool(&raw mut pool, &raw const property).map(|()| pool)
    }

    /// Allocates memory from a pool.
    pub fn alloc_of(&self, pool: u64, bytes: u64) -> Result<u64, Failed> {
        let mut at = 0;
        self.raw_alloc_pool(&raw mut at, bytes as usize, pool, 0).map(|()| at)
    }

    /// Loads a module from PTX.
    pub fn module(&self, text: &str) -> Result<u64, Failed> {
        let (mut module, text) = (0, CString::new(text).map_err(|_| Failed { call: "module", code: 1 })?);
        self.raw_module(&raw mut module, text.as_ptr().cast()).map(|()| module)
    }

    /// Returns the first card's UUID.
    pub fn uuid(&self) -> Result<[u8; 16], Failed> {
        let mut uuid = [0; 16];
        self.raw_uuid(&raw mut uuid, 0).map(|()| uuid)
    }

    /// Returns the first card's memory size in bytes.
    pub fn total(&self) -> Result<u64, Failed> {
        let mut bytes = 0;
        self.raw_total(&raw mut bytes, 0).map(|()| bytes as u64)
    }

    /// Returns the free and the total memory in bytes.
    pub fn info(&self) -> Result<(u64, u64), Failed> {
        let (mut free, mut total) = (0, 0);
        self.raw_info(&raw mut free, &raw mut total).map(|()| (free as u64, total as u64))
    }

    /// Allocates card memory, and returns its address.
    pub fn alloc(&self, bytes: u64) -> Result<u64, Failed> {
        let mut at = 0;
        self.raw_alloc(&raw mut at, bytes as usize).map(|()| at)
    }

    /// Allocates managed memory. The library requests each such allocation from the owner as fixed memory.
    pub fn alloc_managed(&self, bytes: u64) -> Result<u64, Failed> {
        let mut at = 0;
        self.raw_managed(&raw mut at, bytes as usize, 1).map(|()| at)
    }

    /// Frees memory allocated with [`Self::alloc`].
    pub fn free(&self, at: u64) -> Result<(), Failed> {
        self.raw_free(at)
    }

    /// Allocates memory in stream order.
    pub fn alloc_async(&self, bytes: u64, stream: u64) -> Result<u64, Failed> {
        let mut at = 0;
        self.raw_alloc_async(&raw mut at, bytes as usize, stream).map(|()| at)
    }

    /// Frees memory in stream order.
    pub fn free_async(&self, at: u64, stream: u64) -> Result<(), Failed> {
        self.raw_free_async(at, stream)
    }

    /// Creates exportable physical memory on the card or in host memory.
    pub fn create(&self, host: bool, bytes: u64) -> Result<u64, Failed> {
        let mut handle = 0;
        // The type (pinned), the handle type (POSIX descriptor), and the kind and number of the location; the rest is
        // zero.
        let property = [1, 1, if host { 3 } else { 1 }, 0, 0, 0, 0, 0];
        self.raw_create(&raw mut handle, bytes as usize, &raw const property, 0).map(|()| handle)
    }

    /// Releases a reference to physical memory.
    pub fn release(&self, handle: u64) -> Result<(), Failed> {
        self.raw_release(handle)
    }

    /// Exports physical memory as a descriptor.
    pub fn export(&self, handle: u64) -> Result<std::os::fd::OwnedFd, Failed> {
        let mut descriptor = -1;
        self.raw_export(&raw mut descriptor, handle, 1, 0)?;
        // SAFETY: the descriptor is new and has no other owner.
        Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(descriptor) })
    }

    /// Imports physical memory from a descriptor.
    pub fn import(&self, descriptor: &std::os::fd::OwnedFd) -> Result<u64, Failed> {
        let mut handle = 0;
        let number = std::os::fd::AsRawFd::as_raw_fd(descriptor);
        self.raw_import(&raw mut handle, usize::try_from(number).unwrap_or(usize::MAX), 1).map(|()| handle)
    }

    /// Returns a handle that lets another process open an allocation.
    pub fn share(&self, at: u64) -> Result<Ipc, Failed> {
        let mut handle = Ipc([0; 8]);
        self.raw_ipc_get(&raw mut handle, at).map(|()| handle)
    }

    /// Opens another process's allocation.
    pub fn attach(&self, handle: Ipc) -> Result<u64, Failed> {
        let mut at = 0;
        self.raw_ipc_open(&raw mut at, handle, 1).map(|()| at)
    }

    /// Closes another process's allocation.
    pub fn detach(&self, at: u64) -> Result<(), Failed> {
        self.raw_ipc_close(at)
    }

    /// Reserves addresses, and maps physical memory at them with read and write access.
    pub fn map(&self, handle: u64, bytes: u64) -> Result<u64, Failed> {
        let mut at = 0;
        self.raw_reserve(&raw mut at, bytes as usize, 0, 0, 0)?;
        self.map_at(at, bytes, 0, handle)?;
        self.allow(at, bytes, Location::FIRST_CARD, 3)?;
        Ok(at)
    }

    /// Reverts [`Self::map`].
    pub fn unmap(&self, at: u64, bytes: u64) -> Result<(), Failed> {
        self.raw_unmap(at, bytes as usize)?;
        self.raw_unreserve(at, bytes as usize)
    }

    /// Creates physical card memory that cannot be exported.
    pub fn create_own(&self, bytes: u64) -> Result<u64, Failed> {
        self.create_of([1, 0, 1, 0, 0, 0, 0, 0], bytes, 0)
    }

    /// Creates physical memory with the given properties.
    pub fn create_of(&self, property: [i32; 8], bytes: u64, flags: u64) -> Result<u64, Failed> {
        let mut handle = 0;
        self.raw_create(&raw mut handle, bytes as usize, &raw const property, flags).map(|()| handle)
    }

    /// Reserves an address range, and returns its start.
    pub fn reserve(&self, bytes: u64) -> Result<u64, Failed> {
        let mut at = 0;
        self.raw_reserve(&raw mut at, bytes as usize, 0, 0, 0).map(|()| at)
    }

    /// Releases a reserved address range.
    pub fn unreserve(&self, at: u64, bytes: u64) -> Result<(), Failed> {
        self.raw_unreserve(at, bytes as usize)
    }

    /// Maps physical memory at reserved addresses.
    pub fn map_at(&self, at: u64, bytes: u64, offset: u64, handle: u64) -> Result<(), Failed> {
        self.raw_map(at, bytes as usize, offset as usize, handle, 0)
    }

    /// Removes the mappings in an address range.
    pub fn unmap_at(&self, at: u64, bytes: u64) -> Result<(), Failed> {
        self.raw_unmap(at, bytes as usize)
    }

    /// Sets a location's access rights to the mappings in an address range.
    pub fn allow(&self, at: u64, bytes: u64, location: Location, flags: i32) -> Result<(), Failed> {
        let access = [location.kind, location.id, flags];
        self.raw_access(at, bytes as usize, &raw const access, 1)
    }

    /// Returns the first card's access flags for an address.
    pub fn may(&self, at: u64) -> Result<u64, Failed> {
        let (mut flags, location) = (0, [1, 0]);
        self.raw_may(&raw mut flags, &raw const location, at).map(|()| flags)
    }

    /// Adds a reference to the physical memory that is mapped at an address, and returns its handle.
    pub fn reference(&self, at: u64) -> Result<u64, Failed> {
        let mut handle = 0;
        self.raw_reference(&raw mut handle, at).map(|()| handle)
    }

    /// Returns the creation properties of physical memory.
    pub fn property(&self, handle: u64) -> Result<[i32; 8], Failed> {
        let mut property = [0; 8];
        self.raw_property(&raw mut property, handle).map(|()| property)
    }

    /// Returns the minimum and the recommended allocation granularity of card memory that cannot be exported, in bytes.
    pub fn granularity(&self) -> Result<(u64, u64), Failed> {
        let (mut least, mut recommended, property) = (0, 0, [1, 0, 1, 0, 0, 0, 0, 0]);
        self.raw_granularity(&raw mut least, &raw const property, 0)?;
        self.raw_granularity(&raw mut recommended, &raw const property, 1)?;
        Ok((least as u64, recommended as u64))
    }

    /// Returns the pointer attribute with the number `kind` of an address.
    pub fn attribute(&self, kind: i32, at: u64) -> Result<u64, Failed> {
        let mut value = 0u64;
        self.raw_attribute((&raw mut value).cast(), kind, at).map(|()| value)
    }

    /// Returns several attributes of an address.
    pub fn attributes(&self, kinds: &[i32], at: u64) -> Result<Vec<u64>, Failed> {
        let mut values = vec![0u64; kinds.len()];
        let places: Vec<*mut u64> = values.iter_mut().map(|value| &raw mut *value).collect();
        self.raw_attributes(kinds.len() as u32, kinds.as_ptr(), places.as_ptr(), at).map(|()| values)
    }

    /// Returns the base address and size of the allocation that contains an address.
    pub fn range(&self, at: u64) -> Result<(u64, u64), Failed> {
        let (mut base, mut bytes) = (0, 0);
        self.raw_range(&raw mut base, &raw mut bytes, at).map(|()| (base, bytes as u64))
    }

    /// Creates a stream that does not wait for the default stream.
    pub fn stream(&self) -> Result<u64, Failed> {
        let mut stream = 0;
        self.raw_stream(&raw mut stream, 1).map(|()| stream)
    }

    /// Waits for a stream, or for the default stream if `stream` is 0.
    pub fn finish(&self, stream: u64) -> Result<(), Failed> {
        self.raw_stream_finish(stream)
    }

    /// Waits for all work in the current context.
    pub fn finish_all(&self) -> Result<(), Failed> {
        self.raw_finish()
    }

    /// Captures the work that `work` submits to `stream`. Returns an executable graph.
    pub fn capture(&self, stream: u64, work: impl FnOnce() -> Result<(), Failed>) -> Result<u64, Failed> {
        let (mut graph, mut made) = (0, 0);
        self.raw_begin(stream, 0)?;
        work()?;
        self.raw_end(stream, &raw mut graph)?;
        self.raw_instantiate(&raw mut made, graph, 0).map(|()| made)
    }

    /// Begins a capture in global mode.
    pub fn begin_capture(&self, stream: u64) -> Result<(), Failed> {
        self.raw_begin(stream, 0)
    }

    /// Ends a capture. Returns an executable graph.
    pub fn end_capture(&self, stream: u64) -> Result<u64, Failed> {
        let (mut graph, mut made) = (0, 0);
        self.raw_end(stream, &raw mut graph)?;
        self.raw_instantiate(&raw mut made, graph, 0).map(|()| made)
    }

    /// Creates a stream that synchronizes with the default stream.
    pub fn blocking_stream(&self) -> Result<u64, Failed> {
        let mut stream = 0;
        self.raw_stream(&raw mut stream, 0).map(|()| stream)
    }

    /// Destroys a stream. Its pending work still completes.
    pub fn destroy(&self, stream: u64) -> Result<(), Failed> {
        self.raw_destroy(stream)
    }

    /// Makes a stream wait for another stream's current work.
    pub fn join(&self, stream: u64, other: u64) -> Result<(), Failed> {
        let mut event = 0;
        self.raw_event(&raw mut event, 2)?;
        self.raw_record(event, other)?;
        self.raw_wait(stream, event, 0)
    }

    /// Launches an executable graph.
    pub fn graph(&self, graph: u64, stream: u64) -> Result<(), Failed> {
        self.raw_graph(graph, stream)
    }

    /// Releases the memory reserved for graphs on the first card.
    pub fn trim_graphs(&self) -> Result<(), Failed> {
        self.raw_trim(0)
    }

    /// Copies memory in stream order.
    pub fn copy(&self, to: u64, from: u64, bytes: u64, stream: u64) -> Result<(), Failed> {
        self.raw_copy(to, from, bytes as usize, stream)
    }

    /// Reads 64-bit words from an address.
    pub fn read(&self, at: u64, words: usize) -> Result<Vec<u64>, Failed> {
        let mut buffer = vec![0u64; words];
        self.raw_read(buffer.as_mut_ptr().cast(), at, words * 8).map(|()| buffer)
    }

    /// Writes 64-bit words to an address.
    pub fn write(&self, at: u64, words: &[u64]) -> Result<(), Failed> {
        self.raw_write(at, words.as_ptr().cast(), std::mem::size_of_val(words))
    }

    /// Fills memory with a byte value.
    pub fn set(&self, at: u64, value: u8, bytes: u64) -> Result<(), Failed> {
        self.raw_set(at, value, bytes as usize)
    }

    /// Fills memory with a byte value in stream order.
    pub fn set_async(&self, at: u64, value: u8, bytes: u64, stream: u64) -> Result<(), Failed> {
        self.raw_set_async(at, value, bytes as usize, stream)
    }

    /// Returns the fake driver's kernel with the given name.
    pub fn kernel(&self, name: &str) -> Result<u64, Failed> {
        let (mut module, mut function) = (0, 0);
        let name = CString::new(name).map_err(|_| Failed { call: "kernel", code: 1 })?;
        self.raw_module(&raw mut module, std::ptr::null())?;
        self.raw_function(&raw mut function, module, name.as_ptr()).map(|()| function)
    }

    /// Launches a kernel with a single thread.
    pub fn launch(&self, kernel: u64, arguments: &[u64], stream: u64) -> Result<(), Failed> {
        let pointers: Vec<*const u64> = arguments.iter().map(|a| &raw const *a).collect();
        self.raw_launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, pointers.as_ptr(), std::ptr::null())
    }

    /// Returns the address that `cuGetProcAddress` reports for a name.
    pub fn lookup(&self, name: &str, version: i32, flags: u64) -> Result<u64, Failed> {
        let mut found = std::ptr::null_mut();
        let name = CString::new(name).map_err(|_| Failed { call: "lookup", code: 1 })?;
        self.raw_lookup(name.as_ptr(), &raw mut found, version, flags, std::ptr::null_mut()).map(|()| found as u64)
    }
}
