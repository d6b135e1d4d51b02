//! The owner of a modern card, on top of NVIDIA's driver. The owner manages the card's memory, its time, and the
//! programs that share both.
//!
//! Modules:
//! - [`core`]: the state machine that makes all decisions about the tenants' chunks, moves, and turns;
//! - [`control`]: requests from the daemon, which is this process's parent;
//! - [`server`]: the sockets that programs connect to (`cuda-protocol`), and the threads that call the driver.
//!
//! The owner allocates chunks. Programs import them and map them at their own addresses, and the owner copies them
//! through its own mappings. To move chunks, the owner quiesces a program and copies its chunks, and the program maps
//! the copies at the same addresses. `vram` plans the moves, and `sched::turns` schedules the turns; both are
//! independent of CUDA.
//!
//! This crate accesses GPUs only through `owner-driver`, and does not make decisions about cards that the mediator
//! itself owns.

pub mod control;
pub mod core;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod server;
