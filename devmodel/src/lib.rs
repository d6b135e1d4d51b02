//! The vGPU that a guest sees: PCI configuration space, virtual registers, access policy.

#![forbid(unsafe_code)]

pub mod backend;

pub use backend::{Aperture, Backend, ChannelState, Denied, EngineStatus, InterruptLine, Place};
