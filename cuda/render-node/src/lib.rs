//! The render node of a VM's CUDA function, for programs in the guest.
//!
//! - `uapi`: arguments and numbers of the ioctls.
//! - `node`: an open node and its context, with blobs, mappings, submissions, and fences.
//! - `doctor`: finds obstacles to CUDA in a guest. The program `gpu-mediator-guest-doctor` prints them with their
//!   remedies.
//! - `transport`: implements the guest library's [`cuda_ring::Transport`] on a node.
//!
//! The kernel driver is the stock `virtio_gpu`, tested with Linux 6.1 and later. The crate does not interpret the
//! contents of blobs.

#![allow(unsafe_code, reason = "ioctl and mmap")]

pub mod doctor;
mod node;
mod transport;
mod uapi;

pub use node::{CAPSET, Capset, Handle, Node, OpenError, RINGS};
pub use transport::RenderTransport;
