//! A client's journal: what a next process needs to go on with the connection after this one was killed.
//!
//! A journal is a memory file of which the service manager keeps a descriptor (`file`), as it does of the connection and of all that the
//! client has given: files of memory, event descriptors. They are there before the journal names them, and are taken back after it
//! does not any more. What changes with a message of any kind, how far the connection was received and answered, is a few words in
//! mapped memory, and the bytes themselves are received into the file. What a client changes seldom (negotiation, memory, interrupts,
//! PCI configuration) is committed whole: written beside what was committed before, with a sum over all of it, before the client has
//! its answer.
//!
//! The next process reads it with the suspicion that any saved state is read with (`saved`), and handles again what was not answered.
//! Its device is another one, in the state after reset. Decision 075 (`docs/decisions`) says what a client can see of it.

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

use crate::parked::{Giving, ParkError};
use crate::server::Keeper;

/// Most descriptors that one client's journal names: a file for each of its memory backends, three for interrupts.
pub const SLOTS: u8 = 12;
/// Descriptors that one client takes in the store at most: those, the journal, and the connection.
pub const DESCRIPTORS: usize = SLOTS as usize + 2;
/// The part's owner, in its file.
const CLIENT: u32 = 0;

/// A descriptor beside the connection that a [`Keeper`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// The journal itself.
    Journal,
    /// A descriptor that the journal names by this number, below [`SLOTS`].
    Slot(u8),
}

/// Remains that another process has left of a client with a [`Keeper`].
#[derive(Debug)]
pub struct Remains {
    /// Its connection.
    pub connection: UnixStream,
    /// The descriptors beside that.
    pub kept: Vec<(Kept, OwnedFd)>,
}

/// Descriptors of this process, by what the keeper has of each.
#[derive(Debug, Default)]
pub(crate) struct Slots([Option<Slot>; SLOTS as usize]);

#[derive(Debug)]
struct Slot {
    /// Number in this process; several of a process before this one of which all but one were closed, none of what only the keeper has.
    fds: Vec<RawFd>,
    /// The file, if it is one that has an identity.
    file: Option<FileId>,
    /// Set if what is being committed names it.
    named: bool,
}

impl Slot {
    /// Returns true if only the keeper has it, and nothing names it.
    fn is_spare(&self) -> bool {
        !self.named && self.fds.is_empty()
    }
}

/// Identity of a file, and how it was opened. As long as the keeper has it, no other file has this identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
    access: OFlags,
}

impl FileId {
    /// The identity of a file of memory. All event descriptors of a host have the same inode, and none here.
    fn of(fd: BorrowedFd<'_>) -> Option<Self> {
        let stat = rustix::fs::fstat(fd).ok()?;
        let access = rustix::fs::fcntl_getfl(fd).ok()? & OFlags::ACCMODE;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        is_file.then_some(Self { device: stat.st_dev, inode: stat.st_ino, access })
    }
}

impl Slots {
    /// The slot of a descriptor, for a journal that is about to name it.
    pub fn give(&mut self, fd: BorrowedFd<'_>, keeper: &dyn Keeper) -> io::Result<u32> {
        let number = fd.as_raw_fd();
        let file = FileId::of(fd);
        let find = |is: &dyn Fn(&Slot) -> bool| self.0.iter().position(|slot| slot.as_ref().is_some_and(is));
        let known = find(&|slot| slot.fds.contains(&number))
            // A file that the client has taken back, and the keeper has still.
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

    fn of(taken: &[(u32, RawFd)], there: &[u8]) -> Self {
        let mut slots = Self::default();
        for at in there {
            if let Some(slot) = slots.0.get_mut(usize::from(*at)) {
                *slot = Some(Slot { fds: Vec::new(), file: None, named: false });
            }
        }
        // The last one of a number that was closed meanwhile, and given again.
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

    /// Takes back everything.
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

    /// Takes back unnamed descriptors. After many changes files are left for a while: a client that maps and unmaps the same
    /// memory again and again changes nothing then.
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
    /// Processes that had this client and were killed.
    pub deaths: u32,
    /// PCI configuration space of the device, as far as the client writes it.
    pub words: Words,
    /// Set while what was committed is not how it is.
    changed: bool,
    /// The keeper has the file.
    kept: bool,
    /// Something of the client's cannot be kept, so that nothing is.
    void: bool,
}

impl Journal {
    /// A new journal for messages of `message` bytes and `extra` more, with its room.
    pub fn new(keeper: Arc<dyn Keeper>, message: usize, extra: usize) -> io::Result<(Self, Room)> {
        let (file, room) = file::create(message, extra)?;
        Ok((Self::with(keeper, file, Slots::default()), room))
    }

    fn with(keeper: Arc<dyn Keeper>, file: OwnedFd, slots: Slots) -> Self {
        let words = Words::default();
        Self { keeper, file, slots, sequence: 0, deaths: 0, words, changed: true, kept: false, void: false }
    }

    /// Says that what was committed is not how it is any more.
    pub fn change(&mut self) {
        self.changed = true;
    }

    /// Returns whether there is something to commit.
    pub fn is_changed(&self) -> bool {
        self.changed && !self.void
    }

    /// Returns whether there is none any more.
    pub fn is_void(&self) -> bool {
        self.void
    }

    /// Number of the last commit.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Commits what `save` writes down, with all that it gives. If that cannot be, there is no journal from then on, and the log says why.
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

    /// There is no journal any more. The keeper has the connection still, whose end the client is told by whoever comes.
    fn give_up(&mut self) {
        self.void = true;
        self.keeper.give_up(Kept::Journal);
        self.slots.clear(&*self.keeper);
    }
}

#[cfg(test)]
mod tests;
