//! Streams and events. A context executes all work in order, so a stream is only a handle.

use std::ffi::c_uint;
use std::time::Instant;

use gdev::Fence;

use crate::context::{Event, Handle, State, new_handle, to_pointer, with};
use crate::error::{Code, Outcome, Status, status, store};

/// Flag that disables the timing of an event.
const DISABLE_TIMING: c_uint = 2;

/// Creates a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, _flags: c_uint) -> Status {
    status(with(|state| {
        let handle = new_handle();
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(stream, to_pointer(handle)) }?;
        state.streams.insert(handle);
        Ok(())
    }))
}

/// Destroys a stream. The stream's work continues.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Status {
    status(with(|state| if state.streams.remove(&stream.addr()) { Ok(()) } else { Err(Code::InvalidHandle) }))
}

/// Calls [`cuStreamDestroy_v2`].
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy(stream: Handle) -> Status {
    cuStreamDestroy_v2(stream)
}

/// Waits for all work of the stream's context.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: Handle) -> Status {
    status(with(|state| {
        state.check_stream(stream)?;
        Ok(state.gpu.finish()?)
    }))
}

/// Returns success if all work of the stream's context has completed, and `CUDA_ERROR_NOT_READY` otherwise.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: Handle) -> Status {
    status(with(|state| {
        state.check_stream(stream)?;
        let last = state.gpu.last();
        has_ended(state, last)
    }))
}

/// Only checks the handles, because later work of the context always runs after the event's work.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) -> Status {
    status(with(|state| {
        state.check_stream(stream)?;
        get(state, event).map(|_| ())
    }))
}

fn has_ended(state: &mut State, fence: Option<Fence>) -> Outcome<()> {
    match fence {
        Some(fence) if !state.gpu.is_done(fence)? => Err(Code::NotReady),
        // Wait even though the work has ended, because only the wait reports lost work.
        Some(fence) => Ok(state.gpu.wait(fence)?),
        None => Ok(()),
    }
}

fn get(state: &mut State, event: Handle) -> Outcome<&mut Event> {
    state.events.get_mut(&event.addr()).ok_or(Code::InvalidHandle)
}

/// Creates an event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut Handle, flags: c_uint) -> Status {
    status(with(|state| {
        let handle = new_handle();
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(event, to_pointer(handle)) }?;
        state.events.insert(handle, Event { has_time: flags & DISABLE_TIMING == 0, ..Event::default() });
        Ok(())
    }))
}

/// Destroys an event.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: Handle) -> Status {
    status(with(|state| state.events.remove(&event.addr()).map(|_| ()).ok_or(Code::InvalidHandle)))
}

/// Calls [`cuEventDestroy_v2`].
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy(event: Handle) -> Status {
    cuEventDestroy_v2(event)
}

/// Marks the work submitted to the context so far. An event with timing also waits for this work.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Status {
    status(with(|state| {
        state.check_stream(stream)?;
        let fence = state.gpu.last();
        let has_time = get(state, event)?.has_time;
        if has_time {
            state.gpu.finish()?;
        }
        let found = get(state, event)?;
        *found = Event { has_time, fence, ended: has_time.then(Instant::now) };
        Ok(())
    }))
}

/// Returns success if the marked work has completed, and `CUDA_ERROR_NOT_READY` otherwise.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: Handle) -> Status {
    status(with(|state| {
        let fence = get(state, event)?.fence;
        has_ended(state, fence)
    }))
}

/// Waits for the marked work.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: Handle) -> Status {
    status(with(|state| {
        let fence = get(state, event)?.fence;
        fence.map_or(Ok(()), |fence| Ok(state.gpu.wait(fence)?))
    }))
}

/// Stores the time between two events in milliseconds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) -> Status {
    status(with(|state| {
        let [start, end] = [*get(state, start)?, *get(state, end)?];
        let (Some(start), Some(end)) = (start.ended, end.ended) else { return Err(Code::InvalidHandle) };
        let seconds = end.checked_duration_since(start).unwrap_or_default().as_secs_f32();
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(milliseconds, seconds * 1e3) }
    }))
}
