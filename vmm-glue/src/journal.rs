//! A client's journal: the state with which the next process continues the connection after this one was killed.
//!
//! A journal is a memory file whose descriptor the service manager keeps (`file`), together with the descriptors of the
//! connection and of all that the client has lent: files of memory, event descriptors. The manager has them before the
//! journal names them, and drops them after it no longer does. State that changes with every message, such as how far
//! the connection was received and answered, is a few words in mapped memory, and the bytes themselves are received
//! into the file. State that changes seldom (negotiation, memory, interrupts, PCI configuration) is committed whole:
//! written next to the previous commit, with a checksum over all of it, before the client has its answer.
//!
//! The next process reads it with the same checks as any saved state (`saved`), and handles unanswered messages again.
//! Its device is a new one, in the state after reset. Decision 075 (`docs/decisions`) describes the effects that a
//! client can see.

mod file;
mod saved;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags};
use saved_state::Writer;

pub(crate) use file::{Marks, Room};
pub use saved::SavedJournal;
pub(crate) use saved::{Revival, Words, read_words};

use crate::server::Keeper;
use crate::suspended_client::{Giving, ParkError};

/// Largest number of descriptors that one client's journal names: a file for each of its memory backends, three for
/// interrupts.
pub const SLOTS: u8 = 12;
/// Largest number of descriptors of one client in the store: those, the journal, and the connection.
pub const DESCRIPTORS: usize = SLOTS as usize + 2;
/// Owner of the part, in its file.
const CLIENT: u32 = 0;

/// A descriptor that a [`Keeper`] holds in addition to the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// The journal itself.
    Journal,
    /// A descriptor that the journal names by this number, below [`SLOTS`].
    Slot(u8),
}

/// A client's descriptors that another process has left with a [`Keeper`].
#[derive(Debug)]
pub struct Remains {
    /// Its connection.
    pub connection: UnixStream,
    /// The other descriptors.
    pub kept: Vec<(Kept, OwnedFd)>,
}

/// Descriptors of this process, by the keeper's slots.
#[derive(Debug, Default)]
pub(crate) struct Slots([Option<Slot>; SLOTS as usize]);

#[derive(Debug)]
struct Slot {
    /// Numbers in this process. Empty if only the keeper has it; several, of which one is open, after a restart.
    fds: Vec<RawFd>,
    /// The file, if it has an identity.
    file: Option<FileId>,
    /// Set if the current commit names it.
    named: bool,
}

impl Slot {
    /// Returns true if only the keeper has it, and no commit names it.
    fn is_spare(&self) -> bool {
        !self.named && self.fds.is_empty()
    }
}

/// Identity of a file, and its access mode. As long as the keeper has it, no other file has this identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
    access: OFlags,
}

impl FileId {
    /// Returns the identity of a memory file. Event descriptors have none here, because all of a host have the same
    /// inode.
    fn from_fd(fd: BorrowedFd<'_>) -> Option<Self> {
        let stat = rustix::fs::fstat(fd).ok()?;
        let access = rustix::fs::fcntl_getfl(fd).ok()? & OFlags::ACCMODE;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        is_file.then_some(Self { device: stat.st_dev, inode: stat.st_ino, access })
    }
}

impl Slots {
    /// Returns the slot of a descriptor, for a journal that is about to name it.
    pub fn give(&mut self, fd: BorrowedFd<'_>, keeper: &dyn Keeper) -> io::Result<u32> {
        let number = fd.as_raw_fd();
        let file = FileId::from_fd(fd);
        let find = |is: &dyn Fn(&Slot) -> bool| self.0.iter().position(|slot| slot.as_ref().is_some_and(is));
        let known = find(&|slot| slot.fds.contains(&number))
            // A file that the client has taken back, and the keeper still has.
            .or_else(|| find(&|slot| slot.fds.is_empty() && file.is_some() && slot.file == file));
        let place = match known {
            Some(place) => place,
            None => {
                let free = self.0.iter().position(Option::is_none);
                let spare = || find(&|slot| slot.is_spare());
                let free = free.or_else(|| {
                    spare().inspect(|place| {
                        keeper.give_up(Kept::Slot(u8::try_from(*place).unwrap_or(SLOTS)));
                    })
                });
                let free =
                    free.ok_or_else(|| io::Error::other(format!("it has given more than {SLOTS} descriptors")))?;
                let slot = Kept::Slot(u8::try_from(free).unwrap_or(SLOTS));
                if !keeper.keep_more(slot, fd) {
                    return Err(io::Error::other("the service manager keeps no more descriptors"));
                }
                free
            }
        };
        if let Some(slot) = self.0.get_mut(place) {
            *slot = Some(Slot { fds: vec![number], file, named: true });
        }
        u32::try_from(place).map_err(io::Error::other)
    }

    fn from_taken(taken: &[(u32, RawFd)], there: &[u8]) -> Self {
        let mut slots = Self::default();
        for at in there {
            if let Some(slot) = slots.0.get_mut(usize::from(*at)) {
                *slot = Some(Slot { fds: Vec::new(), file: None, named: false });
            }
        }
        // If a number was closed and reused, the last descriptor counts.
        for (at, fd) in taken {
            for slot in slots.0.iter_mut().flatten() {
                slot.fds.retain(|known| known != fd);
            }
            if let Some(Some(slot)) = usize::try_from(*at).ok().and_then(|at| slots.0.get_mut(at)) {
                slot.fds.push(*fd);
            }
        }
        slots
    }

    /// Drops all descriptors from the keeper.
    fn clear(&mut self, keeper: &dyn Keeper) {
        for (at, place) in (0u8..).zip(&mut self.0) {
            if place.take().is_some() {
                keeper.give_up(Kept::Slot(at));
            }
        }
    }

    fn begin(&mut self) {
        self.0.iter_mut().flatten().for_each(|slot| slot.named = false);
    }

    /// Drops unnamed descriptors from the keeper. After many changes files stay for a while, so that a client that
    /// repeatedly maps and unmaps the same memory causes no more changes.
    fn sweep(&mut self, keeper: &dyn Keeper) {
        let stays = |slot: &Slot| slot.file.is_some() && keeper.is_busy();
        for (at, place) in (0u8..).zip(&mut self.0) {
            if let Some(slot) = place.as_mut().filter(|slot| !slot.named)
                && stays(slot)
            {
                // The number may become another file's.
                slot.fds.clear();
                continue;
            }
            if place.take_if(|slot| !slot.named).is_some() {
                keeper.give_up(Kept::Slot(at));
            }
        }
    }
}

/// The journal of one client.
#[derive(Debug)]
pub(crate) struct Journal {
    keeper: Arc<dyn Keeper>,
    file: OwnedFd,
    slots: Slots,
    /// Number of the last commit.
    sequence: u64,
    /// Processes with this client that were killed.
    pub deaths: u32,
    /// PCI configuration space of the device, as far as the client writes it.
    pub words: Words,
    /// Set while the last commit is out of date.
    changed: bool,
    /// The keeper has the file.
    kept: bool,
    /// The keeper cannot keep all descriptors of the client, so the journal has ended.
    void: bool,
}

impl Journal {
    /// Creates a journal for messages of `message` bytes and `extra` more, with its room.
    pub fn new(keeper: Arc<dyn Keeper>, message: usize, extra: usize) -> io::Result<(Self, Room)> {
        let (file, room) = file::create(message, extra)?;
        Ok((Self::with(keeper, file, Slots::default()), room))
    }

    fn with(keeper: Arc<dyn Keeper>, file: OwnedFd, slots: Slots) -> Self {
        let words = Words::default();
        Self { keeper, file, slots, sequence: 0, deaths: 0, words, changed: true, kept: false, void: false }
    }

    /// Notes that the last commit is out of date.
    pub fn change(&mut self) {
        self.changed = true;
    }

    /// Returns true if there are changes to commit.
    pub fn is_changed(&self) -> bool {
        self.changed && !self.void
    }

    /// Returns true if the journal has ended.
    pub fn is_void(&self) -> bool {
        self.void
    }

    /// Number of the last commit.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Commits the state from `save`, with its descriptors. On failure, the journal ends, and the log has the reason.
    pub fn commit(&mut self, save: impl FnOnce(&mut Giving<'_>) -> Result<SavedJournal, ParkError>) {
        if !self.is_changed() {
            return;
        }
        if let Err(error) = self.write(save) {
            tracing::warn!(
                why = %error,
                "the VMM's connection is not kept for another daemon: if this one is killed, its device is gone"
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
            return Err(io::Error::other("what it has is more than a journal holds").into());
        }
        *sequence = next;
        if !self.kept {
            if !keeper.keep_more(Kept::Journal, file.as_fd()) {
                return Err(io::Error::other("the service manager keeps no more descriptors").into());
            }
            self.kept = true;
        }
        self.slots.sweep(&*self.keeper);
        self.changed = false;
        Ok(())
    }

    /// Ends the journal. The keeper still has the connection, and the next process notifies the client of its end.
    fn give_up(&mut self) {
        self.void = true;
        self.keeper.give_up(Kept::Journal);
        self.slots.clear(&*self.keeper);
    }
}

#[cfg(test)]
mod tests;
