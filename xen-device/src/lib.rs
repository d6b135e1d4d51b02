//! Serves a Xen HVM domain, as an alternative to the vfio-user server: this process serves the domain's accesses to one
//! PCI function.
//!
//! A process that emulates a device of a domain is an *ioreq server*. It claims a PCI function and address ranges. Xen
//! forwards a virtual CPU's accesses to these addresses through a shared page, and wakes the server through an event
//! channel. Guest memory is mapped by frame number.
//!
//! Modules, from the hypervisor inwards:
//! - [`hypervisor`]: the interface to Xen; [`kernel`]: its implementation on Linux devices; `fake` (feature `fake`): a
//!   stricter implementation without Xen;
//! - `model`, `fuzz` (feature `fake`): a device for tests, and the body of the fuzz target;
//! - [`store`]: the domain list, from xenstore; `wire`: its protocol;
//! - [`requests`]: the pages that carry accesses;
//! - `function`: the PCI function, with the addresses of its BARs and its interrupts;
//! - `bar_backing`: domain pages under the parts of BARs that a client can map;
//! - `ram`: guest memory as DMA regions, which are removed when the guest releases pages;
//! - `access`: translates requests into device calls; `session`: serves one domain; `server`: serves one domain after
//!   another.
//!
//! A device cannot distinguish this server from the vfio-user server: it is a [`vmm_glue::Device`] with its
//! [`vmm_glue::Link`].
//!
//! Not supported: migration (an ioreq server cannot reject it through Xen's interface, see docs/guides/xen.md), PV and
//! PVH domains, stub domains, more than one segment or bus, grant references.
//!
//! Sources: Xen's public headers `hvm/dm_op.h`, `hvm/ioreq.h`, `memory.h`, `io/xs_wire.h`; Linux's `uapi/xen/privcmd.h`
//! and `uapi/xen/evtchn.h`; `docs/misc/xenstore.txt` and `docs/designs/` in Xen.
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

mod access;
mod bar_backing;
#[cfg(feature = "fake")]
pub mod fake;
mod function;
#[cfg(feature = "fake")]
pub mod fuzz;
pub mod hypervisor;
pub mod kernel;
#[cfg(feature = "fake")]
pub mod model;
mod options;
mod ram;
pub mod requests;
mod server;
mod session;
pub mod store;
mod wire;

pub use hypervisor::{AttachError, Hypervisor, Target};
pub use options::XenOptions;
pub use server::XenServer;
pub use store::{DomainName, Store};
