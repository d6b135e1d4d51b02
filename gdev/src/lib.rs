//! Gdev's programming interface (USENIX ATC 2012): a small library for programs that compute on a GPU.
//!
//! - [`open`] creates a [`Context`] on a [`Target`]: a nouveau render node (in a virtual machine or on a host), a vGPU
//!   that this process drives itself, or a CUDA device.
//! - A context provides memory ([`Place::Vram`], or pinned RAM), copies with [`Fence`]s, kernels ([`Image`], [`Grid`],
//!   [`Params`]), and shared [`Segment`]s.
//! - Small copies go through the aperture. Larger copies are split into chunks, so that the CPU and a copy engine work
//!   concurrently ([`Tuning`]).
//! - [`Backend`] is the interface to a device type: [`nouveau`], [`vgpu`] or [`cuda`].
//!
//! The crate does not include a kernel compiler or graphics support, and does not order the work of different contexts.
//!
//! The C interface with Gdev's names is the library `libgdev.so` of the `gdev-c` crate. `docs/guides/gdev.md` describes
//! both.

mod backend;
mod context;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod mapping;
pub mod nouveau;
mod segment;
mod target;
mod tuning;
mod types;
#[cfg(feature = "vgpu")]
pub mod vgpu;

pub use backend::Backend;
pub use context::{Context, memory_bytes, open};
pub use error::{Error, Result};
pub use segment::{Segment, SegmentRequest, Shared};
pub use target::Target;
pub use tuning::Tuning;
pub use types::{Copy, Fence, Grid, Image, Memory, Module, Params, Place};
