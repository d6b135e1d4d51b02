//! A VM's memory as seen by its guest, the card, and the page tables.
//!
//! Modules:
//! - `grants`: memory that page tables may map
//! - `view`: a VM's read access to its memory on the card
//! - `spaces`: shadow page tables
//! - `ram`: guest RAM at bus addresses
//! - `remap`: apertures that the VMM maps
//! - `operands`: memory to which submitted work refers
//! - `saved`: saved state

mod grants;
mod operands;
pub(crate) mod ram;
mod remap;
mod saved;
mod spaces;
mod view;

pub(crate) use grants::Grants;
pub(crate) use operands::Objects;
pub(crate) use remap::{MappedWindow, Moves, Overlay, PageTarget, Remap, SavedRemap, Slot, ranges};
pub(crate) use saved::{Restored, SavedMemory};
pub(crate) use view::View;

use card_manager::ManagedCard;
use card_state::SavedVm;
use devmodel::SavedVGpu;
use devmodel::backend::Aperture;
use nvspec::addr::{GuestVramAddr, Place, SMALL_PAGE, VramAddr};
use shadow_pt::{AddressSpaces, ApertureTlb, Limits, Mapping, Mode, SpaceId, SyncReport};
use std::sync::Arc;
use vmm_glue::Link;
use vram::{PagePool, TenantId};

/// Maximum card memory for a VM's shadow tables in bytes. A directory needs 64 KiB, and 128 MiB of addresses need 264
/// KiB.
pub(crate) const POOL_BYTES: u64 = 128 << 20;

/// The memory of a VM, and its address spaces.
pub(crate) struct Memory {
    host: Arc<ManagedCard>,
    vm: TenantId,
    grants: Grants,
    shadows: AddressSpaces,
    pool: PagePool,
    bar1: ApertureTlb,
    bar3: ApertureTlb,
    /// Guest VRAM address at which the PRAMIN window starts.
    pramin: Option<GuestVramAddr>,
    /// Accumulated report of all synchronizations since the VM was created.
    report: SyncReport,
    /// Number of synchronizations that have read tables since the VM was created.
    syncs: u64,
}

impl Memory {
    pub(crate) fn new(host: Arc<ManagedCard>, vm: TenantId, link: Link, mode: Mode, vram_bytes: u64) -> Self {
        Self {
            host,
            vm,
            grants: Grants::new(vm, link, vram_bytes),
            shadows: AddressSpaces::new(mode, Limits { table_bytes: POOL_BYTES }),
            pool: PagePool::new(POOL_BYTES),
            bar1: ApertureTlb::new(),
            bar3: ApertureTlb::new(),
            pramin: Some(GuestVramAddr(0)),
            report: SyncReport::default(),
            syncs: 0,
        }
    }

    /// Combines the saved vGPU with the saved form of the VM's address spaces, kept tables and page pool.
    pub(crate) fn save(&self, gpu: SavedVGpu) -> SavedVm {
        let tables = self.grants.tables().map(pv::Tables::save);
        SavedVm { vm: self.vm, gpu, spaces: self.shadows.save(), tables, pool: self.pool.save() }
    }

    /// Returns the address space whose shadow directory is at this VRAM address.
    pub(crate) fn space_of(&self, directory: VramAddr) -> Option<SpaceId> {
        self.shadows.ids().find(|space| self.shadows.directory(*space) == Some(directory))
    }

    /// Returns the memory to which the VM's page tables may refer.
    pub(crate) fn grants(&self) -> &Grants {
        &self.grants
    }

    /// Same as [`Self::grants`], but mutable. The caller must remove revoked memory from the address spaces.
    pub(crate) fn grants_mut(&mut self) -> &mut Grants {
        &mut self.grants
    }

    /// Returns the accumulated report of all synchronizations, and the number of those that read tables.
    pub(crate) fn report(&self) -> (&SyncReport, u64) {
        (&self.report, self.syncs)
    }

    /// Returns the instance block bound to an aperture.
    pub(crate) fn aperture_instance(&self, aperture: Aperture) -> Option<Place> {
        match aperture {
            Aperture::Bar1 => self.bar1.instance(),
            Aperture::Bar3 => self.bar3.instance(),
        }
    }

    /// Binds an instance block to an aperture. `directory` is the block's directory, if known.
    pub(crate) fn bind_aperture(&mut self, aperture: Aperture, instance: Option<Place>, directory: Option<Place>) {
        match aperture {
            Aperture::Bar1 => self.bar1.bind(instance, directory),
            Aperture::Bar3 => self.bar3.bind(instance, directory),
        }
    }

    /// Sets the guest's PRAMIN base.
    pub(crate) fn place_window(&mut self, base: Option<GuestVramAddr>) {
        self.pramin = base;
    }

    /// Handles a guest's flush of the apertures: clears their TLBs, and marks their page tables as possibly changed.
    pub(crate) fn flush_apertures(&mut self) {
        self.bar1.flush();
        self.bar3.flush();
        self.shadows.announced();
    }

    /// Translates an aperture offset through the guest's tables.
    pub(crate) fn translate(&mut self, aperture: Aperture, offset: u64, write: bool) -> Option<Place> {
        let tlb = match aperture {
            Aperture::Bar1 => &mut self.bar1,
            Aperture::Bar3 => &mut self.bar3,
        };
        // Reading the guest's tables requires the card's lock, so acquire it only on a TLB miss.
        let mapping: Mapping = match tlb.cached(offset) {
            Some(mapping) => mapping,
            None => self.with_aperture(aperture, |tlb, view| tlb.translate(offset, view).ok())?,
        };
        (mapping.writable || !write).then_some(mapping.place)
    }

    /// Returns the directory that an aperture uses.
    pub(crate) fn aperture_directory(&mut self, aperture: Aperture) -> Option<Place> {
        self.with_aperture(aperture, |tlb, view| tlb.directory(view))
    }

    /// Returns the pages of a window whose targets have changed in the guest's tables or with the PRAMIN base, with
    /// their new targets.
    pub(crate) fn changes(&mut self, showing: MappedWindow) -> Vec<(u32, PageTarget)> {
        let Some((start, pages)) = self.grants.remap().extent(showing) else { return Vec::new() };
        let vram_bytes = self.grants.vram_bytes();
        let mut changes = Vec::new();
        let aperture = match showing {
            MappedWindow::Bar1 => Aperture::Bar1,
            MappedWindow::Bar3 => Aperture::Bar3,
            MappedWindow::Pramin => {
                let remap = self.grants.remap();
                let place = |page: u64| Some(Place::Vram(self.pramin?.checked_add(page * SMALL_PAGE)?));
                let difference = |page| remap.difference(showing, start / SMALL_PAGE + page, place(page), vram_bytes);
                return (0..pages).filter_map(difference).collect();
            }
        };
        self.with_aperture(aperture, |tlb, view| {
            let remap = view.grants().remap();
            tlb.survey(start, pages, view, |page, place| {
                changes.extend(remap.difference(showing, page, place, vram_bytes));
            });
        });
        changes
    }

    /// Calls `each` with an aperture's TLB and the guest's memory.
    fn with_aperture<T>(&mut self, aperture: Aperture, each: impl FnOnce(&mut ApertureTlb, &mut View<'_>) -> T) -> T {
        let Self { host, grants, bar1, bar3, .. } = self;
        let tlb = match aperture {
            Aperture::Bar1 => bar1,
            Aperture::Bar3 => bar3,
        };
        each(tlb, &mut View::new(host.lock().vram_mut(), grants))
    }
}

#[cfg(test)]
mod tests {
    mod needs;
}
