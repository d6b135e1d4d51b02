//! The mediator's own pages in a guest's address space.

use crate::ShadowMemory;
use crate::space::frame;
use nvspec::addr::{GpuVa, SMALL_PAGE, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, PD_ENTRIES, PDE_SPAN, Pde, Pte, PteAperture, SPT_ENTRIES, TableTarget, kind};

/// Where the mediator's own pages are in each address space: the span of the last directory entry.
pub const HOST_BASE: GpuVa = GpuVa((PD_ENTRIES as u64 - 1) * PDE_SPAN);
/// How many there may be: as many as the shortest table has.
pub const HOST_PAGES: u32 = SPT_ENTRIES >> SIZE_CODE;
/// The size code of the shortest table.
const SIZE_CODE: u8 = 3;

/// The table of the mediator's own pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostTable(VramAddr);

impl HostTable {
    /// Bytes of it.
    pub(crate) const BYTES: u64 = HOST_PAGES as u64 * ENTRY_BYTES;

    /// An empty one. `None` without memory.
    pub(crate) fn new(memory: &mut impl ShadowMemory) -> Option<Self> {
        memory.alloc(Self::BYTES).map(Self)
    }

    pub(crate) fn card(self) -> VramAddr {
        self.0
    }

    /// The directory entry for it.
    pub(crate) fn pde(self) -> Option<u64> {
        let pde = Pde::new().with_large_size(SIZE_CODE).with_small_target(TableTarget::Vram);
        Some(pde.with_small_frame(frame(self.0)?).into())
    }

    /// The entry for a page. `None` for an address that no entry can hold.
    pub(crate) fn pte(page: VramAddr, writable: bool) -> Option<u64> {
        let pte = Pte::new().with_valid(true).with_read_only(!writable).with_aperture(PteAperture::Vram);
        Some(pte.with_kind(kind::PITCH).with_frame(frame(page)?).into())
    }

    /// Sets the entry `index`, which is below [`HOST_PAGES`].
    pub(crate) fn set(self, index: u32, pte: u64, memory: &mut impl ShadowMemory) {
        memory.write(self.0.offset(u64::from(index).saturating_mul(ENTRY_BYTES)), &pte.to_le_bytes());
    }
}

const _: () = assert!(HostTable::BYTES.is_multiple_of(SMALL_PAGE));
