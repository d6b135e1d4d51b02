//! A machine that has a card behind an IOMMU and runs its own VMs. It boots a kernel with VFIO and KVM. Its initramfs
//! contains our init, and QEMU with all files that QEMU reads.
//!
//! The machine contains the same QEMU as the host, so that both support the same devices. QEMU has its own folder for
//! its dynamic loader and libraries, because they may come from a different system than the host's programs.
//!
//! The machine does not contain a shell, test programs, or images of its VMs. Tests add these.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::Kernel;
use crate::cpio::Archive;
use crate::exec;
use crate::initramfs::{self, Program};
use crate::kernel::Unpacked;
use crate::libraries;
use crate::qemu::{self, Qemu};
use crate::recipe::NestRecipe;

/// Name of the kernel with VFIO and KVM, in the record of created items.
pub const ENTRY: &str = "nest";
/// QEMU's folder in the machine, without a leading slash.
const FOLDER: &str = "qemu";

/// The machine's kernel, its programs, and its QEMU.
#[derive(Clone, Debug)]
pub struct Nest {
    kernel: Unpacked,
    programs: Vec<Program>,
    /// QEMU's files, by their paths in the machine.
    files: Vec<(String, PathBuf)>,
    qemu: Qemu,
}

impl Nest {
    /// Collects the parts of the machine. `qemu` is the host's QEMU.
    pub(crate) fn new(recipe: &NestRecipe, kernel: Unpacked, programs: Vec<Program>, qemu: &Qemu) -> Result<Self> {
        let (files, qemu) = portable(recipe, qemu).context("QEMU for the VMs of a machine")?;
        Ok(Self { kernel, programs, files, qemu })
    }

    /// Returns the command that starts QEMU in the machine.
    pub fn qemu(&self) -> &Qemu {
        &self.qemu
    }

    /// Writes the machine's initramfs, extended by `more`, to the file `initrd`. Includes QEMU if `with_qemu` is true.
    pub fn bootable(&self, more: Archive, with_qemu: bool, initrd: &Path) -> Result<Kernel> {
        // The kernel accepts concatenated archives.
        let mut all = initramfs::pack(&self.kernel, &self.programs)?;
        if with_qemu {
            all.extend(self.qemu_files()?.finish());
        }
        all.extend(more.finish());
        fs::write(initrd, all).with_context(|| format!("cannot write {}", initrd.display()))?;
        let Unpacked { name, release, vmlinuz, .. } = self.kernel.clone();
        Ok(Kernel { name, release, vmlinuz, initrd: initrd.to_owned() })
    }

    fn qemu_files(&self) -> Result<Archive> {
        let mut archive = Archive::default();
        for folder in ["", "/lib", "/share"] {
            archive.folder(&format!("{FOLDER}{folder}"));
        }
        for (name, path) in &self.files {
            archive.file(name, 0o755, &fs::read(path).with_context(|| format!("cannot read {}", path.display()))?);
        }
        Ok(archive)
    }
}

/// Lists the files that QEMU needs to run in [`FOLDER`] of another machine. Also returns the QEMU command for that
/// machine.
fn portable(recipe: &NestRecipe, qemu: &Qemu) -> Result<(Vec<(String, PathBuf)>, Qemu)> {
    let program = format!("{FOLDER}/{}", qemu::PROGRAM);
    let mut files = vec![(program.clone(), qemu::binary(qemu)?)];
    let mut loader = None;
    for library in libraries::list(&mut qemu.command())? {
        let name = format!("{FOLDER}/lib/{}", library.file_name());
        if library.is_loader {
            loader = Some(name.clone());
        }
        files.push((name, library.path));
    }
    let loader = loader.context("it has no dynamic loader")?;
    let help = exec::probe(qemu.command().args(["-L", "help"])).context("`-L help` prints nothing")?;
    for name in &recipe.firmware {
        let path = help.lines().map(|folder| Path::new(folder).join(name)).find(|path| path.is_file());
        let path = path.with_context(|| format!("{name} is in none of its folders:\n{help}"))?;
        files.push((format!("{FOLDER}/share/{name}"), path));
    }
    let args = ["--library-path".to_owned(), format!("/{FOLDER}/lib"), format!("/{program}"), "-L".to_owned()];
    let args = args.into_iter().chain([format!("/{FOLDER}/share")]).collect();
    Ok((files, Qemu { program: format!("/{loader}").into(), args, env: Vec::new(), version: qemu.version.clone() }))
}
