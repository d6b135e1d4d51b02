//! The guest's `libcuda.so.1`. The library executes calls itself, or sends them to the program's worker.
//!
//! - [`entry`] contains the exported functions, and dispatches calls to their handlers.
//! - [`connection`] starts the worker through a [`cuda_ring::Transport`] ([`transport`]), publishes messages and waits
//!   for replies. [`thread`] contains the state of each thread: slot, current context, capture mode.
//! - [`call`] sends described calls. The other modules contain the functions that the guest completes itself, by topic.
//!
//! The guest assigns handles itself. Addresses of card memory and pinned memory are the same in the guest and in the
//! worker, so the library reserves their range. `cuda-calls` describes the calls.

mod addresses;
mod allocations;
mod boxes;
mod cached;
mod call;
mod captures;
mod code;
mod connection;
mod contexts;
mod copies;
mod copy_threads;
mod devices;
mod entry;
mod errors;
mod fork;
mod frame;
mod functions;
mod graphs;
mod host_functions;
mod launches;
mod links;
mod lookup;
mod memory;
mod names;
mod nodes;
mod nvml;
mod output;
mod pinned;
mod registered;
mod signals;
mod streaming;
mod streams;
mod tables;
mod thread;
mod transport;

/// Result codes, from NVIDIA's headers.
mod result {
    pub const SUCCESS: i32 = 0;
    pub const INVALID_VALUE: i32 = 1;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const NOT_INITIALIZED: i32 = 3;
    pub const DEINITIALIZED: i32 = 4;
    pub const NO_DEVICE: i32 = 100;
    pub const INVALID_DEVICE: i32 = 101;
    pub const INVALID_CONTEXT: i32 = 201;
    pub const FILE_NOT_FOUND: i32 = 301;
    pub const INVALID_HANDLE: i32 = 400;
    pub const NOT_FOUND: i32 = 500;
    pub const ALREADY_REGISTERED: i32 = 712;
    pub const NOT_REGISTERED: i32 = 713;
    pub const LAUNCH_FAILED: i32 = 719;
    pub const NOT_SUPPORTED: i32 = 801;
}

/// Prints a line to standard error.
macro_rules! report {
    ($($arg:tt)*) => {
        // Ignore errors: without standard error, the program receives only the result of its call.
        { let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("libcuda (guest): {}\n", format_args!($($arg)*))); }
    };
}
use report;
