//! A fake sysfs in a folder, which reacts to writes as the kernel does.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::bind::Attributes;
use crate::{Address, Sysfs};

/// A fake sysfs for tests. It panics if its folder cannot be written.
#[derive(Debug)]
pub struct Fake {
    root: PathBuf,
}

/// A function to add.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// Address of the function.
    pub address: &'a str,
    /// Vendor and device IDs.
    pub id: (u16, u16),
    /// Class code.
    pub class: u32,
    /// Bound driver, if any.
    pub driver: Option<&'a str>,
    /// IOMMU group of the function, if any.
    pub group: Option<u32>,
}

impl Plan<'_> {
    /// A GF100 in group 7, bound to nouveau.
    pub const CARD: Self = Self {
        address: "0000:65:00.0",
        id: (0x10de, 0x06d8),
        class: 0x03_0000,
        driver: Some("nouveau"),
        group: Some(7),
    };
}

impl Fake {
    /// Creates an empty sysfs in the folder `root`, with the drivers vfio-pci and nouveau.
    ///
    /// # Panics
    /// Panics if the folder cannot be written.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        let fake = Self { root: root.to_owned() };
        for folder in ["bus/pci/devices", "bus/pci/drivers", "kernel/iommu_groups"] {
            fs::create_dir_all(root.join(folder)).expect("a folder");
        }
        fs::write(root.join("bus/pci/drivers_probe"), "").expect("a file");
        fake.add_driver("vfio-pci");
        fake.add_driver("nouveau");
        fake
    }

    /// Returns the fake as a [`Sysfs`].
    #[must_use]
    pub fn sysfs(&self) -> Sysfs {
        Sysfs::at(&self.root)
    }

    fn driver_folder(&self, name: &str) -> PathBuf {
        self.root.join("bus/pci/drivers").join(name)
    }

    /// Adds a driver.
    ///
    /// # Panics
    /// Panics if the folder cannot be written.
    pub fn add_driver(&self, name: &str) {
        let folder = self.driver_folder(name);
        fs::create_dir_all(&folder).expect("a folder");
        for file in ["bind", "unbind"] {
            fs::write(folder.join(file), "").expect("a file");
        }
    }

    /// Removes a driver.
    ///
    /// # Panics
    /// Panics if the folder cannot be written.
    pub fn remove_driver(&self, name: &str) {
        fs::remove_dir_all(self.driver_folder(name)).expect("a driver");
    }

    /// Adds a function.
    ///
    /// # Panics
    /// Panics if the folder cannot be written.
    pub fn add(&self, plan: Plan<'_>) {
        let folder = self.root.join("bus/pci/devices").join(plan.address);
        fs::create_dir_all(&folder).expect("a folder");
        let write = |name: &str, text: String| fs::write(folder.join(name), text).expect("a file");
        write("vendor", format!("{:#06x}\n", plan.id.0));
        write("device", format!("{:#06x}\n", plan.id.1));
        write("class", format!("{:#08x}\n", plan.class));
        write("driver_override", "(null)\n".to_owned());
        write("reset_method", "bus\n".to_owned());
        if let Some(group) = plan.group {
            let members = self.root.join(format!("kernel/iommu_groups/{group}/devices"));
            fs::create_dir_all(&members).expect("a folder");
            symlink(&folder, members.join(plan.address)).expect("a link");
            symlink(members.parent().expect("it has one"), folder.join("iommu_group")).expect("a link");
        }
        if let Some(driver) = plan.driver {
            self.add_driver(driver);
            symlink(self.driver_folder(driver), folder.join("driver")).expect("a link");
        }
    }

    /// Adds a device node for a function that is bound to vfio-pci.
    ///
    /// # Panics
    /// Panics if the folder cannot be written.
    pub fn add_node(&self, address: &str, name: &str) {
        let folder = self.root.join("bus/pci/devices").join(address).join("vfio-dev").join(name);
        fs::create_dir_all(folder).expect("a folder");
    }

    /// Replaces a file of a function.
    ///
    /// # Panics
    /// Panics if the folder cannot be written.
    pub fn spoil(&self, address: &str, file: &str, text: &str) {
        fs::write(self.root.join("bus/pci/devices").join(address).join(file), text).expect("a file");
    }
}

impl Attributes for Fake {
    /// Emulates the kernel for the files that binding writes. Writes to other files fail.
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let error = |errno| Err(io::Error::from_raw_os_error(errno));
        if !path.exists() {
            return error(2);
        }
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name == "driver_override" {
            return fs::write(path, text);
        }
        // Accept only the bare address, as binding writes it. The kernel also accepts a trailing newline.
        let Ok(address) = text.parse::<Address>() else { return error(22) };
        let folder = self.root.join("bus/pci/devices").join(address.to_string());
        let driver = folder.join("driver");
        let only = fs::read_to_string(folder.join("driver_override"))?.trim().to_owned();
        let only = if only == "(null)" { String::new() } else { only };
        match name {
            "unbind" if driver.exists() => fs::remove_file(driver),
            "bind" if !driver.exists() => {
                let target = path.parent().unwrap_or(path);
                let matches = only.is_empty() || target.file_name().and_then(|name| name.to_str()) == Some(&only);
                if matches { symlink(target, driver) } else { error(19) }
            }
            "drivers_probe" if driver.exists() => Ok(()),
            "drivers_probe" => {
                let wanted = if only.is_empty() { "nouveau" } else { &only };
                let target = self.driver_folder(wanted);
                // If no driver matches, the kernel reports no error.
                if target.exists() { symlink(target, driver) } else { Ok(()) }
            }
            _ => error(19),
        }
    }
}
