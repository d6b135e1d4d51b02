//! The mediator's own pages in a guest's address space.
//!
//! These pages are in the spans of the last two directory entries, which the guest can never use. The last entry is for
//! the mediator's channel pages, for which every address space with a channel has a short table. The other entry is for
//! memory shared by several address spaces; its table is created when the first such page is mapped.

use crate::ShadowMemory;
use nvspec::addr::{GpuVa, SMALL_PAGE, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, PD_ENTRIES, PDE_SPAN, Pde, Pte, PteAperture, Rights, SPT_ENTRIES, TableTarget, kind};

/// Start of the mediator's channel pages in each address space: the span of the last directory entry.
pub const HOST_BASE: GpuVa = GpuVa((PD_ENTRIES as u64 - 1) * PDE_SPAN);
/// Maximum number of channel pages, equal to the number of entries in the shortest table.
pub const HOST_PAGES: u32 = SPT_ENTRIES >> SIZE_CODE;
/// Size code of the shortest table.
const SIZE_CODE: u8 = 3;
/// Start of the shared pages in each address space: the span of the second-to-last directory entry.
pub const SHARED_BASE: GpuVa = GpuVa((PD_ENTRIES as u64 - 2) * PDE_SPAN);
/// Maximum number of shared pages.
pub const SHARED_PAGES: u32 = SPT_ENTRIES;

/// Index of the mediator's first directory entry. All subsequent entries also belong to the mediator.
pub(crate) const FIRST_ENTRY: u32 = PD_ENTRIES - 2;

/// One of the mediator's pages in an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostPage {
    /// The page with this index, counted from [`HOST_BASE`] and less than [`HOST_PAGES`].
    Own(u32),
    /// The page with this index, counted from [`SHARED_BASE`] and less than [`SHARED_PAGES`].
    Shared(u32),
}

impl HostPage {
    /// Returns the page's area and its index within the area.
    pub(crate) fn split(self) -> Option<(Area, u32)> {
        let (area, index) = match self {
            Self::Own(index) => (Area::Own, index),
            Self::Shared(index) => (Area::Shared, index),
        };
        (index < area.pages()).then_some((area, index))
    }
}

/// One of the two spans with mediator pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Area {
    Own,
    Shared,
}

impl Area {
    /// Returns the area's directory entry.
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

/// The table of one span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostTable {
    card: VramAddr,
    area: Area,
}

impl HostTable {
    /// Allocates an empty table. Returns `None` if no memory is available.
    pub(crate) fn new(area: Area, memory: &mut impl ShadowMemory) -> Option<Self> {
        Some(Self { card: memory.alloc(area.table_bytes())?, area })
    }

    /// Wraps an existing table at `card`.
    pub(crate) fn at(area: Area, card: VramAddr) -> Self {
        Self { card, area }
    }

    pub(crate) fn card(self) -> VramAddr {
        self.card
    }

    /// Returns the table's size in bytes.
    pub(crate) fn bytes(self) -> u64 {
        self.area.table_bytes()
    }

    /// Returns the directory entry that refers to the table.
    pub(crate) fn pde(self) -> Option<u64> {
        let pde = Pde::new().with_large_size(self.area.size_code()).with_small_target(TableTarget::Vram);
        Some(pde.with_small_frame(frame(self.card)?).into())
    }

    /// Returns the entry for a page; `None` if the address does not fit in an entry.
    pub(crate) fn pte(page: VramAddr, rights: Rights) -> Option<u64> {
        let pte = Pte::granting(rights).with_aperture(PteAperture::Vram);
        Some(pte.with_kind(kind::PITCH).with_frame(frame(page)?).into())
    }

    /// Sets entry `index`, which must be less than the span's number of pages.
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

/// Returns the 28-bit frame number of a card address; `None` if it does not fit in an entry.
pub(crate) fn frame(address: VramAddr) -> Option<u32> {
    u32::try_from(address.0 >> SMALL_PAGE.trailing_zeros()).ok().filter(|frame| frame >> 28 == 0)
}
