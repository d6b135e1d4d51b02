//! Executes calls according to their descriptions.
//!
//! UNSAFETY: encodes arguments, and stores results through the program's pointers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use cuda_calls::{Arg, CALLS, Call, Kind, MAX_ARGUMENTS, Treatment, encode, handle, unpack};
use cuda_ring::slots;

use crate::frame::Frame;
use crate::result::NOT_SUPPORTED;
use crate::{connection, report, thread};

/// Number of objects created so far, indexed by kind. Static, because handles are unique within the process.
static COUNTS: [AtomicU32; 16] = [const { AtomicU32::new(0) }; 16];

/// Returns the handle for a new object.
pub fn fresh(kind: Kind) -> u64 {
    let count = COUNTS.get(kind as usize).map_or(0, |count| count.fetch_add(1, Ordering::Relaxed));
    // The first context numbers are reserved for the devices' primary contexts.
    handle(kind, count + if kind == Kind::Context { 256 } else { 1 })
}

/// Returns the index of a call's description by name. The name ends with a suffix (`+` or `-`) if another module
/// completes the call.
macro_rules! index {
    ($name:literal) => {{
        /// Index of the call. Static, so that the name is looked up only once.
        static INDEX: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
        *INDEX.get_or_init(|| cuda_calls::find($name).unwrap_or(usize::MAX))
    }};
}
pub(crate) use index;

/// Names of functions whose calls were rejected. Static, because each function is reported only once.
static REFUSED: Mutex<Vec<&str>> = Mutex::new(Vec::new());

/// Prints a message at the first call to a function that is not available in guests.
pub fn report_refused(name: &'static str) {
    let Ok(mut refused) = REFUSED.lock() else { return };
    if !refused.contains(&name) {
        refused.push(name);
        report!("{name} is not supported in a virtual machine");
    }
}

/// Executes a call according to its description.
pub fn described(frame: &Frame) -> i32 {
    let Some(call) = CALLS.get(frame.index) else { return NOT_SUPPORTED };
    let mut args = [0; MAX_ARGUMENTS];
    for (index, (arg, _)) in args.iter_mut().zip(call.args).enumerate() {
        *arg = frame.arg(index);
    }
    code(perform(frame.index, &mut args, frame.per_thread))
}

/// Converts the outcome of a call to a result code.
pub fn code(outcome: Result<(), i32>) -> i32 {
    outcome.err().unwrap_or(0)
}

fn fixed_words(call: &Call) -> usize {
    let words = |arg: &Arg| match *arg {
        Arg::Out(bytes) | Arg::OutOptional(bytes) | Arg::InOut(bytes) | Arg::OutPart(_, bytes) => {
            usize::from(bytes).div_ceil(8)
        }
        Arg::OutBytes(_) => slots::INLINE_WORDS + 1,
        _ => 0,
    };
    call.args.iter().map(words).sum()
}

/// Sends a call. Stores its results, and the handle of a new object, through the pointers among the arguments.
///
/// # Errors
/// Returns the call's error.
pub fn perform(index: usize, args: &mut [u64; MAX_ARGUMENTS], per_thread: bool) -> Result<(), i32> {
    let call = CALLS.get(index).ok_or(NOT_SUPPORTED)?;
    let connection = connection::get()?;
    let op = u16::try_from(index).map_err(|_| NOT_SUPPORTED)?;
    for (arg, value) in call.args.iter().zip(args.iter_mut()) {
        if *arg == Arg::Handle(Kind::Stream) {
            *value = resolve_stream(*value, per_thread)?;
        }
    }
    let mut encoded = cuda_calls::Encoded::default();
    thread::with(|thread| {
        let write = |message: &mut Vec<u64>| {
            // SAFETY: the arguments come from the program, or from a function of this library that completes the call.
            encoded = unsafe { encode(call, args, &mut fresh, message)? };
            Ok(())
        };
        if call.treatment == Treatment::Posted {
            return connection.post(thread, op, write);
        }
        let area = (fixed_words(call) > slots::INLINE_WORDS).then(|| connection.area());
        let expected = connection.begin(thread, op, area.as_ref(), write)?;
        let answer = connection.end(expected, area.as_ref())?;
        if answer.code != 0 {
            return Err(answer.code);
        }
        // If the driver has returned an object that already has a handle, the reply's last word is that handle.
        if let Some((_, made)) = &mut encoded.new
            && answer.words(connection) > encoded.result_words
        {
            let mut words = vec![0; encoded.result_words + 1];
            answer.read(connection, &mut words);
            *made = words.last().copied().unwrap_or(*made);
        }
        if encoded.result_words > 0 {
            let mut inline = [0; slots::INLINE_WORDS];
            let mut long = Vec::new();
            let results = match inline.get_mut(..encoded.result_words) {
                Some(results) => results,
                None => {
                    long.resize(encoded.result_words, 0);
                    &mut long[..]
                }
            };
            answer.read(connection, results);
            // SAFETY: as above.
            unsafe { unpack(call, args, results) };
        }
        Ok(())
    })?;
    if let Some((kind, made)) = encoded.new {
        let place = call.args.iter().zip(&*args).find(|(arg, _)| matches!(arg, Arg::New(_))).map(|(_, value)| *value);
        if let Some(place) = place {
            // SAFETY: the encoder rejects null pointers.
            unsafe { (place as *mut u64).write_unaligned(made) };
        }
        if kind == Kind::Stream {
            remember_stream(made, thread::current());
        }
    }
    Ok(())
}

/// Sends a call with up to 12 arguments.
///
/// # Errors
/// Returns the call's error.
pub fn invoke(index: usize, arguments: &[u64]) -> Result<(), i32> {
    let mut args = [0; MAX_ARGUMENTS];
    for (arg, value) in args.iter_mut().zip(arguments) {
        *arg = *value;
    }
    perform(index, &mut args, false)
}

/// Handle of the per-thread default stream.
pub const PER_THREAD: u64 = 2;

/// Context of each stream. Static, because exported functions cannot receive state as an argument.
static STREAM_CONTEXTS: LazyLock<Mutex<HashMap<u64, u32>>> = LazyLock::new(Mutex::default);

/// Records the context of a new stream.
pub fn remember_stream(stream: u64, context: u32) {
    STREAM_CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).insert(stream, context);
}

/// Returns the stream to send in a message. For a per-thread default stream, the worker uses an ordinary blocking
/// stream, because one worker thread serves all threads.
pub fn resolve_stream(stream: u64, per_thread: bool) -> Result<u64, i32> {
    if stream != PER_THREAD && !(per_thread && stream == 0) {
        return Ok(stream);
    }
    let context = thread::current();
    let known = thread::with(|thread| {
        Ok(thread.streams.borrow().iter().find(|(of, _)| *of == context).map(|(_, stream)| *stream))
    })?;
    if let Some(stream) = known {
        return Ok(stream);
    }
    let mut made = 0u64;
    invoke(index!("cuStreamCreate"), &[to(&mut made), 0])?;
    thread::with(|thread| {
        thread.streams.borrow_mut().push((context, made));
        Ok(made)
    })
}

/// Returns the context of a stream created by the program.
pub fn stream_context(stream: u64) -> Option<u32> {
    STREAM_CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).get(&stream).copied()
}

/// Removes the record of a stream.
pub fn forget_stream(stream: u64) {
    STREAM_CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).remove(&stream);
}

/// Returns the address of a local result variable, for use as an argument.
pub fn to<T>(place: &mut T) -> u64 {
    (&raw mut *place).addr() as u64
}
