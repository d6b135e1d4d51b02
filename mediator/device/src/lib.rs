//! Common parts of all VM devices (virtual GPUs and passed-through cards): their status ([`DeviceStatus`]), creation
//! errors ([`DeviceError`]), client memory as host memory for a card ([`memory_of`]), memory that clients map for a BAR
//! ([`WindowMemory`]), and a rate limit for page moves in this memory ([`Pace`]). The crate does not serve accesses;
//! the crates `vgpu` and `passthrough` do.

#![forbid(unsafe_code)]

mod memory;
mod pace;
mod status;
mod window;

pub use memory::memory_of;
pub use pace::Pace;
pub use status::{DeniedAccess, DeviceError, DeviceStatus, InterruptKind};
pub use window::WindowMemory;
