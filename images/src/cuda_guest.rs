//! A guest with the stock virtio-gpu driver. Its initramfs contains our init and programs that use CUDA in a VM.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::Kernel;
use crate::cpio::Archive;
use crate::initramfs::{self, Program};
use crate::kernel::Unpacked;

/// Kernel, modules and programs of a guest.
#[derive(Clone, Debug)]
pub struct CudaGuest {
    kernel: Unpacked,
    programs: Vec<Program>,
}

impl CudaGuest {
    pub(crate) fn new(kernel: Unpacked, programs: Vec<Program>) -> Self {
        Self { kernel, programs }
    }

    /// Writes the guest's initramfs, extended by `more`, to the file `initrd`.
    ///
    /// # Errors
    /// Returns an error if an input cannot be read or the file cannot be written.
    pub fn bootable(&self, more: Archive, initrd: &Path) -> Result<Kernel> {
        // The kernel accepts concatenated archives.
        let mut all = initramfs::pack(&self.kernel, &self.programs)?;
        all.extend(more.finish());
        fs::write(initrd, all).with_context(|| format!("cannot write {}", initrd.display()))?;
        let Unpacked { name, release, vmlinuz, .. } = self.kernel.clone();
        Ok(Kernel { name, release, vmlinuz, initrd: initrd.to_owned() })
    }
}

/// Returns the name under which the record lists `kernel` with the virtio-gpu modules.
pub(crate) fn entry(kernel: &str) -> String {
    format!("cuda-{kernel}")
}
