//! Starts a kernel that the device model has loaded into a domain's memory.
//!
//! The firmware of an HVM domain reads the kernel and its initial RAM disk from the device model byte by byte. Each
//! byte costs two exits and an emulated instruction, which adds up to minutes on an emulated CPU. The device model
//! itself therefore loads both into memory, and the firmware loads only a 1 KiB program that starts the kernel
//! (`boot.s`).

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::wait::Scratch;

/// Source of the program that starts the kernel.
const SOURCE: &str = include_str!("boot.s");
/// Guest-physical address of the kernel file. The program is assembled for this address.
pub const KERNEL: u32 = 0x800_0000;
/// Guest-physical address of the RAM disk.
pub const RAMDISK: u32 = 0xa00_0000;
/// Offset of the RAM disk's size in the program.
const RAM_DISK_SIZE_AT: usize = 0x260;

/// Creates the program for a RAM disk of `ramdisk_bytes` bytes.
pub fn program(ramdisk_bytes: usize) -> Result<Vec<u8>> {
    let scratch = Scratch::new("boot")?;
    let at = |file: &str| scratch.path().join(file);
    std::fs::write(at("boot.s"), SOURCE)?;
    let places = [("KERNEL", KERNEL), ("RAMDISK", RAMDISK)].map(|(name, place)| format!("--defsym={name}={place}"));
    run(Command::new("as").arg("--32").args(places).arg("-o").arg(at("boot.o")).arg(at("boot.s")))?;
    run(Command::new("objcopy").args(["-O", "binary"]).arg(at("boot.o")).arg(at("boot")))?;
    let mut program = std::fs::read(at("boot"))?;
    let size =
        program.get_mut(RAM_DISK_SIZE_AT..RAM_DISK_SIZE_AT + 4).context("the program has no field for the size")?;
    size.copy_from_slice(&u32::try_from(ramdisk_bytes)?.to_le_bytes());
    Ok(program)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {command:?}; install the package binutils"))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
