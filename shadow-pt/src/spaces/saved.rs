//! Saved form of address spaces: the addresses of the guest's directories and the shadow directories. Excludes the
//! contents of the guest's tables.
//!
//! The guest's tables are in guest memory, and are read again after a restore. A restored shadow maps no guest memory:
//! its directory on the card is empty except for mediator pages, and all updates are pending until the first
//! [`AddressSpaces::prepare`]. Before that call, the card must not have any work for the space.

use super::AddressSpaces;
use crate::host::{Area, FIRST_ENTRY, HostTable};
use crate::ids::{MAX_SPACES, SpaceId};
use crate::mode::Mode;
use crate::shared::{Limits, Shared};
use crate::space::Space;
use crate::{NoMemory, Place, ShadowMemory};
use nvspec::addr::{Gpa, GuestVramAddr, SMALL_PAGE, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, PD_BYTES};
use saved_state::{Invalid, first_version};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Saved form of all address spaces of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSpaces {
    /// Spaces by index.
    pub(crate) spaces: Vec<Option<SavedSpace>>,
    generations: u32,
    /// Card memory of the previous shadow tables, as start addresses and sizes in bytes. The tables are recreated.
    pub(crate) old: Vec<(u64, u64)>,
    ram_barred: bool,
}

first_version!(SavedSpaces, "shadow-pt");

/// Saved form of an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedSpace {
    pub(crate) generation: u32,
    pub(crate) directory: SavedPlace,
    /// Card address of the shadow directory.
    pub(crate) card: u64,
    /// Card address of the mediator's table for channel pages.
    pub(crate) own: Option<u64>,
    /// Card address of the mediator's table for shared pages.
    pub(crate) common: Option<u64>,
}

/// Guest address of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedPlace {
    Vram(u64),
    Ram(u64),
}

impl AddressSpaces {
    /// Saves the spaces. After this call, the card must not execute work of these spaces.
    #[must_use]
    pub fn save(&self) -> SavedSpaces {
        let Self {
            // The restoring process has its own settings.
            mode: _,
            spaces,
            generations,
            shared,
        } = self;
        let Shared {
            limits: _,
            tables,
            // Derived from the guest's tables.
            pages: _,
            reverse: _,
            gained: _,
            table_bytes: _,
            rooms: _,
            // A restored space assumes that the guest has written entries since its last flush.
            writes: _,
            splits_left: _,
            ram_barred,
        } = shared;
        let tables = tables.iter().map(|table| (table.mirror.card, table.key.bytes()));
        let others = spaces.iter().flatten().flat_map(|space| space.old_tables());
        SavedSpaces {
            spaces: spaces.iter().map(|space| space.as_deref().map(Space::save)).collect(),
            generations: *generations,
            old: tables.chain(others).map(|(card, bytes)| (card.0, bytes)).collect(),
            ram_barred: *ram_barred,
        }
    }

    /// Restores the spaces without mapping guest memory. `owns` must return true if a range of card memory was
    /// allocated for this VM's tables and has no other use. The caller must again report the pages that the guest's CPU
    /// can write without a trap ([`Self::unseen`]), and must flush the card's TLBs for all spaces.
    ///
    /// # Errors
    /// Returns an error if the saved state is invalid. Nothing is then written to the card.
    pub fn restored(
        saved: SavedSpaces,
        mode: Mode,
        limits: Limits,
        memory: &mut impl ShadowMemory,
        mut owns: impl FnMut(VramAddr, u64) -> bool,
    ) -> Result<Self, Invalid> {
        saved.check(&mut owns)?;
        let SavedSpaces { spaces, generations, old, ram_barred } = saved;
        let mut restored = Self::new(mode, limits);
        restored.generations = generations;
        restored.shared.ram_barred = ram_barred;
        for (index, space) in (0u32..).zip(spaces) {
            let space = space.map(|space| space.restored(index, &mut restored.shared, memory)).transpose()?;
            restored.spaces.push(space.map(Box::new));
        }
        // Free the previous tables, which are no longer linked.
        for (card, bytes) in old {
            memory.free(VramAddr(card), bytes);
        }
        Ok(restored)
    }
}

impl SavedSpaces {
    /// Moves the spaces to another card, on which empty directories are allocated. The caller must map the mediator
    /// pages again. Also returns the previous and the new address of each directory.
    ///
    /// # Errors
    /// Returns [`NoMemory`] if card memory is exhausted. The caller must then free all allocations.
    pub fn moved(self, memory: &mut impl ShadowMemory) -> Result<(Self, Vec<(VramAddr, VramAddr)>), NoMemory> {
        let Self { mut spaces, generations, old: _, ram_barred } = self;
        // Do not allocate memory for excess spaces, which the restore rejects.
        spaces.truncate(MAX_SPACES.saturating_add(1));
        let mut places = Vec::new();
        let mut moved = Vec::new();
        for space in spaces {
            let space = space.map(|space| {
                let card = memory.alloc(PD_BYTES).ok_or(NoMemory)?;
                places.push((VramAddr(space.card), card));
                Ok(SavedSpace { card: card.0, own: None, common: None, ..space })
            });
            moved.push(space.transpose()?);
        }
        Ok((Self { spaces: moved, generations, old: Vec::new(), ram_barred }, places))
    }

    /// Checks that all ranges of card memory belong to the VM, and that none of them is used twice.
    fn check(&self, owns: &mut impl FnMut(VramAddr, u64) -> bool) -> Result<(), Invalid> {
        let Self { spaces, generations: _, old, ram_barred: _ } = self;
        Invalid::unless(spaces.len() <= MAX_SPACES, || {
            format!("{} address spaces, at most {MAX_SPACES} are supported", spaces.len())
        })?;
        let (mut used, mut directories) = (BTreeSet::new(), Vec::new());
        let mut claim = |card: u64, bytes: u64| {
            let own = card.checked_rem(SMALL_PAGE) == Some(0) && used.insert(card) && owns(VramAddr(card), bytes);
            Invalid::unless(own, || {
                format!("{bytes:#x} bytes at {card:#x} on the card are misaligned, not owned by the VM, or used twice")
            })
        };
        for space in spaces.iter().flatten() {
            let SavedSpace { generation, directory, card, own, common } = *space;
            claim(card, PD_BYTES)?;
            own.map_or(Ok(()), |card| claim(card, Area::Own.table_bytes()))?;
            common.map_or(Ok(()), |card| claim(card, Area::Shared.table_bytes()))?;
            Invalid::unless(SpaceId::new(generation, 0).generation() == generation, || {
                format!("{generation:#x} is not the generation of an address space")
            })?;
            let place = Place::from(directory);
            let aligned = place.address().checked_rem(SMALL_PAGE) == Some(0);
            Invalid::unless(aligned && !directories.contains(&place), || {
                "two address spaces have the same directory, or the address of a directory is not page-aligned".into()
            })?;
            directories.push(place);
        }
        old.iter().try_for_each(|(card, bytes)| claim(*card, *bytes))
    }
}

impl Space {
    fn save(&self) -> SavedSpace {
        let [own, common] = self.host.map(|table| table.map(|table| table.card().0));
        SavedSpace {
            generation: self.generation,
            directory: self.directory.place.into(),
            card: self.directory.card.0,
            own,
            common,
        }
    }
}

impl SavedSpace {
    /// Restores the space. Its directory contains no guest entries.
    fn restored(self, index: u32, shared: &mut Shared, memory: &mut impl ShadowMemory) -> Result<Space, Invalid> {
        let Self { generation, directory, card, own, common } = self;
        let mut space = Space::new(index, generation, directory.into(), VramAddr(card), shared);
        let tables = [(Area::Own, own), (Area::Shared, common)];
        for (slot, (area, card)) in space.host.iter_mut().zip(tables) {
            *slot = card.map(|card| HostTable::at(area, VramAddr(card)));
            let pde = slot
                .map(|table| {
                    table.pde().ok_or_else(|| Invalid::new("the address of a table does not fit in a directory entry"))
                })
                .transpose()?;
            if let Some(entry) = space.directory.shadow.get_mut(area.entry() as usize) {
                *entry = pde.unwrap_or(0);
            }
        }
        let (guests, own) = space.directory.shadow.split_at(FIRST_ENTRY as usize);
        let empty = vec![0; guests.len().saturating_mul(size_of::<u64>())];
        memory.write(space.directory.card, &empty);
        let bytes: Vec<u8> = own.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        memory.write(space.directory.card.offset(u64::from(FIRST_ENTRY).saturating_mul(ENTRY_BYTES)), &bytes);
        Ok(space)
    }
}

impl From<Place> for SavedPlace {
    fn from(place: Place) -> Self {
        match place {
            Place::Vram(address) => Self::Vram(address.0),
            Place::Ram(address) => Self::Ram(address.0),
        }
    }
}

impl From<SavedPlace> for Place {
    fn from(saved: SavedPlace) -> Self {
        match saved {
            SavedPlace::Vram(address) => Self::Vram(GuestVramAddr(address)),
            SavedPlace::Ram(address) => Self::Ram(Gpa(address)),
        }
    }
}

#[cfg(test)]
mod tests;
