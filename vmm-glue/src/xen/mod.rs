//! The second front: an HVM domain of Xen whose accesses to one PCI function come to this process.
//!
//! A process that emulates a device of a domain is an *ioreq server*: it claims a PCI function and ranges of addresses; Xen
//! passes a virtual CPU's access there through a page that both see, and wakes the server by an event channel. Guest memory
//! is mapped by the numbers of its frames.
//!
//! Parts, from the hypervisor inwards:
//! - [`hypervisor`]: the seam: what is asked of Xen; [`kernel`]: the same by Linux's devices; `fake` (feature `test-client`):
//!   the same without Xen, and stricter;
//! - `model`, `fuzz` (feature `test-client`): a device for tests, and the body of the fuzz target;
//! - [`store`]: which domains there are, by xenstore; `wire`: its protocol;
//! - [`requests`]: the pages that accesses come in;
//! - `function`: the PCI function: where its BARs are, how it interrupts;
//! - `beneath`: pages of the domain under parts of its BARs that a client can map;
//! - `ram`: guest memory as DMA regions, in pieces, which go when the guest gives pages back;
//! - `access`: from a request to calls of the device; `session`: one domain; `server`: one domain after the other.
//!
//! A device cannot tell it from the vfio-user server: it is a [`crate::Device`] with its [`crate::Link`].
//!
//! What it does not do: migration (Xen has no word by which an ioreq server could refuse it, see docs/guides/xen.md), PV and PVH
//! domains, stub domains, more than one segment or bus, grant references.
//!
//! Sources: Xen's public headers `hvm/dm_op.h`, `hvm/ioreq.h`, `memory.h`, `io/xs_wire.h`; Linux's `uapi/xen/privcmd.h` and
//! `uapi/xen/evtchn.h`; `docs/misc/xenstore.txt` and `docs/designs/` of Xen.

mod access;
mod beneath;
#[cfg(feature = "test-client")]
pub mod fake;
mod function;
#[cfg(feature = "test-client")]
pub mod fuzz;
pub mod hypervisor;
pub mod kernel;
#[cfg(feature = "test-client")]
pub mod model;
mod ram;
pub mod requests;
mod server;
mod session;
pub mod store;
mod wire;

pub use hypervisor::{AttachError, Hypervisor, Target};
pub use server::{XenOptions, XenServer};
pub use store::{DomainName, Store};
