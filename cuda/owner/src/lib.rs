//! The owner of a modern card behind NVIDIA's driver: its memory, its time, and the programs that share both.
//!
//! Parts:
//! - [`core`]: everything that is decided, as a state machine: who has which chunk, what moves, whose turn it is;
//! - [`turns`]: grants of the card's time, by the scheduler's decisions;
//! - [`driver`]: what is asked of the driver, with a model of it for tests;
//! - [`control`]: requests of the daemon, of which this is a child;
//! - [`server`]: the socket that programs connect to (`cuda-protocol`), and the threads that call the driver.
//!
//! Chunks are allocations of the owner's that programs import and map at addresses of their own; the owner copies them
//! through mappings of its own. A program is told to be quiet, its chunks are copied, it maps the copies at the same
//! addresses. `vram` says what moves, `sched` whose turn it is; neither knows CUDA.
//!
//! What it does not do: speak to a GPU but through `driver`, or decide for cards that the mediator itself owns.

pub mod control;
pub mod core;
pub mod driver;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod server;
pub mod turns;
