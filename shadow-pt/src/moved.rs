//! Updates entries if only the location of their VRAM has changed. This code determines the per-page cost of moving a
//! chunk.

use crate::translate::FRAME_BITS;
use crate::{Frame, Frames, GuestRange};
use nvspec::addr::{GuestVramAddr, LARGE_PAGE, SMALL_PAGE};
use nvspec::mmu::{Pte, PteAperture};

/// A guest VRAM block with the size of a large page. Small entries often refer to its pages in order.
#[derive(Clone, Copy, Debug)]
struct Block {
    start: u64,
    /// Location of the block, if it is contiguous.
    place: Option<Frame>,
}

/// The small entries that refer to a VRAM range, and its current location.
#[derive(Debug)]
pub(crate) struct Moved {
    start: u64,
    end: u64,
    last: Option<Block>,
}

impl Moved {
    /// Creates the state for a range; `None` for a range of RAM.
    pub(crate) fn for_range(range: GuestRange) -> Option<Self> {
        let (system, start, len) = range.parts();
        (!system).then(|| Self { start, end: start.saturating_add(len), last: None })
    }

    /// Returns true if the guest entry `raw` is a small entry outside the range.
    pub(crate) fn is_elsewhere(&self, raw: Pte) -> bool {
        let address = raw.address();
        raw.aperture() == PteAperture::Vram && (address >= self.end || address.saturating_add(SMALL_PAGE) <= self.start)
    }

    /// Returns the card's entry for the small guest entry `raw`: the current entry `old` with the new location. Returns
    /// `None` if the entry needs a full translation.
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
