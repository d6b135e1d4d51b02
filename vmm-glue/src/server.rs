//! The event loop of one socket.
//!
//! The server serves one client at a time. A connection becomes active only when it sends data: it then becomes the
//! client if no client is being served, and is rejected otherwise. The server blocks only while waiting for events. A
//! client that stops sending or reading delays only its own connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use crate::connection::{Connection, Fatal, Progress};
use crate::counters::{Counters, add, add_len, worth_logging};
use crate::device::Device;
use crate::journal::{Journal, Remains};
use crate::link::{Link, StopHandle};
pub use crate::options::ServerOptions;
use crate::protocol::{FLAG_ERROR, FLAG_TYPE_REPLY, HEADER_SIZE, Header};
use crate::socket::{self, BindError, BoundPath, SocketOptions};
use crate::spin::Spin;
use crate::suspended_client::{SavedClients, SuspendedClient};
use vmm_memory::descriptors::ParkError;
pub use vmm_memory::keeper::Keeper;

/// Maximum number of connections that have sent no data. A further connection closes the oldest one.
const MAX_WAITING: usize = 4;
/// Number of bytes of new output after which the server sends it, before it handles more messages.
const FLUSH_AT: usize = 64 << 10;
/// Number of receive calls after which other events are checked, even if the client keeps sending.
const MAX_ROUNDS: u32 = 64;
/// TIMEOUT: pause before resending a descriptor that the system did not accept. Clients request descriptors only when
/// they start.
const FDS_PAUSE: Duration = Duration::from_millis(10);

/// Reasons why a server cannot continue.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum ServerError {
    #[error("cannot prepare the listening socket")]
    Prepare(#[source] io::Error),
    #[error("waiting for clients failed")]
    Poll(#[source] io::Error),
}

/// A listening socket that serves one device.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    /// The bound path, which is removed on drop.
    _bound: Option<BoundPath>,
    options: ServerOptions,
    keeper: Option<Arc<dyn Keeper>>,
}

impl Server {
    /// Binds `path`. Replaces a socket file that no process serves.
    pub fn bind(path: &Path, socket: &SocketOptions, options: ServerOptions) -> Result<Self, BindError> {
        let (listener, bound) = socket::bind(path, socket)?;
        Ok(Self { listener, _bound: Some(bound), options, keeper: None })
    }

    /// Uses a socket that is already listening (socket activation).
    pub fn from_listener(listener: UnixListener, options: ServerOptions) -> Result<Self, ServerError> {
        listener.set_nonblocking(true).map_err(ServerError::Prepare)?;
        Ok(Self { listener, _bound: None, options, keeper: None })
    }

    /// Sets the keeper that stores copies of the client's connection.
    #[must_use]
    pub fn kept_by(self, keeper: Option<Arc<dyn Keeper>>) -> Self {
        Self { keeper, ..self }
    }

    /// Restores clients saved by another process, for [`Self::serve`]. Restores their link state to `link`.
    ///
    /// # Errors
    /// Fails for the same reasons as [`SuspendedClient::restored`].
    pub fn restored(
        &self,
        saved: SavedClients,
        descriptors: Vec<OwnedFd>,
        link: &Link,
    ) -> Result<SuspendedClient, ParkError> {
        SuspendedClient::restored(saved, descriptors, link, &self.options)
    }

    /// Restores the client of a killed process from the keeper's descriptors, for [`Self::serve`]. Restores its link
    /// state to `link`. The client's device must be new.
    ///
    /// # Errors
    /// Returns an error if no such client exists, its journal is invalid, or its memory cannot be mapped.
    pub fn revived(&self, remains: Remains, link: &Link) -> Result<SuspendedClient, ParkError> {
        let Remains { connection, kept } = remains;
        let keeper = self.keeper.clone().ok_or(ParkError::Stays("connection"))?;
        connection.set_nonblocking(true)?;
        let client = socket::peer(&connection);
        let restored = Journal::restored(keeper, kept, link, client, &self.options)?;
        Ok(SuspendedClient { active: Some((connection, restored)), waiting: Vec::new() })
    }

    /// Returns a duplicate of the listening socket, for another process.
    ///
    /// # Errors
    /// Returns an error if this process has reached its descriptor limit.
    pub fn listener(&self) -> io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    /// Serves one client after another until `stop` is set. `device` must have been created with a clone of `link`.
    ///
    /// Returns an error only on a host failure, which a client cannot cause.
    pub fn run(&self, link: &Link, device: &mut dyn Device, stop: &StopHandle) -> Result<(), ServerError> {
        self.serve(link, device, stop, None).map(drop)
    }

    /// Serves clients like [`Self::run`], but first resumes the `parked` clients, if any. `device` must be in the state
    /// of these clients' device.
    ///
    /// After [`StopHandle::park`], stops serving the clients and returns them. None of their requests is then partially
    /// executed.
    pub fn serve(
        &self,
        link: &Link,
        device: &mut dyn Device,
        stop: &StopHandle,
        parked: Option<SuspendedClient>,
    ) -> Result<Option<SuspendedClient>, ServerError> {
        let mut spin = Spin::new(self.options.spin);
        let mut clients = Clients { server: self, link, device, active: None, waiting: Vec::new() };
        if let Some(parked) = parked {
            clients.resume(parked);
        }
        while !stop.is_stopped() {
            clients.serve(&mut spin);
            if stop.is_parking() {
                return Ok(Some(clients.park()));
            }
            let ready = clients.wait(stop)?;
            spin.woke(ready.client, Instant::now());
            if ready.wake {
                link.wake().clear();
            }
            if ready.unmask {
                link.interrupts().unmask_event();
            }
            if ready.listener {
                clients.accept();
            }
            clients.listen_to_waiting();
        }
        clients.end(None);
        Ok(None)
    }
}

/// Events that ended a wait.
#[derive(Debug, Default)]
struct Ready {
    client: bool,
    wake: bool,
    unmask: bool,
    listener: bool,
}

/// A connection. Unless another process continues it, it is shut down on drop, so that the peer notices.
#[derive(Debug)]
struct Accepted<'a> {
    stream: UnixStream,
    /// Keeper that stores a copy of the connection.
    keeper: Option<&'a dyn Keeper>,
    /// Set if another process continues the connection through another descriptor.
    left: bool,
}

impl Accepted<'_> {
    /// Returns a descriptor through which another process continues the connection. The keeper retains its copy.
    fn leave(mut self) -> io::Result<UnixStream> {
        let stream = self.stream.try_clone()?;
        self.left = true;
        Ok(stream)
    }
}

impl Drop for Accepted<'_> {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        socket::end(&self.stream);
        if let Some(keeper) = self.keeper {
            keeper.release();
        }
    }
}

#[derive(Debug)]
struct Active<'a> {
    accepted: Accepted<'a>,
    connection: Connection,
    /// Set if the connection may contain messages that were received but not handled before it was suspended or its
    /// process was killed.
    unhandled: bool,
}

struct Clients<'a> {
    server: &'a Server,
    link: &'a Link,
    device: &'a mut dyn Device,
    active: Option<Active<'a>>,
    /// Connections that have sent no data, oldest first.
    waiting: Vec<Accepted<'a>>,
}

impl Clients<'_> {
    /// Resumes suspended clients.
    fn resume(&mut self, parked: SuspendedClient) {
        let SuspendedClient { active, waiting } = parked;
        if let Some((stream, mut connection)) = active {
            let resumed = connection.resume(self.device);
            let keeper = self.server.keeper.as_deref();
            if let Some(keeper) = self.server.keeper.as_ref().filter(|_| resumed.is_ok()) {
                connection.keep_journal(keeper, self.device);
            }
            let accepted = Accepted { stream, keeper, left: false };
            self.active = Some(Active { accepted, connection, unhandled: true });
            if let Err(why) = resumed {
                tracing::error!(%why, "a killed daemon's VMM has lost its device");
                self.end(None);
            }
        }
        self.waiting.extend(waiting.into_iter().map(|stream| Accepted { stream, keeper: None, left: false }));
    }

    /// Suspends and returns the clients. Closes a client's connection if its descriptor cannot be duplicated.
    fn park(&mut self) -> SuspendedClient {
        let mut parked = SuspendedClient::default();
        if let Some(Active { accepted, connection, unhandled: _ }) = self.active.take() {
            match accepted.leave() {
                Ok(stream) => parked.active = Some((stream, connection)),
                Err(error) => {
                    tracing::error!(%error, "VMM disconnected: its connection cannot be suspended");
                    connection.close(self.device);
                }
            }
        }
        parked.waiting = std::mem::take(&mut self.waiting).into_iter().filter_map(|it| it.leave().ok()).collect();
        parked
    }

    /// Handles the client's messages, for up to [`MAX_ROUNDS`] rounds, until no more messages arrive for some time.
    fn serve(&mut self, spin: &mut Spin) {
        for _ in 0..MAX_ROUNDS {
            if self.link.take_disconnect() && self.active.is_some() {
                tracing::info!("disconnecting the VMM on request");
                self.end(None);
            }
            let Some(active) = &mut self.active else { return };
            match active.serve(self.device, self.link.counters(), &self.server.options, spin) {
                Ok(Served::Idle) => return,
                Ok(Served::Busy) => (),
                Ok(Served::Closed) => self.end(None),
                Err(fatal) => self.end(Some(fatal)),
            }
        }
    }

    fn wait(&self, stop: &StopHandle) -> Result<Ready, ServerError> {
        let unmask = self.active.as_ref().and_then(|_| self.link.interrupts().unmask_source());
        // Entries without a descriptor use a placeholder descriptor that polls for no events.
        let nothing = || PollFd::from_borrowed_fd(stop.fd(), PollFlags::empty());
        let mut fds: [PollFd<'_>; 5 + MAX_WAITING] = std::array::from_fn(|_| nothing());
        let [stopped, wake, listener, client, unmasked, waiting @ ..] = &mut fds;
        *stopped = input(stop.fd());
        *wake = input(self.link.wake().fd());
        *listener = input(self.server.listener.as_fd());
        if let Some(active) = &self.active {
            let output = if active.has_output() { PollFlags::OUT } else { PollFlags::empty() };
            *client = PollFd::from_borrowed_fd(active.accepted.stream.as_fd(), PollFlags::IN | output);
        }
        if let Some(event) = &unmask {
            *unmasked = input(event.fd());
        }
        for (place, accepted) in waiting.iter_mut().zip(&self.waiting) {
            *place = input(accepted.stream.as_fd());
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => (),
            Err(errno) => return Err(ServerError::Poll(errno.into())),
        }
        let [_, wake, listener, client, unmasked, ..] = &fds;
        let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        Ok(Ready {
            client: self.active.is_some() && ready(client),
            wake: ready(wake),
            unmask: unmask.is_some() && ready(unmasked),
            listener: ready(listener),
        })
    }

    fn accept(&mut self) {
        match self.server.listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = stream.set_nonblocking(true) {
                    tracing::warn!(%error, "connection closed: cannot make it non-blocking");
                    return;
                }
                if self.waiting.len() >= MAX_WAITING {
                    self.closed("it sent no data, and other connections are waiting");
                    self.waiting.remove(0);
                }
                self.waiting.push(Accepted { stream, keeper: None, left: false });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => (),
            Err(error) => {
                tracing::error!(%error, "cannot accept a VMM's connection");
                // The process has probably run out of descriptors. Without a pause, this loop would spin.
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Accepts the first connection that sends data as the client, or rejects it if a client is being served.
    fn listen_to_waiting(&mut self) {
        for mut accepted in std::mem::take(&mut self.waiting) {
            let mut bytes = [0u8; HEADER_SIZE];
            match rustix::net::recv(&accepted.stream, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::INTR) => self.waiting.push(accepted),
                Err(_) | Ok((_, 0)) => (),
                Ok((_, len)) if len < HEADER_SIZE => self.closed("its first message has an incomplete header"),
                Ok(_) if self.active.is_none() => {
                    let link = self.link.clone();
                    let mut connection = Connection::new(link, &self.server.options, socket::peer(&accepted.stream));
                    accepted.keeper = self.server.keeper.as_deref();
                    if let Some(keeper) = &self.server.keeper {
                        keeper.keep(accepted.stream.as_fd());
                        connection.keep_journal(keeper, self.device);
                    }
                    self.active = Some(Active { accepted, connection, unhandled: false });
                    // Earlier requests to disconnect the client or to check its memory were for the previous client.
                    self.link.take_disconnect();
                    self.link.take_check_shared();
                }
                Ok(_) => self.refuse(&accepted.stream),
            }
        }
    }

    fn closed(&self, reason: &str) {
        let before = add(&self.link.counters().connections_closed, 1);
        if worth_logging(before.saturating_add(1)) {
            tracing::warn!(reason, "connection closed");
        }
    }

    fn refuse(&self, stream: &UnixStream) {
        let before = add(&self.link.counters().clients_refused, 1);
        if worth_logging(before.saturating_add(1)) {
            let pid = socket::peer(stream).pid;
            let served = self.link.client().map_or(0, |client| client.pid);
            tracing::warn!(pid, served, "VMM rejected: another one is connected to this device");
        }
        let mut buffer = [0u8; HEADER_SIZE];
        let Ok(first) = socket::receive(stream, &mut buffer) else { return };
        let Some(Ok((request, _))) = buffer.get(..first.len).map(Header::read_from_prefix) else { return };
        let error = u32::try_from(Errno::BUSY.raw_os_error()).unwrap_or(0);
        let size = u32::try_from(HEADER_SIZE).unwrap_or(0);
        let reply = Header { size, flags: FLAG_TYPE_REPLY | FLAG_ERROR, error, ..request };
        let _ = socket::send(stream, reply.as_bytes(), &[]);
    }

    /// Closes the client's connection.
    fn end(&mut self, reason: Option<Fatal>) {
        let Some(Active { accepted, mut connection, unhandled: _ }) = self.active.take() else { return };
        if let Some(reason) = reason {
            add(&self.link.counters().clients_dropped, 1);
            tracing::error!(reason = %reason, "VMM disconnected");
            let (bytes, _) = connection.output().next();
            let _ = socket::send(&accepted.stream, bytes, &[]);
        } else if connection.is_negotiated() {
            tracing::info!("VMM gone");
        }
        drop(accepted);
        connection.close(self.device);
    }
}

fn input(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(fd, PollFlags::IN)
}

/// Result of handling the client's messages.
enum Served {
    /// No work is pending.
    Idle,
    /// Some work was done.
    Busy,
    /// The client has closed the connection.
    Closed,
}

impl Active<'_> {
    fn has_output(&self) -> bool {
        self.connection.pending_output() != 0
    }

    fn serve(
        &mut self,
        device: &mut dyn Device,
        counters: &Counters,
        options: &ServerOptions,
        spin: &mut Spin,
    ) -> Result<Served, Fatal> {
        self.connection.work(device)?;
        self.flush(counters);
        if std::mem::take(&mut self.unhandled) {
            return self.handle(device, counters, options);
        }
        let mut spinning = None;
        let received = loop {
            match socket::receive(&self.accepted.stream, self.connection.space()) {
                Ok(received) => break received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let now = Instant::now();
                    let Some(deadline) = spinning.or_else(|| spin.deadline(now)) else { return Ok(Served::Idle) };
                    spinning = Some(deadline);
                    if now >= deadline {
                        spin.miss(now);
                        return Ok(Served::Idle);
                    }
                    std::hint::spin_loop();
                }
                Err(_) => return Ok(Served::Closed),
            }
        };
        if let Some(deadline) = spinning {
            spin.hit(Instant::now(), deadline);
            add(&counters.spin_hits, 1);
        }
        if received.len == 0 {
            return Ok(Served::Closed);
        }
        self.connection.received(received.len, received.fds, received.truncated);
        self.handle(device, counters, options)
    }

    /// Handles received messages and sends replies.
    fn handle(
        &mut self,
        device: &mut dyn Device,
        counters: &Counters,
        options: &ServerOptions,
    ) -> Result<Served, Fatal> {
        loop {
            let limit = self.connection.pending_output().saturating_add(FLUSH_AT);
            let progress = self.connection.process(device, limit)?;
            self.flush(counters);
            self.connection.complete_deferred(device);
            let queued = self.connection.pending_output();
            if queued > options.max_queued {
                return Err(Fatal::NotReading(queued));
            }
            if progress == Progress::Done {
                return Ok(Served::Busy);
            }
        }
    }

    /// Sends as much output as the client accepts.
    fn flush(&mut self, counters: &Counters) {
        let out = self.connection.output();
        while !out.is_empty() {
            let (bytes, fd) = out.next();
            let fd = fd.as_ref().map(|fd| fd.as_fd());
            match socket::send(&self.accepted.stream, bytes, fd.as_slice()) {
                Ok(len) => {
                    add(&counters.sends, 1);
                    add_len(&counters.bytes_out, len);
                    out.advance(len);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                // The number of descriptors in flight is limited per user, and clients that do not read can exhaust
                // this limit. The socket has space, so without a pause the server would spin.
                Err(error) if error.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error()) => {
                    std::thread::sleep(FDS_PAUSE);
                    break;
                }
                // If the socket is full, the rest is sent later. If it is broken, the next read reports the error.
                Err(_) => break,
            }
        }
        if self.has_output() {
            self.connection.left_unsent();
        }
    }
}
