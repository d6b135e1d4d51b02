//! Folder of VFIO's device files, and the interface for opening a function.

use std::path::PathBuf;

use crate::kernel::{FileOpenError, Kernel, OpenKernel};
use crate::node::NodeFiles;
use crate::real::{Files, open};

/// VFIO's device files in a folder.
#[derive(Clone, Debug)]
pub struct DeviceFiles(pub PathBuf);

impl Default for DeviceFiles {
    fn default() -> Self {
        Self("/dev/vfio".into())
    }
}

impl OpenKernel for DeviceFiles {
    fn open(&self, group: u32, node: Option<&str>) -> Result<Box<dyn Kernel>, FileOpenError> {
        // If the kernel has both interfaces, either works. Some users are permitted to open only the group.
        if let Some(files) = node.and_then(|node| NodeFiles::open(&self.0, node, group)) {
            return Ok(Box::new(files));
        }
        let container = open(&self.0.join("vfio"))?;
        let group = open(&self.0.join(group.to_string()))?;
        Ok(Box::new(Files::new(container, group)))
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn missing_files_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let error = DeviceFiles(folder.path().to_owned()).open(7, Some("vfio0")).err().unwrap();
        assert_eq!((error.path, error.source.kind()), (folder.path().join("vfio"), io::ErrorKind::NotFound));
        std::fs::write(folder.path().join("vfio"), "").unwrap();
        let error = DeviceFiles(folder.path().to_owned()).open(7, Some("vfio0")).err().unwrap();
        assert_eq!(error.path, folder.path().join("7"));
        // A plain file does not support the container calls.
        std::fs::write(folder.path().join("7"), "").unwrap();
        let files = DeviceFiles(folder.path().to_owned()).open(7, Some("vfio0")).ok().unwrap();
        assert!(files.api_version().is_err() && files.group_flags().is_err() && files.iommu_info().is_err());
        assert!(files.device_info().is_err() && files.reset().is_err() && files.read(0, &mut [0]).is_err());
    }
}
