//! The kernel interface: ioctl numbers and argument layouts of DRM and nouveau.
//!
//! Names and layouts match `drm.h` and `nouveau_drm.h`. Linux 6.1 and 6.12 agree on all definitions in this file, and
//! both still support the deprecated calls (`GROBJ_ALLOC`).

/// An ioctl argument type with its request number. The pairing prevents mismatches.
pub trait Request {
    /// The ioctl number, which encodes direction and size.
    const NUMBER: u32;
    /// Name of the request, for messages.
    const NAME: &'static str;
}

/// Direction flag: the kernel reads the argument.
pub const WRITE: u32 = 1;
/// Direction flag: the kernel writes the argument.
pub const READ: u32 = 2;
const DRM_COMMAND_BASE: u32 = 0x40;

/// Returns the ioctl number of a request with the argument type `T`. `kind` is the driver's ioctl type.
pub const fn number<T>(kind: u8, direction: u32, command: u32) -> u32 {
    direction << 30 | (size_of::<T>() as u32) << 16 | (kind as u32) << 8 | command
}

/// Implements [`Request`] for argument types of a driver with the given ioctl type.
macro_rules! requests {
    ($kind:literal: $($type:ty, $direction:expr, $command:expr;)*) => {$(
        impl $crate::nouveau::uapi::Request for $type {
            const NUMBER: u32 = $crate::nouveau::uapi::number::<$type>($kind, $direction, $command);
            const NAME: &'static str = stringify!($type);
        }
    )*};
}

requests! { b'd':
    Version,       READ | WRITE, 0x00;
    GemClose,      WRITE,        0x09;
    PrimeHandleToFd, READ | WRITE, 0x2d;
    PrimeFdToHandle, READ | WRITE, 0x2e;
    GetParam,      READ | WRITE, DRM_COMMAND_BASE;
    ChannelAlloc,  READ | WRITE, DRM_COMMAND_BASE + 0x02;
    ChannelFree,   WRITE,        DRM_COMMAND_BASE + 0x03;
    ObjectAlloc,   WRITE,        DRM_COMMAND_BASE + 0x04;
    GemNew,        READ | WRITE, DRM_COMMAND_BASE + 0x40;
    GemPushbuf,    READ | WRITE, DRM_COMMAND_BASE + 0x41;
    GemCpuPrep,    WRITE,        DRM_COMMAND_BASE + 0x42;
    GemCpuFini,    WRITE,        DRM_COMMAND_BASE + 0x43;
    GemInfo,       READ | WRITE, DRM_COMMAND_BASE + 0x44;
}

pub(crate) use requests;

/// Kernel structure `drm_version`. Of its strings, only the name is requested.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Version {
    /// Major, minor, patch level.
    pub numbers: [i32; 3],
    /// In: size of the name buffer in bytes. Out: length of the driver name.
    pub name_length: usize,
    /// Address of the name buffer.
    pub name: usize,
    /// Lengths and addresses of the date and of the description. Unused, always zero.
    pub unused: [usize; 4],
}

/// Kernel structure `drm_gem_close`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct GemClose {
    /// Handle to close.
    pub handle: u32,
    /// Always zero.
    pub pad: u32,
}

/// Kernel structure `drm_prime_handle`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Prime {
    /// Handle of the buffer. Input of an export, output of an import.
    pub handle: u32,
    /// [`PRIME_FLAGS`] for an export.
    pub flags: u32,
    /// File descriptor. Output of an export, input of an import.
    pub fd: i32,
}

/// Exports a buffer as a file descriptor.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct PrimeHandleToFd(pub Prime);

/// Imports the buffer of a file descriptor.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct PrimeFdToHandle(pub Prime);

/// Flags of an export: `DRM_CLOEXEC | DRM_RDWR`.
pub const PRIME_FLAGS: u32 = 0o200_0002;

/// Kernel structure `drm_nouveau_getparam`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct GetParam {
    /// Parameter, one of [`param`].
    pub param: u64,
    /// Value of the parameter.
    pub value: u64,
}

/// Parameters of [`GetParam`].
pub mod param {
    /// PCI vendor ID.
    pub const PCI_VENDOR: u64 = 3;
    /// PCI device ID.
    pub const PCI_DEVICE: u64 = 4;
    /// Bus type: 1 is PCI, 2 is PCI Express.
    pub const BUS_TYPE: u64 = 5;
    /// VRAM available for buffers, in bytes.
    pub const FB_SIZE: u64 = 8;
    /// Size of the GPU address space for guest RAM, in bytes.
    pub const GART_SIZE: u64 = 9;
    /// Chipset number, 0xc0 for GF100.
    pub const CHIPSET_ID: u64 = 11;
    /// Number of GPCs, number of TPCs << 8, and number of ROPs << 32.
    pub const GRAPH_UNITS: u64 = 13;
    /// PTIMER time in nanoseconds.
    pub const PTIMER_TIME: u64 = 14;
}

/// Kernel structure `drm_nouveau_channel_alloc`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ChannelAlloc {
    /// Not used on Fermi, always zero.
    pub fb_ctxdma_handle: u32,
    /// Not used on Fermi, always zero.
    pub tt_ctxdma_handle: u32,
    /// The channel's number.
    pub channel: i32,
    /// Memory domains allowed for push buffers.
    pub pushbuf_domains: u32,
    /// Handle of the notifier buffer, which the kernel allocates with the channel.
    pub notifier_handle: u32,
    /// Handle and class of each preset subchannel.
    pub subchan: [[u32; 2]; 8],
    /// Number of preset subchannels.
    pub nr_subchan: u32,
}

/// Kernel structure `drm_nouveau_channel_free`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ChannelFree {
    /// The channel's number.
    pub channel: i32,
}

/// Kernel structure `drm_nouveau_grobj_alloc`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ObjectAlloc {
    /// The channel's number.
    pub channel: i32,
    /// Handle chosen by the caller, unique within the channel.
    pub handle: u32,
    /// Class of the object.
    pub class: i32,
}

/// The buffer is in VRAM.
pub const DOMAIN_VRAM: u32 = 1 << 1;
/// The buffer is in guest RAM that the GPU can access.
pub const DOMAIN_GART: u32 = 1 << 2;
/// The CPU can map the buffer.
pub const DOMAIN_MAPPABLE: u32 = 1 << 3;

/// Allows non-contiguous VRAM.
pub const TILE_NONCONTIG: u32 = 8;

/// Kernel structure `drm_nouveau_gem_info`.
#[repr(C)]
#[derive(Debug, Default, Clone)]
pub struct GemInfo {
    /// Handle of the buffer.
    pub handle: u32,
    /// Allowed memory domains (in `GemNew`), or the current domain (in results).
    pub domain: u32,
    /// Size in bytes.
    pub size: u64,
    /// GPU virtual address.
    pub offset: u64,
    /// `mmap` offset of the buffer in the DRM file.
    pub map_handle: u64,
    /// Tiling mode. Zero means untiled.
    pub tile_mode: u32,
    /// [`TILE_NONCONTIG`], with the memory kind in bits 15:8.
    pub tile_flags: u32,
}

/// Kernel structure `drm_nouveau_gem_new`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct GemNew {
    /// In: the request. Out: the result.
    pub info: GemInfo,
    /// Unused, always zero.
    pub channel_hint: u32,
    /// Alignment in bytes.
    pub align: u32,
}

/// Kernel structure `drm_nouveau_gem_pushbuf_bo`, including its `presumed` structure.
#[repr(C)]
#[derive(Debug, Default, Clone)]
pub struct PushbufBuffer {
    /// The kernel ignores this value.
    pub user_priv: u64,
    /// Handle of the buffer.
    pub handle: u32,
    /// Domains for reads.
    pub read_domains: u32,
    /// Domains for writes.
    pub write_domains: u32,
    /// Allowed domains.
    pub valid_domains: u32,
    /// Used only for GPUs without virtual addresses.
    pub presumed_valid: u32,
    /// Used only for GPUs without virtual addresses.
    pub presumed_domain: u32,
    /// Used only for GPUs without virtual addresses.
    pub presumed_offset: u64,
}

/// Kernel structure `drm_nouveau_gem_pushbuf_push`.
#[repr(C)]
#[derive(Debug, Default, Clone)]
pub struct PushbufPush {
    /// Index in the buffer list.
    pub bo_index: u32,
    /// Always zero.
    pub pad: u32,
    /// Offset in the buffer, in bytes.
    pub offset: u64,
    /// Length in bytes, below 2^23.
    pub length: u64,
}

/// Kernel structure `drm_nouveau_gem_pushbuf`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct GemPushbuf {
    /// The channel's number.
    pub channel: u32,
    /// Length of the buffer list.
    pub nr_buffers: u32,
    /// Address of the buffer list.
    pub buffers: u64,
    /// Number of relocations. Always 0, because Fermi uses virtual addresses.
    pub nr_relocs: u32,
    /// Length of the push buffer segment list.
    pub nr_push: u32,
    /// Always zero.
    pub relocs: u64,
    /// Address of the push buffer segment list.
    pub push: u64,
    /// Used only for old GPUs.
    pub suffix0: u32,
    /// Used only for old GPUs.
    pub suffix1: u32,
    /// Out: available VRAM in bytes.
    pub vram_available: u64,
    /// Out: available GART memory in bytes.
    pub gart_available: u64,
}

/// Flag: return `EBUSY` instead of waiting.
pub const CPU_PREP_NOWAIT: u32 = 1;
/// Flag: the CPU will write, so also wait for the GPU's reads.
pub const CPU_PREP_WRITE: u32 = 4;

/// Kernel structure `drm_nouveau_gem_cpu_prep`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct GemCpuPrep {
    /// Handle of the buffer.
    pub handle: u32,
    /// Combination of [`CPU_PREP_WRITE`] and [`CPU_PREP_NOWAIT`], or 0.
    pub flags: u32,
}

/// Kernel structure `drm_nouveau_gem_cpu_fini`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct GemCpuFini {
    /// Handle of the buffer.
    pub handle: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn sizes_are_those_of_the_kernels_headers() {
        let sizes = [
            size_of::<Version>(),
            size_of::<GemClose>(),
            size_of::<GetParam>(),
            size_of::<ChannelAlloc>(),
            size_of::<ChannelFree>(),
            size_of::<ObjectAlloc>(),
            size_of::<GemInfo>(),
            size_of::<GemNew>(),
            size_of::<PushbufBuffer>(),
            size_of::<PushbufPush>(),
            size_of::<GemPushbuf>(),
            size_of::<GemCpuPrep>(),
            size_of::<GemCpuFini>(),
            size_of::<Prime>(),
        ];
        assert_eq!(sizes, [64, 8, 16, 88, 4, 12, 40, 48, 40, 24, 64, 8, 4, 12]);
    }

    #[test]
    fn fields_lie_where_the_kernel_reads_them() {
        assert_eq!(offset_of!(Version, name_length), 16);
        assert_eq!(offset_of!(ChannelAlloc, subchan), 20);
        assert_eq!(offset_of!(ChannelAlloc, nr_subchan), 84);
        assert_eq!(offset_of!(GemInfo, map_handle), 24);
        assert_eq!(offset_of!(GemNew, align), 44);
        assert_eq!(offset_of!(PushbufBuffer, presumed_offset), 32);
        assert_eq!(offset_of!(PushbufPush, length), 16);
        assert_eq!(offset_of!(GemPushbuf, push), 32);
        assert_eq!(offset_of!(GemPushbuf, vram_available), 48);
    }

    #[test]
    fn numbers_are_those_of_the_kernels_headers() {
        assert_eq!(Version::NUMBER, 0xc040_6400);
        assert_eq!(GemClose::NUMBER, 0x4008_6409);
        assert_eq!(PrimeHandleToFd::NUMBER, 0xc00c_642d);
        assert_eq!(PrimeFdToHandle::NUMBER, 0xc00c_642e);
        assert_eq!(GetParam::NUMBER, 0xc010_6440);
        assert_eq!(ChannelAlloc::NUMBER, 0xc058_6442);
        assert_eq!(ChannelFree::NUMBER, 0x4004_6443);
        assert_eq!(ObjectAlloc::NUMBER, 0x400c_6444);
        assert_eq!(GemNew::NUMBER, 0xc030_6480);
        assert_eq!(GemPushbuf::NUMBER, 0xc040_6481);
        assert_eq!(GemCpuPrep::NUMBER, 0x4008_6482);
        assert_eq!(GemCpuFini::NUMBER, 0x4004_6483);
        assert_eq!(GemInfo::NUMBER, 0xc028_6484);
    }
}
