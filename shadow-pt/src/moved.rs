//! Updates entries for VRAM that has moved but is otherwise unchanged. This code determines the cost per page of moving
//! a chunk.

use crate::translate::{FRAME_BITS, LARGE_PAGES};
use crate::{Frame, Frames, GuestRange};
use nvspec::addr::{GuestVramAddr, LARGE_PAGE, SMALL_PAGE};
use nvspec::mmu::{Pte, PteAperture};

/// Bits of a small entry that locate its page: the frame and the aperture.
const PLACE_BITS: u64 =
    Pte::new().with_frame((1 << FRAME_BITS) - 1).with_aperture(PteAperture::SysNonCoherent).into_bits();
/// Bits of a guest entry that locate its page within a block.
const WITHIN_BITS: u64 = Pte::new().with_frame(LARGE_PAGES - 1).into_bits();
/// Bits of a guest entry that identify the block to which it refers.
const BLOCK_BITS: u64 = Pte::new().with_valid(true).into_bits() | PLACE_BITS & !WITHIN_BITS;

/// A block of guest VRAM of large-page size. Small entries often refer to its pages in order.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// [`BLOCK_BITS`] of the guest entries that refer to the block.
    key: u64,
    /// [`PLACE_BITS`] of the card's entry for the first page, if the block is contiguous.
    place: Option<u64>,
}

/// A VRAM range that has moved. Small entries are updated to its new location.
#[derive(Debug)]
pub(crate) struct Moved {
    start: u64,
    end: u64,
    last: Option<Block>,
}

impl Moved {
    /// Creates the update state for a VRAM range. Returns `None` for a RAM range.
    pub(crate) fn for_range(range: GuestRange) -> Option<Self> {
        let (system, start, len) = range.parts();
        (!system).then(|| Self { start, end: start.saturating_add(len), last: None })
    }

    /// Returns true if the small guest entry `raw` refers to VRAM outside the range.
    pub(crate) fn is_elsewhere(&self, raw: Pte) -> bool {
        let address = raw.address();
        raw.aperture() == PteAperture::Vram && (address >= self.end || address.saturating_add(SMALL_PAGE) <= self.start)
    }

    /// Returns the card's new entry for the small guest entry `raw`: the current entry `old` with the new frame.
    /// Returns `None` if the entry requires a full translation.
    pub(crate) fn entry(&mut self, raw: Pte, old: Pte, frames: &mut impl Frames) -> Option<Pte> {
        if !old.valid() || !raw.valid() || raw.aperture() != PteAperture::Vram {
            return None;
        }
        let key = raw.into_bits() & BLOCK_BITS;
        let block = match self.last {
            Some(block) if block.key == key => block,
            _ => *self.last.insert(Block { key, place: place(Pte::from_bits(key).address(), frames) }),
        };
        block.relocate(raw, old)
    }

    /// Returns the same as [`Self::entry`] for an entry that refers to the same block as the previous one. Returns
    /// `None` for all other entries.
    pub(crate) fn next_entry(&self, raw: Pte, old: Pte) -> Option<Pte> {
        let block = self.last.filter(|block| block.key == raw.into_bits() & BLOCK_BITS && old.valid())?;
        block.relocate(raw, old)
    }
}

impl Block {
    fn relocate(self, raw: Pte, old: Pte) -> Option<Pte> {
        let place = self.place?.wrapping_add(raw.into_bits() & WITHIN_BITS);
        Some(Pte::from_bits(old.into_bits() & !PLACE_BITS | place))
    }
}

/// Returns [`PLACE_BITS`] of the card's entry for the first page of the block at `start`, or `None` if the block is not
/// contiguous or an entry cannot refer to all of its pages.
fn place(start: u64, frames: &mut impl Frames) -> Option<u64> {
    let (base, aperture) = match frames.vram(GuestVramAddr(start), LARGE_PAGE)? {
        Frame::Vram(base) => (base.0, PteAperture::Vram),
        Frame::Host(base) => (base.0, PteAperture::SysCoherent),
    };
    let last = base.checked_add(LARGE_PAGE - SMALL_PAGE)? >> SMALL_PAGE.trailing_zeros();
    let fits = base % SMALL_PAGE == 0 && last >> FRAME_BITS == 0;
    let frame = u32::try_from(base >> SMALL_PAGE.trailing_zeros()).ok()?;
    fits.then(|| Pte::new().with_frame(frame).with_aperture(aperture).into_bits())
}
