//! Contexts, and each thread's context stack.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use gdev::{Context, Fence, Memory, Module, Segment};

use crate::device::target;
use crate::error::{Code, Outcome, Status, status, store};

/// A driver API handle: a number cast to a pointer.
pub type Handle = *mut c_void;

/// A kernel of a module, with the state of the legacy launch functions.
pub(crate) struct Function {
    /// Handle of the module.
    pub(crate) module: usize,
    pub(crate) kernel: sm20::Kernel,
    /// Block dimensions in threads, set by `cuFuncSetBlockShape`.
    pub(crate) threads: [u32; 3],
    /// Parameters, set by `cuParamSet*`.
    pub(crate) parameters: Vec<u8>,
}

/// An event: the work that it marks, and the completion time of that work.
#[derive(Clone, Copy, Default)]
pub(crate) struct Event {
    pub(crate) has_time: bool,
    pub(crate) fence: Option<Fence>,
    pub(crate) ended: Option<Instant>,
}

/// A context, with its objects keyed by handle or address.
pub(crate) struct State {
    pub(crate) gpu: Context,
    pub(crate) device: c_int,
    /// Card memory, keyed by start address.
    pub(crate) memory: BTreeMap<u64, Memory>,
    /// Pinned memory, keyed by start address in this process.
    pub(crate) pinned: BTreeMap<u64, Memory>,
    /// Attached segments, keyed by start address.
    pub(crate) attached: BTreeMap<u64, Memory>,
    pub(crate) segments: HashMap<c_int, Segment>,
    pub(crate) modules: HashMap<usize, (Module, sm20::Program)>,
    pub(crate) functions: HashMap<usize, Function>,
    pub(crate) streams: HashSet<usize>,
    pub(crate) events: HashMap<usize, Event>,
}

impl State {
    /// Returns the card memory and the attached segments, which kernels may access.
    pub(crate) fn uses(&self) -> Vec<Memory> {
        self.memory.values().chain(self.attached.values()).copied().collect()
    }

    /// Checks a stream handle. Handle 0 is the default stream.
    pub(crate) fn check_stream(&self, stream: Handle) -> Outcome<()> {
        let stream = stream.addr();
        if stream == 0 || self.streams.contains(&stream) { Ok(()) } else { Err(Code::InvalidHandle) }
    }
}

static CONTEXTS: Mutex<BTreeMap<usize, Arc<Mutex<State>>>> = Mutex::new(BTreeMap::new());
/// The next handle, for objects of any type. Handles are never reused, so using a stale handle is an error.
static NEXT_HANDLE: AtomicUsize = AtomicUsize::new(0x1000);

thread_local! {
    /// The thread's context stack. The last context is the current one.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Returns a new handle.
pub(crate) fn new_handle() -> usize {
    NEXT_HANDLE.fetch_add(0x10, Ordering::Relaxed)
}

/// Converts a handle to the pointer that the program receives.
pub(crate) fn to_pointer(handle: usize) -> Handle {
    std::ptr::without_provenance_mut(handle)
}

fn contexts() -> MutexGuard<'static, BTreeMap<usize, Arc<Mutex<State>>>> {
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn current() -> Option<usize> {
    STACK.with_borrow(|stack| stack.last().copied())
}

/// Calls `call` with the thread's current context.
pub(crate) fn with<T>(call: impl FnOnce(&mut State) -> Outcome<T>) -> Outcome<T> {
    let handle = current().ok_or(Code::InvalidContext)?;
    let state = contexts().get(&handle).cloned().ok_or(Code::InvalidContext)?;
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    call(&mut state)
}

fn check(context: Handle) -> Outcome<usize> {
    let handle = context.addr();
    if contexts().contains_key(&handle) { Ok(handle) } else { Err(Code::InvalidContext) }
}

/// Creates a context on a device, and makes it current.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxCreate_v2(context: *mut Handle, _flags: c_uint, device: c_int) -> Status {
    let create = || {
        let gpu = gdev::open(target(device)?)?;
        let state = State {
            gpu,
            device,
            memory: BTreeMap::new(),
            pinned: BTreeMap::new(),
            attached: BTreeMap::new(),
            segments: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            streams: HashSet::new(),
            events: HashMap::new(),
        };
        let handle = new_handle();
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(context, to_pointer(handle)) }?;
        contexts().insert(handle, Arc::new(Mutex::new(state)));
        STACK.with_borrow_mut(|stack| stack.push(handle));
        Ok(())
    };
    status(create())
}

/// Calls [`cuCtxCreate_v2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxCreate(context: *mut Handle, flags: c_uint, device: c_int) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    unsafe { cuCtxCreate_v2(context, flags, device) }
}

/// Waits for a context's work, and destroys the context with all of its objects.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(context: Handle) -> Status {
    let destroy = || {
        let handle = check(context)?;
        let state = contexts().remove(&handle).ok_or(Code::InvalidContext)?;
        STACK.with_borrow_mut(|stack| {
            if stack.last() == Some(&handle) {
                stack.pop();
            }
        });
        // Destroy the context even if its work was lost.
        let _ = state.lock().unwrap_or_else(PoisonError::into_inner).gpu.finish();
        Ok(())
    };
    status(destroy())
}

/// Calls [`cuCtxDestroy_v2`].
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy(context: Handle) -> Status {
    cuCtxDestroy_v2(context)
}

/// Replaces the current context, or pops it if `context` is 0.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: Handle) -> Status {
    let set = || {
        let next = if context.is_null() { None } else { Some(check(context)?) };
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.extend(next);
        });
        Ok(())
    };
    status(set())
}

/// Stores the current context, or 0 if none is current.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut Handle) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    status(unsafe { store(context, to_pointer(current().unwrap_or(0))) })
}

/// Makes a context current until it is popped.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> Status {
    status(check(context).map(|handle| STACK.with_borrow_mut(|stack| stack.push(handle))))
}

/// Calls [`cuCtxPushCurrent_v2`].
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent(context: Handle) -> Status {
    cuCtxPushCurrent_v2(context)
}

/// Removes the current context from the thread's stack, and stores it if `context` is not NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut Handle) -> Status {
    let popped = STACK.with_borrow_mut(Vec::pop).ok_or(Code::InvalidContext);
    status(popped.and_then(|handle| {
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(context, to_pointer(handle)) }
    }))
}

/// Calls [`cuCtxPopCurrent_v2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent(context: *mut Handle) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    unsafe { cuCtxPopCurrent_v2(context) }
}

/// Stores the device of the current context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> Status {
    // SAFETY: see UNSAFETY in the crate documentation.
    status(with(|state| unsafe { store(device, state.device) }))
}

/// Stores the API version of a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetApiVersion(context: Handle, version: *mut c_uint) -> Status {
    const API_VERSION: c_uint = 3020;
    let context = if context.is_null() { current().ok_or(Code::InvalidContext) } else { check(context) };
    // SAFETY: see UNSAFETY in the crate documentation.
    status(context.and_then(|_| unsafe { store(version, API_VERSION) }))
}

/// Waits for all work of the current context.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Status {
    status(with(|state| Ok(state.gpu.finish()?)))
}
