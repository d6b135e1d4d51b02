//! Memory that the driver reserves for graphs with nodes that allocate: it is counted but never moves.
//!
//! The driver takes it when such a graph is uploaded or launched, and keeps it for the next. So each launch uploads
//! first and requests the added memory from the owner: a tenant over its limit gets the error before the graph runs.
//!
//! UNSAFETY: forwards calls, and reads their results.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use cuda_protocol::{FixedKind, FromTenant};

use super::calls::card;
use super::{chunks, fixed};
use crate::abi::stubs::GATES;
use crate::captures;
use crate::driver::{self, OUT_OF_MEMORY, Object, SUCCESS};
use crate::requests::{self, Answer};
use crate::streams::Stream;
use crate::symbols::at;

/// `CU_GRAPH_NODE_TYPE_*`: a graph in a graph, an allocation, and a condition with graphs of its own.
const CHILD: c_int = 4;
const ALLOCATION: c_int = 10;
const CONDITION: c_int = 13;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: c_int = 2;
/// 64-bit words of `CUDA_MEM_ALLOC_NODE_PARAMS`, and the index of its size.
const PARAMETERS: (usize, usize) = (15, 13);
/// Maximum depth of nested graphs that are examined.
const MAX_GRAPH_DEPTH: u32 = 16;

/// Graphs that can be launched and that allocate.
static GRAPHS: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
/// True once a graph with memory nodes existed.
static ANY: AtomicBool = AtomicBool::new(false);
/// Bytes that are counted, by the driver's device.
static COUNTED: Mutex<Option<HashMap<c_int, u64>>> = Mutex::new(None);

/// Returns the bytes of the largest allocation of a graph, if it has any, or may have.
fn largest(graph: Object, depth: u32) -> Option<u64> {
    let mut count = 0;
    // SAFETY: the program's graph; without a list the driver counts.
    if unsafe { driver::graph_get_nodes(graph, std::ptr::null_mut(), &raw mut count) } != SUCCESS {
        return None;
    }
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: the list has the given length.
    if count == 0 || unsafe { driver::graph_get_nodes(graph, nodes.as_mut_ptr(), &raw mut count) } != SUCCESS {
        return None;
    }
    nodes.truncate(count);
    nodes.into_iter().filter_map(|node| allocates(node, depth)).max()
}

fn allocates(node: Object, depth: u32) -> Option<u64> {
    let mut kind = 0;
    // SAFETY: a node of the program, and a valid pointer.
    if unsafe { driver::graph_node_get_type(node, &raw mut kind) } != SUCCESS {
        return None;
    }
    match kind {
        ALLOCATION => {
            let mut parameters = [0u64; PARAMETERS.0];
            // SAFETY: the buffer has the length of `CUDA_MEM_ALLOC_NODE_PARAMS`.
            let result = unsafe { driver::graph_alloc_get_params(node, parameters.as_mut_ptr().cast()) };
            Some(if result == SUCCESS { parameters[PARAMETERS.1] } else { 0 })
        }
        CHILD if depth > 0 => {
            let mut child = std::ptr::null_mut();
            // SAFETY: as above.
            let result = unsafe { driver::graph_child_get_graph(node, &raw mut child) };
            (result == SUCCESS).then(|| largest(child, depth - 1)).flatten()
        }
        CHILD | CONDITION => Some(0),
        _ => None,
    }
}

/// Requests memory that the driver reserved on the current card since the last call, or returns memory that it
/// released. Returns true if the tenant may have it.
fn count() -> bool {
    let Some((device, card)) = card() else { return true };
    let mut counted = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let counted = counted.get_or_insert_default().entry(device).or_default();
    let mut reserved = 0u64;
    // SAFETY: the pointer is valid; the attribute is a 64-bit number.
    if unsafe { driver::graph_mem_attribute(device, RESERVED, (&raw mut reserved).cast()) } != SUCCESS {
        return true;
    }
    if reserved > *counted && !fixed::fix(card, FixedKind::Driver, reserved - *counted) {
        return false;
    }
    if reserved < *counted {
        requests::unfix(card, FixedKind::Driver, *counted - reserved);
    }
    *counted = reserved;
    true
}

/// Makes the driver release memory that no graph uses now.
fn give_up() {
    if let Some((device, _)) = card() {
        // SAFETY: no pointers.
        unsafe { driver::graph_mem_trim(device) };
    }
    count();
}

fn is_known(graph: Object) -> bool {
    let contains = |graphs: &HashSet<u64>| graphs.contains(&(graph as u64));
    ANY.load(Ordering::Relaxed) && GRAPHS.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(contains)
}

type Call = unsafe extern "C" fn(Object, Object) -> c_int;

/// Calls a function of the driver that takes a graph and a stream, through the gate.
unsafe fn gated(index: usize, graph: Object, stream: Object) -> c_int {
    // SAFETY: the two symbols that this is called for have these arguments.
    let call: Call = unsafe { std::mem::transmute(GATES[index]) };
    // SAFETY: the caller's promise.
    unsafe { call(graph, stream) }
}

/// Uploads a graph that allocates, and counts the memory.
unsafe fn reserve(index: usize, graph: Object, stream: Object) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { gated(index, graph, stream) };
    if result == SUCCESS && count() {
        return SUCCESS;
    }
    // An upload that fails keeps the memory that it got.
    give_up();
    if result == SUCCESS { OUT_OF_MEMORY } else { result }
}

macro_rules! launched {
    ($launch:ident, $upload:ident, $real_launch:ident, $real_upload:ident, $per_thread:literal) => {
        unsafe extern "C" fn $upload(graph: Object, stream: Object) -> c_int {
            // SAFETY: the caller's promise.
            unsafe {
                if is_known(graph) {
                    reserve(at::$real_upload, graph, stream)
                } else {
                    gated(at::$real_upload, graph, stream)
                }
            }
        }

        unsafe extern "C" fn $launch(graph: Object, stream: Object) -> c_int {
            let known = is_known(graph);
            let named = Stream::named(stream as u64, $per_thread);
            // SAFETY: the caller's promise.
            unsafe {
                if known && !(captures::any() && named.is_capturing()) {
                    let result = reserve(at::$real_upload, graph, stream);
                    if result != SUCCESS {
                        return result;
                    }
                }
                let result = gated(at::$real_launch, graph, stream);
                if known {
                    // Next to another running graph it may take more than alone. That memory is reserved now, and
                    // counts when the owner allows it; until then no such graph is launched.
                    count();
                }
                result
            }
        }
    };
}

launched!(launch, upload, cuGraphLaunch, cuGraphUpload, false);
launched!(launch_per_thread, upload_per_thread, cuGraphLaunch_ptsz, cuGraphUpload_ptsz, true);

/// Instantiates a graph by `make`, unless one of its allocations is more than all that the tenant may have.
fn instantiate(made: *mut Object, graph: Object, make: impl FnOnce() -> c_int) -> c_int {
    chunks::present();
    let largest = largest(graph, MAX_GRAPH_DEPTH);
    if let (Some(bytes), Some((_, card))) = (largest, card())
        && bytes > 0
        && let Answer::Memory(_, total) = requests::request(|request| FromTenant::AskMemory { request, card })
        && bytes > total
    {
        return OUT_OF_MEMORY;
    }
    let result = make();
    if result == SUCCESS && !made.is_null() {
        // SAFETY: the driver has written the graph here.
        let made = unsafe { *made } as u64;
        let mut graphs = GRAPHS.lock().unwrap_or_else(PoisonError::into_inner);
        if largest.is_some() {
            graphs.get_or_insert_default().insert(made);
            ANY.store(true, Ordering::Relaxed);
        } else if let Some(graphs) = graphs.as_mut() {
            // The handle of a graph that was destroyed another way may be reused.
            graphs.remove(&made);
        }
    }
    result
}

macro_rules! instantiated {
    ($name:ident($($arg:ident: $ty:ty),*)) => {
        unsafe extern "C" fn $name(made: *mut Object, graph: Object, $($arg: $ty),*) -> c_int {
            // SAFETY: the caller's promise.
            instantiate(made, graph, || unsafe { driver::$name(made, graph, $($arg),*) })
        }
    };
}

instantiated!(graph_instantiate(failed: *mut Object, log: *mut c_void, bytes: usize));
instantiated!(graph_instantiate_v2(failed: *mut Object, log: *mut c_void, bytes: usize));
instantiated!(graph_instantiate_with_flags(flags: u64));
instantiated!(graph_instantiate_with_params(parameters: *mut c_void));
instantiated!(graph_instantiate_with_params_per_thread(parameters: *mut c_void));

unsafe extern "C" fn destroy(graph: Object) -> c_int {
    if let Some(graphs) = GRAPHS.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
        graphs.remove(&(graph as u64));
    }
    // SAFETY: the caller's promise.
    unsafe { driver::graph_exec_destroy(graph) }
}

unsafe extern "C" fn trim(device: c_int) -> c_int {
    // SAFETY: no pointers.
    let result = unsafe { driver::graph_mem_trim(device) };
    if ANY.load(Ordering::Relaxed) {
        count();
    }
    result
}

/// Functions of this module by symbol.
pub fn ours(index: usize) -> Option<*mut ()> {
    Some(match index {
        at::cuGraphLaunch => launch as *mut (),
        at::cuGraphLaunch_ptsz => launch_per_thread as *mut (),
        at::cuGraphUpload => upload as *mut (),
        at::cuGraphUpload_ptsz => upload_per_thread as *mut (),
        at::cuGraphInstantiate => graph_instantiate as *mut (),
        at::cuGraphInstantiate_v2 => graph_instantiate_v2 as *mut (),
        at::cuGraphInstantiateWithFlags => graph_instantiate_with_flags as *mut (),
        at::cuGraphInstantiateWithParams => graph_instantiate_with_params as *mut (),
        at::cuGraphInstantiateWithParams_ptsz => graph_instantiate_with_params_per_thread as *mut (),
        at::cuGraphExecDestroy => destroy as *mut (),
        at::cuDeviceGraphMemTrim => trim as *mut (),
        _ => return None,
    })
}
