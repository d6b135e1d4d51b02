//! Messages between a VM's CUDA device and the worker of one guest program, and the start of that worker.
//!
//! One `SOCK_SEQPACKET` pair per worker. A packet is one [`ToWorker`] or one [`FromWorker`]: [`PACKET`] bytes,
//! little-endian, without descriptors. The worker gets both of its descriptors as arguments:
//! `cuda-worker --window-fd N --link-fd M`. The window is a memfd that both sides map; its blobs are described in
//! `cuda-ring`.
//!
//! ```text
//! device -> worker   Blob { id, kind, offset, size }: the guest has this part of the window
//! device -> worker   Remove { id }: the guest returns it
//! worker -> device   Removed { id }: the card no longer uses it; the device may punch the hole
//! device -> worker   Doorbell: the guest rang; the worker reads its rings
//! worker -> device   Check: a guest thread waits, and words have changed; the device checks the waits again
//! worker -> device   Failed { reason }: the worker ends, for this reason
//! device -> worker   Goodbye: the guest program has ended
//! ```
//!
//! The end of the connection ends the worker. Neither side trusts the guest: the worker checks each range against the
//! window's size, the device checks each identifier.

#![forbid(unsafe_code)]

mod link;
mod message;
mod sandbox;
mod start;

pub use link::{Link, LinkError};
pub use message::{FromWorker, Malformed, PACKET, Reason, ToWorker};
pub use sandbox::{SandboxError, enter as enter_sandbox};
pub use start::{StartError, WorkerOptions};
