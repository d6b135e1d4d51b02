//! The interface to the kernel, with plain types, and one method per VFIO call.
//!
//! The calls have a fixed order. With a container, the group joins the container, the container's IOMMU type is set,
//! and the group opens the device. A function that is opened through its own node is bound to an iommufd and attached
//! to an address space. Tests replace the kernel with a fake, which is stricter than the real one.

use std::io;
use std::ops::Range;

use card::DmaMemory;
use vfio_host::Address;
use vmm_sys_util::eventfd::EventFd;

/// IOMMU capabilities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IommuInfo {
    /// Bit mask of supported page sizes.
    pub page_sizes: u64,
    /// Mappable I/O addresses in ascending order. Empty if the kernel does not report them.
    pub usable: Vec<Range<u64>>,
    /// Number of mappings that can still be created, if reported by the kernel.
    pub available: Option<u32>,
}

/// VFIO properties of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Flags `VFIO_DEVICE_FLAGS_*`.
    pub flags: u32,
    /// Number of regions.
    pub regions: u32,
}

/// A region of a function: a BAR or configuration space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Flags `VFIO_REGION_INFO_FLAG_*`.
    pub flags: u32,
    /// Size in bytes.
    pub size: u64,
    /// Byte offset in the device file.
    pub offset: u64,
    /// True if only parts of the region are mappable.
    pub sparse: bool,
}

/// A function that is affected by a bus reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dependent {
    /// IOMMU group of the function.
    pub group: u32,
    /// Address of the function.
    pub address: Address,
}

/// A change to the configuration of one kind of interrupt.
#[derive(Clone, Copy, Debug)]
pub enum Irq<'a> {
    /// Signals the first interrupt of the kind through an eventfd.
    Signal(&'a EventFd),
    /// Disables signalling for all interrupts of the kind.
    Off,
    /// Unmasks the first interrupt of the kind.
    Unmask,
}

/// A mapped region. Offsets are relative to its start. The caller checks that they are within the region and aligned to
/// the access size.
pub trait Window: Send + Sync {
    /// Returns the size in bytes.
    fn len(&self) -> usize;
    /// Reads a byte.
    fn read8(&self, offset: usize) -> u8;
    /// Reads 32 bits in a single access.
    fn read32(&self, offset: usize) -> u32;
    /// Reads 64 bits in a single access.
    fn read64(&self, offset: usize) -> u64;
    /// Writes a byte.
    fn write8(&self, offset: usize, value: u8);
    /// Writes 32 bits in a single access.
    fn write32(&self, offset: usize, value: u32);
    /// Writes 64 bits in a single access.
    fn write64(&self, offset: usize, value: u64);
}

/// VFIO for one function. It consists either of a container, the function's group and the function, or of the
/// function's node and an iommufd. Dropping this value closes the files. The kernel then removes all mappings and stops
/// the function's memory accesses.
pub trait Kernel: Send + Sync {
    /// Returns true if the function was opened through its own node. There is then neither a container nor a group.
    fn is_node(&self) -> bool {
        false
    }
    /// Binds the function to its iommufd. Valid only if the function was opened through its own node.
    ///
    /// # Errors
    /// Returns the kernel's error if the call fails. The same applies to all methods below.
    fn bind_iommufd(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Attaches the function to its own address space. Valid only if the function was opened through its own node.
    fn attach_space(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Returns VFIO's API version.
    fn api_version(&self) -> io::Result<u32>;
    /// Returns true if the kernel supports an IOMMU type.
    fn has_extension(&self, kind: u32) -> io::Result<bool>;
    /// Returns the group's `VFIO_GROUP_FLAGS_*` flags.
    fn group_flags(&self) -> io::Result<u32>;
    /// Adds the group to the container.
    fn set_container(&self) -> io::Result<()>;
    /// Sets the container's IOMMU type.
    fn set_iommu(&self, kind: u32) -> io::Result<()>;
    /// Returns the IOMMU's capabilities.
    fn iommu_info(&self) -> io::Result<IommuInfo>;
    /// Maps memory at an I/O address. The caller must keep the memory alive until it is unmapped or this value is
    /// dropped.
    fn map(&self, iova: u64, memory: &DmaMemory) -> io::Result<()>;
    /// Removes all mappings in a range, and returns the number of bytes that were mapped.
    fn unmap(&self, iova: u64, len: u64) -> io::Result<u64>;
    /// Opens the function through the group.
    fn open_device(&self, address: Address) -> io::Result<()>;
    /// Returns the function's properties.
    fn device_info(&self) -> io::Result<DeviceInfo>;
    /// Returns a region's properties.
    fn region(&self, index: u32) -> io::Result<Region>;
    /// Changes the configuration of one kind of interrupt.
    fn set_irq(&self, index: u32, set: Irq<'_>) -> io::Result<()>;
    /// Resets only this function.
    fn reset(&self) -> io::Result<()>;
    /// Lists the functions affected by a bus reset, including this one.
    fn dependents(&self) -> io::Result<Vec<Dependent>>;
    /// Resets the bus. All of its functions must belong to the group or be bound to the function's iommufd.
    fn hot_reset(&self) -> io::Result<()>;
    /// Reads from the device file.
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    /// Writes to the device file.
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Maps a region as readable and writable.
    fn map_region(&self, region: &Region) -> io::Result<Box<dyn Window>>;
}

/// Opens VFIO's device files.
pub trait OpenKernel {
    /// Opens the function's node and an iommufd, if the function has a node and both files may be opened. Otherwise,
    /// opens a container and, exclusively, the group.
    ///
    /// # Errors
    /// Returns an error if a file cannot be opened.
    fn open(&self, group: u32, node: Option<&str>) -> Result<Box<dyn Kernel>, FileOpenError>;
}

/// Error for a file that cannot be opened.
#[derive(Debug)]
pub struct FileOpenError {
    /// Path of the file.
    pub path: std::path::PathBuf,
    /// The kernel's error.
    pub source: io::Error,
}
