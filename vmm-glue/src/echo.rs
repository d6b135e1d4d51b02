//! A device that consists of plain memory, without policy or side effects.
//!
//! It serves as the baseline of transport benchmarks, and as a device for server tests.

use crate::device::{AccessError, Ack, Device, MapError, NUM_REGIONS, RegionIndex, RegionInfo};
use vmm_memory::memory::DmaRegion;

/// Size of configuration space in bytes.
pub const CONFIG_SIZE: usize = 4096;

/// The device, whose BAR0 and configuration space are plain memory.
#[derive(Debug)]
pub struct EchoDevice {
    bar0: Vec<u8>,
    config: Vec<u8>,
}

impl EchoDevice {
    /// Creates a device. BAR0 has `bar0_size` bytes, a power of two of at least 4 KiB. The configuration space contains
    /// `vendor`, `device` and a class code.
    pub fn new(bar0_size: usize, vendor: u16, device: u16) -> Self {
        let mut config = vec![0; CONFIG_SIZE];
        // Write the vendor and device IDs, and then class 0xff0000 (unassigned) to the upper three bytes of the dword
        // at 8.
        for (place, value) in [(0, vendor), (2, device), (10, 0xff00)] {
            for (field, byte) in config.iter_mut().skip(place).zip(value.to_le_bytes()) {
                *field = byte;
            }
        }
        Self { bar0: vec![0; bar0_size], config }
    }

    fn place(&mut self, region: RegionIndex, offset: u64, len: usize) -> Option<&mut [u8]> {
        let memory = match region {
            RegionIndex::Bar0 => &mut self.bar0,
            RegionIndex::Config => &mut self.config,
            _ => return None,
        };
        let start = usize::try_from(offset).ok()?;
        memory.get_mut(start..start.checked_add(len)?)
    }
}

impl Device for EchoDevice {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        let size = |memory: &[u8]| u64::try_from(memory.len()).unwrap_or(0);
        RegionIndex::ALL.map(|region| match region {
            RegionIndex::Bar0 => RegionInfo::read_write(size(&self.bar0)),
            RegionIndex::Config => RegionInfo::read_write(size(&self.config)),
            _ => RegionInfo::default(),
        })
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let place = self.place(region, offset, data.len()).ok_or(AccessError::Invalid)?;
        data.copy_from_slice(place);
        Ok(())
    }

    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        self.place(region, offset, data.len()).ok_or(AccessError::Invalid)?.copy_from_slice(data);
        Ok(Ack::Done)
    }

    fn dma_map(&mut self, _region: &DmaRegion) -> Result<(), MapError> {
        Ok(())
    }

    fn dma_unmap(&mut self, _gpa: u64, _size: u64) {}

    fn reset(&mut self) {
        self.bar0.fill(0);
    }

    fn disconnected(&mut self) {
        self.bar0.fill(0);
    }
}
