//! A server's client at rest, for the server to go on with, in this process or in another.
//!
//! What the client sees is that time passes: its connection stays, what it has said stands, and what it says meanwhile waits in
//! the socket. In another process the descriptors stand for themselves; the rest is plain data, which is checked when it is read,
//! as all that another process says.

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

/// Most connections that have not said anything.
const WAITING_MAX: usize = 16;
/// Most descriptors that a client has given or waits for: each region of memory, each interrupt.
pub(crate) const DESCRIPTORS_MAX: usize = 1 << 14;

/// The clients of a server at rest. When it is dropped nothing is said to them: who has their connections goes on with them.
#[derive(Debug, Default)]
pub struct Parked {
    /// The client that is served.
    pub(crate) active: Option<(UnixStream, Connection)>,
    /// Connections that have not said anything, the oldest first.
    pub(crate) waiting: Vec<UnixStream>,
}

/// The clients of a server as they are saved, beside their descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedClients {
    active: Option<SavedClient>,
    /// Descriptors of connections that have not said anything.
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

/// Reason that a client cannot be handed over, or taken over.
#[derive(Debug, Error)]
pub enum ParkError {
    /// The saved state is none that there can be.
    #[error("a saved client is refused: {0}")]
    Invalid(#[from] Invalid),
    /// The client's memory, or one of its interrupts, is none that another process could have.
    #[error("the client's {0} cannot be handed to another process")]
    Stays(&'static str),
    /// The operating system refuses a descriptor.
    #[error("a client's descriptor: {0}")]
    Io(#[from] io::Error),
}

/// The way of descriptors that are named.
#[derive(Debug)]
pub(crate) enum Giving<'a> {
    /// Another of each goes over, named by its place.
    Over(Vec<OwnedFd>),
    /// A keeper has another of each, once, named by its slot.
    Slots(&'a mut Slots, &'a dyn Keeper),
}

impl<'a> Giving<'a> {
    /// To a keeper.
    pub(crate) fn slots(slots: &'a mut Slots, keeper: &'a dyn Keeper) -> Self {
        Self::Slots(slots, keeper)
    }

    /// Gives another descriptor of a file; its name.
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

    /// Those that go over.
    pub(crate) fn over(self) -> Vec<OwnedFd> {
        match self {
            Self::Over(fds) => fds,
            Self::Slots(..) => Vec::new(),
        }
    }
}

/// Descriptors that came over.
#[derive(Debug)]
pub(crate) struct Given {
    fds: Vec<Option<OwnedFd>>,
    /// Those that were taken: name, and number in this process.
    taken: RefCell<Vec<(u32, RawFd)>>,
}

impl Given {
    /// Those of another process.
    pub(crate) fn all(fds: Vec<OwnedFd>) -> Self {
        Self { fds: fds.into_iter().map(Some).collect(), taken: RefCell::default() }
    }

    /// Those of a keeper's slots.
    pub(crate) fn slots(slots: [Option<OwnedFd>; SLOTS as usize]) -> Self {
        Self { fds: slots.into(), taken: RefCell::default() }
    }

    /// Those that were taken, in order.
    pub(crate) fn taken(self) -> Vec<(u32, RawFd)> {
        self.taken.into_inner()
    }

    /// Another descriptor of the one with that name.
    pub(crate) fn take(&self, name: u32) -> Result<OwnedFd, ParkError> {
        let fd = usize::try_from(name).ok().and_then(|place| self.fds.get(place)?.as_ref());
        let fd = fd.ok_or_else(|| Invalid::new(format_args!("descriptor {name} did not come along")))?;
        let fd = fd.try_clone()?;
        self.taken.borrow_mut().push((name, fd.as_raw_fd()));
        Ok(fd)
    }

    /// A connection.
    fn stream(&self, name: u32) -> Result<UnixStream, ParkError> {
        let fd = self.take(name)?;
        let kind = rustix::net::sockopt::socket_type(&fd).map_err(io::Error::from)?;
        Invalid::unless(kind == rustix::net::SocketType::STREAM, || format!("descriptor {name} is no connection"))?;
        let stream = UnixStream::from(fd);
        stream.set_nonblocking(true)?;
        Ok(stream)
    }
}

impl Parked {
    /// Returns whether there is a client.
    pub fn is_connected(&self) -> bool {
        self.active.is_some()
    }

    /// Writes the clients down, with what is behind `link`, and gives another descriptor of all that they have.
    ///
    /// # Errors
    /// When another process could not have it.
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

    /// The clients as they were, with their `descriptors`; what was behind the link is behind `link`, which is new.
    ///
    /// # Errors
    /// When they are none that there can be, or their memory cannot be mapped.
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
            let connection = Connection::restored(connection, &given, (link.clone(), client), options)?;
            link.restore(saved, &given, (&options.memory, client))?;
            Ok::<_, ParkError>((stream, connection))
        });
        let active = active.transpose()?;
        let waiting = waiting.into_iter().map(|name| given.stream(name)).collect::<Result<_, _>>()?;
        Ok(Self { active, waiting })
    }
}
