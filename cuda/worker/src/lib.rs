//! The worker of one guest program: executes the calls in its ring on a CUDA driver library.
//!
//! The library is the shim, so the worker is an ordinary program of a tenant: chunks, relocation, turns and quotas need
//! no code here. The worker trusts nothing in the ring: it copies each message, checks it against the description of
//! the call (`cuda-calls`), and follows addresses only if they belong to the card or to the guest's own memory.
//!
//! - [`serve`] is the entry point: the loop over ring, waits and sleep, and the thread that reads the link.
//! - `executor` executes one message: described calls, and by module `launches`, `copies`, `pinned`,
//!   `host_functions`, `nodes`, `links` those with messages of their own.
//! - `waits` has calls that are answered when work of the card is done. They never stop the ring.
//! - `device_link` connects to the next daemon after the end of the present one.
//! - `objects` maps the guest's handles to the driver's; `window` has the shared memory; `driver` the library.
//! - `sandbox` restricts the process: a guest may run any code in its worker.
//!
//! A crash ends the process, and with it one guest program. The crate does not schedule work:
//! the shim and its owner do. It does not create blobs, and knows neither virtual machines nor their devices.

mod arguments;
mod copies;
mod device_link;
mod driver;
mod executor;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod host_functions;
mod launches;
mod links;
mod nodes;
mod objects;
mod pending;
mod pinned;
mod processes;
pub mod sandbox;
mod serve;
mod waits;
mod window;

pub use arguments::SandboxArgs;
pub use device_link::DeviceLink;
pub use driver::{Driver, LoadError};
pub use executor::{Broken, Executor};
pub use serve::{ServeError, serve};
pub use window::{Window, WindowError};
