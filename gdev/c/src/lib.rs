//! Gdev's functions for C programs, implemented with the `gdev` crate.
//!
//! A handle is a number that this library looks up, so an invalid or closed handle causes an error instead of an
//! invalid access. Functions return 0 or a negative `errno`. Functions that return addresses return 0 on error.
//! [`gerror`] returns the message of the calling thread's last error. Calls on one handle, including waits, are
//! serialized, so use a separate handle for each thread.
//!
//! UNSAFETY: reads and writes memory through pointers from the C program, as declared in `gdev.h`: each pointer must be
//! valid for the given number of bytes, and strings must be NUL-terminated.

#![expect(unsafe_code, reason = "see UNSAFETY")]
#![expect(clippy::missing_safety_doc, reason = "the crate documentation states the conditions of all functions")]

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
