//! Messages between a VM's CUDA device and the worker of one guest program, and the start of that worker.
//!
//! Each worker has one `SOCK_SEQPACKET` connection. A packet is one [`ToWorker`] or one [`FromWorker`]: [`PACKET`]
//! bytes, little-endian, without descriptors except in `Save` and `Hold`. The worker gets both of its descriptors as
//! arguments: `cuda-worker --window-fd N --link-fd M`. The window is a memfd that both sides map; its blobs are
//! described in `cuda-ring`.
//!
//! ```text
//! device -> worker   Blob { id, kind, serial, offset, size }: the guest has this part of the window
//! device -> worker   Remove { id, serial }: the guest gives it back
//! worker -> device   Removed { id, serial }: the card does not use it any longer, the device may punch the hole
//! device -> worker   Doorbell: the guest rang; the worker reads its rings
//! worker -> device   Check: a guest thread waits, and words have changed; the device looks at the waits again
//! worker -> device   Failed { reason }: the worker ends, and why; of a forbidden system call, which
//! device -> worker   Goodbye: the guest program has ended
//! device -> worker   Save, with a file: the program continues in another worker
//! worker -> device   Saved: the worker's state is in the file, and it ends; or Refused { obstacle }: it continues
//! device -> worker   Hold, with a file: like Save, but after Saved the worker waits for Resume or Goodbye
//! device -> worker   Resume: the worker executes its program
//! ```
//!
//! The next worker gets the file with `--restore-fd`, and the same window. This worker sends `Restored` when it
//! continues the program. With `--held`, this worker waits for `Resume` after `Restored`: until then, it ends with its
//! connection, and the previous worker still has the program. The device sends the state of blobs that the previous
//! worker may not have received again.
//!
//! Without [`Rejoin`], the worker exits when the connection is closed. With [`Rejoin`], the worker continues to serve
//! its program, and connects to the next daemon. The next daemon repeats each `Blob` and each `Remove` without a reply,
//! and then sends `Doorbell`; serial numbers make repeated messages harmless. If no daemon accepts a worker within the
//! time limit, the worker exits.
//!
//! Neither side trusts the guest: the worker checks each range against the window's size, and the device checks each
//! identifier.

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
