//! A `libcuda.so.1` for tests that does not need a GPU and is stricter than NVIDIA's library.
//!
//! - Each card is a folder shared by several processes ([`card`]). Each allocation is a file, which is locked while any
//!   process has a handle, an exported descriptor or a mapping of the allocation. `FAKE_CUDA_CARDS` is the number of
//!   cards, and `CUDA_VISIBLE_DEVICES` selects the cards visible to a process. `FAKE_CUDA_NVLINKS` lists the NVLink
//!   connections between the cards.
//! - Addresses ([`space`]): all rules of virtual memory management are checked. An access to an unmapped address, or
//!   without access rights, kills the program.
//! - Work ([`work`]): each stream has a thread, and kernels of all processes share the card's [`engine`]. Captures are
//!   invalidated by the same calls as with NVIDIA's driver. Memory for a graph's allocations is reserved when the graph
//!   is uploaded or launched.
//! - Graphs are captured or built from nodes ([`graphs`]).
//! - Arrays, multidimensional copies, textures and surfaces ([`arrays`]).
//! - Kernels ([`kernels`]) are identified by name; all modules and libraries ([`code`]) contain all of them.
//! - Functions are found by name and version, and in export tables ([`lookup`]); [`facts`] contains attributes of
//!   devices, contexts and streams.
//! - Resets ([`card`]): a card loses all memory, and each process permanently loses its context.
//! - The Multi-Process Service ([`mps`]): kernels of a server's clients run concurrently, and an illegal access by one
//!   client destroys the contexts of all clients.
//! - Access between cards ([`peers`]): work that uses another card's memory without access rights kills the program.
//! - Checkpoints ([`checkpoint`]): one process suspends another and removes it from the card.
//! - Memory for purposes other than allocations ([`further`]): contexts, limits, module variables.
//! - Output of kernels ([`output`]), which only certain calls write.
//! - Registered host memory, and host functions in streams ([`pinned`]).
//! - NVML ([`nvml`]): processes with a context and their memory usage, the card's memory, and its other properties
//!   ([`nvml_facts`]).
//!
//! The clock is the host's clock. Modules contain no code. Textures return single elements without filtering.

mod access;
mod api;
mod arrays;
mod card;
mod checkpoint;
mod code;
mod current;
mod engine;
mod facts;
mod further;
mod graphs;
mod kernels;
mod lookup;
mod memory;
mod modules;
mod mps;
mod nvml;
mod nvml_facts;
mod output;
mod pairs;
mod peers;
mod pinned;
mod registered;
mod space;
mod views;
mod work;

/// Starts a thread that blocks all signals. The threads of NVIDIA's library accept signals, but tests could not
/// distinguish such threads from those of the mediator's library.
///
/// UNSAFETY: sets the signal mask of the calling thread, and restores it before returning.
#[allow(unsafe_code, reason = "see UNSAFETY")]
fn spawn(name: &str, work: impl FnOnce() + Send + 'static) {
    // SAFETY: both sets are local variables, and the first is initialized before it is read.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        // If the thread cannot be started, the driver works without the thread's function.
        let _ = std::thread::Builder::new().name(name.into()).spawn(work);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    }
}

/// Result codes, numbered as in NVIDIA's headers.
mod result {
    pub const SUCCESS: i32 = 0;
    pub const INVALID_VALUE: i32 = 1;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const NOT_INITIALIZED: i32 = 3;
    pub const NO_DEVICE: i32 = 100;
    pub const INVALID_DEVICE: i32 = 101;
    pub const INVALID_CONTEXT: i32 = 201;
    pub const INVALID_HANDLE: i32 = 400;
    pub const ECC_UNCORRECTABLE: i32 = 214;
    pub const FILE_NOT_FOUND: i32 = 301;
    pub const PEER_ACCESS_ALREADY_ENABLED: i32 = 704;
    pub const PEER_ACCESS_NOT_ENABLED: i32 = 705;
    pub const ILLEGAL_STATE: i32 = 401;
    pub const NOT_FOUND: i32 = 500;
    pub const NOT_READY: i32 = 600;
    pub const ILLEGAL_ADDRESS: i32 = 700;
    pub const NOT_SUPPORTED: i32 = 801;
    pub const MPS_CONNECTION_FAILED: i32 = 805;
    pub const MPS_RPC_FAILURE: i32 = 806;
    pub const MPS_SERVER_NOT_READY: i32 = 807;
    pub const MPS_MAX_CLIENTS_REACHED: i32 = 808;
    pub const MPS_CLIENT_TERMINATED: i32 = 810;
    pub const CAPTURE_UNSUPPORTED: i32 = 900;
    pub const CAPTURE_INVALIDATED: i32 = 901;
    pub const CAPTURE_IMPLICIT: i32 = 906;
    pub const CAPTURED_EVENT: i32 = 907;
}
