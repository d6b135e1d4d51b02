//! Chunks of the card that are the mediator's own.

use super::{ChunkId, ChunkState, ChunkTable, Error};

impl ChunkTable {
    /// Sets `chunks` aside for the mediator, those that it has included: no VM gets them. A smaller number than before
    /// gives the difference up, but takes nothing away.
    ///
    /// # Errors
    /// [`Error::CardFull`] when more is missing than is spare; nothing has changed then.
    pub fn set_aside(&mut self, chunks: u32) -> Result<(), Error> {
        let missing = chunks.saturating_sub(self.mediator);
        if missing > self.for_mediator() {
            return Err(self.full(u64::from(missing)));
        }
        self.set_aside = chunks;
        Ok(())
    }

    /// Claims `chunks` for the mediator beyond those that it has: as many as are not set aside for it are its own as soon as
    /// they are spare, and no VM's. A claim of 0 gives that up.
    pub fn claim(&mut self, chunks: u32) {
        self.claimed = chunks.saturating_sub(self.left_aside());
    }

    /// Returns chunks that the mediator has borrowed to the reserve, as far as there are any that nobody is promised.
    pub fn repay(&mut self) {
        self.borrowed -= self.borrowed.min(self.uncommitted());
    }

    /// Chunks of the reserve that the mediator has borrowed.
    #[must_use]
    pub fn borrowed(&self) -> u32 {
        self.borrowed
    }

    /// Takes `count` chunks that follow one another for the mediator; the first lies at a multiple of `align` chunks. What
    /// is missing is borrowed from the reserve.
    ///
    /// # Errors
    /// [`Error::CardFull`] when there is no such run without an owner, or VMs are sure to get what it would need;
    /// [`Error::NeedsScrub`] when scrubbing could make one.
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

    /// Gives `count` chunks from `first` on back that the mediator had reserved. They are scrubbed before reuse: they
    /// held addresses of other VMs' memory.
    ///
    /// # Panics
    /// When one of them is not the mediator's, which is the caller's mistake.
    pub fn release_mediator(&mut self, first: ChunkId, count: u32) {
        for chunk in first.0..first.0 + count {
            assert_eq!(self.card.state(chunk), ChunkState::Mediator, "chunk {chunk} is not the mediator's");
            self.card.abandon(chunk);
        }
        self.mediator -= count;
    }

    /// Chunks without an owner that the mediator can have without borrowing: what is left aside for it, what it claims, and
    /// the spare ones.
    #[must_use]
    pub fn for_mediator(&self) -> u32 {
        // What is quarantined may leave less than is promised.
        self.card.room().saturating_sub(self.promised + self.left_reserve())
    }

    /// Chunks of the card that are for VMs: all but the mediator's, what it claims included as far as it is there, and the
    /// reserve's. A chunk that the mediator has borrowed from the reserve counts once.
    #[must_use]
    pub fn for_vms(&self) -> u32 {
        let kept = self.mediator + self.kept_for_mediator() + self.parked + self.left_reserve();
        self.card.limit().saturating_sub(kept)
    }

    /// Returns what the mediator has not used of what is set aside for it.
    pub(super) fn left_aside(&self) -> u32 {
        self.set_aside.saturating_sub(self.mediator)
    }

    /// Chunks without an owner that no VM gets since they are the mediator's: what is left aside, and what it claims of the
    /// rest.
    #[must_use]
    pub fn kept_for_mediator(&self) -> u32 {
        self.left_aside() + self.uncommitted().min(self.wanted())
    }

    /// Returns what the mediator claims, and what it owes the reserve.
    pub(super) fn wanted(&self) -> u32 {
        self.claimed.saturating_add(self.borrowed)
    }

    pub(super) fn full(&self, wanted: u64) -> Error {
        let (free, to_scrub) = (self.card.free(), self.card.unscrubbed());
        Error::CardFull { wanted, free, to_scrub, promised: self.promised + self.left_reserve() }
    }
}
