//! Mediator pages in a guest's address space.
//!
//! These pages are mapped through the last two directory entries, which are reserved for the mediator. The last entry
//! maps the mediator's channel pages, through a table of minimum size in each address space with a channel. The other
//! entry maps memory shared by several address spaces. Its table is created when the first such page is mapped.

use crate::ShadowMemory;
use nvspec::addr::{GpuVa, SMALL_PAGE, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, PD_ENTRIES, PDE_SPAN, Pde, Pte, PteAperture, Rights, SPT_ENTRIES, TableTarget, kind};

/// Address of the mediator's channel pages in each address space, which are mapped through the last directory entry.
pub const HOST_BASE: GpuVa = GpuVa((PD_ENTRIES as u64 - 1) * PDE_SPAN);
/// Maximum number of channel pages, which equals the number of entries in a table of minimum size.
pub const HOST_PAGES: u32 = SPT_ENTRIES >> SIZE_CODE;
/// Size code of a table of minimum size.
const SIZE_CODE: u8 = 3;
/// Address of the shared pages in each address space, which are mapped through the second-to-last directory entry.
pub const SHARED_BASE: GpuVa = GpuVa((PD_ENTRIES as u64 - 2) * PDE_SPAN);
/// Maximum number of shared pages.
pub const SHARED_PAGES: u32 = SPT_ENTRIES;

/// Index of the first directory entry reserved for the mediator. All subsequent entries are also reserved.
pub(crate) const FIRST_ENTRY: u32 = PD_ENTRIES - 2;

/// A mediator page in an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostPage {
    /// Channel page with this index, which is less than [`HOST_PAGES`].
    Own(u32),
    /// Shared page with this index, which is less than [`SHARED_PAGES`].
    Shared(u32),
}

impl HostPage {
    /// Returns the page's area and index, or `None` if the index is out of range.
    pub(crate) fn split(self) -> Option<(Area, u32)> {
        let (area, index) = match self {
            Self::Own(index) => (Area::Own, index),
            Self::Shared(index) => (Area::Shared, index),
        };
        (index < area.pages()).then_some((area, index))
    }
}

/// One of the two areas for mediator pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Area {
    Own,
    Shared,
}

impl Area {
    /// Returns the index of the area's directory entry.
    pub(crate) const fn entry(self) -> u32 {
        match self {
            Self::Own => FIRST_ENTRY.wrapping_add(1),
            Self::Shared => FIRST_ENTRY,
        }
    }

    const fn size_code(self) -> u8 {
        match self {
            Self::Own => SIZE_CODE,
            Self::Shared => 0,
        }
    }

    const fn pages(self) -> u32 {
        match self {
            Self::Own => HOST_PAGES,
            Self::Shared => SHARED_PAGES,
        }
    }

    /// Returns the size of the area's table in bytes.
    pub(crate) const fn table_bytes(self) -> u64 {
        (self.pages() as u64).wrapping_mul(ENTRY_BYTES)
    }
}

/// The page table of one area for mediator pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostTable {
    card: VramAddr,
    area: Area,
}

impl HostTable {
    /// Allocates an empty table. Returns `None` if card memory is exhausted.
    pub(crate) fn new(area: Area, memory: &mut impl ShadowMemory) -> Option<Self> {
        Some(Self { card: memory.alloc(area.table_bytes())?, area })
    }

    /// Returns the existing table at card address `card`.
    pub(crate) fn at(area: Area, card: VramAddr) -> Self {
        Self { card, area }
    }

    pub(crate) fn card(self) -> VramAddr {
        self.card
    }

    /// Returns the size of the table in bytes.
    pub(crate) fn bytes(self) -> u64 {
        self.area.table_bytes()
    }

    /// Returns the directory entry that refers to the table, or `None` if the table's address does not fit in an entry.
    pub(crate) fn pde(self) -> Option<u64> {
        let pde = Pde::new().with_large_size(self.area.size_code()).with_small_target(TableTarget::Vram);
        Some(pde.with_small_frame(frame(self.card)?).into())
    }

    /// Returns the entry for a page, or `None` if the address does not fit in an entry.
    pub(crate) fn pte(page: VramAddr, rights: Rights) -> Option<u64> {
        let pte = Pte::granting(rights).with_aperture(PteAperture::Vram);
        Some(pte.with_kind(kind::PITCH).with_frame(frame(page)?).into())
    }

    /// Sets entry `index`, which must be less than the area's number of pages.
    pub(crate) fn set(self, index: u32, pte: u64, memory: &mut impl ShadowMemory) {
        memory.write(self.card.offset(u64::from(index).saturating_mul(ENTRY_BYTES)), &pte.to_le_bytes());
    }
}

const _: () = assert!(
    Area::Own.table_bytes().is_multiple_of(SMALL_PAGE)
        && Area::Shared.table_bytes().is_multiple_of(SMALL_PAGE)
        && HOST_BASE.0 == Area::Own.entry() as u64 * PDE_SPAN
        && SHARED_BASE.0 == Area::Shared.entry() as u64 * PDE_SPAN
);

/// Returns the 28-bit frame number of a VRAM address, or `None` if it does not fit in an entry.
pub(crate) fn frame(address: VramAddr) -> Option<u32> {
    u32::try_from(address.0 >> SMALL_PAGE.trailing_zeros()).ok().filter(|frame| frame >> 28 == 0)
}
