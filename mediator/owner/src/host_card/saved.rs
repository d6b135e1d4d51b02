//! All that is kept of a card, written down, for who goes on with it; and the card given away.
//!
//! What its VMs are is theirs to write down. The card itself, its memory and the host's go over as they are.

use super::HostCard;
use super::standstill::Standstill;
use crate::HostError;
use crate::work::SavedWork;
use card_memory::SavedMemory;
use card_memory::segments::SavedSegments;
use card_state::{SavedCard, SavedVm};
use saved_state::{Known, ReadError, SavedState, WriteError, Writer, first_version};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Owner of the parts that are the card's, in a file.
const CARD: u32 = 0;

/// State of a card that its owner keeps, but for what others below it save themselves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedOwner {
    /// Bytes of a chunk, to be told from what is set before anything is read by it.
    pub(super) chunk_bytes: u64,
    /// Place on the card and bytes of the chunks with the fixed structures.
    pub(super) own: (u64, u64),
    /// Bytes of a PGRAPH context, as its firmware says when it starts.
    pub(super) context_bytes: u32,
    /// Time since the card was taken over, by the host's clock.
    pub(super) host_ns: u64,
    pub(super) memory: SavedMemory,
    pub(super) work: SavedWork,
}

first_version!(SavedOwner, "owner");

/// A card and its VMs, as far as they are not each VM's own.
#[derive(Debug)]
pub struct SavedHost {
    /// The parts below the owner. VMs are among them.
    pub card: SavedCard,
    /// The owner's.
    pub(super) owner: SavedOwner,
    /// Segments that VMs share, if there are any: a program that does not know them takes over a card without.
    pub(super) segments: Option<SavedSegments>,
}

impl SavedHost {
    /// The parts that are read here, in the versions that are.
    #[must_use]
    pub fn known() -> Vec<Known> {
        let mut known = SavedCard::known();
        known.extend([Known::of::<SavedOwner>(), Known::of::<SavedSegments>()]);
        known
    }

    /// Appends all parts to a file.
    ///
    /// # Errors
    /// See [`WriteError`].
    pub fn write(&self, file: &mut Writer) -> Result<(), WriteError> {
        let Self { card, owner, segments } = self;
        card.write(file)?;
        file.put(CARD, owner)?;
        segments.as_ref().map_or(Ok(()), |segments| file.put(CARD, segments))
    }

    /// Takes all parts out of a file.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn read(file: &mut SavedState<'_>) -> Result<Self, ReadError> {
        let (mut card, owner) = (SavedCard::read(file)?, file.take(CARD)?);
        let any = !file.owners::<SavedSegments>().is_empty();
        let segments: Option<SavedSegments> = if any { Some(file.take(CARD)?) } else { None };
        card.segments = segments.as_ref().map(SavedSegments::pools).unwrap_or_default();
        Ok(Self { card, owner, segments })
    }
}

impl HostCard {
    /// Says whether another process could go on with the card and its memory; to be asked before it is made to stand still.
    ///
    /// # Errors
    /// What cannot be handed over.
    pub fn check_movable(&self) -> Result<(), HostError> {
        let state = self.lock();
        if !state.memory.is_shared() {
            return Err(HostError::Stays("host memory for its chunks is not shared"));
        }
        if !state.removed.is_empty() {
            return Err(HostError::Stays("it keeps a channel of a VM that was removed"));
        }
        if state.vram().pinned.borrows() {
            return Err(HostError::Unsettled("it still has memory of the card that a VM has left"));
        }
        Ok(())
    }

    /// The file that host memory for chunks lies in, for another process; `None` where there is no such memory.
    #[must_use]
    pub fn host_memory(&self) -> Option<Arc<File>> {
        self.lock().memory.host_file().map(Arc::clone)
    }
}

impl Standstill<'_> {
    /// Writes down what the mediator keeps of the card, with its VMs, each of which `vm` has write itself down. They are called
    /// without any lock.
    ///
    /// # Errors
    /// [`HostError::Unsettled`] when something is on its way to a VM still; see also [`HostCard::check_movable`].
    pub fn save(&self, vms: impl FnOnce() -> Result<Vec<SavedVm>, HostError>) -> Result<SavedHost, HostError> {
        self.host.check_movable()?;
        self.host.tell_ended();
        // They take up what they were told, which the card's state may change by.
        let vms = vms()?;
        let state = self.host.lock();
        let divider = state.memory.divider();
        let card = SavedCard {
            chunks: state.vram().chunks.save(),
            balancer: divider.balancer.save(),
            quanta: divider.quanta.save(),
            channels: state.work.channels().save(),
            scheduler: state.work.schedule().scheduler().save(),
            pool: state.memory.own().save(),
            // They are in the part of segments.
            segments: Vec::new(),
            vms,
        };
        let owner = SavedOwner {
            chunk_bytes: state.vram().chunks.chunk_bytes(),
            own: (self.host.own.0.0, self.host.own.1),
            context_bytes: self.host.info.context_bytes,
            host_ns: state.now_ns(),
            memory: state.memory.save(),
            work: state.work.save()?,
        };
        Ok(SavedHost { card, owner, segments: state.memory.save_segments() })
    }

    /// Gives the card away, to who goes on with what was saved: from now on this process does nothing with it any more, nor when
    /// all that there is of it here is dropped. Whoever asks for its state from then on is told that it has failed.
    pub fn give_away(self) {
        let host = self.host;
        host.lock().vram_mut().pinned.hand_over();
        host.owned.store(false, Ordering::Release);
        host.stop.store(true, Ordering::Release);
        host.fail("it was given away");
        // Who holds the card's lock ends what he does with it; who takes it later is told.
        drop(host.state.lock());
        // Who waits to move memory finds that out.
        drop(self);
        host.end_threads();
    }
}
