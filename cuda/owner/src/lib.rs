//! The owner of a modern card on top of NVIDIA's driver: its memory, its time, and the programs that share both.
//!
//! Parts:
//! - [`core`]: all decisions, as a state machine: the tenants' chunks, moves, and turns;
//! - [`control`]: requests of the daemon, whose child this process is;
//! - [`server`]: the socket that programs connect to (`cuda-protocol`), and the threads that call the driver.
//!
//! Chunks are allocations of the owner that programs import and map at addresses of their own; the owner copies them
//! through mappings of its own. To move chunks it quiesces a program, copies its chunks, and the program maps the
//! copies at the same addresses. `vram` decides the moves, `sched::turns` the turns; neither knows CUDA.
//!
//! Not in this crate: access to a GPU except through `owner-driver`, and decisions about cards that the mediator itself
//! owns.

pub mod control;
pub mod core;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod server;
