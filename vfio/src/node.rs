//! A function opened through its own node in `/dev/vfio/devices`, with an I/O address space in an iommufd.
//!
//! This interface exists in Linux 6.6 and later, if it is enabled in the kernel's configuration. The function is bound
//! to the iommufd, which gives this process exclusive use, and is attached to an address space. There is neither a
//! container nor a group.
//!
//! Sources: the kernel's `Documentation/userspace-api/iommufd.rst`, `include/uapi/linux/iommufd.h`, `vfio.h`.

use std::fs::File;
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use card::DmaMemory;
use iommufd_bindings::iommufd::{
    IOMMUFD_CMD_IOAS_ALLOC, IOMMUFD_CMD_IOAS_IOVA_RANGES, IOMMUFD_CMD_IOAS_MAP, IOMMUFD_CMD_IOAS_UNMAP, IOMMUFD_TYPE,
    iommu_ioas_alloc, iommu_ioas_iova_ranges, iommu_ioas_map, iommu_ioas_unmap, iommu_iova_range,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as FIXED,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as WRITABLE,
};
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_HOT_RESET_FLAG_DEV_ID_OWNED, vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd,
};
use vfio_host::Address;

use crate::kernel::{Dependent, DeviceInfo, IommuInfo, Irq, Kernel, Region, Window};
use crate::real::{
    Call, Packet, call, device_info, exchange, exchange_numbered, hot_reset, open, region, reset_together, set_irq,
};
use crate::window::Mapped;

/// Maximum number of I/O address ranges to request. It exceeds the number of ranges of any IOMMU.
const RANGES: usize = 64;
/// Size in bytes of the structure for binding a function, up to the last field supported by all kernels with this call.
const BIND_BYTES: usize = offset_of!(vfio_device_bind_iommufd, token_uuid_ptr);
/// Size in bytes of the structure for attaching a function, up to the last field supported by all kernels with this
/// call.
const ATTACH_BYTES: usize = offset_of!(vfio_device_attach_iommufd_pt, pt_id) + size_of::<u32>();
/// A group number that no function has.
const NO_GROUP: u32 = u32::MAX;

/// The files of one function, which are dropped in declaration order. The kernel removes the mappings when the last
/// file is closed.
pub(crate) struct NodeFiles {
    device: File,
    iommufd: File,
    /// The address space ID, once created.
    space: OnceLock<u32>,
    /// The function's IOMMU group, which `dependents` reports for all functions if this process owns them.
    group: u32,
}

impl NodeFiles {
    /// Opens the node `devices/<node>` in VFIO's folder, and the iommufd next to that folder. Returns `None` if either
    /// does not exist or may not be opened.
    pub(crate) fn open(folder: &Path, node: &str, group: u32) -> Option<Self> {
        let device = open(&folder.join("devices").join(node)).ok()?;
        let iommufd = open(&folder.with_file_name("iommu")).ok()?;
        Some(Self { device, iommufd, space: OnceLock::new(), group })
    }

    fn space(&self) -> io::Result<u32> {
        self.space.get().copied().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn ask(&self, command: u32, packet: &mut Packet) -> io::Result<()> {
        exchange_numbered(&self.iommufd, u32::from(IOMMUFD_TYPE) << 8 | command, packet).map(drop)
    }
}

/// Returns the error for a call that exists only for groups.
fn of_groups<T>() -> io::Result<T> {
    Err(io::ErrorKind::Unsupported.into())
}

impl Kernel for NodeFiles {
    fn is_node(&self) -> bool {
        true
    }

    fn bind_iommufd(&self) -> io::Result<()> {
        let iommufd = self.iommufd.as_raw_fd();
        let mut packet = Packet::new(BIND_BYTES)
            .with32(offset_of!(vfio_device_bind_iommufd, iommufd), u32::from_ne_bytes(iommufd.to_ne_bytes()));
        exchange(&self.device, Call::DeviceBindIommufd, &mut packet).map(drop)
    }

    fn attach_space(&self) -> io::Result<()> {
        let mut made = Packet::new(size_of::<iommu_ioas_alloc>());
        self.ask(IOMMUFD_CMD_IOAS_ALLOC, &mut made)?;
        let space = made.get32(offset_of!(iommu_ioas_alloc, out_ioas_id));
        let mut packet = Packet::new(ATTACH_BYTES).with32(offset_of!(vfio_device_attach_iommufd_pt, pt_id), space);
        exchange(&self.device, Call::DeviceAttachIommufdPt, &mut packet)?;
        self.space.set(space).map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    fn api_version(&self) -> io::Result<u32> {
        of_groups()
    }

    fn has_extension(&self, _: u32) -> io::Result<bool> {
        of_groups()
    }

    fn group_flags(&self) -> io::Result<u32> {
        of_groups()
    }

    fn set_container(&self) -> io::Result<()> {
        of_groups()
    }

    fn set_iommu(&self, _: u32) -> io::Result<()> {
        of_groups()
    }

    fn open_device(&self, _: Address) -> io::Result<()> {
        of_groups()
    }

    fn iommu_info(&self) -> io::Result<IommuInfo> {
        // The ranges follow the structure. The kernel accepts a longer structure if all bytes after the part that it
        // knows are zero.
        let list = size_of::<iommu_ioas_iova_ranges>();
        let mut packet = Packet::new(list + RANGES * size_of::<iommu_iova_range>())
            .with32(offset_of!(iommu_ioas_iova_ranges, ioas_id), self.space()?)
            .with32(offset_of!(iommu_ioas_iova_ranges, num_iovas), RANGES as u32)
            .with_own_address(offset_of!(iommu_ioas_iova_ranges, allowed_iovas), list);
        self.ask(IOMMUFD_CMD_IOAS_IOVA_RANGES, &mut packet)?;
        let count = packet.get32(offset_of!(iommu_ioas_iova_ranges, num_iovas)) as usize;
        let range = |at: usize| {
            let start = packet.get64(at + offset_of!(iommu_iova_range, start));
            start..packet.get64(at + offset_of!(iommu_iova_range, last)).saturating_add(1)
        };
        let alignment = packet.get64(offset_of!(iommu_ioas_iova_ranges, out_iova_alignment));
        Ok(IommuInfo {
            // The mask contains the smallest mappable page size, and all larger sizes.
            page_sizes: alignment.wrapping_neg(),
            usable: (0..count.min(RANGES)).map(|index| range(list + index * size_of::<iommu_iova_range>())).collect(),
            available: None,
        })
    }

    fn map(&self, iova: u64, memory: &DmaMemory) -> io::Result<()> {
        let write = if memory.writable() { WRITABLE } else { 0 };
        let mut packet = Packet::new(size_of::<iommu_ioas_map>())
            .with32(offset_of!(iommu_ioas_map, flags), FIXED | READABLE | write)
            .with32(offset_of!(iommu_ioas_map, ioas_id), self.space()?)
            .with64(offset_of!(iommu_ioas_map, user_va), memory.host_address().addr() as u64)
            .with64(offset_of!(iommu_ioas_map, length), memory.len() as u64)
            .with64(offset_of!(iommu_ioas_map, iova), iova);
        self.ask(IOMMUFD_CMD_IOAS_MAP, &mut packet)
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<u64> {
        let mut packet = Packet::new(size_of::<iommu_ioas_unmap>())
            .with32(offset_of!(iommu_ioas_unmap, ioas_id), self.space()?)
            .with64(offset_of!(iommu_ioas_unmap, iova), iova)
            .with64(offset_of!(iommu_ioas_unmap, length), len);
        self.ask(IOMMUFD_CMD_IOAS_UNMAP, &mut packet)?;
        Ok(packet.get64(offset_of!(iommu_ioas_unmap, length)))
    }

    fn device_info(&self) -> io::Result<DeviceInfo> {
        device_info(&self.device)
    }

    fn region(&self, index: u32) -> io::Result<Region> {
        region(&self.device, index)
    }

    fn set_irq(&self, index: u32, set: Irq<'_>) -> io::Result<()> {
        set_irq(&self.device, index, set)
    }

    fn reset(&self) -> io::Result<()> {
        call(&self.device, Call::DeviceReset, 0).map(drop)
    }

    fn dependents(&self) -> io::Result<Vec<Dependent>> {
        // For this interface, the kernel does not report groups. Instead, it reports whether every function is bound to
        // this iommufd or is unowned.
        let (flags, listed) = reset_together(&self.device)?;
        let group = if flags & VFIO_PCI_HOT_RESET_FLAG_DEV_ID_OWNED != 0 { self.group } else { NO_GROUP };
        Ok(listed.into_iter().map(|(_, address)| Dependent { group, address }).collect())
    }

    fn hot_reset(&self) -> io::Result<()> {
        hot_reset(&self.device, &[])
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.device.read_exact_at(data, offset)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.device.write_all_at(data, offset)
    }

    fn map_region(&self, region: &Region) -> io::Result<Box<dyn Window>> {
        Ok(Box::new(Mapped::new(&self.device, region.offset, region.size)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_needs_both_files_and_rejects_group_calls() {
        let folder = tempfile::tempdir().unwrap();
        let vfio = folder.path().join("vfio");
        std::fs::create_dir_all(vfio.join("devices")).unwrap();
        let files = || NodeFiles::open(&vfio, "vfio0", 7);
        assert!(files().is_none());
        std::fs::write(vfio.join("devices/vfio0"), "").unwrap();
        assert!(files().is_none());
        std::fs::write(folder.path().join("iommu"), "").unwrap();
        let files = files().expect("both files exist");
        // Plain files support none of the calls.
        assert!(files.is_node() && files.bind_iommufd().is_err() && files.attach_space().is_err());
        assert!(files.iommu_info().is_err() && files.set_container().is_err() && files.device_info().is_err());
    }
}
