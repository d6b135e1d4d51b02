//! One client's state machine: bytes and file descriptors in, replies out.
//!
//! [`Connection`] needs no socket. A server receives into [`Connection::space`], reports by [`Connection::received`], lets
//! [`Connection::process`] carry the messages out and sends what [`Connection::output`] holds. Memory is bounded: one
//! buffer for what comes in, and a caller that ends the connection when the output grows beyond its limit.

mod migration;
mod outbox;
mod receive;
mod regions;
mod saved;
mod session;
mod share;
mod version;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use saved_state::Invalid;
use thiserror::Error;

pub use outbox::Outbox;
pub(crate) use receive::EXTRA;
pub(crate) use saved::SavedConnection;

use crate::counters::add;
use crate::device::{Device, RegionInfo};
use crate::journal::{Journal, Revival, SavedJournal, read_words};
use crate::link::{ClientInfo, Link};
use crate::protocol::{Command, HEADER_SIZE, Header, RegionAccess};
use crate::server::{Keeper, ServerOptions};
use receive::Receive;
use session::Session;

/// Largest message that is skipped rather than taken as a broken stream, in bytes.
pub const MAX_SKIP: u32 = 16 << 20;
/// Most file descriptors of one message.
pub const MAX_FDS: usize = 16;
/// Output beyond which no requests to the client are added, in bytes.
const FLUSH_AT: usize = 64 << 10;

/// Why the server ends a connection.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Fatal {
    #[error("a message of {0} bytes: less than its header of 16")]
    Undersized(u32),
    #[error("a message of {0} bytes: more than the {MAX_SKIP} that can be skipped")]
    Oversized(u32),
    #[error("the first message was {0}, not VERSION")]
    NotNegotiated(Command),
    #[error("version negotiation failed: {0}")]
    Version(String),
    #[error("the client does not read its replies: {0} bytes wait")]
    NotReading(usize),
    #[error(
        "the VMM withdrew guest memory at {gpa:#x} that was mapped (file cut short, or the host cannot provide it)"
    )]
    Withdrawn { gpa: u64 },
}

/// Bytes of the longest message that is taken whole.
pub(crate) fn max_message(max_transfer: usize) -> usize {
    HEADER_SIZE.saturating_add(size_of::<RegionAccess>()).saturating_add(max_transfer)
}

/// Says whether everything that came has been handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All complete messages are handled.
    Done,
    /// Output should be sent before [`Connection::process`] is called again.
    Paused,
}

/// One client.
#[derive(Debug)]
pub struct Connection {
    receive: Receive,
    out: Outbox,
    session: Session,
    /// For a process that goes on when this one was killed.
    journal: Option<Journal>,
    /// The client had another device, of a process that was killed.
    revival: Option<Revival>,
}

impl Connection {
    /// A client that has not said anything yet.
    pub fn new(link: Link, options: &ServerOptions, client: ClientInfo) -> Self {
        let max_transfer = options.max_transfer.clamp(4 << 10, 1 << 20);
        Self {
            receive: Receive::new(max_message(max_transfer)),
            out: Outbox::default(),
            session: Session::new(link, options.memory, max_transfer, client),
            journal: None,
            revival: None,
        }
    }

    /// Has a journal kept from now on, if there is none.
    pub(crate) fn keep_journal(&mut self, keeper: &Arc<dyn Keeper>, device: &mut dyn Device) {
        if self.journal.is_some() || !keeper.keeps_more() {
            return;
        }
        // Those of a process before this one, whose numbers nobody knows here.
        keeper.give_up_more();
        if !device.is_renewable() {
            tracing::warn!("if this daemon is killed, the VMM has lost its device: another could not have it as it is");
            return;
        }
        match Journal::new(Arc::clone(keeper), self.receive.max_message(), EXTRA) {
            Ok((journal, room)) => {
                self.receive.move_into(room);
                self.journal = Some(journal);
                self.session.configured = true;
                self.commit_journal(device);
            }
            Err(error) => tracing::warn!(%error, "the VMM's connection has no journal"),
        }
    }

    /// Goes on with a journal of a process that was killed.
    pub(crate) fn goes_on_with(&mut self, journal: Journal, revival: Revival) {
        self.journal = Some(journal);
        self.revival = Some(revival);
    }

    /// Commits what has changed, and marks as handled what was: the answers are about to be sent.
    fn commit_journal(&mut self, device: &mut dyn Device) {
        let Some(journal) = &mut self.journal else { return };
        if std::mem::take(&mut self.session.configured) && self.session.is_negotiated() {
            let words = read_words(device);
            if words != journal.words {
                journal.words = words;
                journal.change();
            }
        }
        let gave = self.receive.take_gave();
        if std::mem::take(&mut self.session.changed) || gave {
            journal.change();
        }
        self.commit();
        self.mark();
    }

    fn commit(&mut self) {
        let Self { receive, out, session, journal, revival: _ } = self;
        let Some(journal) = journal.as_mut().filter(|journal| journal.is_changed()) else { return };
        let (deaths, words) = (journal.deaths, journal.words.clone());
        journal.commit(|giving| {
            let mut connection = SavedConnection::of((&*receive, &*out, &*session), giving)?;
            connection.forget_input();
            let link = session.link.save(giving)?;
            let regions = session.regions.iter().map(RegionInfo::size).collect();
            let mut files = Vec::new();
            for (region, info) in (0u8..).zip(&session.regions) {
                if let Some(mappable) = info.mappable() {
                    files.push((region, giving.give(mappable.file())?));
                }
            }
            let position = receive.position();
            Ok(SavedJournal { sequence: 0, position, deaths, words, regions, connection, link, files })
        });
        if journal.is_void() {
            receive.move_out();
            self.journal = None;
        }
    }

    fn mark(&mut self) {
        if let Some(journal) = &self.journal {
            self.receive.mark_sent(journal.sequence(), self.session.link.dma().next_id());
        }
    }

    /// The socket has not taken all of [`Self::output`]: the rest is committed.
    pub(crate) fn left_unsent(&mut self) {
        if let Some(journal) = &mut self.journal {
            journal.change();
            self.commit();
        }
    }

    /// Returns where the next bytes belong; not empty after [`Self::process`] returned [`Progress::Done`].
    pub fn space(&mut self) -> &mut [u8] {
        self.receive.space()
    }

    /// `len` bytes were put at the start of [`Self::space`], and descriptors came with them. `truncated`: more came than
    /// there was room for.
    pub fn received(&mut self, len: usize, fds: Vec<OwnedFd>, truncated: bool) {
        let descriptors = !fds.is_empty() || truncated;
        let stray = self.receive.commit(len, fds, truncated);
        self.session.count_received(len, stray);
        if let Some(journal) = self.journal.as_mut().filter(|_| descriptors) {
            journal.change();
            self.commit();
        }
        self.receive.mark(true);
    }

    /// Carries out messages that are complete, until `limit` bytes of output or more wait.
    pub fn process(&mut self, device: &mut dyn Device, limit: usize) -> Result<Progress, Fatal> {
        let mut progress = Progress::Paused;
        while self.out.len() < limit {
            let Some(message) = self.receive.next()? else {
                progress = Progress::Done;
                break;
            };
            self.session.handle(device, message, &mut self.out)?;
        }
        self.commit_journal(device);
        Ok(progress)
    }

    /// Has the device do what it has left of a write whose answer was sent. Belongs behind each sending of [`Self::output`].
    pub fn settle(&mut self, device: &mut dyn Device) {
        self.session.settle(device);
    }

    /// Takes bytes as they might come from a socket, and carries out what is complete. Stops early, and says so, when
    /// output should be sent; bytes that were not taken are returned.
    pub fn handle_bytes<'a>(
        &mut self,
        device: &mut dyn Device,
        bytes: &'a [u8],
        fds: Vec<OwnedFd>,
    ) -> Result<&'a [u8], Fatal> {
        let mut fds = Some(fds);
        let mut rest = bytes;
        loop {
            let space = self.space();
            let len = space.len().min(rest.len());
            let (head, tail) = rest.split_at(len);
            if let Some(place) = space.get_mut(..len) {
                place.copy_from_slice(head);
            }
            self.received(len, fds.take().unwrap_or_default(), false);
            rest = tail;
            if self.process(device, FLUSH_AT)? == Progress::Paused || rest.is_empty() {
                return Ok(rest);
            }
        }
    }

    /// Returns what waits to be sent.
    pub fn output(&mut self) -> &mut Outbox {
        &mut self.out
    }

    /// Bytes that wait to be sent.
    pub fn pending_output(&self) -> usize {
        self.out.len()
    }

    /// Returns whether version negotiation has succeeded.
    pub fn is_negotiated(&self) -> bool {
        self.session.is_negotiated()
    }

    /// Does what the link asks for: sends requests to the client, looks for private or withdrawn memory.
    pub fn work(&mut self, device: &mut dyn Device) -> Result<(), Fatal> {
        self.session.work(device, &mut self.out, FLUSH_AT)?;
        self.mark();
        Ok(())
    }

    /// Goes on with a connection that was [restored](Self::restored), on the thread that serves it from now on.
    ///
    /// # Errors
    /// If the device is none that the client of a process that was killed could go on with.
    pub(crate) fn resume(&mut self, device: &mut dyn Device) -> Result<(), Invalid> {
        self.session.resume(device);
        let Some(revival) = self.revival.take() else { return Ok(()) };
        if self.is_negotiated() {
            revival.carry_out(device, &self.session.link)?;
            // With the files that the client has.
            self.session.regions = device.regions();
            let counters = self.session.link.counters();
            add(&counters.daemon_deaths_survived, u64::from(revival.deaths));
            let ClientInfo { pid, .. } = self.session.client;
            tracing::warn!(
                pid,
                deaths = revival.deaths,
                "the daemon before this one was killed: its VMM goes on, and its device is as after a reset; the guest has to load \
                 its driver anew"
            );
        }
        // With this process's count of deaths, and without what was of no use.
        if let Some(journal) = &mut self.journal {
            journal.change();
            self.commit();
        }
        Ok(())
    }

    /// Ends the connection: takes the client's memory and interrupts away and tells the device.
    pub fn close(mut self, device: &mut dyn Device) {
        self.session.close(device);
    }
}

/// A message as it came.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub header: Header,
    /// Without the header; empty if `oversized`.
    pub body: &'a [u8],
    pub fds: Vec<OwnedFd>,
    /// Some descriptors were lost.
    pub truncated: bool,
    /// The body is larger than any that is taken, and is skipped.
    pub oversized: bool,
}

#[cfg(test)]
mod tests;
