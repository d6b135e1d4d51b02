//! Tracks each thread's current context in the guest.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_calls::{Kind, handle, index_of, own};

use crate::call::{code, index, invoke};
use crate::devices::{MAX_DEVICES, checked, ready};
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED, SUCCESS};
use crate::{allocations, cached, connection, thread};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuCtxGetCurrent", get_current),
    ("cuCtxSetCurrent", set_current),
    ("cuCtxPushCurrent_v2", push),
    ("cuCtxPopCurrent_v2", pop),
    ("cuCtxGetDevice", get_device),
    ("cuCtxGetDevice_v2", get_device_of),
    ("cuCtxGetFlags", get_flags),
    ("cuCtxGetId", get_id),
    ("cuCtxGetApiVersion", get_api_version),
    ("cuCtxSynchronize", synchronize),
    ("cuCtxSynchronize_v2", synchronize_of),
    ("cuCtxCreate_v2", create),
    ("cuCtxCreate_v3", create_with_affinity),
    ("cuCtxCreate_v4", create_with_parameters),
    ("cuCtxDestroy_v2", destroy),
    ("cuDevicePrimaryCtxRetain", retain),
    ("cuDevicePrimaryCtxRelease", release),
    ("cuDevicePrimaryCtxRelease_v2", release),
    ("cuDevicePrimaryCtxGetState", state),
    ("cuDevicePrimaryCtxSetFlags", set_flags),
    ("cuDevicePrimaryCtxSetFlags_v2", set_flags),
    ("cuDevicePrimaryCtxReset", reset),
    ("cuDevicePrimaryCtxReset_v2", reset),
    ("cuThreadExchangeStreamCaptureMode", exchange_mode),
];

/// Maximum number of contexts per program, including destroyed ones.
const MAX_CONTEXTS: usize = 4096;
/// `CU_CTX_MAP_HOST`, which is always set.
const MAP_HOST: u32 = 8;

/// Device and flags of each context, indexed by number. Bit 31 is set while the context exists. Readers do not acquire
/// a lock.
static CONTEXTS: [AtomicU32; MAX_CONTEXTS] = [const { AtomicU32::new(0) }; MAX_CONTEXTS];
const EXISTS: u32 = 1 << 31;

/// Reference count and flags of each primary context.
static PRIMARY: Mutex<[(u32, u32); MAX_DEVICES]> = Mutex::new([(0, 0); MAX_DEVICES]);
/// Flags of each primary context, for lock-free readers. Bit 31 is set while the primary context is active.
static STATES: [AtomicU32; MAX_DEVICES] = [const { AtomicU32::new(0) }; MAX_DEVICES];

fn primary() -> MutexGuard<'static, [(u32, u32); MAX_DEVICES]> {
    PRIMARY.lock().unwrap_or_else(PoisonError::into_inner)
}

fn note(number: u32, device: u32, flags: u32) {
    if let Some(place) = CONTEXTS.get(number as usize) {
        place.store(EXISTS | flags << 8 | device, Ordering::Release);
    }
}

fn forget(number: u32) {
    cached::clear();
    allocations::end_context(number);
    if let Some(place) = CONTEXTS.get(number as usize) {
        place.store(0, Ordering::Release);
    }
}

/// Returns the device and flags of an existing context.
fn find(number: u32) -> Result<(u32, u32), i32> {
    let known = CONTEXTS.get(number as usize).map_or(0, |place| place.load(Ordering::Acquire));
    if known & EXISTS == 0 { Err(INVALID_CONTEXT) } else { Ok((known & 0xff, (known & !EXISTS) >> 8)) }
}

/// Returns the number of an existing context, or 0 for a null handle.
pub fn number(context: u64) -> Result<u32, i32> {
    match context {
        0 => Ok(0),
        context => {
            let number = index_of(Kind::Context, context).ok_or(INVALID_CONTEXT)?;
            find(number).map(|_| number)
        }
    }
}

/// Returns the handle of the thread's current context, or 0 if it has none.
pub fn current_handle() -> u64 {
    match thread::current() {
        0 => 0,
        number => handle(Kind::Context, number),
    }
}

/// Returns the device of the current context.
pub fn current_device() -> Result<u32, i32> {
    find(thread::current()).map(|(device, _)| device)
}

fn get_current(frame: &Frame) -> i32 {
    ready().map_or_else(|error| error, |()| frame.put(0, current_handle()))
}

fn make_current(number: u32) -> Result<(), i32> {
    thread::with(|thread| {
        thread.current.set(number);
        Ok(())
    })
}

fn set_current(frame: &Frame) -> i32 {
    code(ready().and_then(|()| number(frame.arg(0))).and_then(make_current))
}

fn push_number(number: u32) -> Result<(), i32> {
    thread::with(|thread| {
        thread.stack.borrow_mut().push(thread.current.get());
        thread.current.set(number);
        Ok(())
    })
}

fn push(frame: &Frame) -> i32 {
    let number =
        ready().and_then(|()| number(frame.arg(0))).and_then(|n| if n == 0 { Err(INVALID_CONTEXT) } else { Ok(n) });
    code(number.and_then(push_number))
}

fn pop(frame: &Frame) -> i32 {
    let popped = ready().and_then(|()| {
        thread::with(|thread| {
            let old = thread.current.get();
            if old == 0 {
                return Err(INVALID_CONTEXT);
            }
            thread.current.set(thread.stack.borrow_mut().pop().unwrap_or(0));
            Ok(old)
        })
    });
    match popped {
        Ok(old) => {
            frame.put_optional(0, handle(Kind::Context, old));
            SUCCESS
        }
        Err(error) => error,
    }
}

fn get_device(frame: &Frame) -> i32 {
    ready().and_then(|()| current_device()).map_or_else(|error| error, |device| frame.put(0, device as i32))
}

fn get_device_of(frame: &Frame) -> i32 {
    let context = match frame.arg(1) {
        0 => Ok(thread::current()),
        context => number(context),
    };
    let device = context.and_then(find).map(|(device, _)| device as i32);
    device.map_or_else(|error| error, |device| frame.put(0, device))
}

fn get_flags(frame: &Frame) -> i32 {
    let flags = ready().and_then(|()| find(thread::current()));
    flags.map_or_else(|error| error, |(_, flags)| frame.put(0, flags | MAP_HOST))
}

fn get_id(frame: &Frame) -> i32 {
    let context = match frame.arg(0) {
        0 => Ok(thread::current()),
        context => number(context),
    };
    context.and_then(|n| find(n).map(|_| n)).map_or_else(|error| error, |n| frame.put(1, u64::from(n)))
}

fn get_api_version(frame: &Frame) -> i32 {
    // API version of contexts created by `cuCtxCreate_v2` and later functions.
    ready().map_or_else(|error| error, |()| frame.put(1, 3020u32))
}

fn synchronize_in(context: Option<u32>) -> Result<(), i32> {
    let connection = connection::get()?;
    thread::with(|thread| {
        let before = thread.current.get();
        thread.current.set(context.unwrap_or(before));
        let answer = match thread.current.get() {
            0 => Err(INVALID_CONTEXT),
            _ => connection.ask(thread, own::WAIT_CONTEXT, None, |_| {}),
        };
        thread.current.set(before);
        match answer?.code {
            0 => Ok(()),
            code => Err(code),
        }
    })
}

/// Waits for all work of the current context.
pub fn synchronize_current() -> Result<(), i32> {
    synchronize_in(None)
}

fn synchronize(_: &Frame) -> i32 {
    code(ready().and_then(|()| synchronize_in(None)))
}

fn synchronize_of(frame: &Frame) -> i32 {
    let context = match frame.arg(0) {
        0 => Ok(None),
        context => number(context).map(Some),
    };
    code(context.and_then(synchronize_in))
}

fn create_in(place: u64, flags: u32, device: u32) -> Result<(), i32> {
    checked(device)?;
    invoke(index!("cuCtxCreate_v2+"), &[place, u64::from(flags), u64::from(device)])?;
    let number = read(place).and_then(|made| index_of(Kind::Context, made)).ok_or(INVALID_VALUE)?;
    note(number, device, flags);
    push_number(number)
}

/// Reads a handle that was just stored.
///
/// UNSAFETY: `place` points to program memory that was just written.
#[allow(unsafe_code, reason = "see UNSAFETY")]
fn read(place: u64) -> Option<u64> {
    // SAFETY: the caller has stored through the pointer.
    (place != 0).then(|| unsafe { (place as *const u64).read_unaligned() })
}

fn create(frame: &Frame) -> i32 {
    code(create_in(frame.arg(0), frame.int(1), frame.int(2)))
}

/// Creates a context with a list of execution affinities. Only an empty list is supported, which selects the whole
/// card.
fn create_with_affinity(frame: &Frame) -> i32 {
    if frame.arg(1) != 0 && frame.int(2) != 0 {
        return NOT_SUPPORTED;
    }
    code(create_in(frame.arg(0), frame.int(3), frame.int(4)))
}

fn create_with_parameters(frame: &Frame) -> i32 {
    if frame.arg(1) != 0 {
        return NOT_SUPPORTED;
    }
    code(create_in(frame.arg(0), frame.int(2), frame.int(3)))
}

fn destroy(frame: &Frame) -> i32 {
    code(number(frame.arg(0)).and_then(|number| {
        if number <= MAX_DEVICES as u32 {
            return Err(INVALID_CONTEXT);
        }
        cuda_exports::forget_context(frame.arg(0));
        invoke(index!("cuCtxDestroy_v2+"), &[frame.arg(0)])?;
        forget(number);
        thread::with(|thread| {
            if thread.current.get() == number {
                thread.current.set(thread.stack.borrow_mut().pop().unwrap_or(0));
            }
            Ok(())
        })
    }))
}

/// Returns the handle of a device's primary context, even if the context is inactive.
pub fn primary_handle(device: u32) -> Result<u64, i32> {
    checked(device)?;
    if find(device + 1).is_err() {
        note(device + 1, device, 0);
    }
    Ok(handle(Kind::Context, device + 1))
}

/// Adds a reference to a device's primary context, and returns its handle.
fn retain_device(device: u32) -> Result<u64, i32> {
    let at = checked(device)?;
    let made = handle(Kind::Context, device + 1);
    let mut primary = primary();
    let (references, flags) = primary.get_mut(at).ok_or(INVALID_VALUE)?;
    if *references == 0 {
        retain_primary(made, device)?;
        note(device + 1, device, *flags);
        if let Some(state) = STATES.get(at) {
            state.store(EXISTS | *flags, Ordering::Release);
        }
    }
    *references += 1;
    Ok(made)
}

/// Makes the worker retain a device's primary context under the given handle.
fn retain_primary(made: u64, device: u32) -> Result<(), i32> {
    let connection = connection::get()?;
    let op = u16::try_from(index!("cuDevicePrimaryCtxRetain+")).map_err(|_| NOT_SUPPORTED)?;
    thread::with(|thread| {
        let before = thread.current.replace(0);
        let answer = connection.ask(thread, op, None, |message| message.extend([made, u64::from(device)]));
        thread.current.set(before);
        match answer?.code {
            0 => Ok(()),
            code => Err(code),
        }
    })
}

fn retain(frame: &Frame) -> i32 {
    if frame.arg(0) == 0 {
        return INVALID_VALUE;
    }
    retain_device(frame.int(1)).map_or_else(|error| error, |context| frame.put(0, context))
}

fn end_primary(device: u32, call: usize, all: bool) -> Result<(), i32> {
    let at = checked(device)?;
    let is_last = |references: u32| references == 1 || (all && references > 0);
    if primary().get(at).is_some_and(|(references, _)| is_last(*references)) {
        // Libraries' destructors may call CUDA functions, so do not hold a lock here.
        cuda_exports::forget_context(handle(Kind::Context, device + 1));
    }
    let mut primary = primary();
    let (references, _) = primary.get_mut(at).ok_or(INVALID_VALUE)?;
    match *references {
        0 if all => return Ok(()),
        0 => return Err(INVALID_CONTEXT),
        _ => {}
    }
    *references = if all { 0 } else { *references - 1 };
    if *references > 0 {
        return Ok(());
    }
    cached::clear();
    allocations::end_context(device + 1);
    if let Some(state) = STATES.get(at) {
        state.fetch_and(!EXISTS, Ordering::AcqRel);
    }
    let connection = connection::get()?;
    let op = u16::try_from(call).map_err(|_| NOT_SUPPORTED)?;
    thread::with(|thread| {
        let before = thread.current.replace(0);
        let answer = connection.ask(thread, op, None, |message| message.push(u64::from(device)));
        thread.current.set(before);
        match answer?.code {
            0 => Ok(()),
            code => Err(code),
        }
    })
}

fn release(frame: &Frame) -> i32 {
    code(end_primary(frame.int(0), index!("cuDevicePrimaryCtxRelease_v2+"), false))
}

fn reset(frame: &Frame) -> i32 {
    code(end_primary(frame.int(0), index!("cuDevicePrimaryCtxReset_v2+"), true))
}

fn state(frame: &Frame) -> i32 {
    match checked(frame.int(0)) {
        Ok(device) => {
            let state = STATES.get(device).map_or(0, |state| state.load(Ordering::Acquire));
            frame.put_optional(1, state & !EXISTS);
            frame.put_optional(2, i32::from(state & EXISTS != 0));
            SUCCESS
        }
        Err(error) => error,
    }
}

fn set_flags(frame: &Frame) -> i32 {
    code(checked(frame.int(0)).and_then(|device| {
        let flags = frame.int(1) & 0x1f;
        invoke(index!("cuDevicePrimaryCtxSetFlags_v2+"), &[device as u64, u64::from(flags)])?;
        if let Some((_, of)) = primary().get_mut(device) {
            *of = flags;
        }
        if let Some(state) = STATES.get(device) {
            let active = state.load(Ordering::Acquire) & EXISTS;
            state.store(active | flags, Ordering::Release);
        }
        Ok(())
    }))
}

fn exchange_mode(frame: &Frame) -> i32 {
    let Some(mode) = read_mode(frame.arg(0)) else { return INVALID_VALUE };
    let old = thread::with(|thread| Ok(thread.capture_mode.replace(mode)));
    old.map_or_else(|error| error, |old| frame.put(0, u32::from(old)))
}

/// Reads a capture mode.
///
/// UNSAFETY: reads through the program's pointer, as the driver would.
#[allow(unsafe_code, reason = "see UNSAFETY")]
fn read_mode(place: u64) -> Option<u16> {
    // SAFETY: the program passes a mode, or null.
    let mode = (place != 0).then(|| unsafe { (place as *const u32).read_unaligned() })?;
    (mode <= 2).then_some(mode as u16)
}
