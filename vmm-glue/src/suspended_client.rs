//! A suspended client, which a server can resume in this process or in another.
//!
//! The client notices only a delay: its connection and state are preserved, and its messages wait in the socket.
//! Descriptors are passed to another process directly. The rest is plain data, which, like all data from another
//! process, is validated on restore.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use saved_state::{Invalid, first_version};
use serde::{Deserialize, Serialize};

use crate::connection::{Connection, SavedConnection};
use crate::link::{Link, SavedLink};
use crate::options::ServerOptions;
use vmm_memory::descriptors::{Given, Giving, ParkError};

/// Maximum number of connections that have sent no data.
const WAITING_MAX: usize = 16;
/// Maximum number of descriptors that a client has sent or will receive: one per memory region and per interrupt.
pub(crate) const DESCRIPTORS_MAX: usize = 1 << 14;

/// A server's suspended clients. Dropping this value does not notify the clients, because another process continues
/// their connections.
#[derive(Debug, Default)]
pub struct SuspendedClient {
    /// The client being served.
    pub(crate) active: Option<(UnixStream, Connection)>,
    /// Connections that have sent no data, oldest first.
    pub(crate) waiting: Vec<UnixStream>,
}

/// Saved form of a server's clients, excluding their descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedClients {
    active: Option<SavedClient>,
    /// Descriptor names of the connections that have sent no data.
    waiting: Vec<u32>,
}

first_version!(SavedClients, "vmm-glue");

/// The client being served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedClient {
    /// Name of the connection's descriptor.
    stream: u32,
    connection: SavedConnection,
    link: SavedLink,
}

impl SuspendedClient {
    /// Returns true if a client is connected.
    pub fn is_connected(&self) -> bool {
        self.active.is_some()
    }

    /// Saves the clients and the state of `link`. Duplicates all their descriptors.
    ///
    /// # Errors
    /// Returns an error if a descriptor cannot be passed to another process.
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

    /// Restores the clients with their `descriptors`. Restores their link state to `link`, which must be new.
    ///
    /// # Errors
    /// Returns an error if the saved state is invalid, or the clients' memory cannot be mapped.
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
