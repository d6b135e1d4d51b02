//! Saved form of a VM's memory. Address spaces and kept page tables are saved separately.

use super::ram::RamMap;
use super::{Grants, Memory, Remap};
use card_manager::{ManagedCard, ManagerError};
use channels::SavedPlace;
use devmodel::backend::Aperture;
use nvspec::addr::{GuestVramAddr, Iova, Place, SMALL_PAGE, VramAddr};
use pv::Tables;
use saved_state::{Invalid, ascend};
use serde::{Deserialize, Serialize};
use shadow_pt::{AddressSpaces, ApertureTlb, SavedSpaces, SyncReport};
use std::collections::BTreeSet;
use std::sync::Arc;
use vmm_glue::Link;
use vram::{PagePool, TenantId};

/// Saved form of a [`Memory`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedMemory {
    bus_master: bool,
    /// Locations of the instance blocks of BAR1 and BAR3.
    apertures: [Option<SavedPlace>; 2],
    ram: SavedRam,
}

/// Parts of a VM that have already been restored.
pub(crate) struct Restored {
    pub(crate) spaces: AddressSpaces,
    pub(crate) tables: Option<Tables>,
    pub(crate) pool: PagePool,
    pub(crate) remap: Remap,
}

/// Saved regions of guest RAM that are mapped for the card, sorted by address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedRam(pub(super) Vec<SavedRegion>);

/// Saved region of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedRegion {
    pub(super) gpa: u64,
    pub(super) size: u64,
    pub(super) iova: u64,
    pub(super) writable: bool,
}

impl Memory {
    /// Saves the state that [`Self::save`] omits.
    pub(crate) fn save_own(&self) -> SavedMemory {
        let Self {
            host: _,
            vm: _,
            grants,
            // Both are separate parts of the saved state.
            shadows: _,
            pool: _,
            bar1,
            bar3,
            // Saved as a register.
            pramin: _,
            // Statistics restart at 0.
            report: _,
            syncs: _,
        } = self;
        SavedMemory {
            bus_master: grants.bus_master(),
            apertures: [bar1, bar3].map(|aperture| aperture.instance().map(SavedPlace::from)),
            ram: grants.ram().save(),
        }
    }

    /// Restores the memory from its parts, and the client's memory through `link`. Maps the memory for the card, but
    /// does not change the card otherwise. Returns an error if the client lends different memory, or if the host does
    /// not map it.
    pub(crate) fn restored(
        host: Arc<ManagedCard>,
        vm: TenantId,
        link: Link,
        vram_bytes: u64,
        saved: SavedMemory,
        restored: Restored,
    ) -> Result<Self, ManagerError> {
        let SavedMemory { bus_master, apertures, ram } = saved;
        let Restored { mut spaces, tables, pool, remap } = restored;
        let ram = ram.restored(&host, &link)?;
        // Page tables in these pages must be read at each flush.
        remap.homes().for_each(|page| spaces.unseen(GuestVramAddr(u64::from(page) * SMALL_PAGE), true));
        let grants = Grants::restored(vm, link, vram_bytes, ram, bus_master, tables, remap);
        let [bar1, bar3] = apertures.map(|instance| {
            let instance = instance.map(Place::from);
            let directory = instance.and_then(|instance| grants.directory_of(instance));
            let mut aperture = ApertureTlb::new();
            aperture.bind(instance, directory);
            aperture
        });
        let report = SyncReport::default();
        let pramin = Some(GuestVramAddr(0));
        Ok(Self { host, vm, grants, shadows: spaces, pool, bar1, bar3, pramin, report, syncs: 0 })
    }

    /// Restores the memory of a VM that was saved on another card, with its address spaces and kept page tables. The
    /// client's memory is already mapped for the card. Returns the old and the new address of each directory. Returns
    /// an error if the client lends different memory than before, or if the card has no memory for directories.
    pub(crate) fn arrive(
        &mut self,
        saved: SavedMemory,
        spaces: SavedSpaces,
        tables: Option<Tables>,
    ) -> Result<Vec<(VramAddr, VramAddr)>, ManagerError> {
        let SavedMemory { bus_master, apertures, ram } = saved;
        self.grants.ram().save().check_like(&ram)?;
        self.grants.receive(bus_master, tables);
        let places = self.adopt(spaces)?;
        // Page tables in these pages must be read at each flush.
        let homes: Vec<u32> = self.grants.remap().homes().collect();
        homes.into_iter().for_each(|page| self.unseen(GuestVramAddr(u64::from(page) * SMALL_PAGE), true));
        let [bar1, bar3] = apertures.map(|instance| {
            let instance = instance.map(Place::from);
            (instance, instance.and_then(|instance| self.grants.directory_of(instance)))
        });
        self.bind_aperture(Aperture::Bar1, bar1.0, bar1.1);
        self.bind_aperture(Aperture::Bar3, bar3.0, bar3.1);
        Ok(places)
    }

    /// Returns the I/O address ranges of the VM's RAM, and the size of its pool in bytes.
    pub(crate) fn held(&self) -> (impl Iterator<Item = (Iova, u64)> + '_, u64) {
        (self.grants.ram().ranges(), self.pool.held_bytes())
    }

    /// Returns the I/O address ranges of the memory under the VM's apertures.
    pub(crate) fn under_apertures(&self) -> impl Iterator<Item = (Iova, u64)> + '_ {
        self.grants.remap().ranges_of_card()
    }
}

impl SavedRam {
    /// Checks that the regions are the same as before. Their I/O addresses may differ.
    fn check_like(&self, before: &Self) -> Result<(), Invalid> {
        let of = |ram: &Self| ram.0.iter().map(|one| (one.gpa, one.size, one.writable)).collect::<BTreeSet<_>>();
        let (now, then) = (of(self), of(before));
        let what = |(gpa, size, writable): &(u64, u64, bool)| {
            format!(
                "{size:#x} bytes of RAM at {gpa:#x} that the card may {}",
                if *writable { "write" } else { "only read" }
            )
        };
        if let Some(missing) = then.difference(&now).next() {
            return Err(Invalid::new(format_args!("the client no longer lends {}", what(missing))));
        }
        now.difference(&then)
            .next()
            .map_or(Ok(()), |new| Err(Invalid::new(format_args!("the client now lends {}", what(new)))))
    }

    /// Maps the regions for the card at their old addresses.
    fn restored(self, host: &ManagedCard, link: &Link) -> Result<RamMap, ManagerError> {
        let Self(regions) = self;
        Invalid::unless(ascend(regions.iter().map(|region| region.gpa)), || {
            "regions of guest RAM are not in order".into()
        })?;
        let mut map = RamMap::default();
        let lent = link.memory().snapshot();
        for SavedRegion { gpa, size, iova, writable } in regions {
            let region =
                lent.find(gpa).filter(|region| (region.gpa, region.size, region.writable) == (gpa, size, writable));
            let region = region.ok_or_else(|| {
                Invalid::new(format_args!("the client has not lent {size:#x} bytes of RAM at {gpa:#x}"))
            })?;
            map.map_at(host, region, Iova(iova))?;
        }
        Ok(map)
    }
}
