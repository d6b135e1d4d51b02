//! CUDA programs and a scripted owner, for tests and benchmarks of the library.
//!
//! [`Cuda`] is the driver API in a program's view, found by the loader or by path. [`own`] has programs that manage
//! their virtual memory themselves. [`owner`] implements the owner's side of the protocol with a script: it grants,
//! moves chunks at random, and ends turns, without any policy. [`calls`] measures single calls, [`stall`] makes a
//! program unresponsive. [`neighbour`] is an honest program that reports its gains, and [`raw`] a client without the
//! library, for tests with hostile programs. [`runtime`] is NVIDIA's CUDA runtime above one of the libraries.
//!
//! This crate does not make the decisions of a card's owner.

pub mod calls;
mod driver;
pub mod neighbour;
pub mod nvml;
pub mod own;
pub mod owner;
pub mod raw;
pub mod runtime;
pub mod stall;

pub use driver::{Cuda, Failed, Ipc, Location};
