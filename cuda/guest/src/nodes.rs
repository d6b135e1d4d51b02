//! Graph nodes with pointers in their parameters: copies, kernels, and host functions.
//!
//! UNSAFETY: reads and writes the program's structures.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use cuda_calls::boxes::WORDS_3D;
use cuda_calls::own::{self, MAX_NODES, edit};
use cuda_calls::{Kind, index_of};

use crate::call::{code, fresh, index, invoke};
use crate::connection::{self, Connection};
use crate::frame::{Frame, Handler};
use crate::functions::record;
use crate::host_functions;
use crate::launches::{self, Launch};
use crate::result::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, SUCCESS};
use crate::thread::{self, Thread};
use crate::{boxes, call};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuGraphAddMemcpyNode", add_copy),
    ("cuGraphMemcpyNodeSetParams", set_copy),
    ("cuGraphExecMemcpyNodeSetParams", set_exec_copy),
    ("cuGraphAddKernelNode", add_kernel_first),
    ("cuGraphAddKernelNode_v2", add_kernel),
    ("cuGraphKernelNodeSetParams", set_kernel_first),
    ("cuGraphKernelNodeSetParams_v2", set_kernel),
    ("cuGraphExecKernelNodeSetParams", set_exec_kernel_first),
    ("cuGraphExecKernelNodeSetParams_v2", set_exec_kernel),
    ("cuGraphAddHostNode", add_host),
    ("cuGraphHostNodeSetParams", set_host),
    ("cuGraphExecHostNodeSetParams", set_exec_host),
];

/// Version 2 of `CUDA_KERNEL_NODE_PARAMS`. Version 1 ends before the field `kernel`.
#[repr(C)]
#[derive(Clone, Copy)]
struct KernelNode {
    function: u64,
    dimensions: [u32; 6],
    shared: u32,
    parameters: u64,
    extra: u64,
    kernel: u64,
    context: u64,
}

/// Size of version 1 of [`KernelNode`], in bytes.
const FIRST_VERSION_BYTES: usize = std::mem::offset_of!(KernelNode, kernel);

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
struct HostNode {
    function: u64,
    data: u64,
}

/// Node that a call adds or changes.
struct Target {
    edit: u64,
    graph: u64,
    node: u64,
    before: Vec<u64>,
}

/// Reads the target of a call that adds a node. The call's first arguments are the handle pointer, the graph, the
/// dependencies, and their number.
fn added(frame: &Frame) -> Result<Target, i32> {
    let (count, before) = (frame.arg(3) as usize, frame.arg(2) as *const u64);
    if frame.arg(0) == 0 || count > MAX_NODES || (count > 0 && before.is_null()) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program's array has this length.
    let before: Vec<u64> = (0..count).map(|at| unsafe { before.add(at).read_unaligned() }).collect();
    let is_node = |node: &u64| index_of(Kind::Node, *node).is_some();
    if index_of(Kind::Graph, frame.arg(1)).is_none() || !before.iter().all(is_node) {
        return Err(INVALID_HANDLE);
    }
    Ok(Target { edit: edit::ADD, graph: frame.arg(1), node: fresh(Kind::Node), before })
}

/// Reads the target of a call that changes a node in a graph or in an executable graph.
fn changed(frame: &Frame, is_exec: bool) -> Result<Target, i32> {
    let (edit, graph, node) =
        if is_exec { (edit::SET_EXEC, frame.arg(0), frame.arg(1)) } else { (edit::SET, 0, frame.arg(0)) };
    let is_known = !is_exec || index_of(Kind::Exec, graph).is_some();
    if !is_known || index_of(Kind::Node, node).is_none() {
        return Err(INVALID_HANDLE);
    }
    Ok(Target { edit, graph, node, before: Vec::new() })
}

/// Sends a message about a node. Returns the node's handle.
fn send(
    connection: &Connection,
    thread: &Thread,
    op: u16,
    write: impl FnOnce(&mut Vec<u64>) -> Result<(), i32>,
) -> Result<u64, i32> {
    let expected = connection.begin(thread, op, None, write)?;
    let answer = connection.end(expected, None)?;
    match answer.code {
        0 => Ok(answer.inline(connection, 1).first().copied().unwrap_or_default()),
        code => Err(code),
    }
}

/// Stores the node's handle for the program if the call adds a node.
fn store(frame: &Frame, target: &Target, node: u64) -> i32 {
    if target.edit == edit::ADD { frame.put(0, node) } else { SUCCESS }
}

fn kernel(frame: &Frame, target: Result<Target, i32>, parameters: usize, bytes: usize) -> i32 {
    let from = frame.arg(parameters) as *const u8;
    if from.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: all fields are integers.
    let mut node: KernelNode = unsafe { std::mem::zeroed() };
    // SAFETY: the program passes a structure of `bytes` bytes, and the local variable is at least as large.
    unsafe { std::ptr::copy_nonoverlapping(from, (&raw mut node).cast::<u8>(), bytes) };
    let done = target.and_then(|target| send_kernel(&target, &node).map(|made| (target, made)));
    done.map_or_else(|error| error, |(target, made)| store(frame, &target, made))
}

fn send_kernel(target: &Target, node: &KernelNode) -> Result<u64, i32> {
    let connection = connection::get()?;
    let is_kernel = node.function == 0;
    let function = if is_kernel { node.kernel } else { node.function };
    let launch = Launch::from_node(function, node.dimensions, node.shared, node.parameters, node.extra);
    let record = record(launch.function)?;
    thread::with(|thread| {
        if thread.current.get() == 0 {
            return Err(INVALID_CONTEXT);
        }
        let parameters = record.parameters(thread, launch.function)?;
        send(connection, thread, own::GRAPH_KERNEL, |message| {
            let before = &target.before;
            let head =
                [target.edit, target.graph, target.node, u64::from(is_kernel), node.context, before.len() as u64];
            message.extend(head);
            message.extend(before);
            // SAFETY: the program passes valid launch parameters.
            unsafe { launches::append_all(message, &launch, 0, parameters) }
        })
    })
}

fn add_kernel(frame: &Frame) -> i32 {
    kernel(frame, added(frame), 4, size_of::<KernelNode>())
}

fn add_kernel_first(frame: &Frame) -> i32 {
    kernel(frame, added(frame), 4, FIRST_VERSION_BYTES)
}

fn set_kernel(frame: &Frame) -> i32 {
    kernel(frame, changed(frame, false), 1, size_of::<KernelNode>())
}

fn set_kernel_first(frame: &Frame) -> i32 {
    kernel(frame, changed(frame, false), 1, FIRST_VERSION_BYTES)
}

fn set_exec_kernel(frame: &Frame) -> i32 {
    kernel(frame, changed(frame, true), 2, size_of::<KernelNode>())
}

fn set_exec_kernel_first(frame: &Frame) -> i32 {
    kernel(frame, changed(frame, true), 2, FIRST_VERSION_BYTES)
}

fn host(frame: &Frame, target: Result<Target, i32>, parameters: usize) -> i32 {
    let from = frame.arg(parameters) as *const HostNode;
    if from.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the program passes a valid structure.
    let HostNode { function, data } = unsafe { from.read_unaligned() };
    let done = target.and_then(|target| {
        let connection = connection::get()?;
        let made = host_functions::register(function, data, |number| {
            thread::with(|thread| {
                send(connection, thread, own::GRAPH_HOST, |message| {
                    message.extend([target.edit, target.graph, target.node, number, target.before.len() as u64]);
                    message.extend(&target.before);
                    Ok(())
                })
            })
        })?;
        Ok((target, made))
    });
    done.map_or_else(|error| error, |(target, made)| store(frame, &target, made))
}

fn add_host(frame: &Frame) -> i32 {
    host(frame, added(frame), 4)
}

fn set_host(frame: &Frame) -> i32 {
    host(frame, changed(frame, false), 1)
}

fn set_exec_host(frame: &Frame) -> i32 {
    host(frame, changed(frame, true), 2)
}

/// Forwards a copy node, unless it would copy the program's pageable memory at each launch.
fn copy(frame: &Frame, index: usize, copy: usize, count: usize) -> i32 {
    let from = frame.arg(copy) as *const [u64; WORDS_3D];
    if from.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the program passes a valid structure.
    match boxes::is_reachable(&unsafe { from.read_unaligned() }) {
        Ok(true) => {
            let arguments: Vec<u64> = (0..count).map(|index| frame.arg(index)).collect();
            code(invoke(index, &arguments))
        }
        Ok(false) => {
            call::report_refused("a graph's node that copies pageable memory");
            NOT_SUPPORTED
        }
        Err(error) => error,
    }
}

fn add_copy(frame: &Frame) -> i32 {
    copy(frame, index!("cuGraphAddMemcpyNode+"), 4, 6)
}

fn set_copy(frame: &Frame) -> i32 {
    copy(frame, index!("cuGraphMemcpyNodeSetParams+"), 1, 2)
}

fn set_exec_copy(frame: &Frame) -> i32 {
    copy(frame, index!("cuGraphExecMemcpyNodeSetParams+"), 2, 4)
}
