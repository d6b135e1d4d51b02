//! Stores a client's descriptors outside this process, in numbered slots.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::fs::{FileType, OFlags};

/// Maximum number of descriptors that a client's journal refers to: its memory files and interrupt events, the files of
/// mappable regions, and the device's own journal.
pub const SLOTS: u8 = 12;

/// A descriptor that a [`Keeper`] stores in addition to the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// The journal itself.
    Journal,
    /// A descriptor that the journal refers to by this number, which is less than [`SLOTS`].
    Slot(u8),
}

/// Stores a second copy of the client's connection outside this process, so that the connection survives the process.
/// Also stores copies of further descriptors, so that another process can resume the connection from its journal.
pub trait Keeper: std::fmt::Debug + Send + Sync {
    /// Stores a copy of the connection of a new client.
    fn keep(&self, connection: BorrowedFd<'_>);

    /// Drops all copies, because the client has been notified that the connection has ended.
    fn release(&self);

    /// Returns true if the keeper stores more than the connection.
    fn keeps_more(&self) -> bool {
        false
    }

    /// Stores a copy of a descriptor, and replaces the previous descriptor with that name. Returns `false` if the copy
    /// cannot be stored.
    fn keep_more(&self, what: Kept, fd: BorrowedFd<'_>) -> bool {
        let _none = (what, fd);
        false
    }

    /// Drops the copy of a descriptor.
    fn give_up(&self, what: Kept) {
        let _none = what;
    }

    /// Returns true after many recent changes. The caller should then keep unused copies, because the client may use
    /// them again.
    fn is_busy(&self) -> bool {
        false
    }

    /// Drops all copies except that of the connection, including copies from earlier processes.
    fn give_up_more(&self) {}
}

/// Descriptors of this process, indexed by the keeper's slots.
#[derive(Debug, Default)]
pub struct Slots([Option<Slot>; SLOTS as usize]);

#[derive(Debug)]
struct Slot {
    /// Descriptor numbers in this process, or empty if only the keeper has the descriptor. After a restart, the list
    /// may have several entries, one of which is open.
    fds: Vec<RawFd>,
    /// Identity of the file, if the descriptor is a memory file.
    file: Option<FileId>,
    /// Set if the current commit refers to the descriptor.
    named: bool,
}

impl Slot {
    /// Returns true if only the keeper has the descriptor, and the current commit does not refer to it.
    fn is_spare(&self) -> bool {
        !self.named && self.fds.is_empty()
    }
}

/// Identity and access mode of a file. While the keeper has the file open, no other file has this identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
    access: OFlags,
}

impl FileId {
    /// Returns the identity of a memory file. Eventfds have no identity, because all eventfds of a host share one
    /// inode.
    fn from_fd(fd: BorrowedFd<'_>) -> Option<Self> {
        let stat = rustix::fs::fstat(fd).ok()?;
        let access = rustix::fs::fcntl_getfl(fd).ok()? & OFlags::ACCMODE;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        is_file.then_some(Self { device: stat.st_dev, inode: stat.st_ino, access })
    }
}

impl Slots {
    /// Stores a descriptor in the keeper, unless it is already there. Returns the slot, to which the caller's journal
    /// will refer.
    pub fn give(&mut self, fd: BorrowedFd<'_>, keeper: &dyn Keeper) -> io::Result<u32> {
        let number = fd.as_raw_fd();
        let file = FileId::from_fd(fd);
        let find = |is: &dyn Fn(&Slot) -> bool| self.0.iter().position(|slot| slot.as_ref().is_some_and(is));
        let known = find(&|slot| slot.fds.contains(&number))
            // Reuse the slot of a file that the client has removed but the keeper still has.
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
                    free.ok_or_else(|| io::Error::other(format!("the client uses more than {SLOTS} descriptors")))?;
                let slot = Kept::Slot(u8::try_from(free).unwrap_or(SLOTS));
                if !keeper.keep_more(slot, fd) {
                    return Err(io::Error::other("the service manager accepts no more descriptors"));
                }
                free
            }
        };
        if let Some(slot) = self.0.get_mut(place) {
            *slot = Some(Slot { fds: vec![number], file, named: true });
        }
        u32::try_from(place).map_err(io::Error::other)
    }

    /// Creates the slots from the descriptors that this process took and the numbers of the keeper's slots in use.
    #[must_use]
    pub fn from_taken(taken: &[(u32, RawFd)], there: &[u8]) -> Self {
        let mut slots = Self::default();
        for at in there {
            if let Some(slot) = slots.0.get_mut(usize::from(*at)) {
                *slot = Some(Slot { fds: Vec::new(), file: None, named: false });
            }
        }
        // If a number was closed and reused, its last entry is valid.
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
    pub fn clear(&mut self, keeper: &dyn Keeper) {
        for (at, place) in (0u8..).zip(&mut self.0) {
            if place.take().is_some() {
                keeper.give_up(Kept::Slot(at));
            }
        }
    }

    /// Starts a commit without descriptors.
    pub fn begin(&mut self) {
        self.0.iter_mut().flatten().for_each(|slot| slot.named = false);
    }

    /// Drops from the keeper the descriptors to which the commit does not refer. After many changes, keeps files for
    /// some time, so that a client that repeatedly maps and unmaps the same memory causes no further changes.
    pub fn sweep(&mut self, keeper: &dyn Keeper) {
        let stays = |slot: &Slot| slot.file.is_some() && keeper.is_busy();
        for (at, place) in (0u8..).zip(&mut self.0) {
            if let Some(slot) = place.as_mut().filter(|slot| !slot.named)
                && stays(slot)
            {
                // The number may have been reused for another file.
                slot.fds.clear();
                continue;
            }
            if place.take_if(|slot| !slot.named).is_some() {
                keeper.give_up(Kept::Slot(at));
            }
        }
    }
}
