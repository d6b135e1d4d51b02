//! Gdev's functions for C programs, implemented with the crate `gdev`.
//!
//! A handle is a number that this library looks up, so that a wrong or closed handle causes an error and not an invalid
//! access. Functions return 0 or a negative `errno`; functions that return addresses return 0 on error. [`gerror`]
//! returns the message of the calling thread's last error. Calls with one handle exclude each other, including waits,
//! so use a separate handle for each thread.
//!
//! UNSAFETY: reads and writes memory that the C program passes, as its declaration in `gdev.h` says: each pointer must
//! be valid for the given number of bytes, and strings must end with a zero.

#![expect(unsafe_code, reason = "see UNSAFETY")]
#![expect(clippy::missing_safety_doc, reason = "the crate's description has the conditions of all functions")]

mod handle;
mod launch;
mod memory;
mod shared;

pub use handle::{Ghandle, gclose, gdev_open, gerror, gopen, gquery, gtune};
pub use launch::{GdevGrid, GdevKernel, gbarrier, glaunch, gload, gload_raw, gsync};
pub use memory::{
    gfree, gfree_dma, gmalloc, gmalloc_dma, gmemcpy, gmemcpy_async, gmemcpy_both, gmemcpy_from_device,
    gmemcpy_from_device_async, gmemcpy_to_device, gmemcpy_to_device_async,
};
pub use shared::{GDEV_SHM_GROUP, gref, gshmat, gshmctl, gshmdt, gshmget, gunref};
