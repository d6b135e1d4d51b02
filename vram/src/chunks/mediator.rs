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

    /// Takes `count` chunks that follow one another for the mediator; the first lies at a multiple of `align` chunks.
    ///
    /// # Errors
    /// [`Error::CardFull`] when there is no such run without an owner, or VMs are sure to get what it would need;
    /// [`Error::NeedsScrub`] when scrubbing could make one.
    pub fn reserve_mediator(&mut self, count: u32, align: u32) -> Result<ChunkId, Error> {
        if count == 0 {
            return Err(Error::Empty);
        }
        if count > self.for_mediator() {
            return Err(self.full(u64::from(count)));
        }
        let first = self.card.take_run(count, align, ChunkState::Mediator).map_err(|dirty| match dirty {
            true => Error::NeedsScrub { tier: super::Tier::Card, short: count },
            false => self.full(u64::from(count)),
        })?;
        self.mediator += count;
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

    /// Chunks without an owner that the mediator can have: what is left aside for it, and the spare ones.
    #[must_use]
    pub fn for_mediator(&self) -> u32 {
        self.card.room() - self.promised - self.left_reserve()
    }

    /// Chunks of the card that are for VMs: all but the mediator's and the reserve's.
    #[must_use]
    pub fn for_vms(&self) -> u32 {
        self.card.limit() - self.mediator.max(self.set_aside) - self.parked.max(self.reserve)
    }

    /// What the mediator has not used of what is set aside for it.
    pub(super) fn left_aside(&self) -> u32 {
        self.set_aside.saturating_sub(self.mediator)
    }

    pub(super) fn full(&self, wanted: u64) -> Error {
        let (free, to_scrub) = (self.card.free(), self.card.unscrubbed());
        Error::CardFull { wanted, free, to_scrub, promised: self.promised + self.left_reserve() }
    }
}
