//! The initramfs, which contains our init as `/init`, our test programs in `/bin`, and the kernel's modules.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result};

use crate::cache::{Cache, hash_file, key, workspace};
use crate::cpio::Archive;
use crate::exec;
use crate::kernel::Unpacked;
use crate::progress::Progress;
use crate::recipe::RECIPE_VERSION;

/// Compilation target of the guest programs, which are statically linked so that the initramfs needs no libraries.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const RUSTFLAGS: &str = "-C target-feature=+crt-static -C strip=symbols";

/// Path of our init in the initramfs, without a leading slash.
pub const INIT: &str = "init";

/// A program for the guests.
#[derive(Clone, Debug)]
pub struct Program {
    /// Path of the program in the guest, without a leading slash.
    pub guest_path: String,
    /// Path of the static binary on the host.
    pub path: PathBuf,
}

/// Builds guest programs from packages of this workspace: `init` contains the init, and `others` the other programs.
pub fn build_programs(init: &str, others: &[String], progress: &Progress) -> Result<Vec<Program>> {
    let root = workspace();
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from).join("guest");
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(&root).args(["build", "--release", "--target", TARGET]).arg("--target-dir").arg(&target);
    command.env("RUSTFLAGS", RUSTFLAGS).env_remove("CARGO_ENCODED_RUSTFLAGS").env_remove("CARGO_BUILD_TARGET");
    for package in others.iter().map(String::as_str).chain([init]) {
        command.args(["--package", package]);
    }
    let mut step = progress.step("building the guests' programs");
    exec::run(&mut command, "cargo", &mut step, String::new)?;
    let built = target.join(TARGET).join("release");
    let mut programs = vec![Program { guest_path: INIT.into(), path: built.join(init) }];
    for name in others {
        programs.push(Program { guest_path: format!("bin/{name}"), path: built.join(name) });
    }
    Ok(programs)
}

/// Returns the cache key of `kernel`'s initramfs, which is derived from the contents.
pub fn key_of(kernel: &Unpacked, programs: &[Program]) -> Result<String> {
    let hashes = programs.iter().map(|p| hash_file(&p.path)).collect::<Result<Vec<_>>>()?;
    let mut inputs = vec![RECIPE_VERSION, &kernel.key];
    for (program, hash) in programs.iter().zip(&hashes) {
        inputs.extend([program.guest_path.as_str(), hash.as_str()]);
    }
    Ok(key(&inputs))
}

/// Finds or creates the initramfs of `kernel`.
pub fn ensure(kernel: &Unpacked, programs: &[Program], cache: &Cache, progress: &Progress) -> Result<PathBuf> {
    let key = key_of(kernel, programs)?;
    let folder = match cache.find("initramfs", &key) {
        Some(folder) => folder,
        None => cache.make("initramfs", &key, |folder| {
            progress.line(&format!("images: packing the initramfs for {}", kernel.release));
            let path = folder.join("initrd");
            fs::write(&path, pack(kernel, programs)?).with_context(|| format!("cannot write {}", path.display()))
        })?,
    };
    Ok(folder.join("initrd"))
}

/// Packs the initramfs of `kernel`.
pub fn pack(kernel: &Unpacked, programs: &[Program]) -> Result<Vec<u8>> {
    let read = |path: &PathBuf| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut archive = Archive::default();
    for name in ["bin", "dev", "etc", "proc", "run", "sys", "tmp"] {
        archive.folder(name);
    }
    // The kernel opens the console for init before init can mount anything.
    archive.device("dev/console", 0o600, 5, 1);
    for program in programs {
        archive.file(&program.guest_path, 0o755, &read(&program.path)?);
    }
    add_modules(&mut archive, kernel)?;
    Ok(archive.finish())
}

/// Adds a kernel's modules and the list that our init and the agent use to load them. The folder `etc` must exist.
pub(crate) fn add_modules(archive: &mut Archive, kernel: &Unpacked) -> Result<()> {
    archive.folder("modules");
    let mut list = String::new();
    for module in &kernel.modules {
        let name = format!("modules/{}", module.file_name().unwrap_or_default().to_string_lossy());
        let bytes = fs::read(module).with_context(|| format!("cannot read {}", module.display()))?;
        archive.file(&name, 0o644, &bytes);
        list.push_str(&format!("/{name}\n"));
    }
    archive.file("etc/modules.list", 0o644, list.as_bytes());
    Ok(())
}
