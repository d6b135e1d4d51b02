//! The library that programs load as `libcuda.so.1`.
//!
//! Each symbol of the driver API jumps through a slot (`abi::stubs`). On the first call the real driver's library is
//! found and loaded (`abi::loader`), and every slot gets the real function. With [`cuda_protocol::SOCKET_VARIABLE`] in
//! the environment our own functions replace the ones that a mediator must intercept, both in the slots and in the
//! answers of `cuGetProcAddress` (`abi::lookup`). They share one object, the [`shim::Shim`]:
//! - memory (`memory`): allocations are backed by chunks of the owner, at addresses that never change; memory that
//!   cannot move is counted;
//! - submissions (`gate`, `pacing`): blocked outside the tenant's slice and while its chunks move, and with bounded
//!   run-ahead per stream (`pace`, `solo_backlog`); while a stream captures (`captures`), `fences` find the ends of
//!   work;
//! - the link to the owner (`link`): requests of the program's threads.
//!
//! One thread obeys the owner (`agent`). Modules import one way: `abi` and `agent` are above `shim`, and `shim` is
//! above the rest. A module gets the parts that it needs as arguments, and reports an event to its caller.
//!
//! The same file is `libnvidia-ml.so.1` as well (`abi::nvml`): NVML's functions pass, except the ones that report a
//! card's memory.
//!
//! After the driver is loaded, function lookup neither allocates nor locks. No panic crosses the boundary, and there is
//! no output unless [`cuda_protocol::LOG_VARIABLE`] enables it. The process belongs to the program, with its children
//! (`fork`), signals (`process`), descriptors and limits (`descriptors`).

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
