//! The library that programs load as `libcuda.so.1`.
//!
//! Each symbol of the driver API jumps through a slot (`abi::stubs`). The first call finds and loads the real driver's
//! library (`abi::loader`), and fills every slot with the real function. If [`cuda_protocol::SOCKET_VARIABLE`] is set
//! in the environment, this library's own functions replace the functions that a mediator must intercept, both in the
//! slots and in the results of `cuGetProcAddress` (`abi::lookup`). These functions share one object, the
//! [`shim::Shim`], which has a [`shim::Card`] for each owner:
//! - memory (`memory`): allocations are backed by chunks of the owner, at addresses that never change; memory that
//!   cannot move is counted;
//! - submissions (crate `cuda-pacing`): they wait outside the tenant's slice and while its chunks move, and the
//!   run-ahead of each stream is bounded;
//! - the link to the owner (`link`): requests of the program's threads.
//!
//! A program with several cards can use memory of one card on another (`peers`); `cross` decides on which cards it must
//! be quiet while memory moves.
//!
//! One thread for each card carries out its owner's orders (`agent`). Imports go in one direction: `abi` and `agent`
//! import `shim`, and `shim` imports the other modules. A module gets the parts that it needs as arguments, and reports
//! events to its caller.
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
use cuda_pacing::{captures, contexts, events, gate, pace, pacing};

mod abi;
mod agent;
mod cross;
mod descriptors;
mod fork;
mod link;
mod log;
mod memory;
mod peers;
mod process;
mod settings;
mod shim;
mod visible;
