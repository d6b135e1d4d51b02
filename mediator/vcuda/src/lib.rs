//! The CUDA function of a VM: a virtio-gpu device with a private capability set, used through Linux's stock driver.
//!
//! A guest program opens the render node, and creates a context and *blobs*: ranges of the *window*, a BAR backed by
//! one file of this process. The first blob of a context starts a *worker*, a host process that maps the window and
//! calls CUDA for the program. The device passes doorbells to the worker, and completes the waits of the program's
//! threads when words in the program's blobs have reached their values.
//!
//! - `core`: the state machine for contexts, blobs, workers and waits.
//! - `command`: the virtio-gpu commands and their responses.
//! - `pci`, `registers`: the configuration space and BAR0. Each access is handled immediately.
//! - `queue`: the control queue in the guest's memory, with indirect descriptors.
//! - `window`: the window's memory.
//! - `device`: the function's interface to the VMM's server; `executor`: the thread that executes commands; `shared`:
//!   the state that both share.
//! - `worker`: processes and their links.
//! - `saved`, `core::saved`, `registers::saved`: the state for another process; `adoption`: the state of an earlier
//!   process; `function`: the thread, and its suspension; `journal`: the state after a kill; `rejoin`: the socket that
//!   workers use to find the next process.
//! - `restart`, `moving`: requests for new workers, on the same card or on another one; `executor` executes them.
//! - `fuzz` (feature `fuzz`): random steps for tests.
//!
//! The crate does not read the programs' rings and does not depend on CUDA. All input from the guest is untrusted: it
//! is copied once before it is checked.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]
#![cfg_attr(
    test,
    allow(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        reason = "a test that goes wrong may panic"
    )
)]

mod adoption;
mod command;
mod core;
mod device;
mod executor;
mod function;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod journal;
mod moving;
mod pci;
mod queue;
mod registers;
mod rejoin;
mod restart;
mod saved;
mod shared;
pub mod users;
mod window;
mod worker;

pub use crate::core::{Limits, ProgramStatus};
pub use device::{BuildError, CudaDevice, MIN_WINDOW_BYTES, irqs};
pub use function::{CudaFunction, SuspendedFunction};
pub use moving::{CARRY_LIMIT, Carried};
pub use restart::{RESTART_LIMIT, Restart, RestartError};
pub use saved::{ProcessId, SavedFunction};
pub use worker::{Launcher, Process, ProgramLauncher, Started};
