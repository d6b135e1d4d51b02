//! A VM's RAM as seen by the card: maps guest-physical ranges to I/O virtual addresses.

use super::saved::{SavedRam, SavedRegion};
use card_manager::iova::NoIova;
use card_manager::{ManagedCard, ManagerError};
use nvspec::addr::{Gpa, Iova};
use saved_state::Invalid;
use std::collections::BTreeMap;
use vm_device::memory_of;
use vmm_glue::DmaRegion;
use vmm_glue::memory::MemoryTable;
use vram::TenantId;

#[derive(Clone, Copy, Debug)]
struct Region {
    size: u64,
    iova: Iova,
    writable: bool,
}

/// A region that was removed from the map but that the card can still access.
#[derive(Debug)]
#[must_use]
pub(crate) struct Lent {
    size: u64,
    iova: Iova,
}

impl Lent {
    /// Unmaps the region for the card. If `reachable` is true, its I/O addresses are not reused, because TLBs may
    /// contain translations to them.
    pub(crate) fn give_back(self, host: &ManagedCard, vm: TenantId, reachable: bool) {
        let unmapped = host.card().unmap_dma(self.iova.0, self.size);
        match unmapped {
            Ok(()) if !reachable => host.lock().memory_mut().iova_mut().free_for(vm, self.iova),
            Ok(()) => {}
            Err(error) => {
                tracing::error!(%error, iova = %self.iova, "cannot unmap withdrawn guest memory for the card");
            }
        }
    }
}

/// A VM's RAM regions that are mapped for the card.
#[derive(Debug, Default)]
pub(crate) struct RamMap {
    regions: BTreeMap<u64, Region>,
}

impl RamMap {
    /// Maps `region` for the card. Skips a region that is not readable or has no file; page table entries that refer to
    /// it are denied. Returns an error if the VM's quota or the I/O address space is exhausted, or if the host rejects
    /// the mapping.
    pub(crate) fn map(&mut self, host: &ManagedCard, vm: TenantId, region: &DmaRegion) -> Result<(), ManagerError> {
        let Some(mapping) = &region.mapping else { return Ok(()) };
        if !region.readable {
            return Ok(());
        }
        let memory = memory_of(mapping, region.writable)?;
        let len = region.size;
        let iova = host.lock().memory_mut().iova_mut().allocate_for(vm, len, region.gpa).map_err(|why| match why {
            NoIova::Quota(quota) => ManagerError::RamQuota { len, quota },
            NoIova::Full => ManagerError::OutOfIova { len },
        })?;
        if let Err(error) = host.card().map_dma(iova.0, memory) {
            host.lock().memory_mut().iova_mut().free_for(vm, iova);
            return Err(error.into());
        }
        self.regions.insert(region.gpa, Region { size: region.size, iova, writable: region.writable });
        Ok(())
    }

    /// Maps `region`, which the client lends, for the card at the I/O address that it had before the takeover. Returns
    /// an error if the card cannot access the region, or if the host rejects the mapping.
    pub(super) fn map_at(&mut self, host: &ManagedCard, region: &DmaRegion, iova: Iova) -> Result<(), ManagerError> {
        let mapping = region.mapping.as_ref().filter(|_| region.readable);
        let mapping =
            mapping.ok_or_else(|| Invalid::new(format_args!("the card cannot access RAM at {:#x}", region.gpa)))?;
        host.card().map_dma(iova.0, memory_of(mapping, region.writable)?)?;
        self.regions.insert(region.gpa, Region { size: region.size, iova, writable: region.writable });
        Ok(())
    }

    /// Returns the start and size in bytes of each region that is no longer lent unchanged, and all lent regions that
    /// are not mapped unchanged.
    pub(super) fn difference(&self, lent: &MemoryTable) -> (Vec<(u64, u64)>, Vec<DmaRegion>) {
        let is_lent = |gpa: u64, here: &Region| {
            let there = lent.find(gpa).filter(|there| there.mapping.is_some() && there.readable);
            there.is_some_and(|there| (there.gpa, there.size, there.writable) == (gpa, here.size, here.writable))
        };
        let gone: BTreeMap<u64, u64> = self
            .regions
            .iter()
            .filter(|(gpa, here)| !is_lent(**gpa, here))
            .map(|(gpa, here)| (*gpa, here.size))
            .collect();
        let stays = |gpa: u64| self.regions.contains_key(&gpa) && !gone.contains_key(&gpa);
        let new = lent.regions().iter().filter(|region| !stays(region.gpa)).cloned().collect();
        (gone.into_iter().collect(), new)
    }

    /// Saves the regions' addresses, sizes and access rights.
    pub(super) fn save(&self) -> SavedRam {
        let Self { regions } = self;
        let regions = regions.iter().map(|(gpa, region)| {
            let Region { size, iova, writable } = *region;
            SavedRegion { gpa: *gpa, size, iova: iova.0, writable }
        });
        SavedRam(regions.collect())
    }

    /// Returns the I/O address range of each region.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (Iova, u64)> {
        self.regions.values().map(|region| (region.iova, region.size))
    }

    /// Removes the region at `gpa`. Page tables must no longer map it. [`Lent::give_back`] then unmaps it for the card.
    pub(crate) fn take(&mut self, gpa: u64) -> Option<Lent> {
        self.regions.remove(&gpa).map(|Region { size, iova, .. }| Lent { size, iova })
    }

    /// Returns the size in bytes of the region that starts at `gpa`.
    #[must_use]
    pub(crate) fn size_at(&self, gpa: u64) -> Option<u64> {
        self.regions.get(&gpa).map(|region| region.size)
    }

    /// Returns the start and the size in bytes of the first region.
    #[must_use]
    pub(crate) fn first(&self) -> Option<(u64, u64)> {
        self.regions.first_key_value().map(|(&gpa, region)| (gpa, region.size))
    }

    /// Returns the card's address of `gpa` and the number of contiguous bytes from there. Returns `None` if `gpa` is
    /// not mapped, or if `write` is true and the region is read-only.
    #[must_use]
    pub(crate) fn translate(&self, gpa: Gpa, write: bool) -> Option<(Iova, u64)> {
        let (&start, region) = self.regions.range(..=gpa.0).next_back()?;
        let offset = gpa.0 - start;
        (offset < region.size && (!write || region.writable))
            .then(|| (region.iova.offset(offset), region.size - offset))
    }
}
