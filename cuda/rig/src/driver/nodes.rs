//! Graphs built from nodes, tensor maps, and the occupancy of clusters: functions that programs look up by
//! name.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CStr, c_int, c_void};

use super::{Cuda, Failed};

/// `CUDA_MEMSET_NODE_PARAMS`: bytes in one row.
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

/// `CUlaunchConfig`.
#[repr(C)]
struct Configuration {
    dimensions: [u32; 6],
    shared: u32,
    stream: u64,
    attributes: *const [u32; 18],
    count: u32,
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const UPLOAD: u64 = 2;
/// Number of bytes that each node fills.
const FILLED: usize = 4096;

impl Fill {
    fn new(at: u64, value: u32) -> Self {
        Self { at, pitch: 0, value, element_bytes: 1, width: FILLED, height: 1 }
    }
}

/// A function with this signature, found by its name and the driver's version.
macro_rules! function {
    ($cuda:expr, $name:literal, $version:literal, fn($($argument:ty),* $(,)?)) => {{
        let found = $cuda.find($name, $version)?;
        // SAFETY: the header declares the function with these arguments.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(found) }
    }};
}

fn check(call: &'static str, code: c_int) -> Result<(), Failed> {
    if code == 0 { Ok(()) } else { Err(Failed { call, code }) }
}

impl Cuda {
    fn find(&self, name: &'static CStr, version: c_int) -> Result<*mut c_void, Failed> {
        let (mut found, mut status) = (std::ptr::null_mut(), 0);
        self.raw_lookup(name.as_ptr(), &raw mut found, version, 0, &raw mut status)?;
        if found.is_null() { Err(Failed { call: "cuGetProcAddress_v2", code: 500 }) } else { Ok(found) }
    }

    /// Builds a graph of a fill, a child graph with another fill, and the record of an event. Launches it, and launches
    /// it again with a changed fill. Returns the first words of both parts after each launch.
    pub fn build_graph(&self) -> Result<[u64; 4], Failed> {
        type Dependencies = *const u64;
        let create = function!(self, c"cuGraphCreate", 12_000, fn(*mut u64, u32));
        let add_fill =
            function!(self, c"cuGraphAddMemsetNode", 12_000, fn(*mut u64, u64, Dependencies, usize, *const Fill, u64));
        let add_child =
            function!(self, c"cuGraphAddChildGraphNode", 12_000, fn(*mut u64, u64, Dependencies, usize, u64));
        let add_record =
            function!(self, c"cuGraphAddEventRecordNode", 12_000, fn(*mut u64, u64, Dependencies, usize, u64));
        let instantiate =
            function!(self, c"cuGraphInstantiateWithParams", 12_000, fn(*mut u64, u64, *mut Instantiation));
        let change = function!(self, c"cuGraphExecMemsetNodeSetParams", 12_000, fn(u64, u64, *const Fill, u64));
        let query = function!(self, c"cuEventQuery", 12_000, fn(u64));
        let at = self.alloc(2 * FILLED as u64)?;
        let (first, second) = (Fill::new(at, 0x11), Fill::new(at + FILLED as u64, 0x22));
        let (mut graph, mut child, mut nodes, mut event, mut made) = (0, 0, [0; 4], 0, 0);
        let stream = self.stream()?;
        self.raw_event(&raw mut event, 0)?;
        let mut parameters = Instantiation { flags: UPLOAD, stream, node: 0, result: 0 };
        let none = std::ptr::null();
        // SAFETY: all pointers point to locals of the structures' sizes.
        unsafe {
            check("cuGraphCreate", create(&raw mut graph, 0))?;
            check("cuGraphCreate", create(&raw mut child, 0))?;
            let [a, b, c, d] = &mut nodes;
            check("cuGraphAddMemsetNode", add_fill(a, graph, none, 0, &raw const first, self.context))?;
            check("cuGraphAddMemsetNode", add_fill(b, child, none, 0, &raw const second, self.context))?;
            check("cuGraphAddChildGraphNode", add_child(c, graph, a, 1, child))?;
            check("cuGraphAddEventRecordNode", add_record(d, graph, c, 1, event))?;
            let result = instantiate(&raw mut made, graph, &raw mut parameters);
            check("cuGraphInstantiateWithParams", result)?;
        }
        check("the result of the instantiation", parameters.result.cast_signed())?;
        let look = || Ok([self.read(at, 1)?[0], self.read(at + FILLED as u64, 1)?[0]]);
        self.raw_graph(made, stream)?;
        self.finish(stream)?;
        // SAFETY: the event exists.
        check("cuEventQuery", unsafe { query(event) })?;
        let [a, b] = look()?;
        let changed = Fill::new(at, 0x33);
        // SAFETY: the pointer points to a local.
        let result = unsafe { change(made, nodes[0], &raw const changed, self.context) };
        check("cuGraphExecMemsetNodeSetParams", result)?;
        self.raw_graph(made, stream)?;
        self.finish(stream)?;
        let [c, d] = look()?;
        Ok([a, b, c, d])
    }

    /// Encodes a tensor map of three dimensions. Returns true if the same arguments give the same result, and another
    /// address gives a different result.
    pub fn encode_map(&self) -> Result<bool, Failed> {
        let encode = function!(
            self,
            c"cuTensorMapEncodeTiled",
            12_000,
            fn(
                *mut [u64; 16],
                c_int,
                u32,
                u64,
                *const u64,
                *const u64,
                *const u32,
                *const u32,
                c_int,
                c_int,
                c_int,
                c_int,
            )
        );
        /// `cuTensorMap` must be aligned to 64 bytes.
        #[repr(align(64))]
        struct Map([u64; 16]);
        let at = self.alloc(1 << 20)?;
        let (sizes, strides) = ([64u64, 32, 16], [256u64, 8192]);
        let (block, steps) = ([16u32, 8, 4], [1u32; 3]);
        let map = |at| {
            let mut map = Map([0; 16]);
            // `CU_TENSOR_MAP_DATA_TYPE_FLOAT32`, no interleaving, no swizzle, no promotion, no fill.
            // SAFETY: all pointers point to locals of the right lengths.
            let code = unsafe {
                encode(
                    &raw mut map.0,
                    7,
                    3,
                    at,
                    sizes.as_ptr(),
                    strides.as_ptr(),
                    block.as_ptr(),
                    steps.as_ptr(),
                    0,
                    0,
                    0,
                    0,
                )
            };
            check("cuTensorMapEncodeTiled", code).map(|()| map.0)
        };
        let (one, same, other) = (map(at)?, map(at)?, map(at + 4096)?);
        Ok(one == same && one != other && one != [0; 16])
    }

    /// Returns the number of clusters of two blocks of a kernel that fit on the card.
    pub fn clusters(&self, function: u64) -> Result<i32, Failed> {
        let count = function!(self, c"cuOccupancyMaxActiveClusters", 12_000, fn(*mut c_int, u64, *const Configuration));
        // `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`: the number, four bytes, three sizes.
        let mut attribute = [0u32; 18];
        attribute[..5].copy_from_slice(&[4, 0, 2, 1, 1]);
        let configuration = Configuration {
            dimensions: [64, 1, 1, 128, 1, 1],
            shared: 0,
            stream: 0,
            attributes: &raw const attribute,
            count: 1,
        };
        let mut clusters = 0;
        // SAFETY: the pointers point to locals.
        check("cuOccupancyMaxActiveClusters", unsafe { count(&raw mut clusters, function, &raw const configuration) })?;
        Ok(clusters)
    }
}
