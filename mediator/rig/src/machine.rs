//! The machine in which a driver runs, independent of the transport to the vGPU.

use super::Guest;
use nvspec::regs::{pbus, windows::pramin};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::io;
use vmm_glue::RegionIndex;
use vmm_glue::client::memory_file;

/// CPU and RAM of a guest, limited to a driver's needs. As on hardware, accesses do not fail: denied reads return
/// all ones, and so do all reads once the device is gone.
pub trait Machine {
    /// Reads a region.
    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]);

    /// Writes a region.
    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]);

    /// Returns the size of the guest's VRAM in bytes.
    fn vram_bytes(&self) -> u64;

    /// Reads guest VRAM.
    fn vram_read(&self, at: u64, data: &mut [u8]);

    /// Writes guest VRAM as the guest's CPU would.
    fn vram_write(&self, at: u64, data: &[u8]);

    /// Reads guest RAM.
    fn ram_read(&self, gpa: u64, data: &mut [u8]);

    /// Writes guest RAM.
    fn ram_write(&self, gpa: u64, data: &[u8]);

    /// Waits for an MSI message. Returns false if the device has disappeared, so that no interrupt will arrive.
    fn wait_msi(&self) -> bool;

    /// Reads a register.
    fn rd(&mut self, offset: u32) -> u32 {
        let mut word = [0; 4];
        self.read(RegionIndex::Bar0, offset.into(), &mut word);
        u32::from_le_bytes(word)
    }

    /// Writes a register.
    fn wr(&mut self, offset: u32, value: u32) {
        self.write(RegionIndex::Bar0, offset.into(), &value.to_le_bytes());
    }

    /// Writes guest VRAM through PRAMIN.
    fn poke(&mut self, at: u64, value: u32) {
        self.wr(pbus::PRAMIN_WINDOW::OFFSET, (at >> 16) as u32);
        self.wr(pramin::BASE + (at & 0xffff) as u32, value);
    }

    /// Reads guest VRAM through PRAMIN.
    fn peek(&mut self, at: u64) -> u32 {
        self.wr(pbus::PRAMIN_WINDOW::OFFSET, (at >> 16) as u32);
        self.rd(pramin::BASE + (at & 0xffff) as u32)
    }
}

impl Machine for Guest {
    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        Self::read(self, region, offset, data);
    }

    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        Self::write(self, region, offset, data);
    }

    fn vram_bytes(&self) -> u64 {
        self.vram_bytes
    }

    fn vram_read(&self, at: u64, data: &mut [u8]) {
        Self::vram_read(self, at, data);
    }

    fn vram_write(&self, at: u64, data: &[u8]) {
        Self::vram_write(self, at, data);
    }

    fn ram_read(&self, gpa: u64, data: &mut [u8]) {
        Self::ram_read(self, gpa, data);
    }

    fn ram_write(&self, gpa: u64, data: &[u8]) {
        Self::ram_write(self, gpa, data);
    }

    fn wait_msi(&self) -> bool {
        Self::wait_msi(self);
        true
    }
}

/// RAM region backed by a memory file, as in a VMM.
struct Region {
    size: u64,
    file: OwnedFd,
}

/// RAM regions of a guest, by guest-physical address.
#[derive(Default)]
pub(super) struct Ram(BTreeMap<u64, Region>);

impl Ram {
    /// Creates a file of `size` bytes, with a second descriptor for lending.
    pub(super) fn file(size: u64) -> io::Result<(OwnedFd, OwnedFd)> {
        let file = memory_file(size, true)?;
        let lent = file.try_clone()?;
        Ok((file, lent))
    }

    pub(super) fn insert(&mut self, gpa: u64, size: u64, file: OwnedFd) {
        self.0.insert(gpa, Region { size, file });
    }

    /// Removes the region that starts at `gpa`. Returns its size and file.
    pub(super) fn remove(&mut self, gpa: u64) -> Option<(u64, OwnedFd)> {
        self.0.remove(&gpa).map(|Region { size, file }| (size, file))
    }

    /// Returns the start of the first region.
    pub(super) fn first(&self) -> Option<u64> {
        self.0.first_key_value().map(|(&gpa, _)| gpa)
    }

    /// Returns the start, size and file of all regions.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, u64, &OwnedFd)> {
        self.0.iter().map(|(&gpa, Region { size, file })| (gpa, *size, file))
    }

    /// Returns the start and size of the region that contains `gpa`.
    pub(super) fn at(&self, gpa: u64) -> Option<(u64, u64)> {
        let (&start, region) = self.0.range(..=gpa).next_back()?;
        (gpa - start < region.size).then_some((start, region.size))
    }

    pub(super) fn read(&self, gpa: u64, data: &mut [u8]) {
        let (file, at) = self.place(gpa);
        read_file(file, at, data);
    }

    pub(super) fn write(&self, gpa: u64, data: &[u8]) {
        let (file, at) = self.place(gpa);
        assert_eq!(rustix::io::pwrite(file, data, at), Ok(data.len()));
    }

    /// Returns the file of the region that contains `gpa`, for accesses that bypass the guest.
    pub(super) fn file_of(&self, gpa: u64) -> OwnedFd {
        self.place(gpa).0.try_clone().expect("another descriptor")
    }

    fn place(&self, gpa: u64) -> (&OwnedFd, u64) {
        let (&start, region) = self.0.range(..=gpa).next_back().expect("the address is in guest RAM");
        (&region.file, gpa - start)
    }
}

/// Reads a memory file.
pub fn read_file(file: &OwnedFd, at: u64, data: &mut [u8]) {
    assert_eq!(rustix::io::pread(file, &mut *data, at), Ok(data.len()));
}
