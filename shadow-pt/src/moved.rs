//! Updates entries for VRAM that has moved but is otherwise unchanged. This code determines the cost per page of moving
//! a chunk.

use crate::translate::FRAME_BITS;
use crate::{Frame, Frames, GuestRange};
use nvspec::addr::{GuestVramAddr, LARGE_PAGE, SMALL_PAGE};
use nvspec::mmu::{Pte, PteAperture};

/// A block of guest VRAM of large-page size. Small entries often refer to its pages in order.
#[derive(Clone, Copy, Debug)]
struct Block {
    start: u64,
    /// Frame of the block, if the block is contiguous.
    place: Option<Frame>,
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
        let address = raw.address();
        let within = address % LARGE_PAGE;
        let start = address.wrapping_sub(within);
        let block = match self.last {
            Some(block) if block.start == start => block,
            _ => *self.last.insert(Block { start, place: frames.vram(GuestVramAddr(start), LARGE_PAGE) }),
        };
        let (base, aperture) = match block.place? {
            Frame::Vram(base) => (base.0, PteAperture::Vram),
            Frame::Host(base) => (base.0, PteAperture::SysCoherent),
        };
        let at = base.checked_add(within)?;
        let frame = u32::try_from(at >> SMALL_PAGE.trailing_zeros()).ok()?;
        let fits = at % SMALL_PAGE == 0 && frame >> FRAME_BITS == 0;
        fits.then(|| old.with_frame(frame).with_aperture(aperture))
    }
}
