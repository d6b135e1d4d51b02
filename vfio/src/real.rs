//! The kernel's VFIO: its files in `/dev/vfio`, and its calls.
#![expect(unsafe_code, reason = "makes VFIO's ioctls")]
// UNSAFETY: makes `ioctl` system calls. A call that fills a structure passes the structure's length. The kernel then
// writes at most that number of bytes, or writes to an address within the structure. All other calls take a number, or
// only read memory. Callers keep memory alive while it is mapped for the card ([`Kernel::map`]).

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use card::DmaMemory;
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_IOMMU_INFO_CAPS,
    VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, VFIO_IRQ_SET_ACTION_TRIGGER,
    VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE, VFIO_REGION_INFO_CAP_SPARSE_MMAP,
    VFIO_REGION_INFO_FLAG_CAPS, VFIO_TYPE, vfio_device_info, vfio_group_status, vfio_info_cap_header,
    vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap, vfio_iommu_type1_info, vfio_iommu_type1_info_cap_iova_range,
    vfio_iommu_type1_info_dma_avail, vfio_iova_range, vfio_irq_set, vfio_pci_dependent_device, vfio_pci_hot_reset,
    vfio_pci_hot_reset_info, vfio_region_info,
};
use vfio_host::Address;

use crate::kernel::{Dependent, DeviceInfo, FileOpenError, IommuInfo, Irq, Kernel, Region, Window};
use crate::window::Mapped;

/// Call numbers relative to `VFIO_BASE`. Source: the kernel's `include/uapi/linux/vfio.h`.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum Call {
    GetApiVersion = 0,
    CheckExtension = 1,
    SetIommu = 2,
    GroupGetStatus = 3,
    GroupSetContainer = 4,
    GroupGetDeviceFd = 6,
    DeviceGetInfo = 7,
    DeviceGetRegionInfo = 8,
    DeviceSetIrqs = 10,
    DeviceReset = 11,
    /// `VFIO_IOMMU_GET_INFO` on a container, `VFIO_DEVICE_GET_PCI_HOT_RESET_INFO` on a device.
    InfoOrHotResetInfo = 12,
    /// `VFIO_IOMMU_MAP_DMA` on a container, `VFIO_DEVICE_PCI_HOT_RESET` on a device.
    MapDmaOrHotReset = 13,
    UnmapDma = 14,
    /// `VFIO_DEVICE_BIND_IOMMUFD`. This call and the next one are for functions that were opened through their own
    /// node.
    DeviceBindIommufd = 18,
    DeviceAttachIommufdPt = 19,
}

/// Buffer size in bytes for replies that end with a list. No list exceeds this size.
const MAX_ANSWER_BYTES: usize = 4096;

/// The structure of a call, as bytes at the offsets defined in the kernel's header.
pub(crate) struct Packet(Vec<u8>);

impl Packet {
    pub(crate) fn new(len: usize) -> Self {
        Self(vec![0; len])
    }

    pub(crate) fn with32(mut self, at: usize, value: u32) -> Self {
        self.set(at, &value.to_ne_bytes());
        self
    }

    pub(crate) fn with64(mut self, at: usize, value: u64) -> Self {
        self.set(at, &value.to_ne_bytes());
        self
    }

    /// Stores at `at` the address of this structure's byte at offset `of`. The kernel then writes to that address.
    pub(crate) fn with_own_address(mut self, at: usize, of: usize) -> Self {
        let address = self.0.as_mut_ptr().wrapping_add(of).expose_provenance();
        self.set(at, &(address as u64).to_ne_bytes());
        self
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.0.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    fn bytes<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    fn get16(&self, at: usize) -> u16 {
        self.bytes(at).map_or(0, u16::from_ne_bytes)
    }

    pub(crate) fn get32(&self, at: usize) -> u32 {
        self.bytes(at).map_or(0, u32::from_ne_bytes)
    }

    pub(crate) fn get64(&self, at: usize) -> u64 {
        self.bytes(at).map_or(0, u64::from_ne_bytes)
    }

    /// Returns the offset of the capability `id` in the list that starts at `first`. The kernel links capabilities at
    /// increasing offsets.
    fn capability(&self, first: u32, id: u32) -> Option<usize> {
        let mut at = first as usize;
        while at != 0 {
            if u32::from(self.get16(at + offset_of!(vfio_info_cap_header, id))) == id {
                return Some(at);
            }
            let next = self.get32(at + offset_of!(vfio_info_cap_header, next)) as usize;
            at = if next > at && next < self.0.len() { next } else { 0 };
        }
        None
    }
}

/// Makes a VFIO call with a number as its argument.
pub(crate) fn call(file: &File, call: Call, argument: u64) -> io::Result<u32> {
    let request = u64::from(u32::from(VFIO_TYPE) << 8 | (VFIO_BASE + call as u32));
    // SAFETY: the calls made here take at most a number, and do not access this process's memory.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), request as libc::Ioctl, argument) })
}

/// Makes a VFIO call with a structure that starts with its own length.
pub(crate) fn exchange(file: &File, call: Call, packet: &mut Packet) -> io::Result<u32> {
    exchange_numbered(file, u32::from(VFIO_TYPE) << 8 | (VFIO_BASE + call as u32), packet)
}

/// Issues an ioctl with a structure that starts with its own length.
pub(crate) fn exchange_numbered(file: &File, request: u32, packet: &mut Packet) -> io::Result<u32> {
    let (len, request) = (packet.0.len() as u32, u64::from(request));
    packet.set(0, &len.to_ne_bytes());
    // SAFETY: the structure starts with its length, and the kernel neither reads nor writes beyond it.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), request as libc::Ioctl, packet.0.as_mut_ptr()) })
}

fn checked(result: libc::c_int) -> io::Result<u32> {
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

pub(crate) fn open(path: &Path) -> Result<File, FileOpenError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(|source| FileOpenError { path: path.to_owned(), source })
}

/// The files of one function, which are dropped in declaration order. The kernel removes the mappings when the last
/// file is closed.
pub(crate) struct Files {
    device: OnceLock<File>,
    group: File,
    container: File,
}

impl Files {
    /// Stores the files. The function is not open yet.
    pub(crate) fn new(container: File, group: File) -> Self {
        Self { device: OnceLock::new(), group, container }
    }

    fn device(&self) -> io::Result<&File> {
        self.device.get().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Kernel for Files {
    fn api_version(&self) -> io::Result<u32> {
        call(&self.container, Call::GetApiVersion, 0)
    }

    fn has_extension(&self, kind: u32) -> io::Result<bool> {
        Ok(call(&self.container, Call::CheckExtension, u64::from(kind))? != 0)
    }

    fn group_flags(&self) -> io::Result<u32> {
        let mut status = Packet::new(size_of::<vfio_group_status>());
        exchange(&self.group, Call::GroupGetStatus, &mut status)?;
        Ok(status.get32(offset_of!(vfio_group_status, flags)))
    }

    fn set_container(&self) -> io::Result<()> {
        let container = self.container.as_raw_fd();
        let request = u64::from(u32::from(VFIO_TYPE) << 8 | (VFIO_BASE + Call::GroupSetContainer as u32));
        // SAFETY: the kernel reads one number, the descriptor, which outlives the call.
        checked(unsafe { libc::ioctl(self.group.as_raw_fd(), request as libc::Ioctl, &raw const container) }).map(drop)
    }

    fn set_iommu(&self, kind: u32) -> io::Result<()> {
        call(&self.container, Call::SetIommu, u64::from(kind)).map(drop)
    }

    fn iommu_info(&self) -> io::Result<IommuInfo> {
        let mut info = Packet::new(MAX_ANSWER_BYTES);
        exchange(&self.container, Call::InfoOrHotResetInfo, &mut info)?;
        let mut found = IommuInfo {
            page_sizes: info.get64(offset_of!(vfio_iommu_type1_info, iova_pgsizes)),
            ..IommuInfo::default()
        };
        if info.get32(offset_of!(vfio_iommu_type1_info, flags)) & VFIO_IOMMU_INFO_CAPS == 0 {
            return Ok(found);
        }
        let first = info.get32(offset_of!(vfio_iommu_type1_info, cap_offset));
        if let Some(at) = info.capability(first, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) {
            let count = info.get32(at + offset_of!(vfio_iommu_type1_info_cap_iova_range, nr_iovas)) as usize;
            let list = at + offset_of!(vfio_iommu_type1_info_cap_iova_range, iova_ranges);
            for at in (list..info.0.len()).step_by(size_of::<vfio_iova_range>()).take(count) {
                let start = info.get64(at + offset_of!(vfio_iova_range, start));
                let last = info.get64(at + offset_of!(vfio_iova_range, end));
                found.usable.push(start..last.saturating_add(1));
            }
        }
        found.available = info
            .capability(first, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL)
            .map(|at| info.get32(at + offset_of!(vfio_iommu_type1_info_dma_avail, avail)));
        Ok(found)
    }

    fn map(&self, iova: u64, memory: &DmaMemory) -> io::Result<()> {
        let write = if memory.writable() { VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
        let mut packet = Packet::new(size_of::<vfio_iommu_type1_dma_map>())
            .with32(offset_of!(vfio_iommu_type1_dma_map, flags), VFIO_DMA_MAP_FLAG_READ | write)
            .with64(offset_of!(vfio_iommu_type1_dma_map, vaddr), memory.host_address().addr() as u64)
            .with64(offset_of!(vfio_iommu_type1_dma_map, iova), iova)
            .with64(offset_of!(vfio_iommu_type1_dma_map, size), memory.len() as u64);
        exchange(&self.container, Call::MapDmaOrHotReset, &mut packet).map(drop)
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<u64> {
        let mut packet = Packet::new(size_of::<vfio_iommu_type1_dma_unmap>())
            .with64(offset_of!(vfio_iommu_type1_dma_unmap, iova), iova)
            .with64(offset_of!(vfio_iommu_type1_dma_unmap, size), len);
        exchange(&self.container, Call::UnmapDma, &mut packet)?;
        Ok(packet.get64(offset_of!(vfio_iommu_type1_dma_unmap, size)))
    }

    fn open_device(&self, address: Address) -> io::Result<()> {
        let name = std::ffi::CString::new(address.to_string())?;
        let request = u64::from(u32::from(VFIO_TYPE) << 8 | (VFIO_BASE + Call::GroupGetDeviceFd as u32));
        // SAFETY: the kernel reads a NUL-terminated string.
        let number = unsafe { libc::ioctl(self.group.as_raw_fd(), request as libc::Ioctl, name.as_ptr()) };
        checked(number)?;
        // SAFETY: the kernel has just created this descriptor for the caller.
        let device = File::from(unsafe { OwnedFd::from_raw_fd(number) });
        self.device.set(device).map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    fn device_info(&self) -> io::Result<DeviceInfo> {
        device_info(self.device()?)
    }

    fn region(&self, index: u32) -> io::Result<Region> {
        region(self.device()?, index)
    }

    fn set_irq(&self, index: u32, set: Irq<'_>) -> io::Result<()> {
        set_irq(self.device()?, index, set)
    }

    fn reset(&self) -> io::Result<()> {
        call(self.device()?, Call::DeviceReset, 0).map(drop)
    }

    fn dependents(&self) -> io::Result<Vec<Dependent>> {
        let (_, listed) = reset_together(self.device()?)?;
        Ok(listed.into_iter().map(|(group, address)| Dependent { group, address }).collect())
    }

    fn hot_reset(&self) -> io::Result<()> {
        hot_reset(self.device()?, &[self.group.as_raw_fd()])
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.device()?.read_exact_at(data, offset)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.device()?.write_all_at(data, offset)
    }

    fn map_region(&self, region: &Region) -> io::Result<Box<dyn Window>> {
        Ok(Box::new(Mapped::new(self.device()?, region.offset, region.size)?))
    }
}

/// Returns the properties of this file's function.
pub(crate) fn device_info(device: &File) -> io::Result<DeviceInfo> {
    let mut info = Packet::new(size_of::<vfio_device_info>());
    exchange(device, Call::DeviceGetInfo, &mut info)?;
    Ok(DeviceInfo {
        flags: info.get32(offset_of!(vfio_device_info, flags)),
        regions: info.get32(offset_of!(vfio_device_info, num_regions)),
    })
}

/// Returns the properties of one of the function's regions.
pub(crate) fn region(device: &File, index: u32) -> io::Result<Region> {
    let mut info = Packet::new(MAX_ANSWER_BYTES).with32(offset_of!(vfio_region_info, index), index);
    exchange(device, Call::DeviceGetRegionInfo, &mut info)?;
    let flags = info.get32(offset_of!(vfio_region_info, flags));
    let first = info.get32(offset_of!(vfio_region_info, cap_offset));
    let listed = flags & VFIO_REGION_INFO_FLAG_CAPS != 0;
    Ok(Region {
        flags,
        size: info.get64(offset_of!(vfio_region_info, size)),
        offset: info.get64(offset_of!(vfio_region_info, offset)),
        sparse: listed && info.capability(first, VFIO_REGION_INFO_CAP_SPARSE_MMAP).is_some(),
    })
}

/// Changes the configuration of one kind of the function's interrupts.
pub(crate) fn set_irq(device: &File, index: u32, set: Irq<'_>) -> io::Result<()> {
    let head = offset_of!(vfio_irq_set, data);
    let (flags, count, len) = match set {
        Irq::Signal(_) => (VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER, 1, head + size_of::<i32>()),
        Irq::Off => (VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER, 0, head),
        Irq::Unmask => (VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_UNMASK, 1, head),
    };
    let mut packet = Packet::new(len)
        .with32(offset_of!(vfio_irq_set, flags), flags)
        .with32(offset_of!(vfio_irq_set, index), index)
        .with32(offset_of!(vfio_irq_set, count), count);
    if let Irq::Signal(event) = set {
        packet.set(head, &event.as_raw_fd().to_ne_bytes());
    }
    exchange(device, Call::DeviceSetIrqs, &mut packet).map(drop)
}

/// Lists the functions affected by a reset of this function's bus. Returns flags and, for each function, its address
/// and a number, which identifies its group or its iommufd device.
pub(crate) fn reset_together(device: &File) -> io::Result<(u32, Vec<(u32, Address)>)> {
    let mut info = Packet::new(MAX_ANSWER_BYTES);
    exchange(device, Call::InfoOrHotResetInfo, &mut info)?;
    let count = info.get32(offset_of!(vfio_pci_hot_reset_info, count)) as usize;
    let list = offset_of!(vfio_pci_hot_reset_info, devices);
    let places = (list..info.0.len()).step_by(size_of::<vfio_pci_dependent_device>()).take(count);
    let listed = places.map(|at| {
        let segment = info.get16(at + offset_of!(vfio_pci_dependent_device, segment));
        let [bus] = info.bytes(at + offset_of!(vfio_pci_dependent_device, bus)).unwrap_or_default();
        let [devfn] = info.bytes(at + offset_of!(vfio_pci_dependent_device, devfn)).unwrap_or_default();
        (info.get32(at), Address::new(u32::from(segment), bus, devfn))
    });
    Ok((info.get32(offset_of!(vfio_pci_hot_reset_info, flags)), listed.collect()))
}

/// Resets the bus. All of its functions must be in the given groups or, if there are no groups, must be bound to the
/// caller's iommufd.
pub(crate) fn hot_reset(device: &File, groups: &[i32]) -> io::Result<()> {
    let head = offset_of!(vfio_pci_hot_reset, group_fds);
    let mut packet = Packet::new(head + size_of_val(groups));
    packet.set(offset_of!(vfio_pci_hot_reset, count), &(groups.len() as u32).to_ne_bytes());
    for (at, group) in (head..).step_by(size_of::<i32>()).zip(groups) {
        packet.set(at, &group.to_ne_bytes());
    }
    exchange(device, Call::MapDmaOrHotReset, &mut packet).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cyclic_capability_lists_end() {
        let id = offset_of!(vfio_info_cap_header, id);
        let next = offset_of!(vfio_info_cap_header, next);
        let mut packet = Packet::new(64).with32(16 + next, 32).with32(32 + next, 16);
        packet.set(32 + id, &7_u16.to_ne_bytes());
        assert_eq!((packet.capability(16, 7), packet.capability(16, 9)), (Some(32), None));
        assert_eq!(packet.capability(u32::MAX, 9), None);
        assert_eq!(Packet::new(64).with32(16 + next, u32::MAX).capability(16, 9), None);
    }
}
