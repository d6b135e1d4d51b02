//! State machine of a client connection, which consumes bytes and file descriptors and produces replies.
//!
//! [`Connection`] needs no socket. A server receives into [`Connection::space`], passes the length to
//! [`Connection::received`], calls [`Connection::process`] to execute the messages, and sends [`Connection::output`].
//! Memory is bounded: a connection has one input buffer, and the caller closes the connection if the output exceeds a
//! limit.

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
pub(crate) use receive::EXTRA_RECEIVE_BYTES;
pub(crate) use saved::SavedConnection;

use crate::counters::add;
use crate::device::{Device, RegionInfo};
use crate::journal::{Journal, Revival, SavedJournal, read_words};
use crate::link::{ClientInfo, Link};
use crate::options::ServerOptions;
use crate::protocol::{Command, HEADER_SIZE, Header, RegionAccess};
use receive::Receive;
use session::Session;
use vmm_memory::keeper::Keeper;

/// Maximum size of a message that can be skipped, in bytes. A longer message closes the connection.
pub const MAX_SKIP: u32 = 16 << 20;
/// Maximum number of file descriptors per message.
pub const MAX_FDS: usize = 16;
/// Output size in bytes at which [`Connection::work`] and [`Connection::handle_bytes`] stop adding output.
const FLUSH_AT: usize = 64 << 10;

/// Reasons why the server closes a connection.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum Fatal {
    #[error("a message of {0} bytes is shorter than its 16-byte header")]
    Undersized(u32),
    #[error("a message of {0} bytes exceeds the {MAX_SKIP} bytes that can be skipped")]
    Oversized(u32),
    #[error("the first message was {0}, not VERSION")]
    NotNegotiated(Command),
    #[error("version negotiation failed: {0}")]
    Version(String),
    #[error("the client does not read its replies: {0} bytes are queued")]
    NotReading(usize),
    #[error("the VMM withdrew mapped guest memory at {gpa:#x} (file truncated, or page not loadable on the host)")]
    Withdrawn { gpa: u64 },
}

/// Returns the maximum size of a message that is received in full, in bytes.
pub(crate) fn max_message(max_transfer: usize) -> usize {
    HEADER_SIZE.saturating_add(size_of::<RegionAccess>()).saturating_add(max_transfer)
}

/// Result of processing messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All complete messages have been handled.
    Done,
    /// The output must be sent before [`Connection::process`] is called again.
    Paused,
}

/// A client's connection.
#[derive(Debug)]
pub struct Connection {
    receive: Receive,
    out: Outbox,
    session: Session,
    /// State from which the next process resumes if this process is killed.
    journal: Option<Journal>,
    /// The device's own journal, to which the connection's journal refers.
    device_journal: Option<Arc<OwnedFd>>,
    /// Set until the connection is resumed, if a killed process served the client's previous device.
    revival: Option<Revival>,
}

impl Connection {
    /// Creates a connection that has received no data yet.
    pub fn new(link: Link, options: &ServerOptions, client: ClientInfo) -> Self {
        let max_transfer = options.max_transfer.clamp(4 << 10, 1 << 20);
        Self {
            receive: Receive::new(max_message(max_transfer)),
            out: Outbox::default(),
            session: Session::new(link, options.memory, max_transfer, client),
            journal: None,
            device_journal: None,
            revival: None,
        }
    }

    /// Creates the connection's journal if it has none, and if the keeper and the device support journals.
    pub(crate) fn keep_journal(&mut self, keeper: &Arc<dyn Keeper>, device: &mut dyn Device) {
        if self.journal.is_some() || !keeper.keeps_more() {
            return;
        }
        // Drop the descriptor slots of the previous process, because this process cannot identify them.
        keeper.give_up_more();
        if !device.is_renewable() {
            tracing::warn!(
                "if this daemon is killed, the VMM loses its device: another daemon cannot restore the device's state"
            );
            return;
        }
        match Journal::new(Arc::clone(keeper), self.receive.max_message(), EXTRA_RECEIVE_BYTES) {
            Ok((journal, room)) => {
                self.receive.move_into(room);
                self.journal = Some(journal);
                self.device_journal = device.journal();
                self.session.configured = true;
                self.commit_journal(device);
            }
            Err(error) => tracing::warn!(%error, "the VMM's connection has no journal"),
        }
    }

    /// Continues the journal of a killed process.
    pub(crate) fn goes_on_with(&mut self, journal: Journal, revival: Revival) {
        self.journal = Some(journal);
        self.revival = Some(revival);
    }

    /// Commits changes, and marks messages as handled. Called just before their replies are sent.
    fn commit_journal(&mut self, device: &mut dyn Device) {
        let Some(journal) = &mut self.journal else { return };
        if std::mem::take(&mut self.session.configured) && self.session.is_negotiated() {
            self.session.complete_deferred(device);
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
        let Self { receive, out, session, journal, device_journal, revival: _ } = self;
        let Some(journal) = journal.as_mut().filter(|journal| journal.is_changed()) else { return };
        let (deaths, words) = (journal.deaths, journal.words.clone());
        journal.commit(|giving| {
            let mut connection = SavedConnection::from_parts(receive, out, session, giving)?;
            connection.forget_input();
            let link = session.link.save(giving)?;
            let regions = session.regions.iter().map(RegionInfo::size).collect();
            let mut files = Vec::new();
            for (region, info) in (0u8..).zip(&session.regions) {
                if let Some(mappable) = info.mappable() {
                    files.push((region, giving.give(mappable.file())?));
                }
            }
            let device = device_journal.as_ref().map(|file| giving.give(file)).transpose()?;
            let position = receive.position();
            Ok(SavedJournal { sequence: 0, position, deaths, words, regions, connection, link, files, device })
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

    /// Records that the socket has accepted only part of [`Self::output`], and commits the rest.
    pub(crate) fn left_unsent(&mut self) {
        if let Some(journal) = &mut self.journal {
            journal.change();
            self.commit();
        }
    }

    /// Returns the buffer for received bytes. It is not empty after [`Self::process`] has returned [`Progress::Done`].
    pub fn space(&mut self) -> &mut [u8] {
        self.receive.space()
    }

    /// Records that the first `len` bytes of [`Self::space`] were received, with descriptors. `truncated` is true if
    /// some descriptors did not fit.
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

    /// Executes complete messages until at least `limit` bytes of output are queued.
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

    /// Completes the write that the device deferred until after the reply, if any. Call this whenever [`Self::output`]
    /// has been sent. All other methods that call the device first complete the write.
    pub fn complete_deferred(&mut self, device: &mut dyn Device) {
        self.session.complete_deferred(device);
    }

    /// Feeds bytes as if received from a socket, and executes complete messages. Stops early if output should be sent.
    /// Returns the unconsumed bytes.
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

    /// Returns the queued output.
    pub fn output(&mut self) -> &mut Outbox {
        &mut self.out
    }

    /// Returns the number of queued output bytes.
    pub fn pending_output(&self) -> usize {
        self.out.len()
    }

    /// Returns true if version negotiation has succeeded.
    pub fn is_negotiated(&self) -> bool {
        self.session.is_negotiated()
    }

    /// Handles the link's requests: sends requests to the client, and checks for private or withdrawn memory.
    pub fn work(&mut self, device: &mut dyn Device) -> Result<(), Fatal> {
        self.session.complete_deferred(device);
        self.session.work(device, &mut self.out, FLUSH_AT)?;
        self.mark();
        Ok(())
    }

    /// Continues a [restored](Self::restored) connection on the current thread.
    ///
    /// # Errors
    /// Returns an error if the client of a killed process cannot use this device.
    pub(crate) fn resume(&mut self, device: &mut dyn Device) -> Result<(), Invalid> {
        self.session.resume(device);
        let Some(revival) = self.revival.take() else { return Ok(()) };
        if self.is_negotiated() {
            revival.carry_out(device, &self.session.link)?;
            self.session.regions = device.regions();
            self.device_journal = device.journal();
            let counters = self.session.link.counters();
            add(&counters.daemon_deaths_survived, u64::from(revival.deaths));
            let ClientInfo { pid, .. } = self.session.client;
            let device = match revival.keeps_state() {
                true => "its device continues",
                false => "its device was reset; the guest must reload its driver",
            };
            tracing::warn!(
                pid,
                deaths = revival.deaths,
                "the previous daemon was killed: its VMM continues, and {device}"
            );
        }
        // Commit the new number of killed processes, and drop unused descriptors.
        if let Some(journal) = &mut self.journal {
            journal.change();
            self.commit();
        }
        Ok(())
    }

    /// Closes the connection: drops the client's memory and interrupts, and notifies the device.
    pub fn close(mut self, device: &mut dyn Device) {
        self.session.close(device);
    }
}

/// A received message.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    pub header: Header,
    /// Message body, excluding the header. Empty if `oversized`.
    pub body: &'a [u8],
    pub fds: Vec<OwnedFd>,
    /// Set if some descriptors were lost.
    pub truncated: bool,
    /// Set if the body exceeds the size limit and is skipped.
    pub oversized: bool,
}

#[cfg(test)]
mod tests;
