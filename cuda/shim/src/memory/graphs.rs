//! Memory that the driver reserves for graphs with allocation nodes. It never moves, and this library accounts for it.
//!
//! The driver reserves this memory when such a graph is uploaded or launched, and keeps it for the next launch.
//! Therefore, each launch first uploads the graph and requests the additional memory from the owner, so that a tenant
//! at its limit gets an error before the graph runs.
//!
//! UNSAFETY: queries the program's graphs through the driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_protocol::FixedKind;

use super::Operations;
use crate::driver::{self, Object, SUCCESS};

/// `CU_GRAPH_NODE_TYPE_GRAPH`.
const CHILD: c_int = 4;
/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
const ALLOCATION: c_int = 10;
/// `CU_GRAPH_NODE_TYPE_CONDITIONAL`.
const CONDITION: c_int = 13;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: c_int = 2;
/// Size of `CUDA_MEM_ALLOC_NODE_PARAMS` in 64-bit words, and the index of its size field.
const PARAMETERS: (usize, usize) = (15, 13);
/// Maximum nesting depth of the graphs examined.
const MAX_GRAPH_DEPTH: u32 = 16;

/// Graphs with allocation nodes.
#[derive(Debug, Default)]
pub struct Graphs {
    /// Executable graphs with allocation nodes.
    allocating: Mutex<HashSet<u64>>,
    /// Set once an allocating graph has existed.
    any: AtomicBool,
    /// Accounted bytes, keyed by driver device.
    counted: Mutex<HashMap<c_int, u64>>,
}

impl Graphs {
    fn allocating(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.allocating.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the size in bytes of a graph's largest allocation, or `None` if the graph does not allocate. Returns 0 if
/// the graph may allocate an unknown amount.
pub fn largest_allocation(graph: Object) -> Option<u64> {
    largest(graph, MAX_GRAPH_DEPTH)
}

fn largest(graph: Object, depth: u32) -> Option<u64> {
    let mut count = 0;
    // SAFETY: the graph belongs to the program. Without a list, the driver only returns the number of nodes.
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
    // SAFETY: the node belongs to the program, and the pointer is valid.
    if unsafe { driver::graph_node_get_type(node, &raw mut kind) } != SUCCESS {
        return None;
    }
    match kind {
        ALLOCATION => {
            let mut parameters = [0u64; PARAMETERS.0];
            // SAFETY: the buffer has the size of `CUDA_MEM_ALLOC_NODE_PARAMS`.
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

impl Operations<'_> {
    /// Reports to the owner how much the driver's memory for graphs on the current card has changed since the last
    /// call. Returns true if the owner permits the change.
    pub fn count_graphs(self) -> bool {
        let Some((device, card)) = self.link.current_card() else { return true };
        let mut counted = self.memory.graphs.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = counted.entry(device).or_default();
        let mut reserved = 0u64;
        // SAFETY: the pointer is valid; the attribute is a 64-bit integer.
        if unsafe { driver::graph_mem_attribute(device, RESERVED, (&raw mut reserved).cast()) } != SUCCESS {
            return true;
        }
        if reserved > *counted && !self.fix(card, FixedKind::Driver, reserved - *counted) {
            return false;
        }
        if reserved < *counted {
            self.link.unfix(card, FixedKind::Driver, *counted - reserved);
        }
        *counted = reserved;
        true
    }

    /// Makes the driver release unused graph memory on the current card, and updates the accounts.
    pub fn trim_graphs(self) {
        if let Some((device, _)) = self.link.current_card() {
            // SAFETY: the call takes no pointers.
            unsafe { driver::graph_mem_trim(device) };
        }
        self.count_graphs();
    }

    /// Returns true once an allocating graph has existed.
    pub fn any_graphs(self) -> bool {
        self.memory.graphs.any.load(Ordering::Relaxed)
    }

    /// Returns true if an executable graph allocates memory.
    pub fn is_allocating_graph(self, graph: Object) -> bool {
        self.any_graphs() && self.memory.graphs.allocating().contains(&(graph as u64))
    }

    /// Records whether a new executable graph allocates memory.
    pub fn add_graph(self, graph: Object, allocates: bool) {
        let mut graphs = self.memory.graphs.allocating();
        if allocates {
            graphs.insert(graph as u64);
            self.memory.graphs.any.store(true, Ordering::Relaxed);
        } else {
            // The driver may have reused the handle of an allocating graph whose destruction was not observed.
            graphs.remove(&(graph as u64));
        }
    }

    /// Removes a graph's record.
    pub fn forget_graph(self, graph: Object) {
        self.memory.graphs.allocating().remove(&(graph as u64));
    }
}
