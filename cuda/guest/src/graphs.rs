//! Variants of functions for executable graphs, implemented with other variants.
//!
//! UNSAFETY: reads and writes the program's structures.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use crate::call::{code, index, invoke, resolve_stream, to};
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_VALUE, SUCCESS};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuGraphInstantiate", instantiate),
    ("cuGraphInstantiate_v2", instantiate),
    ("cuGraphInstantiateWithParams", instantiate_with_parameters),
    ("cuGraphExecUpdate", update),
];

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`: uploads the graph in a stream.
const UPLOAD: u64 = 2;
/// `CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE`.
const UPDATE_FAILURE: i32 = 910;

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
struct Parameters {
    flags: u64,
    stream: u64,
    node: u64,
    result: u32,
}

/// Instantiates a graph. Returns the driver's result.
fn make(place: u64, graph: u64, flags: u64) -> i32 {
    code(invoke(index!("cuGraphInstantiateWithFlags"), &[place, graph, flags]))
}

/// Implements the first versions of the call, which also return the error node and a log. Both remain empty even if the
/// call fails.
fn instantiate(frame: &Frame) -> i32 {
    frame.put_optional(2, 0u64);
    if frame.arg(4) > 0 {
        frame.put_optional(3, 0u8);
    }
    make(frame.arg(0), frame.arg(1), 0)
}

fn instantiate_with_parameters(frame: &Frame) -> i32 {
    // SAFETY: the program passes a valid structure.
    let Some(parameters) = (unsafe { (frame.arg(2) as *mut Parameters).as_mut() }) else { return INVALID_VALUE };
    let mut made = 0u64;
    let result = make(to(&mut made), frame.arg(1), parameters.flags & !UPLOAD);
    parameters.node = 0;
    // `CUDA_GRAPH_INSTANTIATE_ERROR`.
    parameters.result = u32::from(result != SUCCESS);
    if result != SUCCESS {
        return result;
    }
    if parameters.flags & UPLOAD != 0 {
        let upload = resolve_stream(parameters.stream, frame.per_thread)
            .and_then(|stream| invoke(index!("cuGraphUpload"), &[made, stream]));
        if let Err(error) = upload {
            // Destroy the graph, because the program does not receive a handle for it.
            let _ = invoke(index!("cuGraphExecDestroy"), &[made]);
            return error;
        }
    }
    frame.put(0, made)
}

/// Implements the first version of an update, which returns the error node and the reason.
fn update(frame: &Frame) -> i32 {
    // `CUgraphExecUpdateResultInfo`. The guest receives only the reason.
    let mut reason = [0u64; 3];
    let result = code(invoke(index!("cuGraphExecUpdate_v2"), &[frame.arg(0), frame.arg(1), to(&mut reason)]));
    frame.put_optional(2, 0u64);
    // `CU_GRAPH_EXEC_UPDATE_ERROR`, because the reason for a failed call is unknown.
    frame.put_optional(3, if result == UPDATE_FAILURE { 1 } else { reason[0] as u32 });
    result
}
