//! The render node of a VM's CUDA function, for programs in the guest.
//!
//! - `uapi`: arguments and numbers of the driver's requests.
//! - `node`: an open node with a context: blobs, mappings, submissions, and fences.
//! - `doctor`: finds obstacles to CUDA in a guest; the program `gpu-mediator-guest-doctor` prints them with their
//!   remedies.
//! - `transport`: implements the guest library's [`cuda_ring::Transport`] with a node.
//!
//! The driver is Linux's stock `virtio_gpu`; versions from 6.1 on are tested. The crate does not interpret the contents
//! of blobs.

#![allow(unsafe_code, reason = "ioctl and mmap")]

pub mod doctor;
mod node;
mod transport;
mod uapi;

pub use node::{CAPSET, Capset, Handle, Node, OpenError, RINGS};
pub use transport::RenderTransport;
