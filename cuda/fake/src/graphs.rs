//! Graphs that programs build from nodes. A launch runs the nodes in the order in which they were added, which
//! satisfies every dependency.
//!
//! UNSAFETY: reads and writes through the program's pointers, as the real driver does.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::ffi::c_int;

use crate::api::{api, context, initialised, put};
use crate::result::{INVALID_VALUE, NOT_SUPPORTED, SUCCESS};
use crate::work::{self, Op};

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
struct Fill {
    at: u64,
    pitch: usize,
    value: u32,
    element_bytes: u32,
    width: usize,
    height: usize,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
struct Instantiation {
    flags: u64,
    stream: u64,
    node: u64,
    result: u32,
}

/// A fill of bytes in one row; the fake has no others.
unsafe fn fill(parameters: *const Fill) -> Result<Op, i32> {
    match unsafe { parameters.as_ref() } {
        None => Err(INVALID_VALUE),
        Some(fill) if fill.element_bytes == 1 && fill.height == 1 => {
            Ok(Op::Set(fill.at, fill.width as u64, fill.value as u8))
        }
        Some(_) => Err(NOT_SUPPORTED),
    }
}

/// Adds a node after others, which must be nodes of the same graph.
unsafe fn add(node: *mut u64, graph: u64, dependencies: *const u64, count: usize, operation: Result<Op, i32>) -> c_int {
    if count > 0 && dependencies.is_null() {
        return INVALID_VALUE;
    }
    let known = work::nodes(graph).unwrap_or_default();
    let is_known = |at: usize| known.contains(unsafe { &*dependencies.add(at) });
    if !(0..count).all(is_known) {
        return INVALID_VALUE;
    }
    unsafe { put(node, operation.and_then(|operation| work::add_node(graph, operation))) }
}

api! {
    initialised cuGraphCreate(graph: *mut u64, _flags: u32) { put(graph, Ok(work::create_graph())) }
    initialised cuGraphAddMemsetNode(
        node: *mut u64, graph: u64, dependencies: *const u64, count: usize, parameters: *const Fill, _context: u64
    ) { add(node, graph, dependencies, count, fill(parameters)) }
    initialised cuGraphAddChildGraphNode(
        node: *mut u64, graph: u64, dependencies: *const u64, count: usize, child: u64
    ) { add(node, graph, dependencies, count, work::operations(child).map(Op::Graph)) }
    initialised cuGraphAddEventRecordNode(
        node: *mut u64, graph: u64, dependencies: *const u64, count: usize, event: u64
    ) { add(node, graph, dependencies, count, work::record_operation(event)) }
    context cuGraphInstantiateWithParams(made: *mut u64, graph: u64, parameters: *mut Instantiation) {
        let Some(parameters) = parameters.as_mut() else { return INVALID_VALUE };
        (parameters.node, parameters.result) = (0, 0);
        put(made, work::instantiate(graph))
    }
    context cuGraphExecMemsetNodeSetParams(made: u64, node: u64, parameters: *const Fill, _context: u64) {
        match fill(parameters).and_then(|fill| work::replace_node(made, node, fill)) {
            Ok(()) => SUCCESS,
            Err(error) => error,
        }
    }
}
