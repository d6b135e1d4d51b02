//! One guest address space and its shadow.

use crate::{Frames, GuestMemory, Place, ShadowMemory, SyncReport};
use nvspec::addr::{Gpa, GuestVramAddr, VramAddr};
use std::ops::Range;

/// What a guest cannot exceed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Directory entries that are the host's; the guest's are ignored there.
    pub reserved: Range<u32>,
    /// Bytes of shadow tables in card memory, the directory excluded.
    pub table_bytes: u64,
}

/// The card has no memory for a shadow directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the card has no memory left for a shadow page directory")]
pub struct NoMemory;

/// A range of what the guest calls memory, that is taken away from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestRange {
    /// VRAM: first byte, bytes.
    Vram(GuestVramAddr, u64),
    /// RAM: first byte, bytes.
    Ram(Gpa, u64),
}

/// The shadow of one guest page directory.
#[derive(Debug)]
pub struct Shadow {}

impl Shadow {
    /// An empty shadow for the guest directory at `guest`: nothing is mapped before [`Self::sync`].
    ///
    /// # Errors
    /// [`NoMemory`].
    pub fn new(guest: Place, limits: Limits, memory: &mut impl ShadowMemory) -> Result<Self, NoMemory> {
        let _ = (guest, limits, memory);
        todo!()
    }

    /// Where the guest's directory lies: the key by which a flush finds its shadow.
    #[must_use]
    pub fn guest_directory(&self) -> Place {
        todo!()
    }

    /// Where the shadow directory lies on the card: for instance blocks and for flushing the card's TLBs.
    #[must_use]
    pub fn directory(&self) -> VramAddr {
        todo!()
    }

    /// Makes the shadow what the guest's tables say now, as far as `frames` grants it. Then flush the card's TLBs for
    /// [`Self::directory`] and call [`Self::flushed`].
    pub fn sync(
        &mut self,
        guest: &mut impl GuestMemory,
        frames: &impl Frames,
        memory: &mut impl ShadowMemory,
    ) -> SyncReport {
        let _ = (guest, frames, memory);
        todo!()
    }

    /// Drops every entry that maps into `range`, which is about to be no longer the guest's. Then flush the card's TLBs
    /// and call [`Self::flushed`]. The entries come back at the next [`Self::sync`] if they are granted again.
    pub fn invalidate(&mut self, range: GuestRange, memory: &mut impl ShadowMemory) -> SyncReport {
        let _ = (range, memory);
        todo!()
    }

    /// The card's TLBs hold nothing older than the last [`Self::sync`] or [`Self::invalidate`]: tables that nothing names
    /// any more are freed.
    pub fn flushed(&mut self, memory: &mut impl ShadowMemory) {
        let _ = memory;
        todo!()
    }

    /// Frees everything. No channel or aperture of the card uses the directory any more.
    pub fn destroy(self, memory: &mut impl ShadowMemory) {
        let _ = memory;
        todo!()
    }

    /// Bytes of card memory in use, the directory included.
    #[must_use]
    pub fn card_bytes(&self) -> u64 {
        todo!()
    }
}
