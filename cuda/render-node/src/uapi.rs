//! Arguments and numbers of the DRM ioctls of the Linux driver `virtio_gpu`.
//!
//! Sources: `linux/virtgpu_drm.h`, `drm/drm.h`.

use rustix::ioctl::{Opcode, opcode};

/// Type of all DRM ioctls.
const GROUP: u8 = b'd';
/// First number of driver-specific ioctls.
const DRIVER: u8 = 0x40;

/// A request: its argument and its number.
///
/// # Safety
/// For this number, the kernel must read and write exactly this structure, and must not retain any address in it.
pub(crate) unsafe trait Request {
    /// The request number, including the size and the direction.
    const OPCODE: Opcode;
}

macro_rules! requests {
    ($($(#[$doc:meta])* $name:ident = $opcode:expr, $($(#[$field_doc:meta])* $field:ident: $type:ty),*;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default)]
            #[repr(C)]
            pub(crate) struct $name {
                $($(#[$field_doc])* pub(crate) $field: $type,)*
            }

            // SAFETY: the layout matches the driver's header. Addresses in the argument are created next to the calls.
            unsafe impl Request for $name {
                const OPCODE: Opcode = $opcode;
            }
        )*
    };
}

requests! {
    /// Queries the driver's name.
    Version = opcode::read_write::<Version>(GROUP, 0x00),
        major: i32, minor: i32, patch: i32, padding: u32, name_bytes: u64, name: u64, date_bytes: u64, date: u64,
        description_bytes: u64, description: u64;
    /// Closes a handle.
    Close = opcode::write::<Close>(GROUP, 0x09), handle: u32, padding: u32;
    /// Queries the offset for mapping a blob.
    Map = opcode::read_write::<Map>(GROUP, DRIVER + 0x01), offset: u64, handle: u32, padding: u32;
    /// Submits a command to the context. Newer kernels have additional fields, and treat missing fields as zeros.
    Submit = opcode::read_write::<Submit>(GROUP, DRIVER + 0x02),
        flags: u32, bytes: u32, command: u64, handles: u64, handle_count: u32, fence: i32, ring: u32, padding: u32;
    /// Queries a parameter, which the kernel stores at an address.
    GetParameter = opcode::read_write::<GetParameter>(GROUP, DRIVER + 0x03), parameter: u64, value: u64;
    /// Queries a capability set.
    GetCapset = opcode::read_write::<GetCapset>(GROUP, DRIVER + 0x09),
        id: u32, version: u32, address: u64, bytes: u32, padding: u32;
    /// Creates a blob.
    CreateBlob = opcode::read_write::<CreateBlob>(GROUP, DRIVER + 0x0a),
        memory: u32, flags: u32, handle: u32, resource: u32, bytes: u64, padding: u32, command_bytes: u32, command: u64,
        blob: u64;
    /// Initializes the context.
    InitContext = opcode::read_write::<InitContext>(GROUP, DRIVER + 0x0b), count: u32, padding: u32, parameters: u64;
}

/// Numbers of device parameters.
pub(crate) mod parameter {
    pub(crate) const BLOBS: u64 = 3;
    pub(crate) const HOST_VISIBLE: u64 = 4;
    pub(crate) const CONTEXT_INIT: u64 = 6;
    pub(crate) const CAPSETS: u64 = 7;
}

/// Numbers of context parameters. Each parameter is passed as a number and a value.
pub(crate) mod context {
    pub(crate) const CAPSET: u64 = 1;
    pub(crate) const RINGS: u64 = 2;
}

/// Memory type of a blob that the host allocates.
pub(crate) const MEMORY_HOST3D: u32 = 2;
/// Flag of a mappable blob.
pub(crate) const BLOB_MAPPABLE: u32 = 1;
/// Flag of a submission that returns a fence descriptor.
pub(crate) const FENCE_OUT: u32 = 2;
/// Flag of a submission whose fence is on a ring.
pub(crate) const RING_IDX: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        // The direction, size, type and number, encoded like `_IOWR`.
        assert_eq!(Map::OPCODE, 0xc010_6441);
        assert_eq!(Submit::OPCODE, 0xc028_6442);
        assert_eq!(GetParameter::OPCODE, 0xc010_6443);
        assert_eq!(GetCapset::OPCODE, 0xc018_6449);
        assert_eq!(CreateBlob::OPCODE, 0xc030_644a);
        assert_eq!(InitContext::OPCODE, 0xc010_644b);
        assert_eq!(Version::OPCODE, 0xc040_6400);
        assert_eq!(Close::OPCODE, 0x4008_6409);
    }
}
