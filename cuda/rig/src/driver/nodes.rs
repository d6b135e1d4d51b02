//! Graphs built from nodes, tensor maps, and cluster occupancy. Programs look up these functions by name.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use super::arrays::Copy3d;
use super::{Cuda, Failed, check};

/// `CUDA_MEMSET_NODE_PARAMS` for one row of bytes.
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

/// `CUDA_KERNEL_NODE_PARAMS`, second version.
#[repr(C)]
pub(super) struct KernelNode {
    pub function: u64,
    pub dimensions: [u32; 6],
    pub shared: u32,
    pub parameters: *const *const u64,
    pub extra: u64,
    pub kernel: u64,
    pub context: u64,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
pub(super) struct HostNode {
    pub function: unsafe extern "C" fn(u64),
    pub data: u64,
}

/// `CUstreamCallback`.
type StreamCallback = unsafe extern "C" fn(u64, c_int, u64);

/// Sum of the arguments of the host functions called since the last reset. A static variable, because a host function
/// receives only its argument.
static COUNTED: AtomicU64 = AtomicU64::new(0);
/// Stream of the last callback. A static variable, because a callback receives only its arguments.
static CALLER: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn count(data: u64) {
    COUNTED.fetch_add(data, Ordering::SeqCst);
}

unsafe extern "C" fn count_for_stream(stream: u64, result: c_int, data: u64) {
    CALLER.store(stream, Ordering::SeqCst);
    COUNTED.fetch_add(if result == 0 { data } else { 0 }, Ordering::SeqCst);
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const UPLOAD: u64 = 2;
/// Number of bytes filled by each node.
const FILLED: usize = 4096;

impl Fill {
    fn new(at: u64, value: u32) -> Self {
        Self { at, pitch: 0, value, element_bytes: 1, width: FILLED, height: 1 }
    }
}

impl Cuda {
    /// Builds a graph of a fill, a child graph with another fill, and an event record. Launches it twice, the second
    /// time with a modified fill. Returns the first words of both filled ranges after each launch.
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
        // SAFETY: all pointers refer to local variables of the right types.
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
        // SAFETY: the pointer refers to a local variable.
        let result = unsafe { change(made, nodes[0], &raw const changed, self.context) };
        check("cuGraphExecMemsetNodeSetParams", result)?;
        self.raw_graph(made, stream)?;
        self.finish(stream)?;
        let [c, d] = look()?;
        Ok([a, b, c, d])
    }

    /// Builds a graph from a kernel, a copy, and a host function. Launches the graph unmodified, with modified
    /// parameters in the executable graph, and after modifying the graph itself. Returns the words written by the
    /// kernel and by the copy after each launch, the sum of the host functions' arguments, the result of a call without
    /// parameters, an attribute, and the argument of a callback.
    pub fn build_work(&self) -> Result<Vec<u64>, Failed> {
        type Dependencies = *const u64;
        let create = function!(self, c"cuGraphCreate", 12_000, fn(*mut u64, u32));
        let add_kernel =
            function!(self, c"cuGraphAddKernelNode", 12_000, fn(*mut u64, u64, Dependencies, usize, *const KernelNode));
        let add_copy = function!(
            self,
            c"cuGraphAddMemcpyNode",
            12_000,
            fn(*mut u64, u64, Dependencies, usize, *const Copy3d, u64)
        );
        let add_host =
            function!(self, c"cuGraphAddHostNode", 12_000, fn(*mut u64, u64, Dependencies, usize, *const HostNode));
        let set_kernel = function!(self, c"cuGraphKernelNodeSetParams", 12_000, fn(u64, *const KernelNode));
        let change_kernel = function!(self, c"cuGraphExecKernelNodeSetParams", 12_000, fn(u64, u64, *const KernelNode));
        let set_attribute = function!(self, c"cuGraphKernelNodeSetAttribute", 12_000, fn(u64, c_int, *const [u64; 8]));
        let get_attribute = function!(self, c"cuGraphKernelNodeGetAttribute", 12_000, fn(u64, c_int, *mut [u64; 8]));
        let change_copy = function!(self, c"cuGraphExecMemcpyNodeSetParams", 12_000, fn(u64, u64, *const Copy3d, u64));
        let change_host = function!(self, c"cuGraphExecHostNodeSetParams", 12_000, fn(u64, u64, *const HostNode));
        let instantiate = function!(self, c"cuGraphInstantiateWithFlags", 12_000, fn(*mut u64, u64, u64));
        let (function, stream, at) = (self.kernel("fill")?, self.stream()?, self.alloc(4096)?);
        let (mut graph, mut nodes, mut made) = (0u64, [0u64; 4], [0u64; 2]);
        let arguments = [1u64, 2, 3].map(|round| [at, 8, 100 * round]);
        let pointers = arguments.each_ref().map(|words| words.each_ref().map(std::ptr::from_ref));
        let kernels = pointers.each_ref().map(|pointers| KernelNode {
            function,
            dimensions: [1; 6],
            shared: 0,
            parameters: pointers.as_ptr(),
            extra: 0,
            kernel: 0,
            context: 0,
        });
        let copies = [1024, 2048].map(|offset| Copy3d::line(at + offset, at + 8, 16));
        let hosts = [3, 500].map(|data| HostNode { function: count, data });
        let none = std::ptr::null();
        let mut seen = Vec::new();
        let mut launch = |made| {
            self.raw_graph(made, stream)?;
            self.finish(stream)?;
            seen.extend([self.read(at, 1)?[0], self.read(at + 1024, 1)?[0], self.read(at + 2048, 1)?[0]]);
            seen.push(COUNTED.load(Ordering::SeqCst));
            Ok::<(), Failed>(())
        };
        self.set(at, 0, 4096)?;
        // SAFETY: all pointers refer to local variables of the right types.
        unsafe {
            let [a, b, c, d] = &mut nodes;
            check("cuGraphCreate", create(&raw mut graph, 0))?;
            check("cuGraphAddKernelNode", add_kernel(a, graph, none, 0, &raw const kernels[0]))?;
            check("cuGraphAddMemcpyNode", add_copy(b, graph, a, 1, &raw const copies[0], self.context))?;
            check("cuGraphAddHostNode", add_host(c, graph, b, 1, &raw const hosts[0]))?;
            check("cuGraphInstantiateWithFlags", instantiate(&raw mut made[0], graph, 0))?;
            launch(made[0])?;
            check("cuGraphExecKernelNodeSetParams", change_kernel(made[0], *a, &raw const kernels[1]))?;
            check("cuGraphExecMemcpyNodeSetParams", change_copy(made[0], *b, &raw const copies[1], self.context))?;
            check("cuGraphExecHostNodeSetParams", change_host(made[0], *c, &raw const hosts[1]))?;
            launch(made[0])?;
            check("cuGraphKernelNodeSetParams", set_kernel(*a, &raw const kernels[2]))?;
            check("cuGraphInstantiateWithFlags", instantiate(&raw mut made[1], graph, 0))?;
            launch(made[1])?;
            seen.push(add_kernel(d, graph, none, 0, none.cast()) as u64);
            // `CU_LAUNCH_ATTRIBUTE_PRIORITY`.
            let (priority, mut known) = ([3u64, 0, 0, 0, 0, 0, 0, 0], [0u64; 8]);
            check("cuGraphKernelNodeSetAttribute", set_attribute(*a, 8, &raw const priority))?;
            check("cuGraphKernelNodeGetAttribute", get_attribute(*a, 8, &raw mut known))?;
            seen.push(known[0]);
        }
        seen.push(self.call_back(stream, 7)?);
        Ok(seen)
    }

    /// Adds a callback to a stream. Returns the increase of [`COUNTED`].
    fn call_back(&self, stream: u64, data: u64) -> Result<u64, Failed> {
        let add = function!(self, c"cuStreamAddCallback", 12_000, fn(u64, StreamCallback, u64, u32));
        COUNTED.store(0, Ordering::SeqCst);
        CALLER.store(0, Ordering::SeqCst);
        // SAFETY: the callback is a function of this program.
        check("cuStreamAddCallback", unsafe { add(stream, count_for_stream, data, 0) })?;
        self.finish(stream)?;
        let is_its_own = CALLER.load(Ordering::SeqCst) == stream;
        check("the stream of the callback", i32::from(!is_its_own))?;
        Ok(COUNTED.load(Ordering::SeqCst))
    }

    /// Encodes three-dimensional tensor maps. Returns true if equal arguments produce equal maps, and a different
    /// address produces a different map.
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
        /// `cuTensorMap`, which must be aligned to 64 bytes.
        #[repr(align(64))]
        struct Map([u64; 16]);
        let at = self.alloc(1 << 20)?;
        let (sizes, strides) = ([64u64, 32, 16], [256u64, 8192]);
        let (block, steps) = ([16u32, 8, 4], [1u32; 3]);
        let map = |at| {
            let mut map = Map([0; 16]);
            // `CU_TENSOR_MAP_DATA_TYPE_FLOAT32`, no interleaving, no swizzle, no promotion, no fill.
            // SAFETY: all pointers refer to local variables of the right lengths.
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

    /// Returns the maximum number of a kernel's two-block clusters that can be active on the card concurrently.
    pub fn clusters(&self, function: u64) -> Result<i32, Failed> {
        let count = function!(self, c"cuOccupancyMaxActiveClusters", 12_000, fn(*mut c_int, u64, *const Configuration));
        // `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`: the attribute's number, four bytes of padding, and three dimensions.
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
        // SAFETY: the pointers refer to local variables.
        check("cuOccupancyMaxActiveClusters", unsafe { count(&raw mut clusters, function, &raw const configuration) })?;
        Ok(clusters)
    }
}
