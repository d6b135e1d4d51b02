//! The library that programs load as `libcuda.so.1`.
//!
//! Each symbol of the driver API jumps through a slot (`abi::stubs`). The first call loads the real driver library
//! (`abi::loader`), and fills every slot with the real function. If the environment variable
//! [`cuda_protocol::SOCKET_VARIABLE`] is set, this library's own functions replace those that the mediator must
//! intercept, both in the slots and in the results of `cuGetProcAddress` (`abi::lookup`). These functions share one
//! object, the [`shim::Shim`], with a [`shim::Card`] for each owner:
//! - memory (`memory`): allocations are backed by the owner's chunks, at addresses that never change; memory that
//!   cannot move is accounted for;
//! - submissions (crate `cuda-pacing`): they wait while the tenant has no slice and while its chunks move, and the
//!   work in flight is limited;
//! - the link to the owner (`link`): requests from the program's threads.
//!
//! A program with several cards can use one card's memory on another (`peers`); `cross` decides which cards must be
//! quiesced while memory moves.
//!
//! One thread per card executes its owner's commands (`agent`). Imports go in one direction: `abi` and `agent` import
//! `shim`, and `shim` imports the other modules. A module receives the parts that it needs as arguments, and reports
//! events to its caller.
//!
//! The same file also serves as `libnvidia-ml.so.1` (`abi::nvml`): it forwards NVML functions, except those that report
//! card memory, the tenant's cards, or their processes.
//!
//! Once the driver is loaded, function lookup neither allocates nor locks. No panic crosses the ABI boundary, and the
//! library does not write any output except errors that make `cuInit` fail, unless [`cuda_protocol::LOG_VARIABLE`]
//! enables more. The process belongs to the program, including its children (`fork`), signals (`process`), descriptors
//! and limits (`descriptors`).

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("the stubs are written for x86-64 Linux");

use cuda_driver::{calls as driver, streams, symbols};
use cuda_pacing::{captures, contexts, events, gate, pace, pacing, turn_end};
use program_cards::{cross, peers};

mod abi;
mod agent;
mod descriptors;
mod fork;
mod link;
mod log;
mod memory;
mod process;
mod settings;
mod shim;
mod visible;
