//! The backend for the CUDA driver API: NVIDIA's library, or the mediator's stand-in for tenants.
//!
//! A context is the device's primary context with one stream. Memory in RAM is pinned memory. The driver itself decides
//! how to copy small ranges. No aperture is used. Segments are not supported, because CUDA's shared memory has no keys.
//!
//! UNSAFETY: passes addresses to the driver. Each address refers to a local variable, to memory that the caller lends
//! for the call, or to memory of this context. Ranges are checked first.

#![expect(unsafe_code, reason = "see UNSAFETY")]

mod library;

use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::{
    Backend, Copy, Error, Fence, Grid, Image, Memory, Module, Params, Place, Result, Segment, SegmentRequest, Shared,
    Tuning,
};
use library::Library;

/// Copy settings. The driver decides how to execute small copies.
pub const TUNING: Tuning =
    Tuning { direct_write_bytes: 64 << 10, direct_read_bytes: 64 << 10, piece_bytes: 4 << 20, overlap: true };

/// Maximum number of operations in flight. If the maximum is reached, the next operation waits for the oldest one.
const MAX_IN_FLIGHT: usize = 256;
/// `CU_STREAM_NON_BLOCKING`.
const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const EVENT_WITHOUT_TIME: u32 = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`.
const PINNED_PORTABLE: u32 = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: i32 = 600;
/// Result codes of a context that has lost its work: ECC and NVLink errors, illegal address, launch timeout, assertion,
/// hardware stack error, illegal instruction, misaligned address, invalid address space, invalid PC, and failed launch.
const LOST: [i32; 11] = [214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719];

/// Magic number of a cubin.
const ELF: &[u8] = b"\x7fELF";
/// Magic number of a fat binary.
const FAT_BINARY: &[u8] = &[0x50, 0xed, 0x55, 0xba];

/// Returns the number of devices.
///
/// # Errors
/// Returns an error if the library is missing, or if it has no device.
pub fn device_count() -> Result<i32> {
    let library = Library::load()?;
    let mut count = 0;
    // SAFETY: the pointer is a local variable.
    unsafe {
        library.init(0)?;
        library.device_count(&raw mut count)?;
    }
    Ok(count)
}

/// Returns the size of a device's memory in bytes.
///
/// # Errors
/// Returns an error if the library is missing, or if the device does not exist.
pub(crate) fn memory_bytes(device: i32) -> Result<u64> {
    let library = Library::load()?;
    let mut bytes = 0;
    // SAFETY: the pointer is a local variable.
    unsafe {
        library.init(0)?;
        library.device_memory(&raw mut bytes, device)?;
    }
    Ok(bytes as u64)
}

/// A context on a CUDA device.
#[derive(Debug)]
pub struct Cuda {
    library: Arc<Library>,
    device: i32,
    context: u64,
    stream: u64,
    /// Streams for concurrent copies, created on first use.
    sides: Option<[u64; 2]>,
    memory: HashMap<usize, Arc<Allocation>>,
    next_memory: usize,
    modules: Vec<u64>,
    /// Numbers and events of the operations in flight.
    in_flight: VecDeque<(u64, u64)>,
    /// Unused events, for later operations.
    free_events: Vec<u64>,
    /// Number of the last operation.
    submitted: u64,
    /// Number of the last operation known to have completed.
    ended: u64,
}

/// Memory in a device's primary context. Freed on drop.
#[derive(Debug)]
struct Allocation {
    library: Arc<Library>,
    device: i32,
    context: u64,
    place: Place,
    address: u64,
    bytes: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // Errors from freeing memory cannot be handled. SAFETY: this allocation retains the context, and this is the
        // only reference to the address.
        unsafe {
            let _ = self.library.set_current(self.context);
            let _ = match self.place {
                Place::Vram => self.library.free(self.address),
                Place::Ram => self.library.free_pinned(std::ptr::with_exposed_provenance_mut(self.address as usize)),
            };
            let _ = self.library.release(self.device);
        }
    }
}

impl Cuda {
    /// Creates a context on a device.
    ///
    /// # Errors
    /// Returns an error if no such device exists, or on a driver error.
    pub fn open(number: i32) -> Result<Self> {
        let library = Arc::new(Library::load()?);
        let (mut device, mut context) = (0, 0);
        // SAFETY: the pointers are local variables.
        unsafe {
            library.init(0)?;
            library.device(&raw mut device, number)?;
            library.retain(&raw mut context, device)?;
        }
        let mut cuda = Self {
            library,
            device,
            context,
            stream: 0,
            sides: None,
            memory: HashMap::new(),
            next_memory: 0,
            modules: Vec::new(),
            in_flight: VecDeque::new(),
            free_events: Vec::new(),
            submitted: 0,
            ended: 0,
        };
        cuda.enter()?;
        // SAFETY: the pointer is a local variable.
        unsafe { cuda.library.create_stream(&raw mut cuda.stream, STREAM_NON_BLOCKING)? };
        Ok(cuda)
    }

    /// Makes the context current in this thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained until `self` is dropped.
        unsafe { self.library.set_current(self.context) }
    }

    fn held(&self, memory: Memory) -> Result<&Arc<Allocation>> {
        let known = self.memory.get(&memory.index);
        let known = known.filter(|held| (held.address, held.bytes) == (memory.address, memory.bytes));
        known.ok_or(Error::Memory(memory.index))
    }

    /// Returns the [`Place`] of memory, and the address of a range in it.
    fn range(&self, memory: Memory, offset: u64, bytes: usize) -> Result<(Place, u64)> {
        let held = self.held(memory)?;
        let inside = offset.checked_add(bytes as u64).is_some_and(|end| end <= held.bytes);
        if inside {
            Ok((held.place, held.address + offset))
        } else {
            Err(Error::Range { offset, bytes: bytes as u64, size: held.bytes })
        }
    }

    fn insert(&mut self, allocation: Arc<Allocation>) -> Memory {
        let Allocation { address, bytes, .. } = *allocation;
        let memory = Memory { index: self.next_memory, address, bytes };
        self.memory.insert(memory.index, allocation);
        self.next_memory += 1;
        memory
    }

    /// Returns the streams for concurrent copies. Creates them on first use.
    fn sides(&mut self) -> Result<[u64; 2]> {
        if let Some(sides) = self.sides {
            return Ok(sides);
        }
        let mut sides = [0; 2];
        // SAFETY: the pointers are local variables.
        unsafe {
            self.library.create_stream(&raw mut sides[0], STREAM_NON_BLOCKING)?;
            if let Err(error) = self.library.create_stream(&raw mut sides[1], STREAM_NON_BLOCKING) {
                let _ = self.library.destroy_stream(sides[0]);
                return Err(error);
            }
        }
        self.sides = Some(sides);
        Ok(sides)
    }

    /// Records an event after the operation that was just submitted.
    fn fence(&mut self) -> Result<Fence> {
        if self.in_flight.len() >= MAX_IN_FLIGHT
            && let Some((oldest, _)) = self.in_flight.front()
        {
            self.wait(Fence::new(*oldest))?;
        }
        let event = match self.free_events.pop() {
            Some(event) => event,
            None => {
                let mut event = 0;
                // SAFETY: the pointer is a local variable.
                unsafe { self.library.create_event(&raw mut event, EVENT_WITHOUT_TIME)? };
                event
            }
        };
        // SAFETY: the event and the stream belong to this context.
        if let Err(error) = unsafe { self.library.record(event, self.stream) } {
            self.free_events.push(event);
            return Err(lost(error));
        }
        self.submitted += 1;
        self.in_flight.push_back((self.submitted, event));
        Ok(Fence::new(self.submitted))
    }

    /// Retires the operations up to `number`, which have completed, and recycles their events.
    fn retire(&mut self, number: u64) {
        while let Some((_, event)) = self.in_flight.pop_front_if(|(operation, _)| *operation <= number) {
            self.free_events.push(event);
        }
        self.ended = self.ended.max(number);
    }

    /// Returns the parameter offsets that the kernel declares, and checks that the total sizes match. If the driver
    /// does not report the offsets, returns those of `params` unchecked.
    fn offsets(&self, function: u64, kernel: &str, params: &Params) -> Result<Vec<usize>> {
        let (mut offsets, mut expected) = (Vec::new(), 0);
        loop {
            match self.library.parameter(function, offsets.len()) {
                Some(Some((offset, bytes))) => {
                    offsets.push(offset);
                    expected = offset + bytes;
                }
                // Drivers older than CUDA 12.4 do not report the offsets.
                Some(None) if params.offsets().is_empty() && !params.bytes().is_empty() => {
                    let what = "parameters without offsets: name each value";
                    return Err(Error::Unsupported { device: self.name(), what });
                }
                Some(None) => return Ok(params.offsets().to_vec()),
                None if expected == params.bytes().len() => return Ok(offsets),
                None => {
                    let (expected, given) = (expected as u64, params.bytes().len() as u64);
                    return Err(Error::Parameters { kernel: kernel.to_owned(), expected, given });
                }
            }
        }
    }
}

/// Converts an error that indicates lost work to [`Error::Lost`].
fn lost(error: Error) -> Error {
    match error {
        Error::Cuda { code, .. } if LOST.contains(&code) => Error::Lost(error.to_string()),
        other => other,
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Memory> {
        self.enter()?;
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // References to the allocation may outlive this context, so the allocation itself retains the device's context.
        let mut context = 0;
        // SAFETY: the pointer is a local variable.
        unsafe { self.library.retain(&raw mut context, self.device)? };
        // SAFETY: the pointers are local variables.
        let result = unsafe {
            match place {
                Place::Vram => {
                    let mut address = 0;
                    self.library.allocate(&raw mut address, size).map(|()| address)
                }
                Place::Ram => {
                    let mut address = std::ptr::null_mut();
                    self.library
                        .allocate_pinned(&raw mut address, size, PINNED_PORTABLE)
                        .map(|()| address.addr() as u64)
                }
            }
        };
        let refused = |error| match error {
            Error::Cuda { code: OUT_OF_MEMORY, .. } => Error::Allocation { place, bytes, why: format!("{error}") },
            other => other,
        };
        let address = match result {
            Ok(address) => address,
            Err(error) => {
                // SAFETY: this context still retains the device's context.
                let _ = unsafe { self.library.release(self.device) };
                return Err(refused(error));
            }
        };
        let (library, device) = (Arc::clone(&self.library), self.device);
        Ok(self.insert(Arc::new(Allocation { library, device, context: self.context, place, address, bytes })))
    }

    fn free(&mut self, memory: Memory) -> Result<()> {
        // Pinned memory must not be freed while a copy uses it. For other memory, the driver waits.
        if self.held(memory)?.place == Place::Ram {
            self.wait(Fence::new(self.submitted))?;
        }
        self.memory.remove(&memory.index);
        Ok(())
    }

    fn place(&self, memory: Memory) -> Result<Place> {
        Ok(self.held(memory)?.place)
    }

    fn write_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &[u8]) -> Result<()> {
        let (place, address) = self.range(memory, offset, bytes.len())?;
        self.enter()?;
        let from = bytes.as_ptr().cast::<c_void>();
        // SAFETY: the range is within the memory, and is as long as `bytes`.
        unsafe {
            match place {
                Place::Vram => self.library.copy_to(address, from, bytes.len()).map_err(lost),
                Place::Ram => {
                    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(address as usize);
                    to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                    Ok(())
                }
            }
        }
    }

    fn read_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let (place, address) = self.range(memory, offset, bytes.len())?;
        self.enter()?;
        // SAFETY: the range is within the memory, and is as long as `bytes`.
        unsafe {
            match place {
                Place::Vram => {
                    let to = bytes.as_mut_ptr().cast::<c_void>();
                    self.library.copy_from(to, address, bytes.len()).map_err(lost)
                }
                Place::Ram => {
                    let from: *const u8 = std::ptr::with_exposed_provenance(address as usize);
                    bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len());
                    Ok(())
                }
            }
        }
    }

    fn copy(&mut self, copy: &Copy) -> Result<Fence> {
        let bytes = copy.bytes as usize;
        let (_, from) = self.range(copy.from, copy.from_offset, bytes)?;
        let (_, to) = self.range(copy.to, copy.to_offset, bytes)?;
        self.enter()?;
        // SAFETY: both ranges are in memory of this context, which is freed only after the copy.
        unsafe { self.library.copy(to, from, bytes, self.stream).map_err(lost)? };
        self.fence()
    }

    fn copy_both(&mut self, copies: [&Copy; 2]) -> Result<()> {
        let mut ranges = Vec::new();
        for copy in copies {
            let bytes = copy.bytes as usize;
            let (_, from) = self.range(copy.from, copy.from_offset, bytes)?;
            let (_, to) = self.range(copy.to, copy.to_offset, bytes)?;
            ranges.push((to, from, bytes));
        }
        self.enter()?;
        let sides = self.sides()?;
        let mut result = Ok(());
        for ((to, from, bytes), side) in ranges.into_iter().zip(sides) {
            // SAFETY: both ranges are in memory of this context, which is not freed before the wait below ends.
            result = result.and(unsafe { self.library.copy(to, from, bytes, side) });
        }
        for side in sides {
            // SAFETY: the stream belongs to this context.
            result = result.and(unsafe { self.library.synchronize_stream(side) });
        }
        result.map_err(lost)
    }

    fn load(&mut self, image: Image<'_>) -> Result<Module> {
        let Image::Cuda(bytes) = image else {
            return Err(Error::Image("CUDA loads PTX, cubins and fat binaries, but not programs for sm_20".into()));
        };
        // The driver reads a binary's size from its header, and reads PTX up to the NUL.
        let printable = |letter: char| !letter.is_control() || letter.is_ascii_whitespace() || letter == '\0';
        let text = std::str::from_utf8(bytes).is_ok_and(|text| text.chars().all(printable));
        let known = text && !bytes.is_empty() || bytes.starts_with(ELF) || bytes.starts_with(FAT_BINARY);
        if !known {
            return Err(Error::Image("it is neither PTX text, nor a cubin, nor a fat binary".into()));
        }
        self.enter()?;
        // PTX is a NUL-terminated string. The driver reads a binary's size from its header.
        let mut bytes = bytes.to_vec();
        bytes.push(0);
        let mut module = 0;
        // SAFETY: the image is a NUL-terminated local copy.
        let result = unsafe { self.library.load_module(&raw mut module, bytes.as_ptr().cast()) };
        result.map_err(|error| Error::Image(error.to_string()))?;
        self.modules.push(module);
        Ok(Module { index: self.modules.len() - 1 })
    }

    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Memory]) -> Result<Fence> {
        let module = *self.modules.get(module.index).ok_or(Error::Module(module.index))?;
        uses.iter().try_for_each(|used| self.held(*used).map(drop))?;
        self.enter()?;
        let unknown = || Error::Kernel(name.to_owned());
        let text = CString::new(name).map_err(|_| unknown())?;
        let mut function = 0;
        // SAFETY: the pointers are local variables.
        unsafe { self.library.function(&raw mut function, module, text.as_ptr()).map_err(|_| unknown())? };
        let offsets = self.offsets(function, name, params)?;
        // The driver requires natural alignment of each parameter.
        let mut words = vec![0u64; params.bytes().len().div_ceil(8)];
        for (word, bytes) in words.iter_mut().zip(params.bytes().chunks(8)) {
            let mut all = [0; 8];
            all[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(all);
        }
        let start = words.as_mut_ptr().cast::<u8>();
        let Grid { blocks: [x, y, z], threads: [threads_x, threads_y, threads_z] } = grid;
        // SAFETY: each offset is within `words`, which outlives the call. The driver copies the parameters.
        unsafe {
            let mut pointers: Vec<*mut c_void> =
                offsets.iter().map(|offset| start.add(*offset).cast::<c_void>()).collect();
            let (list, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
            self.library
                .launch(function, x, y, z, threads_x, threads_y, threads_z, 0, self.stream, list, none)
                .map_err(lost)?;
        }
        self.fence()
    }

    fn last(&self) -> Option<Fence> {
        Some(self.submitted).filter(|number| *number > 0).map(Fence::new)
    }

    fn is_done(&mut self, fence: Fence) -> Result<bool> {
        self.enter()?;
        while let Some((number, event)) = self.in_flight.front().copied() {
            if fence.number() <= self.ended {
                break;
            }
            // SAFETY: the event belongs to this context.
            match unsafe { self.library.query(event) } {
                Ok(()) => self.retire(number),
                Err(Error::Cuda { code: NOT_READY, .. }) => return Ok(false),
                Err(error) => return Err(lost(error)),
            }
        }
        Ok(true)
    }

    fn wait(&mut self, fence: Fence) -> Result<()> {
        let Some((number, event)) = self.in_flight.iter().copied().find(|(number, _)| *number >= fence.number()) else {
            return Ok(());
        };
        self.enter()?;
        // SAFETY: the event belongs to this context.
        unsafe { self.library.synchronize(event).map_err(lost)? };
        self.retire(number);
        Ok(())
    }

    fn host_address(&mut self, memory: Memory) -> Result<NonNull<u8>> {
        let held = self.held(memory)?;
        let address = std::ptr::with_exposed_provenance_mut(held.address as usize);
        let what = "CPU addresses for card memory";
        NonNull::new(address)
            .filter(|_| held.place == Place::Ram)
            .ok_or(Error::Unsupported { device: self.name(), what })
    }

    fn share(&mut self, memory: Memory) -> Result<Shared> {
        Ok(Shared::new(memory.bytes, Arc::clone(self.held(memory)?)))
    }

    fn reference(&mut self, shared: &Shared) -> Result<Memory> {
        match shared.source::<Arc<Allocation>>() {
            Some(allocation) if allocation.device == self.device => Ok(self.insert(Arc::clone(allocation))),
            _ => Err(Error::Unsupported { device: self.name(), what: "references to another device's memory" }),
        }
    }

    fn segment(&mut self, _: SegmentRequest) -> Result<Segment> {
        Err(Error::Unsupported { device: self.name(), what: "segments" })
    }

    fn attach(&mut self, _: Segment, _: bool) -> Result<Memory> {
        Err(Error::Unsupported { device: self.name(), what: "segments" })
    }

    fn detach(&mut self, _: Memory) -> Result<()> {
        Err(Error::Unsupported { device: self.name(), what: "segments" })
    }

    fn remove(&mut self, _: Segment) -> Result<()> {
        Err(Error::Unsupported { device: self.name(), what: "segments" })
    }

    fn attached(&mut self, _: Segment) -> Result<u64> {
        Err(Error::Unsupported { device: self.name(), what: "segments" })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Errors from destroying a context cannot be handled.
        let _ = self.enter();
        // SAFETY: all objects belong to this context, and the stream has no work after the wait.
        unsafe {
            for stream in self.sides.into_iter().flatten().chain(Some(self.stream).filter(|stream| *stream != 0)) {
                let _ = self.library.synchronize_stream(stream);
                let _ = self.library.destroy_stream(stream);
            }
            for event in self.in_flight.drain(..).map(|(_, event)| event).chain(self.free_events.drain(..)) {
                let _ = self.library.destroy_event(event);
            }
            for module in self.modules.drain(..) {
                let _ = self.library.unload_module(module);
            }
            self.memory.clear();
            let _ = self.library.release(self.device);
        }
    }
}
