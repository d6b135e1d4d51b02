//! Constants and structures of the vfio-user wire format, in host byte order.
//!
//! This module contains only definitions. It redefines structures that the wire format shares with `linux/vfio.h`,
//! because this crate parses them from untrusted bytes. `REGION_WRITE_MULTI` and command numbers from 16 follow QEMU's
//! edition of the specification.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size in bytes of the header that starts every message.
pub const HEADER_SIZE: usize = size_of::<Header>();

/// Protocol major version of this server.
pub const VERSION_MAJOR: u16 = 0;
/// Highest protocol minor version supported by this server.
pub const VERSION_MINOR: u16 = 1;

/// A command number. A client can send any number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Command(pub u16);

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl Command {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            /// Returns the name in the specification, or `None` for an unknown number.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

commands! {
    /// Negotiates the version and capabilities, in a client's first message.
    VERSION = 1;
    /// Maps client memory for the device.
    DMA_MAP = 2;
    /// Unmaps client memory from the device.
    DMA_UNMAP = 3;
    /// Queries the numbers of regions and of interrupt types.
    DEVICE_GET_INFO = 4;
    /// Queries the size and access rights of a region.
    DEVICE_GET_REGION_INFO = 5;
    /// Queries file descriptors for sub-regions. Not supported.
    DEVICE_GET_REGION_IO_FDS = 6;
    /// Queries the number of interrupts of a type.
    DEVICE_GET_IRQ_INFO = 7;
    /// Attaches event file descriptors to interrupts, or masks, unmasks or triggers interrupts.
    DEVICE_SET_IRQS = 8;
    /// Reads from a region.
    REGION_READ = 9;
    /// Writes to a region.
    REGION_WRITE = 10;
    /// Sent by the server: reads from client memory.
    DMA_READ = 11;
    /// Sent by the server: writes to client memory.
    DMA_WRITE = 12;
    /// Resets the device.
    DEVICE_RESET = 13;
    /// Dirty page request of older editions. Not supported.
    DIRTY_PAGES = 14;
    /// Performs several small region writes in one message.
    REGION_WRITE_MULTI = 15;
    /// Queries or sets a device feature. All features concern migration.
    DEVICE_FEATURE = 16;
    /// Reads migration data from the device.
    MIG_DATA_READ = 17;
    /// Writes migration data to the device.
    MIG_DATA_WRITE = 18;
}

impl std::fmt::Display for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "unknown command {}", self.0),
        }
    }
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// `flags` of [`Header`]: message type mask.
pub const FLAG_TYPE_MASK: u32 = 0xf;
/// `flags` of [`Header`]: request type.
pub const FLAG_TYPE_COMMAND: u32 = 0;
/// `flags` of [`Header`]: reply type.
pub const FLAG_TYPE_REPLY: u32 = 1;
/// `flags` of [`Header`]: the sender expects no reply (a posted write).
pub const FLAG_NO_REPLY: u32 = 1 << 4;
/// `flags` of [`Header`]: the reply reports an error.
pub const FLAG_ERROR: u32 = 1 << 5;

/// The header of every message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// ID chosen by the sender of a request and repeated in the reply.
    pub id: u16,
    /// See [`Command`].
    pub command: u16,
    /// Size of the message in bytes, including this header.
    pub size: u32,
    /// Type and `FLAG_*` bits.
    pub flags: u32,
    /// `errno` value if `FLAG_ERROR` is set.
    pub error: u32,
}
const _: () = assert!(size_of::<Header>() == 16);

impl Header {
    /// Creates the header of a request of `size` bytes, including the header.
    pub const fn request(id: u16, command: Command, size: u32, flags: u32) -> Self {
        Self { id, command: command.0, size, flags, error: 0 }
    }

    /// Returns the command number.
    pub const fn command(&self) -> Command {
        Command(self.command)
    }

    /// Returns true if this is a reply.
    pub const fn is_reply(&self) -> bool {
        self.flags & FLAG_TYPE_MASK == FLAG_TYPE_REPLY
    }

    /// Returns true if this is a request.
    pub const fn is_request(&self) -> bool {
        self.flags & FLAG_TYPE_MASK == FLAG_TYPE_COMMAND
    }

    /// Returns true if the sender expects no reply.
    pub const fn no_reply(&self) -> bool {
        self.flags & FLAG_NO_REPLY != 0
    }
}

/// Fixed part of `VERSION`, followed by a NUL-terminated JSON text.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Version {
    /// Protocol major version.
    pub major: u16,
    /// Protocol minor version.
    pub minor: u16,
}

/// Body of `DMA_MAP`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaMap {
    /// Size of this structure in bytes.
    pub argsz: u32,
    /// `DMA_MAP_*` bits.
    pub flags: u32,
    /// Byte offset in the attached descriptor's file.
    pub offset: u64,
    /// First guest physical address.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
}
const _: () = assert!(size_of::<DmaMap>() == 32);

/// `flags` of [`DmaMap`]: the device may read the memory.
pub const DMA_MAP_READ: u32 = 1;
/// `flags` of [`DmaMap`]: the device may write the memory.
pub const DMA_MAP_WRITE: u32 = 2;

/// Body of `DMA_UNMAP` and its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaUnmap {
    /// Maximum size of the reply body that the client accepts, in bytes.
    pub argsz: u32,
    /// `DMA_UNMAP_*` bits.
    pub flags: u32,
    /// First guest physical address.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
}
const _: () = assert!(size_of::<DmaUnmap>() == 24);

/// `flags` of [`DmaUnmap`]: request a dirty bitmap. Not supported.
pub const DMA_UNMAP_GET_DIRTY_BITMAP: u32 = 1;
/// `flags` of [`DmaUnmap`]: unmap all regions. Address and size are 0.
pub const DMA_UNMAP_ALL: u32 = 2;

/// Body of `DEVICE_GET_INFO` and its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Size of the body in bytes.
    pub argsz: u32,
    /// `DEVICE_*` bits.
    pub flags: u32,
    /// Number of regions.
    pub num_regions: u32,
    /// Number of interrupt types.
    pub num_irqs: u32,
}

/// `flags` of [`DeviceInfo`]: the device can be reset.
pub const DEVICE_RESETTABLE: u32 = 1;
/// `flags` of [`DeviceInfo`]: the device is a PCI device.
pub const DEVICE_PCI: u32 = 2;

/// Body of `DEVICE_GET_REGION_INFO`, and start of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionInfoBody {
    /// Request: maximum size of the reply body that the client accepts, in bytes. Reply: size of the full body.
    pub argsz: u32,
    /// `REGION_*` bits.
    pub flags: u32,
    /// Region number.
    pub index: u32,
    /// Byte offset of the first capability in the body.
    pub cap_offset: u32,
    /// Size of the region in bytes.
    pub size: u64,
    /// Offset in the file, for the client's `mmap` call.
    pub offset: u64,
}
const _: () = assert!(size_of::<RegionInfoBody>() == 32);

/// `flags` of [`RegionInfoBody`]: the region is readable.
pub const REGION_READ: u32 = 1;
/// `flags` of [`RegionInfoBody`]: the region is writable.
pub const REGION_WRITE: u32 = 2;
/// `flags` of [`RegionInfoBody`]: the client may map parts of the region.
pub const REGION_MMAP: u32 = 4;
/// `flags` of [`RegionInfoBody`]: capabilities follow the body.
pub const REGION_CAPS: u32 = 8;

/// Region capability that lists the mappable parts, followed by [`SparseArea`]s.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseMmapCap {
    /// Capability ID, `CAP_SPARSE_MMAP`.
    pub id: u16,
    /// Always 1.
    pub version: u16,
    /// Byte offset of the next capability in the body, or 0 in the last capability.
    pub next: u32,
    /// Number of areas.
    pub nr_areas: u32,
    /// Always 0.
    pub reserved: u32,
}

/// `id` of [`SparseMmapCap`].
pub const CAP_SPARSE_MMAP: u16 = 1;

/// A mappable part of a region.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseArea {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Body of `DEVICE_GET_IRQ_INFO` and its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqInfo {
    /// Size of the body in bytes.
    pub argsz: u32,
    /// `IRQ_INFO_*` bits.
    pub flags: u32,
    /// Interrupt type.
    pub index: u32,
    /// Number of interrupts.
    pub count: u32,
}

/// `flags` of [`IrqInfo`]: the interrupt is signalled through an eventfd.
pub const IRQ_INFO_EVENTFD: u32 = 1;
/// `flags` of [`IrqInfo`]: the interrupt can be masked.
pub const IRQ_INFO_MASKABLE: u32 = 2;
/// `flags` of [`IrqInfo`]: the interrupt masks itself when triggered.
pub const IRQ_INFO_AUTOMASKED: u32 = 4;
/// `flags` of [`IrqInfo`]: all interrupts of the type must be set up together.
pub const IRQ_INFO_NORESIZE: u32 = 8;

/// Start of the body of `DEVICE_SET_IRQS`. Booleans may follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqSet {
    /// Size of the body, including its data, in bytes.
    pub argsz: u32,
    /// One `IRQ_DATA_*` and one `IRQ_ACTION_*` bit.
    pub flags: u32,
    /// Interrupt type.
    pub index: u32,
    /// Number of the first interrupt.
    pub start: u32,
    /// Number of interrupts.
    pub count: u32,
}
const _: () = assert!(size_of::<IrqSet>() == 20);

/// `flags` of [`IrqSet`]: there is no data.
pub const IRQ_DATA_NONE: u32 = 1;
/// `flags` of [`IrqSet`]: the data is one byte per interrupt, nonzero if the action applies to it.
pub const IRQ_DATA_BOOL: u32 = 2;
/// `flags` of [`IrqSet`]: eventfds are attached.
pub const IRQ_DATA_EVENTFD: u32 = 4;
/// `flags` of [`IrqSet`]: mask the interrupts.
pub const IRQ_ACTION_MASK: u32 = 8;
/// `flags` of [`IrqSet`]: unmask the interrupts.
pub const IRQ_ACTION_UNMASK: u32 = 16;
/// `flags` of [`IrqSet`]: trigger the interrupts, or attach the eventfds that the device's interrupts signal.
pub const IRQ_ACTION_TRIGGER: u32 = 32;

/// Start of the body of `REGION_READ` and `REGION_WRITE` and their replies. Data may follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionAccess {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Region number.
    pub region: u32,
    /// Number of bytes.
    pub count: u32,
}
const _: () = assert!(size_of::<RegionAccess>() == 16);

/// One write of `REGION_WRITE_MULTI`. The body consists of a count (`u64`) followed by that many writes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MultiWrite {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Region number.
    pub region: u32,
    /// Number of valid bytes in `data`, 1 to 8.
    pub count: u32,
    /// Bytes to write.
    pub data: [u8; 8],
}
const _: () = assert!(size_of::<MultiWrite>() == 24);

/// Start of the body of `DMA_READ` and `DMA_WRITE` and their replies. Data may follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaAccess {
    /// Guest physical address.
    pub address: u64,
    /// Number of bytes.
    pub count: u64,
}
const _: () = assert!(size_of::<DmaAccess>() == 16);

/// Start of the body of `DEVICE_FEATURE` and its reply. The feature's data follows.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceFeature {
    /// Request: maximum size of the reply body that the client accepts, in bytes. Reply: size of the full body.
    pub argsz: u32,
    /// Feature number (`FEATURE_*`), with `FEATURE_GET`, `FEATURE_SET` and `FEATURE_PROBE`.
    pub flags: u32,
}
const _: () = assert!(size_of::<DeviceFeature>() == 8);

/// `flags` of [`DeviceFeature`]: feature number mask.
pub const FEATURE_MASK: u32 = 0xffff;
/// `flags` of [`DeviceFeature`]: get the feature's data.
pub const FEATURE_GET: u32 = 1 << 16;
/// `flags` of [`DeviceFeature`]: set the feature's data.
pub const FEATURE_SET: u32 = 1 << 17;
/// `flags` of [`DeviceFeature`]: query whether getting and setting are supported.
pub const FEATURE_PROBE: u32 = 1 << 18;

/// Feature: supported migration states, in addition to the two mandatory ones.
pub const FEATURE_MIGRATION: u32 = 1;
/// Feature: the migration state.
pub const FEATURE_MIG_DEVICE_STATE: u32 = 2;
/// Feature: start logging the device's writes to client memory.
pub const FEATURE_DMA_LOGGING_START: u32 = 6;
/// Feature: stop logging.
pub const FEATURE_DMA_LOGGING_STOP: u32 = 7;
/// Feature: report the device's writes.
pub const FEATURE_DMA_LOGGING_REPORT: u32 = 8;

/// Data of [`FEATURE_MIGRATION`]: the device can be stopped, and its state can be read while stopped.
pub const MIGRATION_STOP_COPY: u64 = 1;

/// Data of [`FEATURE_MIG_DEVICE_STATE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MigDeviceState {
    /// One of the `STATE_*` values.
    pub device_state: u32,
    /// Not used on a socket.
    pub data_fd: u32,
}

/// `device_state` of [`MigDeviceState`]: the device has failed, and must be reset.
pub const STATE_ERROR: u32 = 0;
/// `device_state` of [`MigDeviceState`]: the device is stopped and changes no state.
pub const STATE_STOP: u32 = 1;
/// `device_state` of [`MigDeviceState`]: the device is running.
pub const STATE_RUNNING: u32 = 2;
/// `device_state` of [`MigDeviceState`]: the device is stopped, and its state can be read.
pub const STATE_STOP_COPY: u32 = 3;
/// `device_state` of [`MigDeviceState`]: the device is stopped and is loading another state.
pub const STATE_RESUMING: u32 = 4;

/// Start of the data of [`FEATURE_DMA_LOGGING_START`], followed by [`LoggingRange`]s.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LoggingStart {
    /// Request: requested page size in bytes. Reply: actual page size in bytes.
    pub page_size: u64,
    /// Number of ranges, or 0 for all memory.
    pub num_ranges: u32,
    /// Always 0.
    pub reserved: u32,
}
const _: () = assert!(size_of::<LoggingStart>() == 16);

/// A range of client memory in which writes are logged.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LoggingRange {
    /// First address of the range.
    pub iova: u64,
    /// Size in bytes.
    pub length: u64,
}

/// Data of [`FEATURE_DMA_LOGGING_REPORT`]. In the reply, a bitmap of 64-bit words with one bit per page follows.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LoggingReport {
    /// First address of the range.
    pub iova: u64,
    /// Size in bytes.
    pub length: u64,
    /// Page size in bytes.
    pub page_size: u64,
}
const _: () = assert!(size_of::<LoggingReport>() == 24);

/// Start of the body of `MIG_DATA_READ`, its reply, and `MIG_DATA_WRITE`. Data may follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MigData {
    /// Request: maximum size of the reply body that the client accepts, in bytes. Reply: size of the body.
    pub argsz: u32,
    /// Size of the data in bytes.
    pub size: u32,
}
const _: () = assert!(size_of::<MigData>() == 8);

#[cfg(test)]
mod tests {
    use vfio_bindings::bindings::vfio as kernel;

    use super::*;

    #[test]
    fn structures_shared_with_the_kernel_have_its_sizes() {
        assert_eq!(size_of::<DmaMap>(), size_of::<kernel::vfio_iommu_type1_dma_map>());
        assert_eq!(size_of::<DmaUnmap>(), size_of::<kernel::vfio_iommu_type1_dma_unmap>());
        assert_eq!(size_of::<RegionInfoBody>(), size_of::<kernel::vfio_region_info>());
        assert_eq!(size_of::<SparseMmapCap>(), size_of::<kernel::vfio_region_info_cap_sparse_mmap>());
        assert_eq!(size_of::<SparseArea>(), size_of::<kernel::vfio_region_sparse_mmap_area>());
        assert_eq!(size_of::<IrqInfo>(), size_of::<kernel::vfio_irq_info>());
        assert_eq!(size_of::<IrqSet>(), size_of::<kernel::vfio_irq_set>());
        assert_eq!(size_of::<DeviceFeature>(), size_of::<kernel::vfio_device_feature>());
        assert_eq!(size_of::<MigDeviceState>(), size_of::<kernel::vfio_device_feature_mig_state>());
    }

    #[test]
    fn bits_shared_with_the_kernel_are_its_own() {
        let pairs = [
            (DMA_MAP_READ, kernel::VFIO_DMA_MAP_FLAG_READ),
            (DMA_MAP_WRITE, kernel::VFIO_DMA_MAP_FLAG_WRITE),
            (DMA_UNMAP_GET_DIRTY_BITMAP, kernel::VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP),
            (DMA_UNMAP_ALL, kernel::VFIO_DMA_UNMAP_FLAG_ALL),
            (DEVICE_RESETTABLE, kernel::VFIO_DEVICE_FLAGS_RESET),
            (DEVICE_PCI, kernel::VFIO_DEVICE_FLAGS_PCI),
            (REGION_READ, kernel::VFIO_REGION_INFO_FLAG_READ),
            (REGION_WRITE, kernel::VFIO_REGION_INFO_FLAG_WRITE),
            (REGION_MMAP, kernel::VFIO_REGION_INFO_FLAG_MMAP),
            (REGION_CAPS, kernel::VFIO_REGION_INFO_FLAG_CAPS),
            (IRQ_INFO_EVENTFD, kernel::VFIO_IRQ_INFO_EVENTFD),
            (IRQ_INFO_MASKABLE, kernel::VFIO_IRQ_INFO_MASKABLE),
            (IRQ_INFO_AUTOMASKED, kernel::VFIO_IRQ_INFO_AUTOMASKED),
            (IRQ_INFO_NORESIZE, kernel::VFIO_IRQ_INFO_NORESIZE),
            (IRQ_DATA_NONE, kernel::VFIO_IRQ_SET_DATA_NONE),
            (IRQ_DATA_BOOL, kernel::VFIO_IRQ_SET_DATA_BOOL),
            (IRQ_DATA_EVENTFD, kernel::VFIO_IRQ_SET_DATA_EVENTFD),
            (IRQ_ACTION_MASK, kernel::VFIO_IRQ_SET_ACTION_MASK),
            (IRQ_ACTION_UNMASK, kernel::VFIO_IRQ_SET_ACTION_UNMASK),
            (IRQ_ACTION_TRIGGER, kernel::VFIO_IRQ_SET_ACTION_TRIGGER),
            (CAP_SPARSE_MMAP.into(), kernel::VFIO_REGION_INFO_CAP_SPARSE_MMAP),
            (FEATURE_MASK, kernel::VFIO_DEVICE_FEATURE_MASK),
            (FEATURE_GET, kernel::VFIO_DEVICE_FEATURE_GET),
            (FEATURE_SET, kernel::VFIO_DEVICE_FEATURE_SET),
            (FEATURE_PROBE, kernel::VFIO_DEVICE_FEATURE_PROBE),
            (FEATURE_MIGRATION, kernel::VFIO_DEVICE_FEATURE_MIGRATION),
            (FEATURE_MIG_DEVICE_STATE, kernel::VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE),
            (FEATURE_DMA_LOGGING_START, kernel::VFIO_DEVICE_FEATURE_DMA_LOGGING_START),
            (FEATURE_DMA_LOGGING_STOP, kernel::VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP),
            (FEATURE_DMA_LOGGING_REPORT, kernel::VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT),
            (STATE_ERROR, kernel::vfio_device_mig_state_VFIO_DEVICE_STATE_ERROR),
            (STATE_STOP, kernel::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP),
            (STATE_RUNNING, kernel::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING),
            (STATE_STOP_COPY, kernel::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP_COPY),
            (STATE_RESUMING, kernel::vfio_device_mig_state_VFIO_DEVICE_STATE_RESUMING),
        ];
        for (ours, theirs) in pairs {
            assert_eq!(ours, theirs);
        }
    }
}
