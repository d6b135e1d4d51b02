//! The program's stream-ordered host functions. The worker posts the functions' numbers, and one of this library's
//! threads runs the functions.
//!
//! UNSAFETY: calls function pointers from the program, and blocks the thread's signals.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, OnceLock, PoisonError};

use cuda_calls::own;
use cuda_ring::{Words as _, control};

use crate::call::{code, resolve_stream};
use crate::connection;
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_VALUE, OUT_OF_MEMORY};
use crate::thread;

pub const HANDLERS: &[(&str, Handler)] = &[("cuLaunchHostFunc", launch), ("cuStreamAddCallback", add_callback)];

/// `CUhostFn`.
type HostFunction = unsafe extern "C" fn(*mut c_void);

/// `CUstreamCallback`.
type StreamCallback = unsafe extern "C" fn(u64, i32, *mut c_void);

/// One of the program's functions.
#[derive(Clone, Copy)]
enum Function {
    Host(HostFunction),
    /// A callback, and the program's handle for its stream.
    Callback(StreamCallback, u64),
}

/// A function and its argument.
#[derive(Clone, Copy)]
struct Pending {
    function: Function,
    data: u64,
}

/// Enqueued functions, keyed by number, and the last number used. A function is removed immediately before it runs,
/// unless it is part of a graph. Static, because two threads share the list.
static PENDING: Mutex<Option<(HashMap<u64, Pending>, u64)>> = Mutex::new(None);
/// Maximum number of registered functions.
const MAX_PENDING: usize = 1 << 16;

/// Registers one of the program's functions, and calls `send` with its number. Removes the function if `send` fails.
pub fn register<T>(function: u64, data: u64, send: impl FnOnce(u64) -> Result<T, i32>) -> Result<T, i32> {
    if function == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program passes a function of this type.
    let function = unsafe { std::mem::transmute::<*const (), HostFunction>(function as *const ()) };
    add(Pending { function: Function::Host(function), data }, send)
}

fn add<T>(new: Pending, send: impl FnOnce(u64) -> Result<T, i32>) -> Result<T, i32> {
    let number = {
        let mut pending = PENDING.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, next) = pending.get_or_insert_default();
        if all.len() >= MAX_PENDING {
            return Err(OUT_OF_MEMORY);
        }
        *next += 1;
        all.insert(*next, new);
        *next
    };
    if !start() {
        forget(number);
        return Err(OUT_OF_MEMORY);
    }
    send(number).inspect_err(|_| {
        forget(number);
    })
}

/// Enqueues a registered function.
fn enqueue(frame: &Frame, number: u64) -> Result<(), i32> {
    let connection = connection::get()?;
    let stream = resolve_stream(frame.arg(0), frame.per_thread)?;
    thread::with(|thread| {
        connection.post(thread, own::HOST_FUNCTION, |message| {
            message.extend([stream, number]);
            Ok(())
        })
    })
}

fn launch(frame: &Frame) -> i32 {
    code(register(frame.arg(1), frame.arg(2), |number| enqueue(frame, number)))
}

/// Adds a callback, which also receives the stream and its status. The status is always success, because the driver
/// does not run functions after failed work.
fn add_callback(frame: &Frame) -> i32 {
    let function = frame.arg(1);
    if function == 0 || frame.int(3) != 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the program passes a function of this type.
    let function = unsafe { std::mem::transmute::<*const (), StreamCallback>(function as *const ()) };
    let pending = Pending { function: Function::Callback(function, frame.arg(0)), data: frame.arg(2) };
    code(add(pending, |number| enqueue(frame, number)))
}

/// Removes a function.
fn forget(number: u64) -> Option<Pending> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner).as_mut()?.0.remove(&number)
}

/// Starts the thread that runs the functions, if it is not running. Returns false if the thread cannot be started.
fn start() -> bool {
    /// True if the thread was started, or false if this failed. Static, because one thread runs the functions of all
    /// streams.
    static STARTED: OnceLock<bool> = OnceLock::new();
    let spawn = || {
        crate::transport::spawn(|| {
            let _ = run();
        })
        .is_ok()
    };
    *STARTED.get_or_init(spawn)
}

fn run() -> Result<(), i32> {
    let connection = connection::get()?;
    let control = &connection.control;
    for done in 0.. {
        connection.wait(control::CALLBACKS_POSTED, done + 1)?;
        let number = control.load(control::CALLBACKS + 8 * (done % control::CALLBACK_COUNT));
        let pending = if number & own::CAPTURED == 0 {
            forget(number)
        } else {
            let pending = PENDING.lock().unwrap_or_else(PoisonError::into_inner);
            pending.as_ref().and_then(|(all, _)| all.get(&(number & !own::CAPTURED)).copied())
        };
        let data = pending.map_or(0, |pending| pending.data) as *mut c_void;
        match pending.map(|pending| pending.function) {
            // SAFETY: the program passed the function and its argument for this purpose.
            Some(Function::Host(function)) => unsafe { function(data) },
            // SAFETY: as above.
            Some(Function::Callback(function, stream)) => unsafe { function(stream, 0, data) },
            None => {}
        }
        control.store(control::CALLBACKS_DONE, done + 1);
    }
    Ok(())
}
