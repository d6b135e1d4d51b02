//! The library that programs load as `libcuda.so.1`.
//!
//! Each symbol of the driver API jumps through a slot (`abi::stubs`). The first call finds and loads the real driver's
//! library (`abi::loader`), and fills every slot with the real function. If [`cuda_protocol::SOCKET_VARIABLE`] is set
//! in the environment, this library's own functions replace the functions that a mediator must intercept, both in the
//! slots and in the results of `cuGetProcAddress` (`abi::lookup`). These functions share one object, the
//! [`shim::Shim`]:
//! - memory (`memory`): allocations are backed by chunks of the owner, at addresses that never change; memory that
//!   cannot move is counted;
//! - submissions (`gate`, `pacing`): they wait outside the tenant's slice and while its chunks move, and the run-ahead
//!   of each stream is bounded (`pace`, `solo_backlog`); while a stream captures (`captures`), `fences` find the end of
//!   work;
//! - the link to the owner (`link`): requests of the program's threads.
//!
//! One thread carries out the owner's orders (`agent`). Imports go in one direction: `abi` and `agent` import `shim`,
//! and `shim` imports the other modules. A module gets the parts that it needs as arguments, and reports events to its
//! caller.
//!
//! The same file also serves as `libnvidia-ml.so.1` (`abi::nvml`): it forwards NVML's functions, except those that
//! report a card's memory, the tenant's cards or their processes.
//!
//! After the driver is loaded, function lookup neither allocates nor locks. No panic crosses the ABI boundary, and the
//! library writes no output unless [`cuda_protocol::LOG_VARIABLE`] enables it. The process belongs to the program, with
//! its children (`fork`), signals (`process`), descriptors and limits (`descriptors`).

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("the stubs are written for x86-64 Linux");

use cuda_driver::{calls as driver, streams, symbols};

mod abi;
mod agent;
mod captures;
mod contexts;
mod descriptors;
mod events;
mod fences;
mod fork;
mod gate;
mod link;
mod log;
mod memory;
mod pace;
mod pacing;
mod process;
mod settings;
mod shim;
mod solo_backlog;
mod visible;
