//! Driver functions for graphs. This library accounts for the memory that graphs allocate.
//!
//! UNSAFETY: forwards calls, and reads their results.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use cuda_protocol::FromTenant;

use crate::abi::shim;
use crate::abi::stubs::GATES;
use crate::driver::{self, OUT_OF_MEMORY, Object, SUCCESS};
use crate::link::Answer;
use crate::memory::graphs::largest_allocation;
use crate::shim::Card;
use crate::streams::Stream;
use crate::symbols::at;

type Call = unsafe extern "C" fn(Object, Object) -> c_int;

/// Returns true if an executable graph allocates memory.
fn is_allocating(graph: Object) -> bool {
    shim().memory(shim().first()).is_allocating_graph(graph)
}

/// Updates the accounts with the memory that the driver has reserved for graphs on each card. Returns true if all
/// owners permit the change.
fn count_graphs() -> bool {
    let shim = shim();
    let count = |card: &Card| shim.in_context(card, || shim.memory(card).count_graphs());
    // Update every card, even after a rejection.
    let mut allowed = true;
    for card in shim.cards() {
        allowed &= count(card);
    }
    allowed
}

/// Makes the driver release unused graph memory on each card.
fn trim_graphs() {
    let shim = shim();
    shim.cards().for_each(|card| shim.in_context(card, || shim.memory(card).trim_graphs()));
}

/// Returns true if a size exceeds the program's memory limit on every card.
fn exceeds_all(bytes: u64) -> bool {
    let exceeds = |card: &Card| {
        let ask = |number| card.link.request(|request| FromTenant::AskMemory { request, card: number });
        let number = if shim().is_single() { card.link.current_card().map(|(_, number)| number) } else { Some(0) };
        number.is_some_and(|number| matches!(ask(number), Answer::Memory(_, total) if bytes > total))
    };
    shim().cards().all(exceeds)
}

/// Calls a driver function that takes a graph and a stream, through the gate.
unsafe fn gated(index: usize, graph: Object, stream: Object) -> c_int {
    // SAFETY: callers pass only symbols with these arguments.
    let call: Call = unsafe { std::mem::transmute(GATES[index]) };
    // SAFETY: guaranteed by the caller.
    unsafe { call(graph, stream) }
}

/// Uploads an allocating graph, and accounts for its memory.
unsafe fn reserve(index: usize, graph: Object, stream: Object) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { gated(index, graph, stream) };
    if result == SUCCESS && count_graphs() {
        return SUCCESS;
    }
    // Neither a failed nor a rejected upload releases its memory.
    trim_graphs();
    if result == SUCCESS { OUT_OF_MEMORY } else { result }
}

macro_rules! launched {
    ($launch:ident, $upload:ident, $real_launch:ident, $real_upload:ident, $per_thread:literal) => {
        unsafe extern "C" fn $upload(graph: Object, stream: Object) -> c_int {
            // SAFETY: guaranteed by the caller.
            unsafe {
                if is_allocating(graph) {
                    reserve(at::$real_upload, graph, stream)
                } else {
                    gated(at::$real_upload, graph, stream)
                }
            }
        }

        unsafe extern "C" fn $launch(graph: Object, stream: Object) -> c_int {
            let known = is_allocating(graph);
            let named = Stream::named(stream as u64, $per_thread);
            // SAFETY: guaranteed by the caller.
            unsafe {
                if known && !(shim().captures.any() && named.is_capturing()) {
                    let result = reserve(at::$real_upload, graph, stream);
                    if result != SUCCESS {
                        return result;
                    }
                }
                let result = gated(at::$real_launch, graph, stream);
                if known {
                    // While another graph runs, a graph may need more memory than it needs alone. The driver has
                    // already reserved this memory, so account for it. No other allocating graph is launched until the
                    // owner permits it.
                    count_graphs();
                }
                result
            }
        }
    };
}

launched!(launch, upload, cuGraphLaunch, cuGraphUpload, false);
launched!(launch_per_thread, upload_per_thread, cuGraphLaunch_ptsz, cuGraphUpload_ptsz, true);

/// Records a new executable graph.
fn add_graph(graph: Object, allocates: bool) {
    // A graph may allocate on several cards, so the first card keeps the list of graphs.
    shim().memory(shim().first()).add_graph(graph, allocates);
}

/// Instantiates a graph with `make`. Fails if one of the graph's allocations exceeds the tenant's memory limit.
fn instantiate(made: *mut Object, graph: Object, make: impl FnOnce() -> c_int) -> c_int {
    shim().present();
    let largest = largest_allocation(graph);
    if largest.is_some_and(|bytes| bytes > 0 && exceeds_all(bytes)) {
        return OUT_OF_MEMORY;
    }
    let result = make();
    if result == SUCCESS && !made.is_null() {
        // SAFETY: the driver has written the graph to `made`.
        add_graph(unsafe { *made }, largest.is_some());
    }
    result
}

macro_rules! instantiated {
    ($name:ident($($arg:ident: $ty:ty),*)) => {
        unsafe extern "C" fn $name(made: *mut Object, graph: Object, $($arg: $ty),*) -> c_int {
            // SAFETY: guaranteed by the caller.
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
    shim().memory(shim().first()).forget_graph(graph);
    // SAFETY: guaranteed by the caller.
    unsafe { driver::graph_exec_destroy(graph) }
}

unsafe extern "C" fn trim(device: c_int) -> c_int {
    // SAFETY: the call takes no pointers.
    let result = unsafe { driver::graph_mem_trim(device) };
    if shim().memory(shim().first()).any_graphs() {
        count_graphs();
    }
    result
}

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
