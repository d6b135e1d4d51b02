//! NVIDIA's driver, called through its library.

// UNSAFETY: calls the driver's functions, each with pointers to local variables.
#![allow(unsafe_code, reason = "calls a foreign library")]

use super::functions::{CheckpointArgs, Functions, RawHandle};
use super::{Address, Device, Driver, DriverError, FetchTimes, Handle, Memory, Queue};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUpointer_attribute, CUstream,
    CUstream_flags, CUuuid,
};
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_NUMBER: c_uint = 1;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
const RECOMMENDED: c_uint = 1;
/// Lowest `cuDriverGetVersion` of a driver that can restore processes on other cards (driver 580).
const PAIRS_VERSION: c_int = 13_000;
/// `CU_PROCESS_STATE_RUNNING`.
const RUNNING: c_int = 0;
/// `CU_PROCESS_STATE_LOCKED`.
const LOCKED: c_int = 1;
/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: c_int = 1;

/// Time limit in ms for locking a process that is moved.
// TIMEOUT: the process's gate is closed and its work has completed, so the lock waits only for calls in other threads.
const LOCK_MS: u64 = 10_000;

/// `CUcheckpointGpuPair`: the UUIDs of the old and the new card.
type GpuPair = [[u8; 16]; 2];

/// The driver, with the primary context of one card and a stream for each [`Queue`].
pub struct Real {
    functions: Functions,
    ordinal: CUdevice,
    /// NUMA node for host memory.
    node: c_int,
    context: CUcontext,
    streams: [CUstream; Queue::ALL.len()],
    device: Device,
    /// A piece of zeroed host memory, the source of copies that zero other memory. `None` if it could not be allocated.
    zeros: OnceLock<Option<Address>>,
}

// SAFETY: any thread may call the driver's functions; contexts and streams are driver handles, not memory of this
// process.
unsafe impl Send for Real {}
// SAFETY: as above.
unsafe impl Sync for Real {}

fn check(call: &'static str, code: c_int) -> Result<(), DriverError> {
    if code == 0 { Ok(()) } else { Err(DriverError::Call { call, code }) }
}

impl Real {
    /// Loads the library at `path` and opens the card with index `ordinal`.
    ///
    /// # Errors
    /// Returns an error if the loader or the driver fails.
    pub fn open(path: &Path, ordinal: u32) -> Result<Self, DriverError> {
        let functions = Functions::load(path)?;
        let f = &functions;
        let ordinal_raw = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let mut device: CUdevice = 0;
        let mut context: CUcontext = std::ptr::null_mut();
        let mut streams: [CUstream; Queue::ALL.len()] = [std::ptr::null_mut(); _];
        let (mut name, mut uuid, mut total) = ([0; 256], CUuuid { bytes: [0; 16] }, 0usize);
        let mut node: c_int = 0;
        // SAFETY: all pointers refer to local variables that outlive the calls, and the length of the name is passed.
        unsafe {
            check("cuInit", (f.init)(0))?;
            check("cuDeviceGet", (f.device_get)(&mut device, ordinal_raw))?;
            check("cuDeviceGetName", (f.device_name)(name.as_mut_ptr(), 255, device))?;
            check("cuDeviceGetUuid", (f.device_uuid)(&mut uuid, device))?;
            check("cuDeviceTotalMem", (f.device_total)(&mut total, device))?;
            check("cuDevicePrimaryCtxRetain", (f.context_retain)(&mut context, device))?;
            check("cuCtxSetCurrent", (f.context_set)(context))?;
            for stream in &mut streams {
                check("cuStreamCreate", (f.stream_create)(stream, CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint))?;
            }
            let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID as c_uint;
            // On hosts without NUMA, the driver reports -1 or an error. In both cases, all memory is on node 0.
            if (f.device_attribute)(&mut node, attribute, device) != 0 {
                node = 0;
            }
        }
        // SAFETY: the buffer was zeroed, and its last byte was not available to the driver.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let suspends = f.checkpoint_lock.is_some() && f.checkpoint_take.is_some() && f.checkpoint_restore.is_some();
        let uuid = uuid.bytes.map(|byte| byte as u8);
        let mut version = 0;
        // SAFETY: the pointer refers to a local variable.
        let known = f.version.is_some_and(|function| unsafe { function(&mut version) } == 0);
        let fetches = suspends && f.checkpoint_state.is_some() && known && version >= PAIRS_VERSION;
        let device_info = Device { name, uuid, total_bytes: total as u64, granularity: 0, suspends, fetches };
        let (node, zeros) = (node.max(0), OnceLock::new());
        let mut this = Self { ordinal: device, node, context, streams, device: device_info, functions, zeros };
        this.device.granularity = this.granularity(Memory::Device)?.max(this.granularity(Memory::Host)?);
        Ok(this)
    }

    /// Loads the library at `path` and opens a card, identified by its index, its UUID with the prefix `GPU-`, or its
    /// PCI address.
    ///
    /// # Errors
    /// Returns an error if the card does not exist, or if the loader or the driver fails.
    pub fn find(path: &Path, device: &str) -> Result<Self, DriverError> {
        if let Ok(ordinal) = device.parse() {
            return Self::open(path, ordinal);
        }
        let functions = Functions::load(path)?;
        // SAFETY: the call takes no pointers.
        check("cuInit", unsafe { (functions.init)(0) })?;
        if let Some(wanted) = device.strip_prefix("GPU-") {
            let wanted = wanted.replace('-', "").to_lowercase();
            // TIMEOUT: the loop ends, because the driver rejects the first index without a card.
            for ordinal in 0..u32::MAX {
                let (mut found, mut uuid): (CUdevice, _) = (0, CUuuid { bytes: [0; 16] });
                // SAFETY: both pointers refer to local variables.
                unsafe {
                    check("cuDeviceGet", (functions.device_get)(&mut found, ordinal as c_int))?;
                    check("cuDeviceGetUuid", (functions.device_uuid)(&mut uuid, found))?;
                }
                let text: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
                if text == wanted {
                    return Self::open(path, ordinal);
                }
            }
        }
        let function = functions.device_by_address.ok_or(DriverError::Missing("cuDeviceGetByPCIBusId"))?;
        let mut found: CUdevice = 0;
        let address = std::ffi::CString::new(device).unwrap_or_default();
        // SAFETY: the arguments are a local variable and a NUL-terminated string.
        check("cuDeviceGetByPCIBusId", unsafe { function(&mut found, address.as_ptr()) })?;
        // In all driver versions, the handle of a device is its index.
        Self::open(path, u32::try_from(found).unwrap_or(u32::MAX))
    }

    /// Allocates card memory with `cuMemAlloc`, as a program does. The memory is freed when this process exits.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn hold_plainly(&self, bytes: u64) -> Result<Address, DriverError> {
        self.enter()?;
        let mut at = 0;
        // SAFETY: the pointer refers to a local variable.
        check("cuMemAlloc", unsafe { (self.functions.allocate)(&mut at, bytes as usize) })?;
        Ok(Address(at))
    }

    fn granularity(&self, memory: Memory) -> Result<u64, DriverError> {
        let mut bytes = 0;
        // SAFETY: both pointers refer to local variables.
        let code = unsafe { (self.functions.granularity)(&mut bytes, &self.properties(memory), RECOMMENDED) };
        check("cuMemGetAllocationGranularity", code).map(|()| bytes as u64)
    }

    /// Returns zeroed host memory, with the size of the device's granularity, or `None` if it cannot be allocated.
    fn zeros(&self, queue: Queue) -> Option<Address> {
        let bytes = self.device.granularity;
        let make = || {
            let (handle, at) = (self.create(Memory::Host, bytes)?, self.reserve(bytes)?);
            self.map(at, bytes, handle)?;
            self.zero_with_kernel(queue, at, bytes)?;
            self.finish(queue).map(|()| at)
        };
        let made = || make().inspect_err(|error| tracing::warn!(%error, "memory is zeroed with kernels")).ok();
        *self.zeros.get_or_init(made)
    }

    fn zero_with_kernel(&self, queue: Queue, at: Address, bytes: u64) -> Result<(), DriverError> {
        self.enter()?;
        // SAFETY: as in `copy`.
        check("cuMemsetD8Async", unsafe { (self.functions.zero)(at.0, 0, bytes as usize, self.stream(queue)) })
    }

    fn properties(&self, memory: Memory) -> CUmemAllocationProp {
        let location = match memory {
            Memory::Device => self.location(),
            Memory::Host => CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, id: self.node },
        };
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: POSIX,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            // SAFETY: the structure consists of integers, and zeros are valid defaults.
            allocFlags: unsafe { std::mem::zeroed() },
        }
    }

    fn location(&self) -> CUmemLocation {
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.ordinal }
    }

    /// Makes the card's context current on this thread. Methods that need the context call this first, because they may
    /// run on any thread.
    fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context was retained and is never released.
        check("cuCtxSetCurrent", unsafe { (self.functions.context_set)(self.context) })
    }

    fn stream(&self, queue: Queue) -> CUstream {
        self.streams[queue as usize]
    }

    fn checkpoint(
        &self,
        call: &'static str,
        function: Option<unsafe extern "C" fn(c_int, *mut CheckpointArgs) -> c_int>,
        pid: u32,
        [first, second]: [u64; 2],
    ) -> Result<(), DriverError> {
        let function = function.ok_or(DriverError::Missing(call))?;
        let pid = c_int::try_from(pid).unwrap_or(0);
        let mut arguments = CheckpointArgs::default();
        (arguments[0], arguments[1]) = (first, second);
        // SAFETY: the argument is a local variable, as large as the arguments of any of these functions. A pointer in
        // it refers to the caller's pairs.
        check(call, unsafe { function(pid, &mut arguments) })
    }

    /// Suspends a process. `lock_ms` is the time limit for its work to complete, in ms, or 0 for no limit.
    fn suspend_within(&self, pid: u32, lock_ms: u64) -> Result<(), DriverError> {
        self.checkpoint("cuCheckpointProcessLock", self.functions.checkpoint_lock, pid, [lock_ms, 0])?;
        self.checkpoint("cuCheckpointProcessCheckpoint", self.functions.checkpoint_take, pid, [0; 2])
    }

    /// Restores and unlocks a suspended process. `pairs` is empty if the process keeps its cards.
    fn restore(&self, pid: u32, pairs: &[GpuPair]) -> Result<(), DriverError> {
        // The first word of the arguments points to the pairs, and the second word begins with their number.
        let words = if pairs.is_empty() { [0; 2] } else { [pairs.as_ptr() as u64, pairs.len() as u64] };
        self.checkpoint("cuCheckpointProcessRestore", self.functions.checkpoint_restore, pid, words)?;
        self.checkpoint("cuCheckpointProcessUnlock", self.functions.checkpoint_unlock, pid, [0; 2])
    }

    /// Returns the `CUprocessState` of a process.
    fn process_state(&self, pid: u32) -> Result<c_int, DriverError> {
        const CALL: &str = "cuCheckpointProcessGetState";
        let function = self.functions.checkpoint_state.ok_or(DriverError::Missing(CALL))?;
        let mut state = 0;
        // SAFETY: the pointer refers to a local variable.
        check(CALL, unsafe { function(c_int::try_from(pid).unwrap_or(0), &mut state) }).map(|()| state)
    }

    /// Returns the UUIDs of all cards that are visible to this process.
    fn uuids(&self) -> Result<Vec<[u8; 16]>, DriverError> {
        const CALL: &str = "cuDeviceGetCount";
        let function = self.functions.device_count.ok_or(DriverError::Missing(CALL))?;
        let mut count = 0;
        // SAFETY: the pointer points to a local variable.
        check(CALL, unsafe { function(&mut count) })?;
        (0..count).map(|ordinal| self.uuid_at(ordinal)).collect()
    }

    fn uuid_at(&self, ordinal: c_int) -> Result<[u8; 16], DriverError> {
        let (mut device, mut uuid): (CUdevice, _) = (0, CUuuid { bytes: [0; 16] });
        // SAFETY: both pointers point to local variables.
        unsafe {
            check("cuDeviceGet", (self.functions.device_get)(&mut device, ordinal))?;
            check("cuDeviceGetUuid", (self.functions.device_uuid)(&mut uuid, device))?;
        }
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Returns the product name and the memory size of a device.
    fn model_of(&self, device: CUdevice) -> Option<(String, u64)> {
        let (mut name, mut total) = ([0; 256], 0usize);
        // SAFETY: the pointers point to local variables, and the length of the name is passed.
        unsafe {
            check("cuDeviceGetName", (self.functions.device_name)(name.as_mut_ptr(), 255, device)).ok()?;
            check("cuDeviceTotalMem", (self.functions.device_total)(&mut total, device)).ok()?;
        }
        // SAFETY: the buffer is zeroed, and the driver could not write its last byte.
        Some((unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(), total as u64))
    }

    /// Restores on this card a process that was suspended on card `from`. Driver 580 needs a pair for each card that
    /// the process's driver has found, and returns error 1 otherwise. The process may report fewer cards, because an
    /// environment variable can hide some, so a second attempt names all cards that are visible to the owner.
    fn restore_from(&self, pid: u32, from: [u8; 16], sees: &[[u8; 16]]) -> Result<(), DriverError> {
        let seen = self.exchanged(from, sees.to_vec());
        match self.restore(pid, &seen) {
            Err(DriverError::Call { code: INVALID_VALUE, .. }) => {}
            done => return done,
        }
        let all = self.exchanged(from, self.uuids()?);
        tracing::info!(pid, seen = seen.len(), all = all.len(), "restoring a process with pairs for all cards");
        self.restore(pid, &all)
    }

    /// Returns pairs that exchange the card `from` and this card, and leave the others in `cards` unchanged.
    fn exchanged(&self, from: [u8; 16], mut cards: Vec<[u8; 16]>) -> Vec<GpuPair> {
        for card in [from, self.device.uuid] {
            if !cards.contains(&card) {
                cards.push(card);
            }
        }
        let new = |old: [u8; 16]| match old {
            old if old == from => self.device.uuid,
            old if old == self.device.uuid => from,
            old => old,
        };
        cards.into_iter().map(|old| [old, new(old)]).collect()
    }
}

impl Driver for Real {
    fn device(&self) -> &Device {
        &self.device
    }

    fn free_bytes(&self) -> Result<u64, DriverError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers refer to local variables.
        check("cuMemGetInfo", unsafe { (self.functions.memory_info)(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    fn create(&self, memory: Memory, bytes: u64) -> Result<Handle, DriverError> {
        self.enter()?;
        let mut handle: RawHandle = 0;
        // SAFETY: both pointers refer to local variables.
        let code = unsafe { (self.functions.create)(&mut handle, bytes as usize, &self.properties(memory), 0) };
        check("cuMemCreate", code).map(|()| Handle(handle))
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError> {
        self.enter()?;
        let mut descriptor: c_int = -1;
        let to: *mut c_int = &mut descriptor;
        // SAFETY: for this handle type, the driver writes an int through the pointer.
        let code = unsafe { (self.functions.export)(to.cast(), handle.0, POSIX_NUMBER, 0) };
        check("cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver created the descriptor for the caller.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // Programs that this process starts must not inherit the descriptor.
        let _ = rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC);
        Ok(descriptor)
    }

    fn import(&self, descriptor: BorrowedFd<'_>) -> Result<Handle, DriverError> {
        self.enter()?;
        let mut handle: RawHandle = 0;
        let from = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: for this handle type, the pointer argument is the descriptor's number.
        let code = unsafe { (self.functions.import)(&mut handle, from, POSIX_NUMBER) };
        check("cuMemImportFromShareableHandle", code).map(|()| Handle(handle))
    }

    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        self.enter()?;
        // SAFETY: the call does not access memory of this process.
        check("cuMemRelease", unsafe { (self.functions.release)(handle.0) })
    }

    fn reserve(&self, bytes: u64) -> Result<Address, DriverError> {
        self.enter()?;
        let mut at = 0;
        // SAFETY: the pointer refers to a local variable.
        check("cuMemAddressReserve", unsafe { (self.functions.reserve)(&mut at, bytes as usize, 0, 0, 0) })?;
        Ok(Address(at))
    }

    fn map(&self, at: Address, bytes: u64, handle: Handle) -> Result<(), DriverError> {
        self.enter()?;
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: self.location(), flags };
        // SAFETY: the addresses are card addresses, not memory of this process; the description is a local variable.
        unsafe {
            check("cuMemMap", (self.functions.map)(at.0, bytes as usize, 0, handle.0, 0))?;
            let accessible = check("cuMemSetAccess", (self.functions.set_access)(at.0, bytes as usize, &access, 1));
            if accessible.is_err() {
                (self.functions.unmap)(at.0, bytes as usize);
            }
            accessible
        }
    }

    fn memory_at(&self, at: Address) -> Result<Memory, DriverError> {
        self.enter()?;
        let function = self.functions.pointer_attribute.ok_or(DriverError::Missing("cuPointerGetAttribute"))?;
        let mut kind: c_uint = 0;
        let to: *mut c_uint = &mut kind;
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as c_uint;
        // SAFETY: for this attribute, the driver writes an unsigned int through the pointer.
        check("cuPointerGetAttribute", unsafe { function(to.cast(), attribute, at.0) })?;
        // CU_MEMORYTYPE_HOST is 1, CU_MEMORYTYPE_DEVICE is 2.
        Ok(if kind == 1 { Memory::Host } else { Memory::Device })
    }

    fn unmap(&self, at: Address, bytes: u64) -> Result<(), DriverError> {
        self.enter()?;
        // SAFETY: the addresses are card addresses, not memory of this process.
        check("cuMemUnmap", unsafe { (self.functions.unmap)(at.0, bytes as usize) })
    }

    fn copy(&self, queue: Queue, to: Address, from: Address, bytes: u64) -> Result<(), DriverError> {
        self.enter()?;
        // SAFETY: both ranges are in mapped allocations of the owner, which only the card accesses.
        let code = unsafe { (self.functions.copy)(to.0, from.0, bytes as usize, self.stream(queue)) };
        check("cuMemcpyAsync", code)
    }

    fn zero(&self, queue: Queue, at: Address, bytes: u64) -> Result<(), DriverError> {
        let zeros = if queue == Queue::Zero { None } else { self.zeros(queue) };
        let Some(zeros) = zeros else { return self.zero_with_kernel(queue, at, bytes) };
        let mut zeroed = 0;
        while zeroed < bytes {
            let part = self.device.granularity.min(bytes - zeroed);
            self.copy(queue, at.plus(zeroed), zeros, part)?;
            zeroed += part;
        }
        Ok(())
    }

    fn finish(&self, queue: Queue) -> Result<(), DriverError> {
        self.enter()?;
        // SAFETY: the stream exists as long as `self`.
        check("cuStreamSynchronize", unsafe { (self.functions.stream_finish)(self.stream(queue)) })
    }

    fn suspend(&self, pid: u32) -> Result<(), DriverError> {
        self.suspend_within(pid, 0)
    }

    fn fetch(&self, pid: u32, from: [u8; 16], sees: &[[u8; 16]]) -> Result<FetchTimes, DriverError> {
        let begin = Instant::now();
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let unlock = || self.checkpoint("cuCheckpointProcessUnlock", self.functions.checkpoint_unlock, pid, [0; 2]);
        match self.process_state(pid)? {
            RUNNING if from == self.device.uuid => return Ok(FetchTimes::default()),
            RUNNING => {
                if let Err(error) = self.suspend_within(pid, LOCK_MS) {
                    // The process may already be locked.
                    let _ = unlock();
                    return Err(error);
                }
            }
            LOCKED => return unlock().map(|()| FetchTimes::default()),
            // The process was suspended by an owner that exited before resuming it. For other states, the restore
            // fails.
            _ => {}
        }
        let checkpoint = begin.elapsed();
        let moved = if from == self.device.uuid { self.restore(pid, &[]) } else { self.restore_from(pid, from, sees) };
        if moved.is_err()
            && let Err(error) = self.restore(pid, &[])
        {
            tracing::error!(pid, %error, "a program that could not be moved cannot be resumed on its own card either");
        }
        let restore = begin.elapsed().saturating_sub(checkpoint);
        let (checkpoint_us, restore_us) = (us(checkpoint), us(restore));
        tracing::info!(pid, checkpoint_us, restore_us, moved = moved.is_ok(), "the driver has moved a program");
        moved.map(|()| FetchTimes { checkpoint_us, restore_us })
    }

    fn uuid_of(&self, device: &str) -> Option<[u8; 16]> {
        let ordinal: CUdevice = match (device.parse(), super::parse_uuid(device)) {
            (Ok(ordinal), _) => ordinal,
            (_, Some(uuid)) => {
                let known = self.uuids().ok()?.iter().position(|known| *known == uuid)?;
                c_int::try_from(known).ok()?
            }
            _ => {
                let (mut found, address) = (0, std::ffi::CString::new(device).ok()?);
                // SAFETY: the arguments are a local variable and a NUL-terminated string.
                let code = unsafe { self.functions.device_by_address?(&mut found, address.as_ptr()) };
                (code == 0).then_some(found)?
            }
        };
        let same = self.model_of(ordinal)? == (self.device.name.clone(), self.device.total_bytes);
        same.then(|| self.uuid_at(ordinal).ok()).flatten().filter(|uuid| *uuid != self.device.uuid)
    }

    fn resume(&self, pid: u32) -> Result<(), DriverError> {
        self.restore(pid, &[])
    }
}
