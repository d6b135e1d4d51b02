//! Opens the card at an address. Checks all preconditions, in the order in which an operator would fix them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use card::Identity;
use nvspec::chip;
use nvspec::regs::windows::BAR0_BYTES;
use nvspec::regs::{pmc, ptop};
use parking_lot::Mutex;
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_GROUP_FLAGS_CONTAINER_SET,
    VFIO_GROUP_FLAGS_VIABLE, VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_BAR1_REGION_INDEX, VFIO_PCI_BAR3_REGION_INDEX,
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_TYPE1v2_IOMMU,
};
use vfio_host::{Address, Function, Sysfs};

use crate::VfioCard;
use crate::bar::Bar;
use crate::dma::{Mappings, PAGE};
use crate::error::OpenError;
use crate::files::DeviceFiles;
use crate::kernel::{FileOpenError, Kernel, OpenKernel};
use crate::pci;
use crate::reset::{self, Reset};

/// Valid sizes of an aperture in bytes.
const APERTURE: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 36;

/// Locations of sysfs and of VFIO's device files.
#[derive(Clone, Debug)]
pub struct Place {
    /// Sysfs, the kernel's view of devices.
    pub sysfs: Sysfs,
    /// Folder of VFIO's device files.
    pub files: PathBuf,
}

impl Default for Place {
    fn default() -> Self {
        Self { sysfs: Sysfs::default(), files: DeviceFiles::default().0 }
    }
}

impl VfioCard {
    /// Opens the function at `address` for this process.
    ///
    /// # Errors
    /// Returns an [`OpenError`] if the function cannot be opened. The function has then been released completely.
    pub fn open(place: &Place, address: Address, reset: Reset) -> Result<Self, OpenError> {
        Self::open_by(place, &DeviceFiles(place.files.clone()), address, reset)
    }

    pub(crate) fn open_by(
        place: &Place,
        files: &dyn OpenKernel,
        address: Address,
        reset: Reset,
    ) -> Result<Self, OpenError> {
        let function = place.sysfs.function(address)?;
        let obstacles = function.obstacles();
        let (true, Some(group)) = (obstacles.is_empty(), function.group) else {
            return Err(OpenError::Obstacles(obstacles));
        };
        let opened = files.open(group, function.node.as_deref());
        let kernel: Arc<dyn Kernel> = opened.map_err(|error| unopened(error, address, group))?.into();
        if kernel.is_node() {
            attach(&*kernel, address, group)?;
        } else {
            join(&*kernel, address, group)?;
        }
        Self::take(kernel, &function, group, reset)
    }

    /// Opens a function whose IOMMU has been set up, either in a container or through an iommufd.
    fn take(kernel: Arc<dyn Kernel>, function: &Function, group: u32, reset: Reset) -> Result<Self, OpenError> {
        let address = function.address;
        let fail = |call| move |source| OpenError::Call { address, call, source };
        let iommu = kernel.iommu_info().map_err(fail("VFIO_IOMMU_GET_INFO"))?;
        if iommu.page_sizes & PAGE == 0 {
            let what = format!("does not support 4 KiB pages, only sizes {:#x}", iommu.page_sizes);
            return Err(OpenError::Interface(what));
        }
        if !kernel.is_node() {
            kernel.open_device(address).map_err(fail("VFIO_GROUP_GET_DEVICE_FD"))?;
        }
        let info = kernel.device_info().map_err(fail("VFIO_DEVICE_GET_INFO"))?;
        if info.flags & VFIO_DEVICE_FLAGS_PCI == 0 || info.regions <= VFIO_PCI_CONFIG_REGION_INDEX {
            return Err(OpenError::Interface(format!("reports that {address} is not a PCI function")));
        }
        let region = |index| kernel.region(index).map_err(fail("VFIO_DEVICE_GET_REGION_INFO"));
        let bar = |index, sizes: std::ops::RangeInclusive<u64>| {
            let region = region(index)?;
            if !sizes.contains(&region.size) || !region.size.is_power_of_two() {
                return Err(OpenError::Bar { address, bar: index, size: region.size });
            }
            Ok(region)
        };
        let registers = bar(VFIO_PCI_BAR0_REGION_INDEX, BAR0_BYTES..=1 << 30)?;
        let (bar1, bar3) = (bar(VFIO_PCI_BAR1_REGION_INDEX, APERTURE)?, bar(VFIO_PCI_BAR3_REGION_INDEX, APERTURE)?);
        let config = Bar::new(Arc::clone(&kernel), region(VFIO_PCI_CONFIG_REGION_INDEX)?);
        pci::wake(&config).map_err(fail("waking it"))?;
        // From here on, the function can access memory, but no memory is mapped yet.
        pci::set_enabled(&config, true).map_err(fail("enabling it"))?;
        let (vendor, device, subsystem_vendor, subsystem, revision, class) =
            pci::identity(&config).map_err(fail("reading its identity"))?;
        let method =
            reset::choose(&*kernel, reset, info.flags & VFIO_DEVICE_FLAGS_RESET != 0, &function.resets, group)?;
        let [registers, bar1, bar3] = [registers, bar1, bar3].map(|region| Bar::new(Arc::clone(&kernel), region));
        identify(&registers, address)?;
        let units = registers.read32(pmc::ENABLE::OFFSET);
        let (bar1_size, bar3_size) = (bar1.size(), bar3.size());
        let bar0_size = registers.size();
        tracing::info!(
            card = %address, group, iommufd = kernel.is_node(), reset = method.name(), ways = function.resets.join(" "),
            mapped = registers.is_mapped() && bar1.is_mapped() && bar3.is_mapped(),
            mappings_left = iommu.available, "the card is opened through VFIO"
        );
        Ok(Self {
            address,
            identity: Identity {
                vendor,
                device,
                subsystem_vendor,
                subsystem,
                revision,
                class,
                bar0_size,
                bar1_size,
                bar3_size,
            },
            registers,
            bar1,
            bar3,
            config,
            method,
            units,
            interrupt: Mutex::new(None),
            lost: crate::lost::Lost::watch(&*kernel),
            kernel,
            mappings: Mappings::new(&iommu),
        })
    }
}

fn unopened(error: FileOpenError, address: Address, group: u32) -> OpenError {
    let FileOpenError { path, source } = error;
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV) => OpenError::NoVfio(path),
        Some(libc::EACCES | libc::EPERM) => OpenError::Forbidden(path),
        Some(libc::EBUSY) => OpenError::InUse { address, group },
        _ => OpenError::Call { address, call: "opening VFIO's files", source },
    }
}

/// Binds the function to its iommufd, and attaches it to an address space.
fn attach(kernel: &dyn Kernel, address: Address, group: u32) -> Result<(), OpenError> {
    let fail = |call| {
        move |source: io::Error| match source.raw_os_error() {
            Some(libc::EPERM) => OpenError::NoInterruptRemapping,
            Some(libc::EBUSY) => OpenError::InUse { address, group },
            _ => OpenError::Call { address, call, source },
        }
    };
    kernel.bind_iommufd().map_err(fail("VFIO_DEVICE_BIND_IOMMUFD"))?;
    kernel.attach_space().map_err(fail("VFIO_DEVICE_ATTACH_IOMMUFD_PT"))
}

/// Adds the group to the container, and sets the container's IOMMU type.
fn join(kernel: &dyn Kernel, address: Address, group: u32) -> Result<(), OpenError> {
    let fail = |call| move |source| OpenError::Call { address, call, source };
    let version = kernel.api_version().map_err(fail("VFIO_GET_API_VERSION"))?;
    if version != VFIO_API_VERSION {
        return Err(OpenError::Interface(format!("has version {version}, expected {VFIO_API_VERSION}")));
    }
    if !kernel.has_extension(VFIO_TYPE1v2_IOMMU).map_err(fail("VFIO_CHECK_EXTENSION"))? {
        return Err(OpenError::Interface("has no IOMMU of type 1, version 2".to_owned()));
    }
    let flags = kernel.group_flags().map_err(fail("VFIO_GROUP_GET_STATUS"))?;
    if flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
        return Err(OpenError::NotViable { group });
    }
    if flags & VFIO_GROUP_FLAGS_CONTAINER_SET != 0 {
        return Err(OpenError::InUse { address, group });
    }
    kernel.set_container().map_err(fail("VFIO_GROUP_SET_CONTAINER"))?;
    kernel.set_iommu(VFIO_TYPE1v2_IOMMU).map_err(|source| match source.raw_os_error() {
        Some(libc::EPERM) => OpenError::NoInterruptRemapping,
        _ => OpenError::Call { address, call: "VFIO_SET_IOMMU", source },
    })
}

/// Checks that the card responds, that its chip is supported, and that its VBIOS has run.
fn identify(registers: &Bar, address: Address) -> Result<(), OpenError> {
    let boot0 = registers.read32(pmc::BOOT_0::OFFSET);
    if boot0 == u32::MAX {
        return Err(OpenError::Silent(address));
    }
    if chip::by_boot0(boot0).is_none() {
        return Err(OpenError::UnknownChip { address, boot0 });
    }
    let register = ptop::DEVINIT_STATUS::OFFSET;
    let value = registers.read32(register);
    if !ptop::DEVINIT_STATUS::DONE.is_set(value) {
        return Err(OpenError::NotPosted { address, register, value });
    }
    Ok(())
}
