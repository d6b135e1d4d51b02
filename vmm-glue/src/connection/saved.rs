//! Saved form of a client connection. The link saves the client's memory and interrupts.

use saved_state::Invalid;
use serde::{Deserialize, Serialize};

use super::outbox::SavedOutbox;
use super::receive::{Receive, SavedReceive};
use super::session::Session;
use super::version::Peer;
use super::{Connection, MAX_SKIP, Outbox, max_message};
use crate::journal::Room;
use crate::link::{ClientInfo, Link};
use crate::options::ServerOptions;
use vmm_memory::descriptors::{Given, Giving, ParkError};

/// Permitted values of the maximum size of the data in one message, in bytes.
const TRANSFER: std::ops::RangeInclusive<usize> = (4 << 10)..=(1 << 20);

/// Saved form of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedConnection {
    receive: SavedReceive,
    out: SavedOutbox,
    /// Maximum size of the data in one message in bytes, as negotiated with the client.
    max_transfer: u32,
    /// Properties of the client, set after negotiation.
    peer: Option<SavedPeer>,
    refused: u64,
}

/// Properties of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedPeer {
    minor: u16,
    max_transfer: u32,
    takes_fds: bool,
    complete: bool,
}

impl SavedConnection {
    /// Creates the saved form from a connection's parts.
    pub(super) fn from_parts(
        receive: &Receive,
        out: &Outbox,
        session: &Session,
        giving: &mut Giving<'_>,
    ) -> Result<Self, ParkError> {
        let Session {
            // The link is saved separately.
            link: _,
            // The next server's options determine the limits.
            limits: _,
            max_transfer,
            // The socket identifies the client.
            client: _,
            peer,
            // The device provides its regions.
            regions: _,
            // The next process restarts the check.
            share: _,
            // Withdrawals are counted per process.
            withdrawals: _,
            refused,
            // Only the journal uses these flags, and it is created again.
            changed: _,
            configured: _,
            // A device cannot be saved during a migration.
            migration: _,
            // A client is suspended only after the deferred write has completed. If the process is killed, the write is
            // lost with all other work.
            deferred: _,
        } = session;
        let peer = peer.map(|Peer { minor, max_transfer, takes_fds, complete }| SavedPeer {
            minor,
            max_transfer: u32::try_from(max_transfer).unwrap_or(u32::MAX),
            takes_fds,
            complete,
        });
        Ok(Self {
            receive: receive.save(giving)?,
            out: out.save(giving)?,
            max_transfer: u32::try_from(*max_transfer).unwrap_or(u32::MAX),
            peer,
            refused: *refused,
        })
    }

    /// Returns the maximum size of the data in one message, in bytes.
    pub(crate) fn max_transfer(&self) -> Result<usize, Invalid> {
        let max_transfer = usize::try_from(self.max_transfer).unwrap_or(usize::MAX);
        Invalid::unless(TRANSFER.contains(&max_transfer), || format!("messages of {max_transfer} bytes of data"))?;
        Ok(max_transfer)
    }

    /// Drops the output, which has been sent.
    pub(crate) fn forget_output(&mut self) {
        self.out = SavedOutbox::default();
    }

    /// Drops the unhandled bytes, which are stored elsewhere.
    pub(super) fn forget_input(&mut self) {
        self.receive.bytes.clear();
    }
}

impl Connection {
    /// Saves the connection.
    pub(crate) fn save(&self, giving: &mut Giving<'_>) -> Result<SavedConnection, ParkError> {
        let Self {
            receive,
            out,
            session,
            // The next process and its device create new journals.
            journal: _,
            device_journal: _,
            // The revival is applied before any message is handled.
            revival: _,
        } = self;
        SavedConnection::from_parts(receive, out, session, giving)
    }

    /// Restores the connection. It has no regions until [`Self::resume`] is called.
    pub(crate) fn restored(
        saved: SavedConnection,
        given: &Given,
        link: Link,
        client: ClientInfo,
        options: &ServerOptions,
    ) -> Result<Self, ParkError> {
        Self::made(saved, given, link, client, options, Receive::restored)
    }

    /// Restores the connection from its journal, whose buffer contains the connection's bytes. `position` is the end of
    /// the part of the stream that the commit covers.
    pub(crate) fn revived(
        saved: SavedConnection,
        given: &Given,
        link: Link,
        client: ClientInfo,
        options: &ServerOptions,
        room: Room,
        position: u64,
    ) -> Result<Self, ParkError> {
        Self::made(saved, given, link, client, options, |receive, given, max_message| {
            Receive::revived(receive, given, max_message, room, position)
        })
    }

    fn made(
        saved: SavedConnection,
        given: &Given,
        link: Link,
        client: ClientInfo,
        options: &ServerOptions,
        receiving: impl FnOnce(SavedReceive, &Given, usize) -> Result<Receive, ParkError>,
    ) -> Result<Self, ParkError> {
        let max_transfer = saved.max_transfer()?;
        let SavedConnection { receive, out, max_transfer: _, peer, refused } = saved;
        let size = |bytes: u32| usize::try_from(bytes).unwrap_or(usize::MAX);
        let max_message = max_message(max_transfer);
        let peer = peer.map(|SavedPeer { minor, max_transfer, takes_fds, complete }| Peer {
            minor,
            max_transfer: size(max_transfer),
            takes_fds,
            complete,
        });
        let mut session = Session::new(link, options.memory, max_transfer, client);
        (session.peer, session.refused) = (peer, refused);
        Ok(Self {
            receive: receiving(receive, given, max_message)?,
            out: Outbox::restored(out, given, options.max_queued)?,
            session,
            journal: None,
            device_journal: None,
            revival: None,
        })
    }
}

impl SavedReceive {
    /// Validates the saved values for a buffer of `room` bytes.
    pub(super) fn check(&self, room: usize) -> Result<(), Invalid> {
        let Self { bytes, skip, sets } = self;
        Invalid::unless(bytes.len() <= room && *skip <= u64::from(MAX_SKIP), || {
            format!("{} bytes of a message are unhandled, and {skip} must be skipped", bytes.len())
        })?;
        let ends = sets.iter().map(|set| set.end);
        Invalid::unless(ends.clone().is_sorted() && sets.len() <= super::receive::MAX_SETS, || {
            "message descriptors are out of order or too many".into()
        })
    }
}
