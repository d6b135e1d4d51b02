//! File descriptors that are passed to another process.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use saved_state::Invalid;
use thiserror::Error;

use crate::keeper::{Keeper, SLOTS, Slots};

/// Reasons why a client cannot be handed over or restored.
#[derive(Debug, Error)]
pub enum ParkError {
    /// The saved state is invalid.
    #[error("saved client rejected: {0}")]
    Invalid(#[from] Invalid),
    /// The client's memory, or one of its interrupts, cannot be passed to another process.
    #[error("the client's {0} cannot be passed to another process")]
    Stays(&'static str),
    /// The operating system failed to create or duplicate a descriptor.
    #[error("a client's descriptor: {0}")]
    Io(#[from] io::Error),
}

/// Destination of saved descriptors, which assigns a name to each descriptor.
#[derive(Debug)]
pub enum Giving<'a> {
    /// Duplicates descriptors for another process. A descriptor's name is its index.
    Over(Vec<OwnedFd>),
    /// Stores a duplicate of each descriptor in a keeper. A descriptor's name is its slot.
    Slots(&'a mut Slots, &'a dyn Keeper),
}

impl<'a> Giving<'a> {
    /// Creates a destination that stores descriptors in a keeper.
    pub fn slots(slots: &'a mut Slots, keeper: &'a dyn Keeper) -> Self {
        Self::Slots(slots, keeper)
    }

    /// Duplicates a descriptor for the destination. Returns its name.
    pub fn give(&mut self, fd: impl AsFd) -> io::Result<u32> {
        match self {
            Self::Over(fds) => {
                let name = u32::try_from(fds.len()).unwrap_or(u32::MAX);
                fds.push(fd.as_fd().try_clone_to_owned()?);
                Ok(name)
            }
            Self::Slots(slots, keeper) => slots.give(fd.as_fd(), *keeper),
        }
    }

    /// Returns the descriptors to hand over.
    pub fn over(self) -> Vec<OwnedFd> {
        match self {
            Self::Over(fds) => fds,
            Self::Slots(..) => Vec::new(),
        }
    }
}

/// Descriptors that were handed over.
#[derive(Debug)]
pub struct Given {
    fds: Vec<Option<OwnedFd>>,
    /// Descriptors already taken, as names and descriptor numbers in this process.
    taken: RefCell<Vec<(u32, RawFd)>>,
}

impl Given {
    /// Creates the set from another process's descriptors.
    pub fn all(fds: Vec<OwnedFd>) -> Self {
        Self { fds: fds.into_iter().map(Some).collect(), taken: RefCell::default() }
    }

    /// Creates the set from the slots of a keeper.
    pub fn slots(slots: [Option<OwnedFd>; SLOTS as usize]) -> Self {
        Self { fds: slots.into(), taken: RefCell::default() }
    }

    /// Returns the names and numbers of the taken descriptors, in order.
    pub fn taken(self) -> Vec<(u32, RawFd)> {
        self.taken.into_inner()
    }

    /// Returns a duplicate of the descriptor named `name`.
    pub fn take(&self, name: u32) -> Result<OwnedFd, ParkError> {
        let fd = usize::try_from(name).ok().and_then(|place| self.fds.get(place)?.as_ref());
        let fd = fd.ok_or_else(|| Invalid::new(format_args!("descriptor {name} is missing")))?;
        let fd = fd.try_clone()?;
        self.taken.borrow_mut().push((name, fd.as_raw_fd()));
        Ok(fd)
    }

    /// Returns the descriptor named `name` as a connection.
    pub fn stream(&self, name: u32) -> Result<UnixStream, ParkError> {
        let fd = self.take(name)?;
        let kind = rustix::net::sockopt::socket_type(&fd).map_err(io::Error::from)?;
        Invalid::unless(kind == rustix::net::SocketType::STREAM, || format!("descriptor {name} is not a connection"))?;
        let stream = UnixStream::from(fd);
        stream.set_nonblocking(true)?;
        Ok(stream)
    }
}
