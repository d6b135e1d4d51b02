//! A server's suspended client, with which the server continues in this process or in another.
//!
//! The client only sees that time passes: its connection and its state stay, and its messages wait in the socket.
//! Descriptors are handed to another process directly; the rest is plain data, which is checked when it is read, like
//! all data from another process.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use saved_state::{Invalid, first_version};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::connection::{Connection, SavedConnection};
use crate::journal::{SLOTS, Slots};
use crate::link::{Link, SavedLink};
use crate::server::{Keeper, ServerOptions};

/// Largest number of connections that have sent nothing.
const WAITING_MAX: usize = 16;
/// Largest number of descriptors that a client has given or waits for: each region of memory, each interrupt.
pub(crate) const DESCRIPTORS_MAX: usize = 1 << 14;

/// The suspended clients of a server. Dropping it sends them nothing: the new holder of their connections continues.
#[derive(Debug, Default)]
pub struct SuspendedClient {
    /// The client that is served.
    pub(crate) active: Option<(UnixStream, Connection)>,
    /// Connections that have sent nothing, the oldest first.
    pub(crate) waiting: Vec<UnixStream>,
}

/// The clients of a server in their saved form, without their descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedClients {
    active: Option<SavedClient>,
    /// Descriptors of connections that have sent nothing.
    waiting: Vec<u32>,
}

first_version!(SavedClients, "vmm-glue");

/// The client that is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedClient {
    /// Descriptor of its connection.
    stream: u32,
    connection: SavedConnection,
    link: SavedLink,
}

/// Why a client cannot be handed over, or taken over.
#[derive(Debug, Error)]
pub enum ParkError {
    /// The saved state is invalid.
    #[error("a saved client is refused: {0}")]
    Invalid(#[from] Invalid),
    /// The client's memory, or one of its interrupts, cannot be handed to another process.
    #[error("the client's {0} cannot be handed to another process")]
    Stays(&'static str),
    /// The operating system refuses a descriptor.
    #[error("a client's descriptor: {0}")]
    Io(#[from] io::Error),
}

/// Destination of named descriptors.
#[derive(Debug)]
pub(crate) enum Giving<'a> {
    /// A duplicate of each is handed over, named by its index.
    Over(Vec<OwnedFd>),
    /// A keeper gets one duplicate of each, named by its slot.
    Slots(&'a mut Slots, &'a dyn Keeper),
}

impl<'a> Giving<'a> {
    /// Hands descriptors to a keeper.
    pub(crate) fn slots(slots: &'a mut Slots, keeper: &'a dyn Keeper) -> Self {
        Self::Slots(slots, keeper)
    }

    /// Hands over a duplicate of a descriptor; returns its name.
    pub(crate) fn give(&mut self, fd: impl AsFd) -> io::Result<u32> {
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
    pub(crate) fn over(self) -> Vec<OwnedFd> {
        match self {
            Self::Over(fds) => fds,
            Self::Slots(..) => Vec::new(),
        }
    }
}

/// Descriptors that were handed over.
#[derive(Debug)]
pub(crate) struct Given {
    fds: Vec<Option<OwnedFd>>,
    /// Those that were taken: name, and number in this process.
    taken: RefCell<Vec<(u32, RawFd)>>,
}

impl Given {
    /// Creates the set from another process's descriptors.
    pub(crate) fn all(fds: Vec<OwnedFd>) -> Self {
        Self { fds: fds.into_iter().map(Some).collect(), taken: RefCell::default() }
    }

    /// Creates the set from a keeper's slots.
    pub(crate) fn slots(slots: [Option<OwnedFd>; SLOTS as usize]) -> Self {
        Self { fds: slots.into(), taken: RefCell::default() }
    }

    /// Returns those that were taken, in order.
    pub(crate) fn taken(self) -> Vec<(u32, RawFd)> {
        self.taken.into_inner()
    }

    /// Returns a duplicate of the descriptor with that name.
    pub(crate) fn take(&self, name: u32) -> Result<OwnedFd, ParkError> {
        let fd = usize::try_from(name).ok().and_then(|place| self.fds.get(place)?.as_ref());
        let fd = fd.ok_or_else(|| Invalid::new(format_args!("descriptor {name} did not come along")))?;
        let fd = fd.try_clone()?;
        self.taken.borrow_mut().push((name, fd.as_raw_fd()));
        Ok(fd)
    }

    /// Returns a connection.
    fn stream(&self, name: u32) -> Result<UnixStream, ParkError> {
        let fd = self.take(name)?;
        let kind = rustix::net::sockopt::socket_type(&fd).map_err(io::Error::from)?;
        Invalid::unless(kind == rustix::net::SocketType::STREAM, || format!("descriptor {name} is no connection"))?;
        let stream = UnixStream::from(fd);
        stream.set_nonblocking(true)?;
        Ok(stream)
    }
}

impl SuspendedClient {
    /// Returns true if there is a client.
    pub fn is_connected(&self) -> bool {
        self.active.is_some()
    }

    /// Saves the clients, with the state of `link`, and duplicates all their descriptors.
    ///
    /// # Errors
    /// If it cannot be handed to another process.
    pub fn save(&self, link: &Link) -> Result<(SavedClients, Vec<OwnedFd>), ParkError> {
        let Self { active, waiting } = self;
        let mut giving = Giving::Over(Vec::new());
        let active = active.as_ref().map(|(stream, connection)| {
            let stream = giving.give(stream)?;
            let connection = connection.save(&mut giving)?;
            Ok::<_, ParkError>(SavedClient { stream, connection, link: link.save(&mut giving)? })
        });
        let active = active.transpose()?;
        let waiting = waiting.iter().map(|stream| giving.give(stream)).collect::<io::Result<_>>()?;
        Ok((SavedClients { active, waiting }, giving.over()))
    }

    /// Restores the clients with their `descriptors`; restores the state of their link into `link`, which is new.
    ///
    /// # Errors
    /// If they are invalid, or their memory cannot be mapped.
    pub fn restored(
        saved: SavedClients,
        descriptors: Vec<OwnedFd>,
        link: &Link,
        options: &ServerOptions,
    ) -> Result<Self, ParkError> {
        let SavedClients { active, waiting } = saved;
        Invalid::unless(waiting.len() <= WAITING_MAX && descriptors.len() <= DESCRIPTORS_MAX, || {
            format!("{} connections and {} descriptors are too many", waiting.len(), descriptors.len())
        })?;
        let given = Given::all(descriptors);
        let active = active.map(|SavedClient { stream, connection, link: saved }| {
            let stream = given.stream(stream)?;
            let client = crate::socket::peer(&stream);
            let connection = Connection::restored(connection, &given, link.clone(), client, options)?;
            link.restore(saved, &given, &options.memory, client)?;
            Ok::<_, ParkError>((stream, connection))
        });
        let active = active.transpose()?;
        let waiting = waiting.into_iter().map(|name| given.stream(name)).collect::<Result<_, _>>()?;
        Ok(Self { active, waiting })
    }
}
