//! The common part of every device of a VM (a virtual GPU or the card itself): its status ([`DeviceStatus`]), the
//! errors of its creation ([`DeviceError`]), the client's memory as host memory for a card ([`memory_of`]), memory that
//! the client maps for a BAR ([`WindowMemory`]), and a rate limit for moves of pages in this memory ([`Pace`]). The
//! crate does not serve accesses; the crates `vgpu` and `passthrough` do.

#![forbid(unsafe_code)]

mod memory;
mod pace;
mod status;
mod window;

pub use memory::memory_of;
pub use pace::Pace;
pub use status::{DeniedAccess, DeviceError, DeviceStatus, InterruptKind};
pub use window::WindowMemory;
