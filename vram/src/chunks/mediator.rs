//! Card chunks for the mediator.

use super::{ChunkId, ChunkState, ChunkTable, Error};

impl ChunkTable {
    /// Sets aside `chunks` chunks for the mediator, including those that it already owns. VMs cannot get these chunks.
    /// Lowering the number releases the difference, but removes no chunk from the mediator.
    ///
    /// # Errors
    /// Returns [`Error::CardFull`] if too few chunks are spare, and changes nothing.
    pub fn set_aside(&mut self, chunks: u32) -> Result<(), Error> {
        let missing = chunks.saturating_sub(self.mediator);
        if missing > self.for_mediator() {
            return Err(self.full(u64::from(missing)));
        }
        self.set_aside = chunks;
        Ok(())
    }

    /// Claims `chunks` chunks for the mediator, in addition to those that it already has. As soon as chunks are spare,
    /// the mediator gets them before any VM does. The value 0 cancels the claim.
    pub fn claim(&mut self, chunks: u32) {
        self.claimed = chunks.saturating_sub(self.left_aside());
    }

    /// Releases borrowed chunks to the reserve, up to the number of uncommitted chunks.
    pub fn repay(&mut self) {
        self.borrowed -= self.borrowed.min(self.uncommitted());
    }

    /// Returns the number of reserve chunks that the mediator has borrowed.
    #[must_use]
    pub fn borrowed(&self) -> u32 {
        self.borrowed
    }

    /// Allocates `count` contiguous chunks for the mediator, aligned to `align` chunks. Borrows missing chunks from the
    /// reserve.
    ///
    /// # Errors
    /// Returns [`Error::CardFull`] if no such run is available, or if its chunks are guaranteed to VMs. Returns
    /// [`Error::NeedsScrub`] if such a run may become available after scrubbing, or [`Error::Empty`] if `count` is 0.
    pub fn reserve_mediator(&mut self, count: u32, align: u32) -> Result<ChunkId, Error> {
        if count == 0 {
            return Err(Error::Empty);
        }
        let borrowed = count.saturating_sub(self.for_mediator());
        if borrowed > self.left_reserve() {
            return Err(self.full(u64::from(count)));
        }
        let first = self.card.take_run(count, align, ChunkState::Mediator).map_err(|dirty| match dirty {
            true => Error::NeedsScrub { tier: super::Tier::Card, short: count },
            false => self.full(u64::from(count)),
        })?;
        self.claimed = self.claimed.saturating_sub(count.saturating_sub(self.left_aside()));
        self.mediator += count;
        self.borrowed += borrowed;
        Ok(ChunkId(first))
    }

    /// Releases `count` of the mediator's chunks, starting with `first`. They may contain addresses of VMs' memory, so
    /// they are scrubbed before reuse.
    ///
    /// # Panics
    /// Panics if a chunk does not belong to the mediator.
    pub fn release_mediator(&mut self, first: ChunkId, count: u32) {
        for chunk in first.0..first.0 + count {
            assert_eq!(self.card.state(chunk), ChunkState::Mediator, "chunk {chunk} does not belong to the mediator");
            self.card.abandon(chunk);
        }
        self.mediator -= count;
    }

    /// Returns the number of chunks without an owner that the mediator can get without borrowing. These are the rest of
    /// its share, its claim, and the spare chunks.
    #[must_use]
    pub fn for_mediator(&self) -> u32 {
        // Quarantine may leave fewer chunks than are promised.
        self.card.room().saturating_sub(self.promised + self.left_reserve())
    }

    /// Returns the number of card chunks for VMs, which are all chunks except for the reserve, the mediator's chunks,
    /// and the spare part of its claim. A chunk that the mediator has borrowed from the reserve is subtracted only
    /// once.
    #[must_use]
    pub fn for_vms(&self) -> u32 {
        let kept = self.mediator + self.kept_for_mediator() + self.parked + self.left_reserve();
        self.card.limit().saturating_sub(kept)
    }

    /// Returns the unused part of the mediator's share.
    pub(super) fn left_aside(&self) -> u32 {
        self.set_aside.saturating_sub(self.mediator)
    }

    /// Returns the number of free chunks that only the mediator can get, which are the rest of its share and its claim.
    #[must_use]
    pub fn kept_for_mediator(&self) -> u32 {
        self.left_aside() + self.uncommitted().min(self.wanted())
    }

    /// Returns the number of chunks that the mediator claims, plus the number that it has borrowed from the reserve.
    pub(super) fn wanted(&self) -> u32 {
        self.claimed.saturating_add(self.borrowed)
    }

    pub(super) fn full(&self, wanted: u64) -> Error {
        let (free, to_scrub) = (self.card.free(), self.card.unscrubbed());
        Error::CardFull { wanted, free, to_scrub, promised: self.promised + self.left_reserve() }
    }
}
