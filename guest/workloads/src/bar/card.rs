//! The PCI function and its mapped regions.

use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::layout::reg;
use gdev::mapping::{Mapping, Width};

const DEVICES: &str = "/sys/bus/pci/devices";
const VENDOR_NVIDIA: &str = "0x10de";

/// Offset of the 16-bit command register in configuration space.
const COMMAND: u64 = 4;
/// Command register bits for memory decoding and bus mastering.
const COMMAND_WANTED: u16 = 0x6;

/// A card and its three BARs: BAR0 contains the registers, BAR1 is the VRAM aperture, and BAR3 is the instance
/// aperture.
pub struct Card {
    registers: Mapping,
    /// The apertures. Devices other than cards, such as those in transport benchmarks, may lack them.
    apertures: [Result<Mapping>; 2],
    directory: PathBuf,
}

impl Card {
    /// Opens the function at `address`, or the first NVIDIA function. If no driver is bound, also enables the
    /// function's memory decoding and bus mastering.
    pub fn open(address: Option<&str>) -> Result<Self> {
        let directory = match address {
            Some(address) => Path::new(DEVICES).join(address),
            None => first_card()?,
        };
        if !directory.join("driver").exists() {
            enable(&directory)?;
        }
        let region = |number| map_region(&directory, number);
        Ok(Self { registers: region(0)?, apertures: [region(1), region(3)], directory })
    }

    /// Returns the path of the function's configuration space.
    pub fn config_path(&self) -> PathBuf {
        self.directory.join("config")
    }

    /// Returns the mapping of BAR `number`: 0, 1 or 3.
    pub fn region(&self, number: u64) -> Result<&Mapping> {
        let aperture = match number {
            0 => return Ok(&self.registers),
            1 => &self.apertures[0],
            3 => &self.apertures[1],
            _ => bail!("region {number}: one of 0, 1, 3"),
        };
        aperture.as_ref().map_err(|error| anyhow!("{error:#}"))
    }

    /// Reads the 32-bit register at BAR0 offset `register`.
    pub fn read(&self, register: u32) -> u32 {
        self.registers.load(register as usize, Width::Dword) as u32
    }

    /// Writes the 32-bit register at BAR0 offset `register`.
    pub fn write(&self, register: u32, value: u32) {
        self.registers.store(register as usize, Width::Dword, value.into());
    }

    /// Returns the size of VRAM in bytes according to the card's registers.
    pub fn vram(&self) -> Result<u64> {
        let (partitions, disabled) = (self.read(reg::FBP_COUNT), self.read(reg::FBP_DISABLED));
        ensure!((1..=32).contains(&partitions), "the card reports {partitions} memory partitions");
        let present = (0..partitions).filter(|partition| disabled >> partition & 1 == 0);
        let mib: u64 = present.map(|partition| u64::from(self.read(reg::FBP_MIB + partition * 0x1000))).sum();
        ensure!((1..=1 << 20).contains(&mib), "the card reports {mib} MiB of VRAM");
        Ok(mib << 20)
    }

    /// Reads a dword of VRAM through the PRAMIN window.
    pub fn vram_read(&self, address: u64) -> u32 {
        self.read(self.window(address))
    }

    /// Writes a dword of VRAM through the PRAMIN window.
    pub fn vram_write(&self, address: u64, value: u32) {
        self.write(self.window(address), value);
    }

    /// Zeroes a range of VRAM.
    pub fn vram_zero(&self, address: u64, bytes: u64) {
        for at in (address..address + bytes).step_by(4) {
            if at == address || at.is_multiple_of(1 << 16) {
                self.window(at);
            }
            self.write(reg::PRAMIN + (at & 0xffff) as u32, 0);
        }
    }

    /// Moves the window to an address, and returns the register offset of the dword at that address.
    fn window(&self, address: u64) -> u32 {
        self.write(reg::PRAMIN_WINDOW, (address >> 16) as u32);
        reg::PRAMIN + (address & 0xffff) as u32
    }
}

fn first_card() -> Result<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(DEVICES)
        .context(DEVICES)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| fs::read_to_string(path.join("vendor")).is_ok_and(|vendor| vendor.trim() == VENDOR_NVIDIA))
        .collect();
    found.sort();
    found.into_iter().next().context("no PCI function of vendor 10de")
}

/// Resumes the function, and enables its memory decoding and bus mastering. Without a driver, the function may be
/// runtime-suspended.
fn enable(directory: &Path) -> Result<()> {
    // Some kernels do not have this file.
    let _ = fs::write(directory.join("power/control"), "on");
    fs::write(directory.join("enable"), "1").with_context(|| format!("{}/enable", directory.display()))?;
    let path = directory.join("config");
    let mut config =
        OpenOptions::new().read(true).write(true).open(&path).with_context(|| path.display().to_string())?;
    let mut command = [0; 2];
    config.seek(SeekFrom::Start(COMMAND))?;
    config.read_exact(&mut command)?;
    let wanted = u16::from_le_bytes(command) | COMMAND_WANTED;
    config.seek(SeekFrom::Start(COMMAND))?;
    config.write_all(&wanted.to_le_bytes())?;
    Ok(())
}

fn map_region(directory: &Path, number: u32) -> Result<Mapping> {
    let path = directory.join(format!("resource{number}"));
    let name = || path.display().to_string();
    let file = OpenOptions::new().read(true).write(true).open(&path).with_context(name)?;
    let length = usize::try_from(file.metadata().with_context(name)?.len())?;
    ensure!(length > 0, "{} is empty", path.display());
    Mapping::new(&file, 0, length).with_context(name)
}
