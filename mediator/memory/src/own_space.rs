//! The mediator's own GPU address space. It maps all card memory and the host memory for guest chunks.
//!
//! Only the mediator's own channels use it. It consists of large pages, except for the channels' work areas.

use super::vram::CardVram;
use crate::ManagerError;
use nvspec::addr::{GpuVa, LARGE_PAGE, SMALL_PAGE, VramAddr};
use nvspec::mmu::{
    ENTRY_BYTES, HOST_VA_BASE, LPT_BYTES, PD_BYTES, PDE_SHIFT, PDE_SPAN, Pde, Pte, PteAperture, Rights, SPT_BYTES,
    TableTarget,
};
use std::collections::BTreeMap;
use vram::{HostAddr, PagePool, Place};

/// Virtual address at which card memory starts.
const VRAM_VA: GpuVa = GpuVa(1 << 36);
/// Virtual address at which the host slots start.
const SLOTS_VA: GpuVa = GpuVa(1 << 38);
/// Maximum total size of the slots in bytes.
pub(crate) const SLOTS_BYTES_MAX: u64 = HOST_VA_BASE.0 - SLOTS_VA.0;
/// Maximum size of card memory in bytes.
const VRAM_BYTES_MAX: u64 = SLOTS_VA.0 - VRAM_VA.0;
/// Size code of the work areas' page table: one eighth of the full size, as in all address spaces.
const WORK_SIZE_CODE: u8 = 3;

/// Returns the virtual address of a chunk.
#[must_use]
pub fn va(place: Place) -> GpuVa {
    match place {
        Place::Card(VramAddr(address)) => VRAM_VA.offset(address),
        Place::Host(HostAddr(address)) => SLOTS_VA.offset(address),
    }
}

/// The mediator's address space. Its page tables are in the mediator's chunks.
pub struct OwnSpace {
    directory: VramAddr,
    /// Large-page tables, by index of the directory entry.
    tables: BTreeMap<u64, VramAddr>,
    work: VramAddr,
    /// Set if entries were written since the last flush of the card's TLBs.
    stale: bool,
}

impl OwnSpace {
    /// Creates an address space that maps all card memory and the host slots.
    ///
    /// # Errors
    /// Returns an error if the card has no memory for the tables or if it does not respond.
    pub fn new(vram: &mut CardVram, pool: &mut PagePool) -> Result<Self, ManagerError> {
        let (bytes, slots) = (vram.memory.vram_bytes(), vram.pinned.range());
        for (what, bytes, most) in
            [("the card's memory", bytes, VRAM_BYTES_MAX), ("host memory for it", slots.1, SLOTS_BYTES_MAX)]
        {
            if bytes > most {
                return Err(ManagerError::Unmovable { what, bytes, most });
            }
        }
        let directory = vram.alloc(pool, PD_BYTES)?;
        let work = vram.alloc(pool, SPT_BYTES >> WORK_SIZE_CODE)?;
        let mut space = Self { directory, tables: BTreeMap::new(), work, stale: true };
        let pde = Pde::new().with_large_size(WORK_SIZE_CODE).with_small_target(TableTarget::Vram);
        space.link(vram, HOST_VA_BASE, pde.with_small_frame(frame(work.0)))?;
        space.map(vram, pool, VRAM_VA, PteAperture::Vram, 0, bytes)?;
        space.map(vram, pool, SLOTS_VA, PteAperture::SysCoherent, slots.0.0, slots.1)?;
        Ok(space)
    }

    /// Returns the VRAM address of the page directory.
    #[must_use]
    pub fn directory(&self) -> VramAddr {
        self.directory
    }

    /// Maps `page`, which belongs to a channel's work area or images, at the virtual page `index` pages after
    /// [`HOST_VA_BASE`].
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub(crate) fn map_work(
        &mut self,
        vram: &mut CardVram,
        index: u32,
        page: VramAddr,
        rights: Rights,
    ) -> Result<(), ManagerError> {
        let pte = Pte::granting(rights).with_frame(frame(page.0));
        self.stale = true;
        Ok(vram.memory.write(self.work.offset(u64::from(index) * ENTRY_BYTES), &u64::from(pte).to_le_bytes())?)
    }

    /// Unmaps a page of a channel's work area or images.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn unmap_work(&mut self, vram: &mut CardVram, index: u32) -> Result<(), ManagerError> {
        self.stale = true;
        Ok(vram.memory.write(self.work.offset(u64::from(index) * ENTRY_BYTES), &[0; ENTRY_BYTES as usize])?)
    }

    /// Flushes the card's TLBs if any entry has changed.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn flush(&mut self, vram: &mut CardVram) -> Result<(), ManagerError> {
        if std::mem::take(&mut self.stale) {
            vram.memory.invalidate(self.directory, false)?;
        }
        Ok(())
    }

    /// Maps whole large pages. The last one may extend beyond `bytes`. The card has no memory there, and no copy
    /// accesses it.
    fn map(
        &mut self,
        vram: &mut CardVram,
        pool: &mut PagePool,
        va: GpuVa,
        aperture: PteAperture,
        address: u64,
        bytes: u64,
    ) -> Result<(), ManagerError> {
        self.stale = true;
        let mut done = 0;
        while done < bytes {
            let at = va.offset(done);
            let within = at.0 % PDE_SPAN;
            let run = (PDE_SPAN - within).min(bytes - done);
            let table = self.table(vram, pool, at)?;
            let entries: Vec<u8> = (0..run.div_ceil(LARGE_PAGE))
                .map(|page| frame(address + done + page * LARGE_PAGE))
                .map(|frame| Pte::new().with_valid(true).with_aperture(aperture).with_frame(frame))
                .flat_map(|pte| u64::from(pte).to_le_bytes())
                .collect();
            vram.memory.write(table.offset(within / LARGE_PAGE * ENTRY_BYTES), &entries)?;
            done += run;
        }
        Ok(())
    }

    fn table(&mut self, vram: &mut CardVram, pool: &mut PagePool, va: GpuVa) -> Result<VramAddr, ManagerError> {
        let index = va.0 >> PDE_SHIFT;
        if let Some(table) = self.tables.get(&index) {
            return Ok(*table);
        }
        let table = vram.alloc(pool, LPT_BYTES)?;
        self.tables.insert(index, table);
        self.link(vram, va, Pde::new().with_large_target(TableTarget::Vram).with_large_frame(frame(table.0)))?;
        Ok(table)
    }

    fn link(&self, vram: &mut CardVram, va: GpuVa, pde: Pde) -> Result<(), ManagerError> {
        let at = self.directory.offset((va.0 >> PDE_SHIFT) * ENTRY_BYTES);
        Ok(vram.memory.write(at, &u64::from(pde).to_le_bytes())?)
    }
}

/// Converts an address to its form in an entry: the 28-bit number of a 4 KiB page, which covers the card's 40-bit
/// addresses.
fn frame(address: u64) -> u32 {
    (address / SMALL_PAGE) as u32
}
