//! Page tables of an address space.

use std::collections::HashMap;

use super::device::State;
use super::ranges::{PAGE_BYTES, Ranges};
use crate::{Error, Place, Result};

/// First usable virtual address. Generic addresses below 4 GiB may refer to local or shared memory.
const FIRST_ADDRESS: u64 = 1 << 32;
/// End of the 40-bit virtual address space.
const END_ADDRESS: u64 = 1 << 40;
/// End of the virtual addresses that this driver maps. The last two directory entries are reserved for the mediator,
/// which maps segments through one of them.
const END_MAPPED_ADDRESS: u64 = END_ADDRESS - 2 * TABLE_SPAN_BYTES;
/// Size of a page directory in bytes: 8 bytes per 128 MiB of the 40-bit address space.
const DIRECTORY_BYTES: u64 = 0x1_0000;
/// Size of the virtual address range that a page table maps, in bytes.
const TABLE_SPAN_BYTES: u64 = 128 << 20;
/// Size of a page table for small pages, in bytes.
const TABLE_BYTES: u64 = TABLE_SPAN_BYTES / PAGE_BYTES * ENTRY_BYTES;
/// Size of a directory or table entry, in bytes.
const ENTRY_BYTES: u64 = 8;
/// Low word of a page table entry: the page is valid.
const VALID: u32 = 1;
/// High word of a page table entry: volatile, coherent system memory.
const SYSTEM_MEMORY: u32 = 2 << 1 | 1;
/// Maximum number of page table entries per write.
const ENTRIES_AT_ONCE: u64 = 512;

/// Target of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Physical {
    /// A guest VRAM address.
    Vram(u64),
    /// The guest-physical address of RAM.
    Ram(u64),
}

/// An address space: its page directory and page tables. [`Self::destroy`] frees their memory.
#[derive(Debug)]
pub(super) struct Space {
    directory: u64,
    /// VRAM addresses of the page tables, by directory index.
    tables: HashMap<u64, u64>,
    addresses: Ranges,
}

impl Space {
    /// Creates an empty address space for channels.
    pub(super) fn new(device: &mut State) -> Result<Self> {
        Self::new_at(device, FIRST_ADDRESS)
    }

    /// Creates an empty address space that starts at `start`.
    pub(super) fn new_at(device: &mut State, start: u64) -> Result<Self> {
        let directory = device.take_vram(DIRECTORY_BYTES)?;
        device.bus.zero_vram(directory, DIRECTORY_BYTES)?;
        Ok(Self { directory, tables: HashMap::new(), addresses: Ranges::new(start, END_MAPPED_ADDRESS) })
    }

    /// Writes the page directory's address and the highest virtual address into an instance block.
    pub(super) fn assign(&self, device: &mut State, instance: u64) -> Result<()> {
        let directory = self.directory.to_le_bytes();
        // Write the page directory address and the highest virtual address.
        let limit = (END_ADDRESS - 1).to_le_bytes();
        device.bus.write_vram(instance + 0x200, &[directory, limit].concat())
    }

    /// Maps whole pages. Returns their virtual address.
    pub(super) fn map(&mut self, device: &mut State, physical: Physical, bytes: u64) -> Result<u64> {
        let pages = bytes.div_ceil(PAGE_BYTES);
        let why = "the address space is full";
        let full = || Error::Allocation { place: Place::Vram, bytes, why: why.to_owned() };
        let address = self.addresses.take(bytes).ok_or_else(full)?;
        let mapped = self.write_entries(device, address, pages, |page| match physical {
            Physical::Vram(at) => u64::from(((at + page * PAGE_BYTES) >> 8) as u32 | VALID),
            Physical::Ram(at) => {
                u64::from(((at + page * PAGE_BYTES) >> 8) as u32 | VALID) | u64::from(SYSTEM_MEMORY) << 32
            }
        });
        match mapped.and_then(|()| device.flush_translations()) {
            Ok(()) => Ok(address),
            Err(error) => {
                self.addresses.give(address, bytes);
                Err(error)
            }
        }
    }

    /// Unmaps pages. Later accesses to these pages fault.
    pub(super) fn unmap(&mut self, device: &mut State, address: u64, bytes: u64) -> Result<()> {
        self.write_entries(device, address, bytes.div_ceil(PAGE_BYTES), |_| 0)?;
        device.flush_translations()?;
        self.addresses.give(address, bytes);
        Ok(())
    }

    /// Frees the page directory and the page tables. No channel may still use the address space.
    pub(super) fn destroy(&mut self, device: &mut State) {
        for (_, table) in self.tables.drain() {
            device.vram.give(table, TABLE_BYTES);
        }
        device.vram.give(self.directory, DIRECTORY_BYTES);
    }

    fn write_entries(
        &mut self,
        device: &mut State,
        address: u64,
        pages: u64,
        entry: impl Fn(u64) -> u64,
    ) -> Result<()> {
        let mut page = 0;
        while page < pages {
            let at = address + page * PAGE_BYTES;
            let (table, slot) = (self.table(device, at / TABLE_SPAN_BYTES)?, at % TABLE_SPAN_BYTES / PAGE_BYTES);
            let count = (pages - page).min(TABLE_SPAN_BYTES / PAGE_BYTES - slot).min(ENTRIES_AT_ONCE);
            let entries: Vec<u8> = (page..page + count).flat_map(|page| entry(page).to_le_bytes()).collect();
            device.bus.write_vram(table + slot * ENTRY_BYTES, &entries)?;
            page += count;
        }
        Ok(())
    }

    /// Returns the VRAM address of a page table. Creates the table on first use.
    fn table(&mut self, device: &mut State, index: u64) -> Result<u64> {
        if let Some(table) = self.tables.get(&index) {
            return Ok(*table);
        }
        let table = device.take_vram(TABLE_BYTES)?;
        self.tables.insert(index, table);
        device.bus.zero_vram(table, TABLE_BYTES)?;
        // The second word of a directory entry contains the address of the small-page table.
        device.bus.write_vram32(self.directory + index * ENTRY_BYTES + 4, ((table >> 12) << 4) as u32 | VALID)?;
        Ok(table)
    }
}
