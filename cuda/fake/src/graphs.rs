//! Graphs that programs build from nodes. A launch runs the nodes in the order of their addition, which satisfies all
//! dependencies.
//!
//! UNSAFETY: reads and writes through the program's pointers, like the real driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use crate::api::{api, context, initialised, put};
use crate::arrays::Copy3d;
use crate::code;
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

/// Converts a memset node into an operation. Only fills of bytes in one row are supported.
unsafe fn fill(parameters: *const Fill) -> Result<Op, i32> {
    match unsafe { parameters.as_ref() } {
        None => Err(INVALID_VALUE),
        Some(fill) if fill.element_bytes == 1 && fill.height == 1 => {
            Ok(Op::Set(fill.at, fill.width as u64, fill.value as u8))
        }
        Some(_) => Err(NOT_SUPPORTED),
    }
}

/// Version 2 of `CUDA_KERNEL_NODE_PARAMS`.
#[repr(C)]
struct KernelNode {
    function: u64,
    dimensions: [u32; 6],
    shared: u32,
    parameters: *const *const u64,
    extra: u64,
    kernel: u64,
    context: u64,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
struct HostNode {
    function: Option<work::HostFunction>,
    data: u64,
}

unsafe fn kernel(parameters: *const KernelNode) -> Result<Op, i32> {
    let node = unsafe { parameters.as_ref() }.ok_or(INVALID_VALUE)?;
    let handle = if node.function == 0 { node.kernel } else { node.function };
    if node.dimensions.contains(&0) || node.extra != 0 {
        return Err(INVALID_VALUE);
    }
    unsafe { code::operation(handle, node.parameters) }
}

unsafe fn host(parameters: *const HostNode) -> Result<Op, i32> {
    let node = unsafe { parameters.as_ref() }.ok_or(INVALID_VALUE)?;
    node.function.map(|function| Op::Host(function, node.data)).ok_or(INVALID_VALUE)
}

unsafe fn copy(parameters: *const Copy3d) -> Result<Op, i32> {
    unsafe { parameters.as_ref() }.ok_or(INVALID_VALUE)?.operation()
}

/// Attributes of kernel nodes, by node and attribute number.
static ATTRIBUTES: Mutex<BTreeMap<(u64, c_int), [u64; 8]>> = Mutex::new(BTreeMap::new());

/// Replaces the operation of a graph's node.
fn replace(graph: u64, node: u64, operation: Result<Op, i32>) -> c_int {
    operation.and_then(|operation| work::replace_node(graph, node, operation)).err().unwrap_or(SUCCESS)
}

/// Adds a node that depends on other nodes, which must be in the same graph.
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
    initialised cuGraphAddKernelNode_v2(
        node: *mut u64, graph: u64, dependencies: *const u64, count: usize, parameters: *const KernelNode
    ) { add(node, graph, dependencies, count, kernel(parameters)) }
    initialised cuGraphAddMemcpyNode(
        node: *mut u64, graph: u64, dependencies: *const u64, count: usize, parameters: *const Copy3d, _context: u64
    ) { add(node, graph, dependencies, count, copy(parameters)) }
    initialised cuGraphAddHostNode(
        node: *mut u64, graph: u64, dependencies: *const u64, count: usize, parameters: *const HostNode
    ) { add(node, graph, dependencies, count, host(parameters)) }
    initialised cuGraphKernelNodeSetAttribute(node: u64, which: c_int, value: *const [u64; 8]) {
        let (Some(value), Ok(_)) = (value.as_ref(), work::node(node)) else { return INVALID_VALUE };
        ATTRIBUTES.lock().unwrap_or_else(PoisonError::into_inner).insert((node, which), *value);
        SUCCESS
    }
    initialised cuGraphKernelNodeGetAttribute(node: u64, which: c_int, value: *mut [u64; 8]) {
        let known = ATTRIBUTES.lock().unwrap_or_else(PoisonError::into_inner).get(&(node, which)).copied();
        put(value, Ok(known.unwrap_or_default()))
    }
    // The upper bits of a node's number contain the number of its graph.
    initialised cuGraphKernelNodeSetParams_v2(node: u64, parameters: *const KernelNode) {
        replace(node >> 16, node, kernel(parameters))
    }
    context cuGraphExecKernelNodeSetParams_v2(made: u64, node: u64, parameters: *const KernelNode) {
        replace(made, node, kernel(parameters))
    }
    context cuGraphExecMemcpyNodeSetParams(made: u64, node: u64, parameters: *const Copy3d, _context: u64) {
        replace(made, node, copy(parameters))
    }
    context cuGraphExecHostNodeSetParams(made: u64, node: u64, parameters: *const HostNode) {
        replace(made, node, host(parameters))
    }
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
