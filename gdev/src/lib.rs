//! Gdev's programming interface (USENIX ATC 2012): one small library for every program that computes on a GPU.
//!
//! - [`open`] creates a [`Context`] on a [`Target`]: nouveau's render node (in a virtual machine or on a host), a vGPU
//!   whose driver is this process, or a CUDA device.
//! - A context has memory ([`Place::Vram`], or pinned RAM), copies with [`Fence`]s, kernels ([`Image`], [`Grid`],
//!   [`Params`]), and shared [`Segment`]s.
//! - Small copies go through the aperture; larger ones are divided into pieces, so that the CPU and a copy engine work
//!   at the same time ([`Tuning`]).
//! - [`Backend`] is the interface to a kind of device: [`nouveau`], [`vgpu`] and [`cuda`].
//!
//! The crate does not include a kernel compiler or graphics, and does not order the work of two contexts.
//!
//! The C interface with Gdev's names is the library `libgdev.so` of the crate `gdev-c`. `docs/guides/gdev.md` describes
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
