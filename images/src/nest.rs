//! A machine that has a card behind an IOMMU: our init in an initramfs, on a kernel with VFIO.
//!
//! What it does not have: a shell, and the programs that run in it, which the tests put there.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::Kernel;
use crate::cpio::Archive;
use crate::initramfs::{self, Program};
use crate::kernel::Unpacked;

/// Name of the kernel with these modules in the record of what was made.
pub const ENTRY: &str = "nest";

/// The machine's kernel and its programs.
#[derive(Clone, Debug)]
pub struct Nest {
    pub(crate) kernel: Unpacked,
    pub(crate) programs: Vec<Program>,
}

impl Nest {
    /// Writes the machine's initramfs with `more` in it to `initrd`.
    pub fn bootable(&self, more: Archive, initrd: &Path) -> Result<Kernel> {
        // The kernel takes archives one behind the other.
        let all = [initramfs::pack(&self.kernel, &self.programs)?, more.finish()].concat();
        fs::write(initrd, all).with_context(|| format!("cannot write {}", initrd.display()))?;
        let Unpacked { name, release, vmlinuz, .. } = self.kernel.clone();
        Ok(Kernel { name, release, vmlinuz, initrd: initrd.to_owned() })
    }
}
