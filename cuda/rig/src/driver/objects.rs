//! Objects of all kinds that survive a restart of the program's worker, and objects that prevent one.
//!
//! UNSAFETY: calls library functions with the signatures from NVIDIA's headers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use super::nodes::{HostNode, KernelNode};
use super::variables::Counters;
use super::{Cuda, Failed, check};

/// Number of words per buffer.
const WORDS: u64 = 100_000;
const BYTES: u64 = WORDS * 8;
/// Number of words in pinned memory.
const PINNED_WORDS: usize = 1000;

/// `CUDA_ARRAY_DESCRIPTOR`: width, height, format of one byte with one channel.
static ARRAY: [u64; 3] = [64, 4, 1 | 1 << 32];

/// Sum of the arguments passed to [`count`]. A static variable, because a host function receives only its argument.
static CALLED: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn count(data: u64) {
    CALLED.fetch_add(data, Ordering::SeqCst);
}

/// A program's objects, with the expected contents of its memory.
#[derive(Debug)]
pub struct Objects {
    /// Buffers, each with the expected value of its first word. The following words count up.
    buffers: Vec<(u64, u64)>,
    /// A stream-ordered allocation.
    small: u64,
    pinned: u64,
    streams: [u64; 2],
    event: u64,
    add: u64,
    /// An executable graph, which adds to the first buffer and calls a host function.
    exec: u64,
    /// The kernel node in the graph of `exec`.
    node: u64,
    /// An executable graph from a capture, which adds 3 to the second buffer and calls a host function.
    captured: u64,
    /// Handle of a second context.
    other: u64,
    /// A buffer in the second context.
    far: u64,
    called: u64,
    counters: Counters,
    obstacles: Vec<(String, u64)>,
}

fn failed(call: &'static str) -> Failed {
    Failed { call, code: -1 }
}

impl Cuda {
    /// Creates the objects.
    ///
    /// # Errors
    /// Returns an error if a call fails.
    pub fn objects(&self) -> Result<Objects, Failed> {
        let pin = function!(self, c"cuMemHostAlloc", 12_000, fn(*mut u64, usize, u32));
        let priority = function!(self, c"cuStreamCreateWithPriority", 12_000, fn(*mut u64, u32, c_int));
        let create_event = function!(self, c"cuEventCreate", 12_000, fn(*mut u64, u32));
        let fill = self.kernel("fill")?;
        let add = self.kernel("add")?;
        let (mut second, mut event, mut pinned) = (0, 0, 0);
        // SAFETY: the pointers refer to local variables.
        unsafe {
            check("cuStreamCreateWithPriority", priority(&raw mut second, 1, 0))?;
            check("cuEventCreate", create_event(&raw mut event, 2))?;
            check("cuMemHostAlloc", pin(&raw mut pinned, PINNED_WORDS * 8, 0))?;
        }
        let streams = [self.stream()?, second];
        let mut buffers = Vec::new();
        let mut freed = Vec::new();
        for value in 0..4u64 {
            // Leave holes between the buffers, so that their addresses depend on the order of allocations.
            freed.push(self.alloc(BYTES / 2)?);
            let at = self.alloc(BYTES)?;
            self.launch(fill, &[at, WORDS, 1000 * value], streams[0])?;
            buffers.push((at, 1000 * value));
        }
        self.finish(streams[0])?;
        freed.into_iter().try_for_each(|at| self.free(at))?;
        let small = self.alloc_async(64, streams[0])?;
        self.set_async(small, 0, 64, streams[0])?;
        self.finish(streams[0])?;
        let first = self.context;
        let other = self.another_context()?;
        let far = self.alloc(BYTES)?;
        self.write(far, &[7])?;
        self.enter()?;
        let [exec, node] = self.graph_of(add, buffers[0].0)?;
        debug_assert!(first != other, "two contexts");
        let captured = self.captured(streams[0], add, buffers[1].0)?;
        let (called, counters, obstacles) = (0, self.counters()?, Vec::new());
        Ok(Objects {
            buffers,
            small,
            pinned,
            streams,
            event,
            add,
            exec,
            node,
            captured,
            other,
            far,
            called,
            counters,
            obstacles,
        })
    }

    /// Captures a graph that adds 3 to a buffer and calls a host function. Destroys the graph and an event that the
    /// capture used, and returns the executable graph.
    fn captured(&self, stream: u64, add: u64, at: u64) -> Result<u64, Failed> {
        let launch_host = function!(self, c"cuLaunchHostFunc", 12_000, fn(u64, unsafe extern "C" fn(u64), u64));
        let create_event = function!(self, c"cuEventCreate", 12_000, fn(*mut u64, u32));
        let end_event = function!(self, c"cuEventDestroy", 12_000, fn(u64));
        let wait_event = function!(self, c"cuStreamWaitEvent", 12_000, fn(u64, u64, u32));
        let end_graph = function!(self, c"cuGraphDestroy", 12_000, fn(u64));
        let (mut event, mut graph, mut exec) = (0, 0, 0);
        self.begin_capture(stream)?;
        self.launch(add, &[at, WORDS, 1], stream)?;
        // SAFETY: the pointers refer to local variables, and the objects exist.
        unsafe {
            check("cuEventCreate", create_event(&raw mut event, 2))?;
            check("cuEventRecord", (self.functions.raw_record)(event, stream))?;
            check("cuStreamWaitEvent", wait_event(stream, event, 0))?;
            check("cuEventDestroy", end_event(event))?;
            check("cuLaunchHostFunc", launch_host(stream, count, 100))?;
        }
        self.launch(add, &[at, WORDS, 2], stream)?;
        self.raw_end(stream, &raw mut graph)?;
        self.raw_instantiate(&raw mut exec, graph, 0)?;
        // SAFETY: the graph exists.
        check("cuGraphDestroy", unsafe { end_graph(graph) })?;
        Ok(exec)
    }

    /// Builds a graph that adds 5 to a buffer and calls a host function. Returns the executable graph and its kernel
    /// node.
    fn graph_of(&self, add: u64, at: u64) -> Result<[u64; 2], Failed> {
        type Dependencies = *const u64;
        let create = function!(self, c"cuGraphCreate", 12_000, fn(*mut u64, u32));
        let add_kernel =
            function!(self, c"cuGraphAddKernelNode", 12_000, fn(*mut u64, u64, Dependencies, usize, *const KernelNode));
        let add_host =
            function!(self, c"cuGraphAddHostNode", 12_000, fn(*mut u64, u64, Dependencies, usize, *const HostNode));
        let instantiate = function!(self, c"cuGraphInstantiateWithFlags", 12_000, fn(*mut u64, u64, u64));
        let (mut exec, mut graph, mut node, mut last) = (0, 0, 0, 0);
        let arguments = [at, WORDS, 5];
        let pointers = arguments.each_ref().map(std::ptr::from_ref);
        let kernel = kernel_node(add, pointers.as_ptr());
        let host = HostNode { function: count, data: 1 };
        // SAFETY: all pointers refer to local variables of the right types.
        unsafe {
            check("cuGraphCreate", create(&raw mut graph, 0))?;
            check("cuGraphAddKernelNode", add_kernel(&raw mut node, graph, std::ptr::null(), 0, &raw const kernel))?;
            check("cuGraphAddHostNode", add_host(&raw mut last, graph, &raw const node, 1, &raw const host))?;
            check("cuGraphInstantiateWithFlags", instantiate(&raw mut exec, graph, 0))?;
        }
        Ok([exec, node])
    }
}

fn kernel_node(function: u64, parameters: *const *const u64) -> KernelNode {
    KernelNode { function, dimensions: [1; 6], shared: 0, parameters, extra: 0, kernel: 0, context: 0 }
}

impl Objects {
    /// Uses all objects, and checks all results. Returns a checksum of the memory contents.
    ///
    /// # Errors
    /// Returns an error if a call fails or a result is wrong.
    pub fn round(&mut self, cuda: Cuda, round: u64) -> Result<u64, Failed> {
        let set_current = function!(cuda, c"cuCtxSetCurrent", 12_000, fn(u64));
        let launch_host = function!(cuda, c"cuLaunchHostFunc", 12_000, fn(u64, unsafe extern "C" fn(u64), u64));
        let wait_event = function!(cuda, c"cuStreamWaitEvent", 12_000, fn(u64, u64, u32));
        let change = function!(cuda, c"cuGraphExecKernelNodeSetParams", 12_000, fn(u64, u64, *const KernelNode));
        let [first, second] = self.streams;
        let capturing = self.obstacles.iter().any(|(kind, _)| kind == "capture");
        let mut added = 5;
        if round.is_multiple_of(3) && !capturing {
            // From now on, the executable graph differs from the graph.
            added = round;
            self.change_exec(added, change)?;
        }
        for (at, value) in &mut self.buffers {
            cuda.launch(self.add, &[*at, WORDS, round], second)?;
            *value += round;
        }
        // SAFETY: the objects exist, and the function has one argument.
        unsafe {
            (cuda.functions.raw_record)(self.event, second);
            check("cuStreamWaitEvent", wait_event(first, self.event, 0))?;
            if !capturing {
                check("cuLaunchHostFunc", launch_host(second, count, 10))?;
                self.called += 10;
            }
        }
        if !capturing {
            self.counters.round(cuda)?;
            cuda.graph(self.exec, second)?;
            cuda.graph(self.captured, second)?;
            self.buffers[0].1 += added;
            self.buffers[1].1 += 3;
            self.called += 101;
            if added != 5 {
                cuda.finish(second)?;
                self.change_exec(5, change)?;
            }
        }
        // Make the card write to pinned memory.
        cuda.copy(self.pinned, self.buffers[0].0, PINNED_WORDS as u64 * 8, second)?;
        cuda.finish(second)?;
        // SAFETY: the copy is complete.
        let seen = unsafe { std::slice::from_raw_parts(self.pinned as *const u64, PINNED_WORDS) };
        let expected = self.buffers[0].1;
        if !seen.iter().zip(expected..).all(|(seen, expected)| *seen == expected) {
            return Err(failed("a copy to pinned memory"));
        }
        let mut sum = 0u64;
        for (number, (at, value)) in self.buffers.iter().enumerate() {
            let words = cuda.read(*at, WORDS as usize)?;
            if !words.iter().zip(*value..).all(|(found, expected)| *found == expected) {
                eprintln!("buffer {number} has {} instead of {value} in round {round}", words[0]);
                return Err(failed("the contents of a buffer"));
            }
            sum += words[0];
        }
        let word = cuda.read(self.small, 1)?[0];
        cuda.write(self.small, &[word + 1])?;
        // SAFETY: both contexts exist.
        check("cuCtxSetCurrent", unsafe { set_current(self.other) })?;
        let far = cuda.read(self.far, 1)?[0];
        cuda.write(self.far, &[far + 1])?;
        cuda.enter()?;
        if (word, far) != (round - 1, round + 6) {
            return Err(failed("the contents of small or other memory"));
        }
        let called = CALLED.load(Ordering::SeqCst);
        if called != self.called {
            eprintln!("functions were called {called} times instead of {}", self.called);
            return Err(failed("functions of the program"));
        }
        Ok(sum)
    }

    fn change_exec(
        &self,
        added: u64,
        change: unsafe extern "C" fn(u64, u64, *const KernelNode) -> c_int,
    ) -> Result<(), Failed> {
        let arguments = [self.buffers[0].0, WORDS, added];
        let pointers = arguments.each_ref().map(std::ptr::from_ref);
        let kernel = kernel_node(self.add, pointers.as_ptr());
        // SAFETY: the pointers refer to local variables.
        check("cuGraphExecKernelNodeSetParams", unsafe { change(self.exec, self.node, &raw const kernel) })
    }

    /// Creates an object that prevents a restart, or destroys all such objects.
    ///
    /// # Errors
    /// Returns an error if a call fails or the kind is unknown.
    pub fn obstruct(&mut self, cuda: Cuda, kind: &str) -> Result<(), Failed> {
        let create_event = function!(cuda, c"cuEventCreate", 12_000, fn(*mut u64, u32));
        let end_event = function!(cuda, c"cuEventDestroy", 12_000, fn(u64));
        let array = function!(cuda, c"cuArrayCreate", 12_000, fn(*mut u64, *const [u64; 3]));
        let end_array = function!(cuda, c"cuArrayDestroy", 12_000, fn(u64));
        let end_module = function!(cuda, c"cuModuleUnload", 12_000, fn(u64));
        let end_exec = function!(cuda, c"cuGraphExecDestroy", 12_000, fn(u64));
        let end_graph = function!(cuda, c"cuGraphDestroy", 12_000, fn(u64));
        let pin = function!(cuda, c"cuMemHostAlloc", 12_000, fn(*mut u64, usize, u32));
        let unpin = function!(cuda, c"cuMemFreeHost", 12_000, fn(u64));
        let mut made = 0u64;
        // SAFETY: the pointers refer to local variables of the right sizes, and the objects exist.
        unsafe {
            match kind {
                "event" => {
                    check("cuEventCreate", create_event(&raw mut made, 0))?;
                    check("cuEventRecord", (cuda.functions.raw_record)(made, 0))?;
                }
                "mapping" => made = cuda.create_own(2 << 20)?,
                "array" => check("cuArrayCreate", array(&raw mut made, &raw const ARRAY))?,
                "address" => made = cuda.addressed_module()?,
                "pointer" => {
                    made = cuda.alloc(64)?;
                    cuda.store_address(made)?;
                }
                "pinned" => {
                    check("cuMemHostAlloc", pin(&raw mut made, 4096, 0))?;
                    cuda.store_address(made)?;
                }
                "unreadable" => made = cuda.broken_module()?,
                "missing" => made = cuda.module_with(".const .u32 missing;")?,
                "pointers" => made = cuda.module_with(".global .u64 table[1] = {tally};")?,
                "heap" => made = cuda.module_with(".extern .func (.param .b64 r) malloc (.param .b64 n);")?,
                "captured" => {
                    let [stream, _] = self.streams;
                    let mut graph = 0;
                    cuda.begin_capture(stream)?;
                    let inner = cuda.alloc_async(64, stream)?;
                    cuda.launch(self.add, &[inner, 1, 0], stream)?;
                    cuda.free_async(inner, stream)?;
                    cuda.raw_end(stream, &raw mut graph)?;
                    cuda.raw_instantiate(&raw mut made, graph, 0)?;
                    check("cuGraphDestroy", end_graph(graph))?;
                }
                "capture" => {
                    made = cuda.stream()?;
                    cuda.begin_capture(made)?;
                }
                "end" => {
                    for (kind, made) in self.obstacles.drain(..) {
                        match &kind[..] {
                            "event" => check("cuEventDestroy", end_event(made))?,
                            "mapping" => cuda.release(made)?,
                            "array" => check("cuArrayDestroy", end_array(made))?,
                            "address" | "unreadable" | "missing" | "pointers" | "heap" => {
                                check("cuModuleUnload", end_module(made))?;
                            }
                            "pointer" => cuda.free(made)?,
                            "pinned" => {
                                // Clear the stored address, because the library may keep the memory for later
                                // allocations.
                                (made as *mut u64).add(1).write(0);
                                check("cuMemFreeHost", unpin(made))?;
                            }
                            "captured" => check("cuGraphExecDestroy", end_exec(made))?,
                            _ => {
                                let mut graph = 0;
                                cuda.raw_end(made, &raw mut graph)?;
                                check("cuGraphDestroy", end_graph(graph))?;
                                cuda.destroy(made)?;
                            }
                        }
                    }
                    return Ok(());
                }
                _ => return Err(failed("a kind of object")),
            }
        }
        self.obstacles.push((kind.to_owned(), made));
        Ok(())
    }
}
