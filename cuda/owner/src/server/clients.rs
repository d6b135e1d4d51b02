//! Accepts, reads and closes connections.
//!
//! The serving thread does a bounded amount of work for each tenant before it serves the other tenants, regardless of
//! the tenant's number of connections.

use super::Cause;
use super::limits::{Admission, FULL_NS, SILENT_NS};
use super::outbox::Connection;
use super::peers::Peer;
use super::{Event, PieceId, Serving, SessionId};
use cuda_protocol::{End, FromOwner, FromTenant, Link, LinkError};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

/// Maximum number of messages from one process that are handled before the tenant's other processes are served.
const MESSAGES_AT_ONCE: usize = 16;
/// Number of messages from one tenant's processes after which other tenants are served.
const TENANT_MESSAGES_AT_ONCE: usize = 64;
/// Number of state machine steps for one tenant after which other tenants are served.
const TENANT_STEPS_AT_ONCE: u64 = 4096;

impl Serving {
    /// Returns the tenant or user that a connection is attributed to.
    pub(super) fn cause_of(&self, session: SessionId) -> Option<Cause> {
        Some(match self.core.user_and_tenant(session)? {
            (_, Some(tenant)) => Cause::Tenant(tenant),
            (uid, None) => Cause::User(uid),
        })
    }

    pub(super) fn accept(&mut self, listener: usize) {
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let Some((tenant, listener)) = self.listeners.get(listener) else { return };
        let tenant = *tenant;
        let socket = match rustix::net::accept_with(listener, flags) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // Until then, connecting processes wait in the listener's queue.
                self.accepts_from = self.now() + FULL_NS;
                return self.warn(Some(Cause::User(0)), |left_out| {
                    tracing::warn!(left_out, "no descriptor for a connection: raise the limit of open files");
                });
            }
            Err(_) => return,
        };
        let session = SessionId(self.next + 1);
        let link = Link::new(socket);
        let peer = match Peer::from_socket(link.as_fd()) {
            Ok(peer) => peer,
            Err(refused) => return self.refuse(tenant.map(Cause::Tenant), &link, End::Denied, &refused.to_string()),
        };
        let (pid, uid) = (peer.pid(), peer.uid());
        let cause = tenant.map_or(Cause::User(uid), Cause::Tenant);
        let greeted = |id| self.core.has_greeted(id);
        match self.limits.admit(&self.sessions, greeted, cause, self.core.tenant_count()) {
            Admission::Admitted => {}
            Admission::Replaces(silent) => self.lose(silent),
            Admission::Refused => {
                let why = "this tenant or user already has the maximum number of connections: end some of its programs";
                return self.refuse(Some(cause), &link, End::Crowded, why);
            }
        }
        if let Err(refused) = self.peers.add(session, peer) {
            return self.refuse(Some(cause), &link, End::Denied, &refused.to_string());
        }
        self.next += 1;
        self.sessions.insert(session, Connection::new(link, cause, self.now()));
        self.handle(Event::Connected { session, pid, uid, tenant });
    }

    fn refuse(&mut self, cause: Option<Cause>, link: &Link, end: End, why: &str) {
        self.warn(cause, |left_out| tracing::warn!(?cause, why, left_out, "a connection is refused"));
        let _ = link.try_send(&FromOwner::Goodbye(end), &[]);
    }

    /// Handles pending messages in rotation between tenants, and between the processes of each tenant.
    pub(super) fn hear_all(&mut self, ready: Vec<SessionId>) {
        let mut by_cause: BTreeMap<Cause, Vec<SessionId>> = BTreeMap::new();
        for session in ready {
            if let Some(connection) = self.sessions.get(&session) {
                by_cause.entry(connection.cause).or_default().push(session);
            }
        }
        self.heard.retain(|cause, _| by_cause.contains_key(cause));
        for (cause, mut sessions) in by_cause {
            let last = self.heard.get(&cause).copied();
            let first = sessions.partition_point(|&session| last.is_some_and(|last| session <= last));
            sessions.rotate_left(first);
            let (mut messages, limit) = (0, self.core.steps() + TENANT_STEPS_AT_ONCE);
            for session in sessions {
                if messages >= TENANT_MESSAGES_AT_ONCE || self.core.steps() >= limit {
                    break;
                }
                self.heard.insert(cause, session);
                messages += self.hear(session, limit);
            }
        }
    }

    /// Handles messages from a process. Returns the number of handled messages.
    fn hear(&mut self, session: SessionId, limit: u64) -> usize {
        for number in 0..MESSAGES_AT_ONCE {
            let Some(connection) = self.sessions.get(&session) else { return number };
            if self.core.steps() >= limit {
                return number;
            }
            match connection.link.try_receive() {
                Ok(received) => {
                    let greets = matches!(received.message, FromTenant::Hello(_));
                    // The process may have exited after it connected, and another process may use its connection.
                    if greets && !self.peers.lives(session) {
                        self.lose(session);
                        return number;
                    }
                    let pieces: Vec<PieceId> = received.descriptors.into_iter().map(|fd| self.keep(fd)).collect();
                    self.handle(Event::Said { session, message: received.message, pieces });
                    if greets
                        && let Some(cause) = self.cause_of(session)
                        && let Some(connection) = self.sessions.get_mut(&session)
                    {
                        self.outboxes.belongs(connection, cause);
                    }
                }
                Err(LinkError::WouldBlock) => return number,
                Err(error) => {
                    if !matches!(error, LinkError::Closed) {
                        self.warn_of(session, "the connection of a program failed", &error);
                    }
                    self.lose(session);
                    return number + 1;
                }
            }
        }
        MESSAGES_AT_ONCE
    }

    /// Stores a received descriptor as a piece until the state machine uses or drops the piece.
    fn keep(&mut self, descriptor: OwnedFd) -> PieceId {
        let piece = self.core.piece_number();
        self.vault.receive(piece, descriptor);
        piece
    }

    /// Returns the connections that have not sent `Hello`, each with its start time.
    fn silent(&self) -> impl Iterator<Item = (SessionId, u64)> + '_ {
        let silent = self.sessions.iter().filter(|(id, _)| !self.core.has_greeted(**id));
        silent.map(|(&id, connection)| (id, connection.since))
    }

    /// Closes connections that have not sent `Hello` in time.
    pub(super) fn end_silent(&mut self) {
        let now = self.now();
        let late: Vec<_> = self.silent().filter(|(_, since)| now >= since + SILENT_NS).map(|(id, _)| id).collect();
        for session in late {
            let cause = self.cause_of(session);
            self.warn(cause, |left_out| {
                tracing::warn!(?cause, left_out, "closing a connection that has sent no message")
            });
            self.lose(session);
        }
    }

    /// Sends the deferred messages that are due.
    pub(super) fn send_again(&mut self) {
        let (now, bounds) = (self.now(), self.limits.unread(self.core.tenant_count()));
        for (session, error) in self.outboxes.retry(&mut self.sessions, bounds, now) {
            if !matches!(error, LinkError::Closed) {
                self.warn_of(session, "the connection of a program failed", &error);
            }
            self.lose(session);
        }
    }

    /// Returns the time in ns until a silent connection is closed, connections are accepted again, or a message is
    /// retried, whichever is first.
    pub(super) fn next_retry(&self) -> Option<u64> {
        let now = self.now();
        let silent = self.silent().map(|(_, since)| since + SILENT_NS).min();
        let accepts = (self.accepts_from > now).then_some(self.accepts_from);
        let due = silent.into_iter().chain(accepts).chain(self.outboxes.due(&self.sessions)).min();
        due.map(|due| due.saturating_sub(now))
    }
}
