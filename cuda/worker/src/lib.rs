//! The worker of one guest program. It executes the calls in the program's ring on a CUDA driver library.
//!
//! The library is the shim, so the worker is an ordinary tenant program, and does not need code for chunks, relocation,
//! turns or quotas. The worker does not trust the contents of the ring. It copies each message, and checks it against
//! the description of the call (`cuda-calls`). It uses addresses only if they belong to the card or to the guest's own
//! memory.
//!
//! - [`serve`] is the entry point: the loop that handles the ring, waits and sleeps, and the thread that reads the
//!   link.
//! - `executor` executes one message. This module handles described calls itself; the modules `launches`, `copies`,
//!   `pinned`, `host_functions`, `nodes` and `links` handle calls that have their own messages.
//! - `waits` handles calls whose reply is sent when work on the card completes. Such calls never block the ring.
//! - `save` writes the state of a program to a file, and `restore` continues from it in another worker.
//! - `output` collects the output of kernels.
//! - `device_link` connects to the next daemon after the connection to the current one was closed.
//! - `objects` maps the guest's handles to the driver's; `window` maps the shared memory; `driver` calls the library.
//! - `sandbox` restricts the process, because a guest may be able to run arbitrary code in its worker.
//!
//! A crash terminates the process, and with it one guest program. The crate does not schedule work; the shim and the
//! card's owner do. The worker does not create blobs, and is independent of virtual machines and their devices.

mod arguments;
mod captures;
mod contents;
mod copies;
mod device_link;
mod driver;
mod executor;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod host_functions;
mod launches;
mod links;
mod names;
mod nodes;
mod objects;
mod output;
mod pending;
mod pinned;
mod processes;
mod restore;
pub mod sandbox;
mod save;
mod serve;
mod variables;
mod waits;
mod window;

pub use arguments::SandboxArgs;
pub use device_link::DeviceLink;
pub use driver::{Driver, LoadError};
pub use executor::{Broken, Executor};
pub use output::Output;
pub use serve::{ServeError, Start, serve};
pub use window::{Window, WindowError};
