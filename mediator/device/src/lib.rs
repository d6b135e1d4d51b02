//! The part that every device of a VM has, be it a virtual GPU or the card itself: how it stands ([`DeviceStatus`]), why it cannot be made
//! ([`DeviceError`]), the client's memory as a card takes it ([`memory_of`]), memory that it maps under a BAR ([`WindowMemory`]), and a
//! bound on how fast that moves ([`Pace`]).
//!
//! What it does not do: serve accesses. The crates `vgpu` and `passthrough` are the devices.

#![forbid(unsafe_code)]

mod memory;
mod pace;
mod status;
mod window;

pub use memory::memory_of;
pub use pace::Pace;
pub use status::{DeniedAccess, DeviceError, DeviceStatus, InterruptKind};
pub use window::WindowMemory;
