//! Messages between a VM's CUDA device and the worker of one guest program, and the start of that worker.
//!
//! Each worker has one `SOCK_SEQPACKET` connection. A packet is one [`ToWorker`] or one [`FromWorker`]: [`PACKET`]
//! bytes, little-endian, without descriptors except in `Save` and `Hold`. The worker receives its descriptors as
//! arguments: `cuda-worker --window-fd N --link-fd M`. The window is a memfd that both sides map; its blobs are
//! described in `cuda-ring`.
//!
//! ```text
//! device -> worker  Blob { id, kind, serial, offset, size }: the guest may use this part of the window
//! device -> worker  Remove { id, serial }: the guest releases it
//! worker -> device  Removed { id, serial }: the card no longer uses it, and the device may punch a hole
//! device -> worker  Doorbell: the guest has rung the doorbell; the worker reads the rings
//! worker -> device  Check: words have changed while a guest thread waits; the device checks the waits
//! worker -> device  Failed { reason }: the worker exits, for this reason, such as a forbidden system call
//! device -> worker  Goodbye: the guest program has exited
//! device -> worker  Save, with a file: the worker saves its state for another worker
//! worker -> device  Saved: the state is in the file, and the worker exits; or Refused { obstacle }: it continues
//! device -> worker  Hold, with a file: like Save, but after Saved the worker waits for Resume or Goodbye
//! device -> worker  Resume: the worker executes its program
//! ```
//!
//! The next worker receives the file with `--restore-fd`, and the same window. It sends `Restored` when it has restored
//! the state. With `--held`, it waits for `Resume` after `Restored`. Until then, it exits when its connection is
//! closed, and the previous worker still has the program. The device repeats messages about blobs that the previous
//! worker may not have received.
//!
//! Without [`Rejoin`], the worker exits when the connection is closed. With [`Rejoin`], the worker continues to serve
//! its program, and connects to the next daemon. The next daemon repeats each `Blob` and each `Remove` without a reply,
//! and then sends `Doorbell`; serial numbers make repeated messages harmless. If no daemon accepts a worker within the
//! time limit, the worker exits. Neither side trusts the guest: the worker checks each range against the window size,
//! and the device checks each identifier.

#![forbid(unsafe_code)]

mod calls;
mod link;
mod message;
mod obstacle;
mod start;

pub use calls::call_name;
pub use link::{Link, LinkError};
pub use message::{FromWorker, Malformed, PACKET, Reason, ToWorker};
pub use obstacle::Obstacle;
pub use start::{Rejoin, Restrictions, StartError, WorkerFiles, WorkerOptions};
