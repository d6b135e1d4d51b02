//! Handles, errors, and context settings.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdev::{Context, Error, Fence, Memory, Module, Place, Segment, Target, Tuning};

/// Handle of a context, returned by [`gopen`].
pub type Ghandle = u64;

/// [`gquery`] query: alignment of card memory allocations in bytes.
const QUERY_ALIGNMENT: u32 = 1;
/// [`gquery`] query: 1 if the device supports segments.
const QUERY_SEGMENTS: u32 = 2;

/// [`gtune`] setting: [`Tuning::piece_bytes`].
const TUNE_PIECE: u32 = 1;
/// [`gtune`] setting: [`Tuning::direct_write_bytes`].
const TUNE_DIRECT_WRITE: u32 = 2;
/// [`gtune`] setting: [`Tuning::direct_read_bytes`].
const TUNE_DIRECT_READ: u32 = 3;
/// [`gtune`] setting: [`Tuning::overlap`].
const TUNE_OVERLAP: u32 = 4;

/// Origin of a mapping, which determines the function that releases it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Allocated by [`crate::gmalloc`].
    Own,
    /// Mapped by [`crate::gref`].
    Reference,
    /// Attached by [`crate::gshmat`].
    Attached,
}

/// A context, and the objects that C programs identify by address or number.
pub(crate) struct State {
    pub(crate) context: Context,
    /// Memory, keyed by its GPU virtual start address.
    pub(crate) memory: BTreeMap<u64, (Memory, Kind)>,
    /// Pinned memory, keyed by its start address in this process.
    pub(crate) pinned: BTreeMap<u64, Memory>,
    pub(crate) modules: Vec<Module>,
    pub(crate) segments: HashMap<u32, Segment>,
    /// Highest fence number returned to the program.
    pub(crate) fences: u64,
}

/// An errno value and an error message.
pub(crate) struct Failure(pub(crate) c_int, pub(crate) String);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let number = match &error {
            Error::Allocation { .. } => libc::ENOMEM,
            Error::Unsupported { .. } => libc::EOPNOTSUPP,
            Error::Open { .. } => libc::ENODEV,
            Error::Kernel(_) => libc::ENOENT,
            Error::Driver { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            Error::Lost(_) | Error::Cuda { .. } => libc::EIO,
            _ => libc::EINVAL,
        };
        Self(number, error.to_string())
    }
}

pub(crate) fn invalid(why: impl Into<String>) -> Failure {
    Failure(libc::EINVAL, why.into())
}

/// Result of a C interface function.
pub(crate) type Outcome<T> = Result<T, Failure>;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// All open contexts, keyed by handle.
struct Handles {
    last: Ghandle,
    open: BTreeMap<Ghandle, Arc<Mutex<State>>>,
}

static HANDLES: Mutex<Handles> = Mutex::new(Handles { last: 0, open: BTreeMap::new() });

fn handles() -> MutexGuard<'static, Handles> {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stores an error message for [`gerror`] and returns the error number.
fn record(Failure(number, message): Failure) -> c_int {
    let text: Vec<u8> = message.into_bytes().into_iter().filter(|byte| *byte != 0).collect();
    MESSAGE.with_borrow_mut(|last| *last = CString::new(text).unwrap_or_default());
    number
}

/// Looks up the context of a handle.
fn find(handle: Ghandle) -> Outcome<Arc<Mutex<State>>> {
    let found = handles().open.get(&handle).cloned();
    found.ok_or_else(|| Failure(libc::EBADF, format!("{handle} is not an open handle")))
}

/// Calls `work` with the context of a handle.
pub(crate) fn with<T>(handle: Ghandle, work: impl FnOnce(&mut State) -> Outcome<T>) -> Outcome<T> {
    let state = find(handle)?;
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    work(&mut state)
}

/// Records the error, if any. Returns 0 on success, or a negative errno value.
pub(crate) fn status(outcome: Outcome<()>) -> c_int {
    outcome.map_or_else(|failure| -record(failure), |()| 0)
}

/// Records the error, if any. Returns the value, or 0 on error.
pub(crate) fn value(outcome: Outcome<u64>) -> u64 {
    outcome.unwrap_or_else(|failure| {
        record(failure);
        0
    })
}

impl State {
    /// Returns the memory that contains an address, and the offset of the address in this memory.
    pub(crate) fn memory_at(&self, address: u64) -> Outcome<(Memory, u64)> {
        let found = self.memory.range(..=address).next_back().map(|(start, (memory, _))| (*memory, address - start));
        let inside = found.filter(|(memory, offset)| *offset < memory.bytes.max(1));
        inside.ok_or_else(|| invalid(format!("{address:#x} is not an address of this handle's memory")))
    }

    /// Returns the pinned memory that contains an address of this process.
    pub(crate) fn pinned_at(&self, address: u64) -> Outcome<(Memory, u64)> {
        let found = self.pinned.range(..=address).next_back().map(|(start, memory)| (*memory, address - start));
        let inside = found.filter(|(memory, offset)| *offset < memory.bytes.max(1));
        inside.ok_or_else(|| invalid(format!("{address:#x} is not an address from gmalloc_dma of this handle")))
    }

    /// Allocates memory, and records it by its GPU virtual address.
    pub(crate) fn allocate(&mut self, place: Place, bytes: u64) -> Outcome<Memory> {
        if bytes == 0 {
            return Err(invalid("an allocation of 0 bytes"));
        }
        let memory = self.context.allocate(place, bytes)?;
        self.memory.insert(memory.address, (memory, Kind::Own));
        Ok(memory)
    }

    /// Releases memory of the given kind through `end`. Returns the size of the memory in bytes.
    pub(crate) fn end(
        &mut self,
        address: u64,
        kind: Kind,
        end: impl FnOnce(&mut Context, Memory) -> gdev::Result<()>,
    ) -> Outcome<u64> {
        let known = self.memory.get(&address).filter(|(_, found)| *found == kind).map(|(memory, _)| *memory);
        let unknown = || invalid(format!("{address:#x} does not come from the function of this kind of memory"));
        let memory = known.ok_or_else(unknown)?;
        end(&mut self.context, memory)?;
        self.memory.remove(&address);
        Ok(memory.bytes)
    }

    /// Returns the number by which C programs identify a fence.
    pub(crate) fn number(&mut self, fence: Fence) -> u64 {
        self.fences = self.fences.max(fence.number());
        fence.number()
    }
}

fn open(target: &Target) -> Outcome<u64> {
    let context = gdev::open(target)?;
    let state = State {
        context,
        memory: BTreeMap::new(),
        pinned: BTreeMap::new(),
        modules: Vec::new(),
        segments: HashMap::new(),
        fences: 0,
    };
    let mut handles = handles();
    handles.last += 1;
    let handle = handles.last;
    handles.open.insert(handle, Arc::new(Mutex::new(state)));
    Ok(handle)
}

/// Opens device `minor` and creates a context. Uses a CUDA device if one exists, or a nouveau render node otherwise.
/// The environment variable `GDEV_TARGET` overrides the device, with the same names as [`gdev_open`]. Returns 0 on
/// error.
#[unsafe(no_mangle)]
pub extern "C" fn gopen(minor: c_int) -> Ghandle {
    value(match std::env::var("GDEV_TARGET") {
        Ok(name) => name.parse().map_err(Failure::from).and_then(|target| open(&target)),
        Err(_) => match (Target::first(), minor) {
            (_, ..0) => Err(invalid(format!("device {minor}: numbers start at 0"))),
            (Target::Cuda(_), _) => open(&Target::Cuda(minor)),
            (Target::Nouveau(_) | Target::Vgpu(_), _) => {
                open(&Target::Nouveau(format!("/dev/dri/renderD{}", 128 + i64::from(minor)).into()))
            }
        },
    })
}

/// Opens a device by name: `cuda`, `cuda:NUMBER`, `nouveau`, `nouveau:/dev/dri/renderD128` or `vgpu:/SOCKET`. Returns 0
/// on error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdev_open(target: *const c_char) -> Ghandle {
    // SAFETY: see UNSAFETY in the crate documentation.
    let name = unsafe { text(target) };
    value(name.and_then(|name| open(&name.parse::<Target>()?)))
}

/// Waits for all work, closes a context, and frees its memory.
#[unsafe(no_mangle)]
pub extern "C" fn gclose(handle: Ghandle) -> c_int {
    status(find(handle).and_then(|state| {
        handles().open.remove(&handle);
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(state.context.finish()?)
    }))
}

/// Returns the message of the calling thread's last error. It is valid until the thread's next error.
#[unsafe(no_mangle)]
pub extern "C" fn gerror() -> *const c_char {
    MESSAGE.with_borrow(|message| message.as_ptr())
}

/// Queries a device property. Query 1 returns the alignment of card memory in bytes. Query 2 returns 1 if the device
/// supports segments, and 0 otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gquery(handle: Ghandle, query: u32, result: *mut u64) -> c_int {
    status(with(handle, |state| {
        let answer = match query {
            QUERY_ALIGNMENT => 256,
            QUERY_SEGMENTS => u64::from(state.context.has_segments()),
            other => return Err(invalid(format!("query {other}: 1 or 2"))),
        };
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(result, answer) }
    }))
}

/// Sets a copy parameter. Setting 1 is the chunk size in bytes. Settings 2 and 3 are the maximum sizes of direct writes
/// and reads in bytes. Setting 4 is 1 if the CPU and the copy engine work concurrently, and 0 otherwise.
#[unsafe(no_mangle)]
pub extern "C" fn gtune(handle: Ghandle, setting: u32, value: u32) -> c_int {
    status(with(handle, |state| {
        let (tuning, value) = (state.context.tuning(), u64::from(value));
        let tuning = match setting {
            TUNE_PIECE => Tuning { piece_bytes: value, ..tuning },
            TUNE_DIRECT_WRITE => Tuning { direct_write_bytes: value, ..tuning },
            TUNE_DIRECT_READ => Tuning { direct_read_bytes: value, ..tuning },
            TUNE_OVERLAP => Tuning { overlap: value != 0, ..tuning },
            other => return Err(invalid(format!("setting {other}: from 1 to 4"))),
        };
        Ok(state.context.tune(tuning)?)
    }))
}

/// Reads a string from a C program.
pub(crate) unsafe fn text<'a>(pointer: *const c_char) -> Outcome<&'a str> {
    if pointer.is_null() {
        return Err(invalid("a string is NULL"));
    }
    // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| invalid("a string is not UTF-8"))
}

/// Returns a buffer of the C program as a slice.
pub(crate) unsafe fn bytes<'a>(pointer: *const libc::c_void, length: u64) -> Outcome<&'a [u8]> {
    if length == 0 {
        return Ok(&[]);
    }
    let length = usize::try_from(length).ok().filter(|length| isize::try_from(*length).is_ok());
    match length {
        // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
        Some(length) if !pointer.is_null() => Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), length) }),
        _ => Err(invalid("a buffer is NULL, or longer than the address space")),
    }
}

/// Returns a buffer of the C program as a mutable slice.
pub(crate) unsafe fn bytes_mut<'a>(pointer: *mut libc::c_void, length: u64) -> Outcome<&'a mut [u8]> {
    if length == 0 {
        return Ok(&mut []);
    }
    let length = usize::try_from(length).ok().filter(|length| isize::try_from(*length).is_ok());
    match length {
        // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
        Some(length) if !pointer.is_null() => Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), length) }),
        _ => Err(invalid("a buffer is NULL, or longer than the address space")),
    }
}

/// Stores a result, unless the pointer is NULL.
pub(crate) unsafe fn store<T>(pointer: *mut T, value: T) -> Outcome<()> {
    if !pointer.is_null() {
        // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
        unsafe { pointer.write_unaligned(value) };
    }
    Ok(())
}
