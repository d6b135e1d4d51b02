//! The library that is `libcuda.so.1` for a program.
//!
//! Each symbol of the driver API jumps through a slot (`abi::stubs`). On the first call the real driver's library is
//! found and loaded (`abi::loader`), and every slot gets the real function. With [`cuda_protocol::SOCKET_VARIABLE`] in
//! the environment our own functions replace the ones that a mediator must intercept, both in the slots and in the
//! answers of `cuGetProcAddress` (`abi::lookup`):
//! - memory (`memory`): allocations are in chunks of the owner, at addresses that never change; memory that cannot move
//!   is counted;
//! - submissions (`gate`, `pace`, `solo_backlog`): blocked outside the tenant's slice and while its chunks move, and
//!   with bounded run-ahead per stream (`streams`); while a stream captures (`captures`), `fences` find the ends of
//!   work;
//! - the connection (`tenant`): one thread obeys the owner.
//!
//! The same file is `libnvidia-ml.so.1` as well (`abi::nvml`): NVML's functions pass, except those that report a card's
//! memory.
//!
//! After the driver is loaded, function lookup neither allocates nor locks. No panic crosses the boundary, and there is
//! no output unless [`cuda_protocol::LOG_VARIABLE`] enables it. The process belongs to the program, with its children
//! (`fork`), signals (`process`), descriptors and limits (`descriptors`).

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("the stubs are written for x86-64 Linux");

use cuda_driver::{calls as driver, streams, symbols};

mod abi;
mod captures;
mod contexts;
mod descriptors;
mod fences;
mod fork;
mod gate;
mod log;
mod memory;
mod pace;
mod process;
mod requests;
mod settings;
mod solo_backlog;
mod tenant;
mod visible;
