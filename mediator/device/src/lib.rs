//! The part that every device of a VM has, be it a virtual GPU or the card itself: how it stands ([`DeviceStatus`]), why it cannot be made
//! ([`DeviceError`]), the client's memory as a card takes it ([`memory_of`]), and memory that it maps under a BAR ([`WindowMemory`]).
//!
//! What it does not do: serve accesses. The crates `vgpu` and `passthrough` are the devices.

#![forbid(unsafe_code)]

mod memory;
mod status;
mod window;

pub use memory::memory_of;
pub use status::{DeniedAccess, DeviceError, DeviceStatus, InterruptKind};
pub use window::WindowMemory;
