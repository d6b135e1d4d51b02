//! Default streams, waits, and stream properties that the guest tracks.

use cuda_calls::{Kind, handle, own};

use crate::call::{PER_THREAD, code, described, forget_stream, index, invoke, resolve_stream, stream_context, to};
use crate::contexts::current_handle;
use crate::devices::ready;
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_HANDLE, NOT_SUPPORTED};
use crate::{connection, thread};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuStreamSynchronize", synchronize),
    ("cuStreamGetCtx", get_context),
    ("cuStreamDestroy_v2", destroy),
    ("cuEventSynchronize", synchronize_event),
    ("cuGraphGetNodes", graph_nodes),
];

/// Sends a wait message, and waits for its reply.
pub fn wait(op: u16, object: u64) -> Result<(), i32> {
    let connection = connection::get()?;
    thread::with(|thread| match connection.ask(thread, op, None, |message| message.push(object))?.code {
        0 => Ok(()),
        code => Err(code),
    })
}

fn checked(kind: Kind, object: u64) -> Result<u64, i32> {
    let is_default = kind == Kind::Stream && object <= PER_THREAD;
    if is_default || cuda_calls::index_of(kind, object).is_some() { Ok(object) } else { Err(INVALID_HANDLE) }
}

fn synchronize(frame: &Frame) -> i32 {
    let stream = ready().and_then(|()| resolve_stream(frame.arg(0), frame.per_thread));
    code(stream.and_then(|stream| checked(Kind::Stream, stream)).and_then(|stream| wait(own::WAIT_STREAM, stream)))
}

fn synchronize_event(frame: &Frame) -> i32 {
    code(checked(Kind::Event, frame.arg(0)).and_then(|event| wait(own::WAIT_EVENT, event)))
}

fn get_context(frame: &Frame) -> i32 {
    let known = stream_context(frame.arg(0));
    frame.put(1, known.map_or_else(current_handle, |number| handle(Kind::Context, number)))
}

fn destroy(frame: &Frame) -> i32 {
    let result = described(frame);
    if result == 0 {
        forget_stream(frame.arg(0));
    }
    result
}

fn graph_nodes(frame: &Frame) -> i32 {
    if frame.arg(1) != 0 {
        return NOT_SUPPORTED;
    }
    let mut count = 0u64;
    match invoke(index!("cuGraphGetNodes+"), &[frame.arg(0), 0, to(&mut count)]) {
        Ok(()) => frame.put(2, count),
        Err(error) => error,
    }
}
