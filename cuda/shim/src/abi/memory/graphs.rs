//! The driver's graph functions. The memory of graphs that allocate is counted.
//!
//! UNSAFETY: forwards calls, and reads their results.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use cuda_protocol::FromTenant;

use crate::abi::stubs::GATES;
use crate::abi::{memory, shim};
use crate::driver::{self, OUT_OF_MEMORY, Object, SUCCESS};
use crate::link::Answer;
use crate::memory::graphs::largest_allocation;
use crate::streams::Stream;
use crate::symbols::at;

type Call = unsafe extern "C" fn(Object, Object) -> c_int;

/// Calls, through the gate, a driver function that takes a graph and a stream.
unsafe fn gated(index: usize, graph: Object, stream: Object) -> c_int {
    // SAFETY: both symbols for which this function is called have these arguments.
    let call: Call = unsafe { std::mem::transmute(GATES[index]) };
    // SAFETY: guaranteed by the caller.
    unsafe { call(graph, stream) }
}

/// Uploads a graph that allocates, and counts the memory.
unsafe fn reserve(index: usize, graph: Object, stream: Object) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { gated(index, graph, stream) };
    if result == SUCCESS && memory().count_graphs() {
        return SUCCESS;
    }
    // A failed upload keeps the memory that it has obtained.
    memory().trim_graphs();
    if result == SUCCESS { OUT_OF_MEMORY } else { result }
}

macro_rules! launched {
    ($launch:ident, $upload:ident, $real_launch:ident, $real_upload:ident, $per_thread:literal) => {
        unsafe extern "C" fn $upload(graph: Object, stream: Object) -> c_int {
            // SAFETY: guaranteed by the caller.
            unsafe {
                if memory().is_allocating_graph(graph) {
                    reserve(at::$real_upload, graph, stream)
                } else {
                    gated(at::$real_upload, graph, stream)
                }
            }
        }

        unsafe extern "C" fn $launch(graph: Object, stream: Object) -> c_int {
            let known = memory().is_allocating_graph(graph);
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
                    // While another graph runs, this graph may take more memory than it would take alone. The driver
                    // has reserved this memory now. It is counted when the owner allows it, and no graph that allocates
                    // is launched before.
                    memory().count_graphs();
                }
                result
            }
        }
    };
}

launched!(launch, upload, cuGraphLaunch, cuGraphUpload, false);
launched!(launch_per_thread, upload_per_thread, cuGraphLaunch_ptsz, cuGraphUpload_ptsz, true);

/// Instantiates a graph with `make`. Fails if one of the graph's allocations exceeds the tenant's whole memory.
fn instantiate(made: *mut Object, graph: Object, make: impl FnOnce() -> c_int) -> c_int {
    let memory = memory();
    memory.present();
    let largest = largest_allocation(graph);
    if let (Some(bytes), Some((_, card))) = (largest, memory.link.current_card())
        && bytes > 0
        && let Answer::Memory(_, total) = memory.link.request(|request| FromTenant::AskMemory { request, card })
        && bytes > total
    {
        return OUT_OF_MEMORY;
    }
    let result = make();
    if result == SUCCESS && !made.is_null() {
        // SAFETY: the driver has written the graph to `made`.
        memory.add_graph(unsafe { *made }, largest.is_some());
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
    memory().forget_graph(graph);
    // SAFETY: guaranteed by the caller.
    unsafe { driver::graph_exec_destroy(graph) }
}

unsafe extern "C" fn trim(device: c_int) -> c_int {
    // SAFETY: the call takes no pointers.
    let result = unsafe { driver::graph_mem_trim(device) };
    if memory().any_graphs() {
        memory().count_graphs();
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
