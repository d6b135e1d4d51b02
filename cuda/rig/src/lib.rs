//! CUDA programs and a scripted owner, for tests and benchmarks of the library.
//!
//! [`Cuda`] is the driver API as a program calls it; the library is found by the loader or by its path. [`own`]
//! contains programs that manage their virtual memory themselves. [`owner`] plays the owner's side of the protocol from
//! a script: it grants requests, moves random chunks, and ends turns, without any policy. [`calls`] measures individual
//! calls, and [`stall`] stops a program's replies. [`neighbour`] is an honest program that reports its progress, and
//! [`raw`] is a client without the library; tests with hostile programs use both. [`runtime`] calls NVIDIA's CUDA
//! runtime. [`cards`] uses several cards in one program. [`attack`] makes system calls in the driver's process, and
//! [`printing`] runs kernels that print.
//!
//! This crate does not make the decisions of a card's owner.

pub mod attack;
pub mod calls;
pub mod cards;
pub mod copying;
mod driver;
pub mod neighbour;
pub mod nvml;
pub mod own;
pub mod owner;
pub mod printing;
pub mod raw;
pub mod runtime;
pub mod stall;

pub use driver::{Cuda, Failed, Ipc, Location, Objects};
