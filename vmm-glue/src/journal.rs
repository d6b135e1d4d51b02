//! A client's journal: the state from which the next process continues the connection if this process is killed.
//!
//! A journal is a memory file. The service manager holds the descriptors of this file, the connection, and the client's
//! memory files and eventfds. The service manager receives a descriptor before the journal refers to it, and drops it
//! after the last reference is gone. State that changes with every message, such as the received and handled parts of
//! the stream, is stored in a few words of mapped memory, and the stream is received into the file. State that rarely
//! changes (negotiation, memory, interrupts, PCI configuration) is committed as a whole: it is written next to the
//! previous commit, with a checksum, before the server replies to the client.
//!
//! The next process validates the journal like any saved state (`saved`), and handles again the messages to which no
//! reply was sent. Its device is new, and in the reset state unless it resumes from its own journal. Decision 075
//! (`docs/decisions`) describes the effects that a client can observe.

mod file;
mod saved;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use saved_state::Writer;

pub(crate) use file::{Marks, Room};
pub use saved::SavedJournal;
pub(crate) use saved::{Revival, Words, read_words};

use vmm_memory::descriptors::{Giving, ParkError};
use vmm_memory::keeper::{Keeper, Slots};
pub use vmm_memory::keeper::{Kept, SLOTS};

/// Maximum number of stored descriptors of a client: its slots, the journal, and the connection.
pub const DESCRIPTORS: usize = SLOTS as usize + 2;
/// Owner ID of a client's part in the journal file.
const CLIENT: u32 = 0;

/// A client's descriptors that a previous process stored in a [`Keeper`].
#[derive(Debug)]
pub struct Remains {
    /// The client's connection.
    pub connection: UnixStream,
    /// The other descriptors.
    pub kept: Vec<(Kept, OwnedFd)>,
}

/// A client's journal.
#[derive(Debug)]
pub(crate) struct Journal {
    keeper: Arc<dyn Keeper>,
    file: OwnedFd,
    slots: Slots,
    /// Number of the latest commit.
    sequence: u64,
    /// Number of processes that were killed while they served this client.
    pub deaths: u32,
    /// Saved dwords of the device's PCI configuration space.
    pub words: Words,
    /// Set if the latest commit is out of date.
    changed: bool,
    /// Set if the keeper has stored the file.
    kept: bool,
    /// Set if the journal has ended because a commit failed.
    void: bool,
}

impl Journal {
    /// Creates a journal whose buffer has space for messages of `message` bytes, and for `extra` more bytes.
    pub fn new(keeper: Arc<dyn Keeper>, message: usize, extra: usize) -> io::Result<(Self, Room)> {
        let (file, room) = file::create(message, extra)?;
        Ok((Self::with(keeper, file, Slots::default()), room))
    }

    fn with(keeper: Arc<dyn Keeper>, file: OwnedFd, slots: Slots) -> Self {
        let words = Words::default();
        Self { keeper, file, slots, sequence: 0, deaths: 0, words, changed: true, kept: false, void: false }
    }

    /// Records that the latest commit is out of date.
    pub fn change(&mut self) {
        self.changed = true;
    }

    /// Returns true if changes must be committed.
    pub fn is_changed(&self) -> bool {
        self.changed && !self.void
    }

    /// Returns true if the journal has ended.
    pub fn is_void(&self) -> bool {
        self.void
    }

    /// Returns the number of the latest commit.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Commits the state that `save` returns, with its descriptors. On failure, ends the journal and logs the reason.
    pub fn commit(&mut self, save: impl FnOnce(&mut Giving<'_>) -> Result<SavedJournal, ParkError>) {
        if !self.is_changed() {
            return;
        }
        if let Err(error) = self.write(save) {
            tracing::warn!(
                why = %error,
                "the VMM's connection is not preserved for another daemon: if this daemon is killed, the VMM loses \
                 its device"
            );
            self.give_up();
        }
    }

    fn write(
        &mut self,
        save: impl FnOnce(&mut Giving<'_>) -> Result<SavedJournal, ParkError>,
    ) -> Result<(), ParkError> {
        let Self { keeper, file, slots, sequence, .. } = self;
        slots.begin();
        let next = sequence.saturating_add(1);
        let saved = SavedJournal { sequence: next, ..save(&mut Giving::slots(slots, &**keeper))? };
        let mut identity = [0; 16];
        let (number, _) = identity.split_at_mut(8);
        number.copy_from_slice(&next.to_le_bytes());
        let mut writer = Writer::new(identity);
        writer.put(CLIENT, &saved).map_err(io::Error::other)?;
        if !file::write_half(file.as_fd(), next, &writer.finish())? {
            return Err(io::Error::other("the state exceeds the journal's capacity").into());
        }
        *sequence = next;
        if !self.kept {
            if !keeper.keep_more(Kept::Journal, file.as_fd()) {
                return Err(io::Error::other("the service manager accepts no more descriptors").into());
            }
            self.kept = true;
        }
        self.slots.sweep(&*self.keeper);
        self.changed = false;
        Ok(())
    }

    /// Ends the journal. The keeper still holds the connection, which the next process closes, so that the client
    /// notices.
    fn give_up(&mut self) {
        self.void = true;
        self.keeper.give_up(Kept::Journal);
        self.slots.clear(&*self.keeper);
    }
}

#[cfg(test)]
mod tests;
