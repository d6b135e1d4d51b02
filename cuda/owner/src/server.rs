//! The threads around [`Core`]: one serves the sockets and makes all decisions, and workers call the driver.
//!
//! The serving thread owns the state machine, so decisions do not need a lock. This thread calls neither the driver nor
//! any other function that may block. Each worker executes its orders in sequence: one worker allocates and releases
//! pieces on the card, one allocates and releases pieces in host memory, and two copy, one in each direction.

mod clients;
mod limits;
mod links;
mod mps;
mod outbox;
mod peers;
mod workers;

use crate::core::{Action, CardConfig, Core, Event, PieceId, SessionId, SetupError};
use cuda_protocol::{FromOwner, LinkError};
use gang::CardId;
use limits::Limits;
pub use mps::MpsOptions;
use mps::MpsServers;
use outbox::{Connection, Outboxes};
use owner_driver::{CardUse, Driver, New, Users, Vault};
pub use owner_host::Rights;
use owner_host::{AccountsFile, Bound, Journal, Lines, Links, ListenError, OwnerLinks};
use peers::{News, Peers};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vram::TenantId;
use workers::Workers;

/// Maximum number of notes from other threads that are handled before processes are served.
const NOTES_AT_ONCE: usize = 256;
/// Time during which programs of an earlier owner can reconnect before other programs get memory.
// TIMEOUT: programs retry every `cuda_protocol::RECONNECT_MS`, so they have ten attempts.
const COME_BACK: Duration = Duration::from_secs(2);

/// Reason why an owner cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The card's settings are invalid.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] owner_driver::DriverError),
    /// The socket cannot be created.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Another system call failed.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

/// Tenant or user to which a connection and its log lines are attributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    /// A tenant's programs.
    Tenant(TenantId),
    /// A user's programs that do not belong to any tenant.
    User(u32),
}

type Call = Box<dyn FnOnce(&mut Core) + Send>;

/// Message that wakes the serving thread.
enum Note {
    Event(Event),
    /// A piece could not be allocated. Contains the reason.
    Failed(PieceId, String),
    /// A driver call reported that the card was reset or has failed.
    CardLost(String),
    Call(Call),
    Listen(Option<TenantId>, OwnedFd),
    Unlisten(TenantId),
    Mps(MpsOptions),
    Links(OwnerLinks),
    /// Cards to whose owners this owner must connect, each with the owner's socket.
    LinkWith(BTreeMap<CardId, PathBuf>),
    /// Processes of a tenant that has moved here from another card.
    Expect(TenantId, Vec<u32>),
    Stop,
}

/// Channel from other threads to the serving thread.
#[derive(Clone)]
struct Notes {
    sender: Sender<Note>,
    bell: Arc<OwnedFd>,
}

impl Notes {
    fn put(&self, note: Note) {
        if self.sender.send(note).is_ok() {
            // If the counter is full, the serving thread has already been signalled.
            let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
        }
    }
}

/// A running owner of a card. Dropping this value stops the owner. Programs then keep their memory and try to connect
/// to the next owner.
pub struct Server {
    notes: Notes,
    sockets: Vec<(Option<TenantId>, Bound)>,
    thread: Option<JoinHandle<()>>,
    users: Option<Users>,
    driver: Arc<dyn Driver>,
    /// Each multi-card tenant's cards, each with the path of its owner's socket.
    gangs: BTreeMap<TenantId, BTreeMap<CardId, PathBuf>>,
    /// Sockets of tenants that are moving to this card, until the owner listens on them.
    held_sockets: BTreeMap<TenantId, (PathBuf, Rights)>,
}

impl Server {
    /// Takes over a card and listens on `socket`, replacing an existing file. If `journal` is set, waits for programs
    /// of a previous owner before other programs get memory.
    ///
    /// # Errors
    /// Returns a [`ServerError`] if the owner cannot start.
    pub fn start(
        config: CardConfig,
        driver: Arc<dyn Driver>,
        socket: &Path,
        journal: Option<&Path>,
    ) -> Result<Self, ServerError> {
        let mut server = Self::start_closed(config, driver, journal)?;
        server.listen(None, socket, &Rights::default())?;
        Ok(server)
    }

    /// Takes over a card without listening. See [`Self::start`]. `path` is the path of the journal.
    ///
    /// # Errors
    /// Returns a [`ServerError`] if the owner cannot start.
    pub fn start_closed(
        mut config: CardConfig,
        driver: Arc<dyn Driver>,
        path: Option<&Path>,
    ) -> Result<Self, ServerError> {
        config.uuid = driver.device().uuid;
        let limits = Limits::raise();
        config.connections_most = config.connections_most.min(limits.connections);
        // Programs present numbers assigned by previous owners, including those of other cards. Two random ranges
        // overlap with a probability of 1 in 8 million.
        let mut core = Core::new(config.clone(), RandomState::new().hash_one(0) as u32)?;
        let journal = path.map(Journal::open);
        let accounts = path.map(AccountsFile::beside);
        if let Some(Err(error)) = accounts.as_ref().and_then(AccountsFile::read).map(|file| core.restore(&file)) {
            tracing::warn!(%error, "the accounts of the card's previous owner cannot be read: they begin at zero");
        }
        core.expect(journal.iter().flat_map(Journal::alive), COME_BACK.as_nanos() as u64);
        peers::report_rights();
        let (sender, receiver) = channel();
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?);
        let notes = Notes { sender, bell: Arc::clone(&bell) };
        let chunks = (config.card_bytes + 2 * config.host_bytes + config.host_ready_bytes) / config.chunk_bytes;
        let vault = Arc::new(Vault::new(Arc::clone(&driver), config.chunk_bytes, 2 * chunks + 64, limits.pieces)?);
        let workers = Workers::start(&vault, &notes)?;
        let serving = Serving {
            core,
            listeners: Vec::new(),
            receiver,
            bell,
            sessions: BTreeMap::new(),
            outboxes: Outboxes::default(),
            limits,
            heard: BTreeMap::new(),
            accepts_from: 0,
            notes_left: false,
            peers: Peers::new()?,
            vault,
            workers,
            mps: MpsServers::new(&notes),
            links: Links::default(),
            journal,
            accounts,
            lines: Lines::default(),
            start: Instant::now(),
            attends_until: 0,
            next: 0,
            stopping: false,
        };
        let thread = std::thread::Builder::new().name("cuda-owner".into()).spawn(move || serving.serve())?;
        let (sockets, gangs, held_sockets) = Default::default();
        Ok(Self { notes, sockets, thread: Some(thread), users: None, driver, gangs, held_sockets })
    }

    /// Monitors the processes that use the card, and their memory, through NVML and the driver. `driver` is the path of
    /// the driver's library; NVML's library is in the same folder.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be started.
    pub fn watch_users(&mut self, driver: &Path, uuid: [u8; 16]) -> Result<(), ServerError> {
        let notes = self.notes.clone();
        let report = move |found| {
            notes.put(match found {
                CardUse::Users(users, own) => Note::Event(Event::Users { users, own }),
                CardUse::InUseForNobody(bytes) => Note::Event(Event::InUseForNobody(bytes)),
                CardUse::Unknown => Note::Event(Event::Blind),
                CardUse::Lost(why) => Note::CardLost(why),
            });
        };
        self.users = Some(Users::start(driver, uuid, &self.driver, report)?);
        Ok(())
    }

    /// Starts MPS servers for share groups that need one, and takes over the servers of an earlier owner.
    pub fn serve_mps(&self, options: MpsOptions) {
        self.notes.put(Note::Mps(options));
    }

    /// Listens at `path` for programs of one tenant, or of any tenant that their user may belong to. Replaces an
    /// existing file.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub fn listen(&mut self, tenant: Option<TenantId>, path: &Path, rights: &Rights) -> Result<(), ServerError> {
        let (listener, bound) = rights.listen(path)?;
        self.notes.put(Note::Listen(tenant, listener));
        self.sockets.push((tenant, bound));
        Ok(())
    }

    /// Records the socket of a tenant without listening on it.
    pub fn hold_socket(&mut self, tenant: TenantId, path: PathBuf, rights: Rights) {
        self.held_sockets.insert(tenant, (path, rights));
    }

    /// Listens on a socket that [`Self::hold_socket`] has recorded, if any.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub fn release_socket(&mut self, tenant: TenantId) -> Result<(), ServerError> {
        let Some((path, rights)) = self.held_sockets.remove(&tenant) else { return Ok(()) };
        self.listen(Some(tenant), &path, &rights)
    }

    /// Closes the sockets of a tenant. The tenant's connections remain.
    pub fn unlisten(&mut self, tenant: TenantId) {
        self.held_sockets.remove(&tenant);
        self.notes.put(Note::Unlisten(tenant));
        let of_it = |(of, _): &mut (Option<TenantId>, Bound)| *of == Some(tenant);
        self.sockets.extract_if(.., of_it).for_each(|(_, bound)| bound.remove());
    }

    /// Expects processes of a tenant to connect. Kills the processes that do not connect in time, because no owner
    /// accounts for their chunks.
    pub fn expect(&self, tenant: TenantId, pids: Vec<u32>) {
        self.notes.put(Note::Expect(tenant, pids));
    }

    /// Returns true if the driver can move processes to this card.
    #[must_use]
    pub fn fetches(&self) -> bool {
        self.driver.device().fetches
    }

    /// Listens at `path` for the owners of other cards. `card` is the number of this card.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub fn listen_for_owners(&self, card: CardId, path: &Path) -> Result<(), ServerError> {
        self.notes.put(Note::Links(OwnerLinks::listen(card, path)?));
        Ok(())
    }

    /// Connects to the owners of a tenant's cards. An empty `cards` ends the connections that no other tenant needs.
    pub fn link_with(&mut self, tenant: TenantId, cards: BTreeMap<CardId, PathBuf>) {
        self.gangs.insert(tenant, cards);
        self.gangs.retain(|_, cards| !cards.is_empty());
        self.notes
            .put(Note::LinkWith(self.gangs.values().flatten().map(|(card, path)| (*card, path.clone())).collect()));
    }

    /// Returns the path of the first socket for programs.
    ///
    /// # Panics
    /// Panics if no socket exists.
    #[cfg(test)]
    fn socket(&self) -> &Path {
        self.sockets[0].1.path()
    }

    /// Runs a function on the state machine in the serving thread. Returns `None` if the thread has exited.
    pub fn call<T: Send + 'static>(&self, what: impl FnOnce(&mut Core) -> T + Send + 'static) -> Option<T> {
        let (done, wait) = channel();
        // The caller waits for the result.
        let call: Call = Box::new(move |core| drop(done.send(what(core))));
        self.notes.put(Note::Call(call));
        wait.recv().ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.users = None;
        self.notes.put(Note::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.sockets.iter().for_each(|(_, bound)| bound.remove());
    }
}

/// State of the serving thread.
struct Serving {
    core: Core,
    listeners: Vec<(Option<TenantId>, OwnedFd)>,
    receiver: Receiver<Note>,
    bell: Arc<OwnedFd>,
    sessions: BTreeMap<SessionId, Connection>,
    outboxes: Outboxes,
    limits: Limits,
    /// Connection that was read last, for each tenant or user.
    heard: BTreeMap<Cause, SessionId>,
    /// Earliest time at which connections are accepted, in ns since `start`.
    accepts_from: u64,
    /// Set if unhandled notes may remain.
    notes_left: bool,
    peers: Peers,
    vault: Arc<Vault>,
    workers: Workers,
    mps: MpsServers,
    links: Links,
    journal: Option<Journal>,
    /// Accounts for the next owner.
    accounts: Option<AccountsFile>,
    lines: Lines<Cause>,
    start: Instant,
    /// Time until which the thread polls without sleeping, in ns since `start`.
    attends_until: u64,
    next: u64,
    stopping: bool,
}

impl Serving {
    fn serve(mut self) {
        self.carry_out();
        while !self.stopping {
            let ready = self.wait();
            self.take_notes();
            // Close connections that another process keeps open after the accepted process has exited.
            for session in self.peers.ended() {
                self.lose(session);
            }
            self.serve_links(ready.links);
            self.hear_all(ready.sessions);
            for listener in ready.listeners {
                self.accept(listener);
            }
            self.end_silent();
            self.send_again();
            let due = self.core.next_wakeup().is_some();
            if due {
                self.handle(Event::Tick);
            }
            let core = &self.core;
            let news = self.peers.look(|session| core.adopts(session));
            for news in news {
                self.tell(news);
            }
            if let Some(journal) = &mut self.journal {
                journal.keep(self.core.pids());
            }
            let (now, state) = (self.now(), self.core.strikes_and_use());
            self.accounts.iter_mut().for_each(|file| file.keep(now, state, |id| self.core.save(id)));
        }
        let (now, state) = (self.now(), self.core.strikes_and_use());
        self.accounts.iter_mut().for_each(|file| file.write(now, state, |id| self.core.save(id)));
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn wait(&self) -> Ready {
        let attends = (self.now() < self.attends_until).then_some(0);
        let notes = self.notes_left.then_some(0);
        let limit = self.core.next_wakeup().into_iter().chain(self.peers.next_look()).chain(attends).chain(notes);
        let limit = limit.chain(self.next_retry()).chain(self.links.next_due(self.now())).min();
        let limit =
            limit.map(|ns| Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 });
        let ids: Vec<SessionId> = self.sessions.keys().copied().collect();
        // Do not poll the listeners for a while after descriptors have run out, because they would stay readable.
        let listening = if self.now() < self.accepts_from { 0 } else { self.listeners.len() };
        let of_listeners = self.listeners[..listening].iter().map(|(_, listener)| listener.as_fd());
        let of_sessions = self.sessions.values().map(|connection| connection.link.as_fd());
        let all = [self.bell.as_fd(), self.peers.ends()].into_iter().chain(of_listeners).chain(of_sessions);
        let mut polled: Vec<PollFd<'_>> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let first_link = polled.len();
        polled.extend(self.links.polled(self.now()));
        match poll(&mut polled, limit.as_ref()) {
            Ok(0) if attends.is_some() => {
                // The process that this thread waits for may need this CPU.
                std::thread::yield_now();
                return Ready::default();
            }
            Ok(_) => {}
            Err(_) => return Ready::default(),
        }
        let is_ready = |at: usize| !polled[at].revents().is_empty();
        if is_ready(0) {
            let _ = rustix::io::read(&*self.bell, &mut [0u8; 8]);
        }
        let first = 2 + listening;
        let sessions = ids.into_iter().enumerate().filter(|(at, _)| is_ready(at + first)).map(|(_, id)| id).collect();
        let links = (first_link..polled.len()).any(is_ready);
        Ready { listeners: (0..listening).filter(|at| is_ready(at + 2)).collect(), sessions, links }
    }

    fn take_notes(&mut self) {
        self.notes_left = true;
        for _ in 0..NOTES_AT_ONCE {
            let Ok(note) = self.receiver.try_recv() else {
                self.notes_left = false;
                return;
            };
            match note {
                Note::Event(event) => self.handle(event),
                Note::Failed(piece, why) => {
                    let cause = self.core.tenant_of(piece).map(Cause::Tenant);
                    self.warn(cause, |left_out| tracing::warn!(?cause, why, left_out, "no memory for a program"));
                }
                Note::CardLost(error) => end_for_lost_card(&error),
                Note::Call(call) => {
                    // Advance the clock first, so that the changes get the current time.
                    self.handle(Event::Tick);
                    call(&mut self.core);
                    self.carry_out();
                }
                Note::Listen(tenant, listener) => self.listeners.push((tenant, listener)),
                Note::Mps(options) => self.mps.configure(options),
                Note::Links(links) => self.links.begin(links),
                Note::LinkWith(peers) => self.links.set_peers(&peers),
                Note::Unlisten(tenant) => {
                    self.listeners.retain(|(of, _)| *of != Some(tenant));
                    self.peers.forget(tenant);
                }
                Note::Expect(tenant, pids) => pids.into_iter().for_each(|pid| self.peers.expect(pid, tenant)),
                Note::Stop => self.stopping = true,
            }
        }
    }

    fn handle(&mut self, event: Event) {
        if let Event::Mps { group, report: cuda_mps::Report::Retired } = &event {
            self.mps.retired(group);
        }
        let now = self.now();
        self.core.handle(now, event);
        self.carry_out();
    }

    /// Reports a state change of a process to the state machine.
    fn tell(&mut self, news: News) {
        match news {
            News::Signalled(Some(tenant), done) => self.handle(Event::Signalled { tenant, done }),
            News::Signalled(None, _) => {}
            News::Ended(pid) => self.handle(Event::Ended { pid }),
        }
    }

    /// Writes a log line, unless its cause has exceeded the rate limit.
    fn warn(&mut self, cause: Option<Cause>, write: impl FnOnce(u64)) {
        let now = self.now();
        if let Some(left_out) = cause.map_or(Some(0), |cause| self.lines.may_write(cause, now)) {
            write(left_out);
        }
    }

    fn warn_of(&mut self, session: SessionId, what: &str, error: &LinkError) {
        let cause = self.cause_of(session);
        self.warn(cause, |left_out| tracing::warn!(?session, ?cause, %error, left_out, "{what}"));
    }

    /// Removes a closed connection.
    fn lose(&mut self, session: SessionId) {
        if let Some(connection) = self.sessions.remove(&session) {
            self.outboxes.ended(session, connection);
            let tenant = self.core.user_and_tenant(session).and_then(|(_, tenant)| tenant);
            self.peers.gone(session, tenant, self.core.holds_chunks(session));
            self.handle(Event::Gone { session });
        }
    }

    fn carry_out(&mut self) {
        let (mut lost, mut news, mut looked) = (Vec::new(), Vec::new(), Vec::new());
        for action in self.core.take_actions() {
            match action {
                Action::Send { session, message, pieces } => {
                    if let Err(error) = self.send(session, message, &pieces) {
                        self.warn_of(session, "program does not accept a message; closing its connection", &error);
                        lost.push(session);
                    }
                }
                Action::Close { session } => lost.push(session),
                Action::Kill { session, tenant, is_client } => {
                    let client = self.peers.pid(session).filter(|_| is_client);
                    client.into_iter().for_each(|pid| self.mps.terminate(pid));
                    news.extend(self.peers.give_up(session, tenant, client.is_some()));
                }
                Action::Adopted { session } => self.peers.adopted(session),
                Action::KillStranger { pid } => peers::kill(pid),
                Action::Attend { ns } => self.attends_until = self.now() + ns,
                Action::LookAt { session, is_overdue } => looked.push((session, is_overdue)),
                Action::Suspend { session } => match self.peers.pid(session) {
                    Some(pid) => self.workers.suspend(session, pid),
                    None => lost.push(session),
                },
                Action::Fetch { session, from, sees } => match self.peers.pid(session) {
                    Some(pid) => self.workers.fetch(session, pid, from, sees),
                    None => lost.push(session),
                },
                Action::Make { piece, memory, zeroed } => self.workers.make(New { piece, memory, zeroed }),
                Action::Import { piece } => self.workers.import(piece),
                Action::Drop { piece } => {
                    let giver = self.core.giver_of(piece);
                    self.workers.drop_piece(piece, self.vault.memory(piece), giver);
                }
                Action::Copy { batch, pieces, to } => self.workers.copy(batch, pieces, to),
                Action::StartServer { group, user } => self.mps.start(&group, user),
                Action::RetireServer { group } => self.mps.retire(&group),
                Action::PollServer { group } => self.mps.poll(&group),
                Action::Tell { card, message } => {
                    self.links.send(card, message, self.start.elapsed().as_nanos() as u64)
                }
                Action::Probe { card } => self.links.probe(card, self.now()),
                Action::TellQuantum(message) => self.links.send_state(message, self.now()),
            }
        }
        for session in lost {
            self.lose(session);
        }
        for news in news {
            self.tell(news);
        }
        for (session, is_overdue) in looked {
            let stopped = self.peers.pid(session).is_some_and(owner_host::is_stopped);
            self.handle(Event::Looked { session, stopped, is_overdue });
        }
    }

    fn send(&mut self, session: SessionId, message: FromOwner, pieces: &[PieceId]) -> Result<(), LinkError> {
        let descriptors: Vec<_> = pieces.iter().filter_map(|&piece| self.vault.descriptor(piece)).collect();
        let (now, bounds) = (self.now(), self.limits.unread(self.core.tenant_count()));
        self.outboxes.send(&mut self.sessions, session, (message, descriptors), bounds, now)
    }
}

/// Exits with [`cuda_control::CARD_LOST`], because a process cannot restore a lost context.
fn end_for_lost_card(error: &str) {
    tracing::error!(
        error,
        "the card was reset or has failed, and all memory of programs on it is lost: the owner ends, and a new one \
         serves once it can open the card"
    );
    // The driver's objects can no longer be released. The driver's exit handlers may wait for the card, so they are not
    // executed.
    signal_hook::low_level::exit(cuda_control::CARD_LOST);
}

/// Descriptors that are ready after a wait.
#[derive(Debug, Default)]
struct Ready {
    listeners: Vec<usize>,
    sessions: Vec<SessionId>,
    /// Set if a link to the owner of another card is ready.
    links: bool,
}

#[cfg(test)]
mod tests;
