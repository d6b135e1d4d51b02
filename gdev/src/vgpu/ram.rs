//! Pinned memory: RAM of this process that the device can access.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use vmm_glue::client::memory_file;

use super::device::State;
use super::ranges::PAGE_BYTES;
use super::space::Physical;
use crate::mapping::{Mapping, Width};
use crate::{Error, Place, Result};

/// Memory with a guest-physical address. [`Self::release`] unmaps it from the device.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    mapping: Mapping,
    gpa: u64,
    bytes: u64,
}

impl PinnedMemory {
    /// Allocates whole pages of zeroed memory.
    ///
    /// # Errors
    /// Returns an error if no memory is available, or if the daemon rejects it.
    pub(super) fn new(device: &mut State, bytes: u64) -> Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let failed = |why: String| Error::Allocation { place: Place::Ram, bytes, why };
        let file: OwnedFd = memory_file(bytes, true).map_err(|error| failed(error.to_string()))?;
        let file = File::from(file);
        let length = usize::try_from(bytes).map_err(|_| failed("it is larger than the address space".into()))?;
        let mapping = Mapping::new(&file, 0, length).map_err(|error| failed(error.to_string()))?;
        let gpa = device.ram.take(bytes).ok_or_else(|| failed("no guest-physical address is free".into()))?;
        if let Err(error) = device.bus.map_ram(gpa, bytes, &file.into()) {
            device.ram.give(gpa, bytes);
            return Err(error);
        }
        Ok(Self { mapping, gpa, bytes })
    }

    /// Returns the address for page table entries.
    pub(super) fn physical(&self) -> Physical {
        Physical::Ram(self.gpa)
    }

    /// Returns the guest-physical address.
    pub(super) fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Returns a pointer to the first byte.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    /// Writes `bytes` at an offset.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) {
        self.mapping.write(offset as usize, bytes);
    }

    /// Fills `bytes` from an offset in the memory.
    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.mapping.read(offset as usize, bytes);
    }

    /// Reads a 32-bit word in a single access.
    pub(super) fn load32(&self, offset: u64) -> u32 {
        self.mapping.load(offset as usize, Width::Dword) as u32
    }

    /// Unmaps the memory from the device, which must no longer use it.
    pub(super) fn release(&self, device: &mut State) {
        // If the daemon is lost, the device cannot access the memory either.
        if device.bus.unmap_ram(self.gpa, self.bytes).is_ok() {
            device.ram.give(self.gpa, self.bytes);
        }
    }
}
