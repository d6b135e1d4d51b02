//! The VMM interface: a vfio-user server for one virtual PCI function per UNIX socket.
//!
//! Modules, from the wire to the device:
//! - [`protocol`]: numbers and structures of the wire format.
//! - [`socket`]: binds a path, sets permissions, and passes file descriptors.
//! - [`connection`]: a client's state machine, which turns bytes into replies. It needs no socket, so tests and fuzzers
//!   can drive it.
//! - [`server`]: the event loop of one socket, which serves one client after another, with busy polling and bounded
//!   output.
//! - [`device`]: the trait that a device implements.
//! - [`migration`]: the trait that a migratable device implements.
//! - [`mappable`]: parts of a region that a client can map and access without messages.
//! - [`link`]: the parts that a device may use from any thread: [`interrupts`], [`memory`] (a crate of its own),
//!   [`dma`], [`counters`].
//! - `options`: server options.
//! - `suspended_client`: a suspended client, which a server can resume in this process or in another.
//! - [`journal`]: a client's state for the next process, in case this process is killed.
//! - `event`: a client's event descriptor, which cannot block any thread.
//! - [`pieces`], [`spin`]: splitting of accesses, and polling before sleeping. Servers of other kinds also use them.
//! - [`echo`]: a device that consists of plain memory, the baseline of transport benchmarks.
//! - `client`, `fuzz` (feature `client`): a client, and the body of the fuzz target.
//!
//! The crate is not specific to GPUs. Not supported: copying a device's state while the device runs (`PRE_COPY`), the
//! dirty page messages of older specification editions, I/O file descriptors of regions, twin-socket mode, and
//! transports other than UNIX sockets.
//!
//! All input from a client is untrusted: sizes, counts, offsets, flags and file descriptors are validated, buffers are
//! bounded, and a client that does not read its replies is disconnected. An invalid but framed message gets an error
//! reply. If a stream loses its framing, the server closes the connection.
//!
//! Lock order: the state of `Link`, then [`interrupts`]; in [`dma`], the client's state, then a request's state. The
//! other locks are leaf locks. No lock is held while the server calls a device.
//!
//! Sources: the vfio-user specification (`docs/interop/vfio-user.rst` in QEMU, `docs/vfio-user.rst` in libvfio-user),
//! the behaviour of QEMU's `hw/vfio-user` and of the rust-vmm `vfio-user` crate's client (used by cloud-hypervisor),
//! `linux/vfio.h`.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]
#![cfg_attr(
    test,
    allow(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        reason = "a failing test may panic"
    )
)]

#[cfg(feature = "client")]
pub mod client;
pub mod connection;
pub mod counters;
pub mod device;
pub mod dma;
pub mod echo;
mod event;
#[cfg(feature = "client")]
pub mod fuzz;
pub mod interrupts;
pub mod journal;
pub mod link;
pub mod mappable;
pub mod migration;
mod options;
pub mod pieces;
pub mod protocol;
pub mod server;
pub mod socket;
pub mod spin;
mod suspended_client;

pub use counters::{Counters, worth_logging};
pub use device::{AccessError, Ack, Deferred, Device, MapError, RegionIndex, RegionInfo};
pub use interrupts::{Interrupts, IrqCounts};
pub use link::{ClientInfo, Link, StopHandle};
pub use mappable::{Mappable, MappableError, MmapArea};
pub use migration::{Migration, MigrationError};
pub use server::{Server, ServerError, ServerOptions};
pub use socket::{BindError, BoundPath, SocketOptions};
pub use suspended_client::{SavedClients, SuspendedClient};
pub use vmm_memory::descriptors::ParkError;
pub use vmm_memory::memory;
pub use vmm_memory::memory::{DmaRegion, GuestMemory, Mapping, MemoryTable};
