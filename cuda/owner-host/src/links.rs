//! Connections between the owners of cards that are used by the same tenant.
//!
//! Each owner listens on a socket that only its own user can open. For each pair of cards, the owner of the
//! higher-numbered card connects to the other owner, and retries every [`RETRY_NS`]. Owners therefore reconnect on
//! their own, for example after one of them restarts.
//!
//! Both sides send a greeting first. Afterwards, each packet is one [`Message`], a probe, or the reply to a probe. An
//! owner that exits, does not read its messages, or sends anything else loses its connection, which is re-established
//! later. No function blocks on another owner. One call reads at most [`MESSAGES_AT_ONCE`] messages from each owner.

use crate::rights::{Bound, ListenError, Rights};
use crate::{CardState, Lines, StateMessage};
use gang::{CardId, GangId, Message};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Version of the packets. Owners of different versions do not connect.
const VERSION: u16 = 3;
/// Maximum size of a packet in bytes.
const MAX_PACKET: usize = 64;
/// Maximum clock value in a message. A correct owner's clock never reaches it. A larger value is an error, and would
/// disrupt the clocks of all other cards.
pub const MAX_CLOCK: u64 = 1 << 56;
/// Maximum number of messages of one owner that are handled before programs are served again.
const MESSAGES_AT_ONCE: usize = 64;
/// Maximum number of accepted connections that have not sent a greeting yet.
const MAX_UNKNOWN: usize = 16;
/// Interval between connection attempts, in ns.
// TIMEOUT: an owner that has exited is restarted after 100 ms at the earliest.
const RETRY_NS: u64 = 200_000_000;
/// Time limit for a greeting, in ns.
// TIMEOUT: a running owner replies within a millisecond; a stopped owner does not reply.
const GREETING_NS: u64 = 2_000_000_000;
/// Time in ns during which no connections are accepted after the process has run out of descriptors.
const FULL_NS: u64 = 100_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Packet {
    Greeting {
        version: u16,
        card: CardId,
    },
    Gang(Message),
    /// Checks whether the other owner responds.
    Probe,
    /// Replies to a probe.
    Reply,
    /// State of a gang's memory quantum on the sender's card.
    Quantum {
        gang: GangId,
        state: CardState,
    },
}

/// An event of a link to another owner. Messages from a card arrive only after its `Reached`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// The link to the owner of this card is up.
    Reached(CardId),
    /// The link to the owner of this card is down.
    Lost(CardId),
    /// The owner of this card has sent a message.
    Said(CardId, Message),
    /// The owner of this card has replied to a probe.
    Replied(CardId),
    /// The owner of this card has sent the state of a gang's memory quantum.
    Quantum(CardId, GangId, CardState),
}

/// A connection to another owner, which may not have sent its greeting yet.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    since: u64,
    is_greeted: bool,
}

/// An owner that this owner must be connected to.
#[derive(Debug)]
struct Peer {
    path: PathBuf,
    connection: Option<Connection>,
    /// Time of the next connection attempt, in ns.
    retry_at: u64,
}

/// An owner's connections to other owners.
#[derive(Debug)]
pub struct OwnerLinks {
    card: CardId,
    listener: OwnedFd,
    bound: Bound,
    /// Earliest time at which connections are accepted, in ns.
    accepts_from: u64,
    peers: BTreeMap<CardId, Peer>,
    /// Accepted connections that have not sent a greeting yet, oldest first.
    unknown: Vec<Connection>,
    events: Vec<LinkEvent>,
    lines: Lines<Refusal>,
}

/// Reason why a connection was rejected, for the rate limit of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Refusal {
    User,
    Version,
}

impl OwnerLinks {
    /// Listens for other owners at `path`. `card` is the number of this owner's card.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub fn listen(card: CardId, path: &Path) -> Result<Self, ListenError> {
        let (listener, bound) = Rights { mode: Some(0o600), ..Rights::default() }.listen(path)?;
        let failed = |error: Errno| ListenError { path: path.to_owned(), source: io::Error::from(error).into() };
        rustix::io::ioctl_fionbio(&listener, true).map_err(failed)?;
        let (peers, unknown, events) = (BTreeMap::new(), Vec::new(), Vec::new());
        Ok(Self { card, listener, bound, accepts_from: 0, peers, unknown, events, lines: Lines::default() })
    }

    /// Sets the owners that this owner must be connected to. `wanted` contains the paths of their sockets, keyed by
    /// card.
    pub fn set_peers(&mut self, wanted: &BTreeMap<CardId, PathBuf>) {
        let Self { card: own, peers, events, .. } = self;
        peers.retain(|card, peer| {
            let stays = wanted.get(card) == Some(&peer.path);
            if !stays && peer.connection.as_ref().is_some_and(|connection| connection.is_greeted) {
                events.push(LinkEvent::Lost(*card));
            }
            stays
        });
        for (&card, path) in wanted.iter().filter(|(card, _)| *card != own) {
            peers.entry(card).or_insert_with(|| Peer { path: path.clone(), connection: None, retry_at: 0 });
        }
    }

    /// Returns the descriptors to poll. [`Self::serve`] must be called when one of them is ready.
    pub fn polled(&self, now: u64) -> impl Iterator<Item = PollFd<'_>> {
        let listener = (now >= self.accepts_from).then_some(&self.listener);
        let connections = self.peers.values().filter_map(|peer| peer.connection.as_ref()).chain(&self.unknown);
        let all = listener.into_iter().chain(connections.map(|connection| &connection.socket));
        all.map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN))
    }

    /// Returns the time until [`Self::serve`] must be called even if no descriptor is ready, in ns.
    #[must_use]
    pub fn next_due(&self, now: u64) -> Option<u64> {
        let peers = self.peers.iter().filter_map(|(card, peer)| match &peer.connection {
            Some(connection) if connection.is_greeted => None,
            Some(connection) => Some(connection.since + GREETING_NS),
            None => (*card < self.card).then_some(peer.retry_at),
        });
        let unknown = self.unknown.iter().map(|connection| connection.since + GREETING_NS);
        let accepts = (self.accepts_from > now).then_some(self.accepts_from);
        let events = (!self.events.is_empty()).then_some(now);
        peers.chain(unknown).chain(accepts).chain(events).min().map(|at| at.saturating_sub(now))
    }

    /// Opens connections, and closes connections that have not sent a greeting in time. If `is_ready` is set, first
    /// accepts connections and receives messages. Returns the events in order.
    pub fn serve(&mut self, now: u64, is_ready: bool) -> Vec<LinkEvent> {
        if is_ready {
            self.accept(now);
            self.hear_unknown(now);
            let cards: Vec<CardId> = self.peers.keys().copied().collect();
            cards.into_iter().for_each(|card| self.hear(card, now));
        }
        self.unknown.retain(|connection| now < connection.since + GREETING_NS);
        let late =
            |peer: &Peer| peer.connection.as_ref().is_some_and(|c| !c.is_greeted && now >= c.since + GREETING_NS);
        let silent: Vec<CardId> = self.peers.iter().filter(|(_, peer)| late(peer)).map(|(&card, _)| card).collect();
        silent.into_iter().for_each(|card| self.lose(card, "it does not reply", now));
        let (own, greeting) = (self.card, Packet::Greeting { version: VERSION, card: self.card });
        let due = self
            .peers
            .iter_mut()
            .filter(|(card, peer)| **card < own && peer.connection.is_none() && now >= peer.retry_at);
        for (_, peer) in due {
            peer.retry_at = now + RETRY_NS;
            let connected = connect(&peer.path).filter(|socket| transmit(socket, &greeting).is_ok());
            peer.connection = connected.map(|socket| Connection { socket, since: now, is_greeted: false });
        }
        std::mem::take(&mut self.events)
    }

    /// Sends a message to the owner of a card, or closes the connection if the owner does not read its messages. Does
    /// nothing without a connection to that owner.
    pub fn send(&mut self, card: CardId, message: Message, now: u64) {
        self.send_packet(card, &Packet::Gang(message), now);
    }

    /// Sends a probe to the owner of a card, like [`Self::send`].
    pub fn probe(&mut self, card: CardId, now: u64) {
        self.send_packet(card, &Packet::Probe, now);
    }

    /// Sends the state of a gang's memory quantum on this card, like [`Self::send`].
    pub fn send_state(&mut self, message: StateMessage, now: u64) {
        let StateMessage { to, gang, state } = message;
        self.send_packet(to, &Packet::Quantum { gang, state }, now);
    }

    fn send_packet(&mut self, card: CardId, packet: &Packet, now: u64) {
        let Some(connection) = self.peers.get(&card).and_then(|peer| peer.connection.as_ref()) else { return };
        if connection.is_greeted
            && let Err(error) = transmit(&connection.socket, packet)
        {
            let why = if error == Errno::AGAIN { "it does not read its messages" } else { "the connection failed" };
            self.lose(card, why, now);
        }
    }

    fn accept(&mut self, now: u64) {
        if now < self.accepts_from {
            return;
        }
        for _ in 0..MAX_UNKNOWN {
            match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    let user = rustix::net::sockopt::socket_peercred(&socket).map(|peer| peer.uid);
                    if user != Ok(rustix::process::geteuid()) {
                        if let Some(left_out) = self.lines.may_write(Refusal::User, now) {
                            tracing::warn!(
                                ?user,
                                left_out,
                                "a process of another user connects as the owner of a card; rejected"
                            );
                        }
                        continue;
                    }
                    if self.unknown.len() >= MAX_UNKNOWN {
                        self.unknown.remove(0);
                    }
                    self.unknown.push(Connection { socket, since: now, is_greeted: false });
                }
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    self.accepts_from = now + FULL_NS;
                    return;
                }
                Err(_) => return,
            }
        }
    }

    /// Reads the greetings of accepted connections.
    fn hear_unknown(&mut self, now: u64) {
        for connection in std::mem::take(&mut self.unknown) {
            match receive(&connection.socket) {
                Err(Errno::AGAIN) => self.unknown.push(connection),
                Ok(Some(Packet::Greeting { version: VERSION, card })) if card > self.card => {
                    self.greeted(card, connection, now);
                }
                Ok(Some(Packet::Greeting { version, card })) => {
                    if let Some(left_out) = self.lines.may_write(Refusal::Version, now) {
                        tracing::warn!(
                            ?card,
                            version,
                            left_out,
                            "the owner of another card has a different version; its link is rejected"
                        );
                    }
                }
                Ok(Some(Packet::Gang(_) | Packet::Probe | Packet::Reply | Packet::Quantum { .. }) | None) | Err(_) => {}
            }
        }
    }

    /// Starts to use an accepted connection after its greeting. It replaces an existing connection to the same owner.
    fn greeted(&mut self, card: CardId, connection: Connection, now: u64) {
        // If this owner does not know the other owner yet, the other owner will retry.
        if !self.peers.contains_key(&card) {
            return;
        }
        self.lose(card, "its owner has reconnected", now);
        let greeting = Packet::Greeting { version: VERSION, card: self.card };
        if transmit(&connection.socket, &greeting).is_ok()
            && let Some(peer) = self.peers.get_mut(&card)
        {
            peer.connection = Some(Connection { is_greeted: true, ..connection });
            tracing::info!(?card, "linked with the owner of another card");
            self.events.push(LinkEvent::Reached(card));
        }
    }

    /// Reads the messages of one owner.
    fn hear(&mut self, card: CardId, now: u64) {
        for _ in 0..MESSAGES_AT_ONCE {
            let Some(connection) = self.peers.get_mut(&card).and_then(|peer| peer.connection.as_mut()) else { return };
            match (receive(&connection.socket), connection.is_greeted) {
                (Err(Errno::AGAIN), _) => return,
                (Ok(Some(Packet::Greeting { version: VERSION, card: of })), false) if of == card => {
                    connection.is_greeted = true;
                    tracing::info!(?card, "linked with the owner of another card");
                    self.events.push(LinkEvent::Reached(card));
                }
                (Ok(Some(Packet::Gang(message))), true) if message.clock <= MAX_CLOCK => {
                    self.events.push(LinkEvent::Said(card, message));
                }
                (Ok(Some(Packet::Probe)), true) => self.send_packet(card, &Packet::Reply, now),
                (Ok(Some(Packet::Reply)), true) => self.events.push(LinkEvent::Replied(card)),
                (Ok(Some(Packet::Quantum { gang, state })), true) => {
                    self.events.push(LinkEvent::Quantum(card, gang, state));
                }
                (Ok(None), _) => return self.lose(card, "it has closed the connection", now),
                (Ok(Some(_)), _) => return self.lose(card, "it sends invalid messages", now),
                (Err(_), _) => return self.lose(card, "the connection failed", now),
            }
        }
    }

    fn lose(&mut self, card: CardId, why: &str, now: u64) {
        let Some(peer) = self.peers.get_mut(&card) else { return };
        peer.retry_at = now + RETRY_NS;
        if peer.connection.take().is_some_and(|connection| connection.is_greeted) {
            tracing::warn!(?card, why, "the link with the owner of another card has ended");
            self.events.push(LinkEvent::Lost(card));
        }
    }
}

impl Drop for OwnerLinks {
    fn drop(&mut self) {
        self.bound.remove();
    }
}

/// Links of an owner, if it listens for other owners.
#[derive(Debug, Default)]
pub struct Links(Option<OwnerLinks>);

impl Links {
    /// Starts to use the given links.
    pub fn begin(&mut self, links: OwnerLinks) {
        self.0 = Some(links);
    }

    /// Sets the peers, like [`OwnerLinks::set_peers`].
    pub fn set_peers(&mut self, peers: &BTreeMap<CardId, PathBuf>) {
        self.0.iter_mut().for_each(|links| links.set_peers(peers));
    }

    /// Returns the descriptors to poll, like [`OwnerLinks::polled`].
    pub fn polled(&self, now: u64) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().flat_map(move |links| links.polled(now))
    }

    /// Returns the time until the next call, like [`OwnerLinks::next_due`].
    #[must_use]
    pub fn next_due(&self, now: u64) -> Option<u64> {
        self.0.as_ref()?.next_due(now)
    }

    /// Sends a message, like [`OwnerLinks::send`].
    pub fn send(&mut self, card: CardId, message: Message, now: u64) {
        self.0.iter_mut().for_each(|links| links.send(card, message, now));
    }

    /// Sends a probe, like [`OwnerLinks::probe`].
    pub fn probe(&mut self, card: CardId, now: u64) {
        self.0.iter_mut().for_each(|links| links.probe(card, now));
    }

    /// Sends a gang's state, like [`OwnerLinks::send_state`].
    pub fn send_state(&mut self, message: StateMessage, now: u64) {
        self.0.iter_mut().for_each(|links| links.send_state(message, now));
    }

    /// Serves the links and returns the events, like [`OwnerLinks::serve`].
    pub fn serve(&mut self, now: u64, is_ready: bool) -> Vec<LinkEvent> {
        self.0.as_mut().map_or_else(Vec::new, |links| links.serve(now, is_ready))
    }
}

/// Connects to an owner's socket without blocking. Returns `None` if no owner of this user listens there.
fn connect(path: &Path) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(&socket).ok()?;
    (peer.uid == rustix::process::geteuid()).then_some(socket)
}

fn transmit(socket: &OwnedFd, packet: &Packet) -> Result<(), Errno> {
    let mut buffer = [0; MAX_PACKET];
    let bytes = postcard::to_slice(packet, &mut buffer).map_err(|_| Errno::MSGSIZE)?;
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::io::retry_on_intr(|| rustix::net::send(socket, bytes, flags)).map(drop)
}

/// Receives a packet without blocking. Returns `Ok(None)` if the other side has closed the connection.
fn receive(socket: &OwnedFd) -> Result<Option<Packet>, Errno> {
    let mut buffer = [0; MAX_PACKET];
    // With `TRUNC`, the call returns the full length of a truncated packet.
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    let (_, length) = rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut buffer[..], flags))?;
    if length == 0 {
        return Ok(None);
    }
    let bytes = buffer.get(..length).ok_or(Errno::MSGSIZE)?;
    match postcard::take_from_bytes(bytes) {
        Ok((packet, [])) => Ok(Some(packet)),
        Ok(_) | Err(_) => Err(Errno::BADMSG),
    }
}

#[cfg(test)]
mod tests;
