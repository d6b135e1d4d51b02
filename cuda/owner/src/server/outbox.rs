//! Messages in transit to processes, and descriptors that the processes have not received yet. The kernel counts the
//! descriptors that a user has sent and that have not been received. It rejects a message if this number exceeds the
//! sender's limit on open files (`ETOOMANYREFS`). Therefore, this module limits the number of such descriptors per
//! connection, per tenant and in total. A message beyond a limit waits here, like a message that does not fit into the
//! socket. A process that does not read delays only messages to its own tenant. A connection is closed only if too many
//! messages without descriptors wait for its process.
//!
//! UNSAFETY: queries the number of unread bytes in a socket, which no library supports.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use super::Cause;
use crate::core::SessionId;
use cuda_protocol::{FromOwner, Link, LinkError};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Maximum number of messages without descriptors, and of messages about turns, that wait for one process. The
/// process's chunks limit the number of messages with descriptors.
const WAITING_MOST: usize = 256;
/// Maximum number of unread descriptors per connection. At this limit, the next message with descriptors waits.
const UNREAD_MOST: usize = 256;
/// Maximum number of unread descriptors per tenant.
const TENANT_UNREAD_MOST: usize = 4096;
/// Delay before a deferred message is first retried, in ns. The delay doubles with each retry.
// TIMEOUT: a process that reads its messages receives 256 descriptors in less time. The longest delay is about 64 ms.
const AGAIN_NS: u64 = 1_000_000;
/// Maximum number of doublings of [`AGAIN_NS`].
const DOUBLINGS_MOST: u32 = 6;

/// A message with its descriptors.
type Packet = (FromOwner, Vec<Arc<OwnedFd>>);

/// A connection with its queued messages.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) link: Link,
    /// The tenant or user that the connection is attributed to.
    pub(super) cause: Cause,
    /// Time when the connection was established, in ns.
    pub(super) since: u64,
    /// Messages about turns. They may overtake messages about chunks, because no other message depends on their order.
    urgent: VecDeque<Packet>,
    waiting: VecDeque<Packet>,
    /// Number of messages without descriptors in `waiting`.
    plain: usize,
    /// Upper bound on the number of descriptors that the process has not read.
    unread: usize,
    /// Number of consecutive failed attempts to send.
    tries: u32,
    /// Time of the next attempt, in ns.
    again: u64,
}

/// Limits on descriptors in transit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unread {
    /// Limit for all connections together.
    pub(super) all: usize,
    /// Number of tenants that share the limit.
    pub(super) tenants: usize,
}

impl Unread {
    /// Returns the maximum number of unread descriptors per tenant. A tenant without unread descriptors is always sent
    /// one message.
    fn of_tenant(self) -> usize {
        (self.all / self.tenants.max(1)).min(TENANT_UNREAD_MOST)
    }
}

/// The number of descriptors in transit for each tenant, and the connections with descriptors in transit or queued
/// messages.
#[derive(Debug, Default)]
pub(super) struct Outboxes {
    unread: BTreeMap<Cause, usize>,
    readers: BTreeSet<SessionId>,
    waiters: BTreeSet<SessionId>,
}

impl Connection {
    pub(super) fn new(link: Link, cause: Cause, since: u64) -> Self {
        let (urgent, waiting) = Default::default();
        Self { link, cause, since, urgent, waiting, plain: 0, unread: 0, tries: 0, again: 0 }
    }

    /// Returns the next message to send.
    fn next(&self) -> Option<&Packet> {
        self.urgent.front().or(self.waiting.front())
    }
}

impl Outboxes {
    /// Sends a message after the queued ones. Returns an error if too many messages wait for the process, or if the
    /// connection fails.
    pub(super) fn send(
        &mut self,
        connections: &mut BTreeMap<SessionId, Connection>,
        id: SessionId,
        packet: Packet,
        bounds: Unread,
        now: u64,
    ) -> Result<(), LinkError> {
        let Some(connection) = connections.get_mut(&id) else { return Ok(()) };
        let is_urgent = matches!(
            packet.0,
            FromOwner::Run(_)
                | FromOwner::Stop { .. }
                | FromOwner::Drain { .. }
                | FromOwner::Step(_)
                | FromOwner::Soon { .. }
        );
        if is_urgent {
            connection.urgent.push_back(packet);
        } else {
            connection.plain += usize::from(packet.1.is_empty());
            connection.waiting.push_back(packet);
        }
        // An attempt before the due time would fail again.
        if !self.waiters.contains(&id) || is_urgent {
            self.flush(connections, id, bounds, now)?;
        }
        let Some(connection) = connections.get(&id) else { return Ok(()) };
        let too_many = connection.plain > WAITING_MOST || connection.urgent.len() > WAITING_MOST;
        if too_many { Err(LinkError::WouldBlock) } else { Ok(()) }
    }

    /// Sends queued messages until a limit is reached or the socket is full.
    fn flush(
        &mut self,
        connections: &mut BTreeMap<SessionId, Connection>,
        id: SessionId,
        bounds: Unread,
        now: u64,
    ) -> Result<(), LinkError> {
        loop {
            let Some(connection) = connections.get_mut(&id) else { return Ok(()) };
            let urgent = !connection.urgent.is_empty();
            let Some(count) = connection.next().map(|(_, descriptors)| descriptors.len()) else {
                connection.tries = 0;
                self.waiters.remove(&id);
                return Ok(());
            };
            let cause = connection.cause;
            let may = count == 0 || self.may_send(connection, count, bounds);
            let sent = match connection.next() {
                Some((message, descriptors)) if may => {
                    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(|fd| fd.as_fd()).collect();
                    connection.link.try_send(message, &borrowed)
                }
                _ => Err(LinkError::WouldBlock),
            };
            match sent {
                Ok(()) => {
                    let taken = if urgent { connection.urgent.pop_front() } else { connection.waiting.pop_front() };
                    connection.plain -= usize::from(!urgent && taken.is_some() && count == 0);
                    connection.tries = 0;
                    if count > 0 {
                        connection.unread += count;
                        *self.unread.entry(cause).or_default() += count;
                        self.readers.insert(id);
                    }
                }
                // Unread descriptors of this or of other connections may be the cause. The owner cannot tell which.
                Err(LinkError::WouldBlock | LinkError::Crowded) => {
                    connection.again = now + (AGAIN_NS << connection.tries.min(DOUBLINGS_MOST));
                    connection.tries += 1;
                    self.waiters.insert(id);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns true if a message with `count` descriptors may be sent.
    fn may_send(&mut self, connection: &mut Connection, count: usize, bounds: Unread) -> bool {
        if connection.unread > 0 && is_read(connection.link.as_fd()) {
            self.forget(connection);
        }
        let all: usize = self.unread.values().sum();
        let own = self.unread.get(&connection.cause).copied().unwrap_or(0);
        connection.unread + count <= UNREAD_MOST
            && (own == 0 || own + count <= bounds.of_tenant())
            && (own == 0 || all + count <= bounds.all)
    }

    /// Records that the descriptors of a connection were read, or will never be read.
    fn forget(&mut self, connection: &mut Connection) {
        let unread = std::mem::take(&mut connection.unread);
        if let Some(all) = self.unread.get_mut(&connection.cause) {
            *all -= unread;
            if *all == 0 {
                self.unread.remove(&connection.cause);
            }
        }
    }

    /// Records that a connection was closed.
    pub(super) fn ended(&mut self, id: SessionId, mut connection: Connection) {
        self.forget(&mut connection);
        self.readers.remove(&id);
        self.waiters.remove(&id);
    }

    /// Attributes a connection to another tenant or user.
    pub(super) fn belongs(&mut self, connection: &mut Connection, cause: Cause) {
        let unread = connection.unread;
        self.forget(connection);
        connection.cause = cause;
        if unread > 0 {
            connection.unread = unread;
            *self.unread.entry(cause).or_default() += unread;
        }
    }

    /// Returns the time of the next attempt to send a queued message, in ns.
    pub(super) fn due(&self, connections: &BTreeMap<SessionId, Connection>) -> Option<u64> {
        self.waiters.iter().filter_map(|id| connections.get(id)).map(|connection| connection.again).min()
    }

    /// Retries the messages that are due. Returns the failed connections with their errors.
    pub(super) fn retry(
        &mut self,
        connections: &mut BTreeMap<SessionId, Connection>,
        bounds: Unread,
        now: u64,
    ) -> Vec<(SessionId, LinkError)> {
        if self.due(connections).is_none_or(|due| due > now) {
            return Vec::new();
        }
        // A process of the same tenant may have read its messages meanwhile.
        for id in self.readers.clone() {
            match connections.get_mut(&id) {
                Some(connection) if connection.unread > 0 && !is_read(connection.link.as_fd()) => {}
                Some(connection) => {
                    self.forget(connection);
                    self.readers.remove(&id);
                }
                None => drop(self.readers.remove(&id)),
            }
        }
        let due = self.waiters.iter().filter(|id| connections.get(id).is_none_or(|waits| waits.again <= now));
        let mut failed = Vec::new();
        for id in due.copied().collect::<Vec<_>>() {
            if let Err(error) = self.flush(connections, id, bounds, now) {
                failed.push((id, error));
            }
        }
        failed
    }

    /// Returns the number of descriptors in transit to one tenant or user.
    #[cfg(test)]
    pub(super) fn unread(&self, cause: Cause) -> usize {
        self.unread.get(&cause).copied().unwrap_or(0)
    }
}

/// Returns true if the peer has received all messages.
fn is_read(socket: BorrowedFd<'_>) -> bool {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open, and the kernel writes one integer.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    done == 0 && bytes == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_protocol::{Chunk, ChunkId, MAX_CHUNKS, Place};

    const BOUNDS: Unread = Unread { all: 2048, tenants: 2 };

    fn grant(file: &Arc<OwnedFd>) -> Packet {
        let chunk = Chunk { id: ChunkId(1), place: Place::Device };
        let message = FromOwner::Granted { request: 1, chunks: vec![chunk; MAX_CHUNKS], more: false };
        (message, vec![Arc::clone(file); MAX_CHUNKS])
    }

    fn plain(request: u32) -> Packet {
        (FromOwner::Fixed { request }, Vec::new())
    }

    struct Sides {
        outboxes: Outboxes,
        connections: BTreeMap<SessionId, Connection>,
        programs: Vec<Link>,
        file: Arc<OwnedFd>,
        now: u64,
    }

    impl Sides {
        /// Creates one connection for each of these tenant numbers.
        fn new(tenants: &[u32]) -> Self {
            let (mut connections, mut programs) = (BTreeMap::new(), Vec::new());
            for (at, &tenant) in tenants.iter().enumerate() {
                let (owner, program) = Link::pair().expect("a pair");
                let connection = Connection::new(owner, Cause::Tenant(vram::TenantId(tenant)), 0);
                connections.insert(SessionId(at as u64), connection);
                programs.push(program);
            }
            let file = Arc::new(tempfile::tempfile().expect("a file").into());
            Self { outboxes: Outboxes::default(), connections, programs, file, now: 0 }
        }

        fn send(&mut self, to: u64, packet: Packet) -> Result<(), LinkError> {
            self.outboxes.send(&mut self.connections, SessionId(to), packet, BOUNDS, self.now)
        }

        fn retry(&mut self) -> usize {
            self.now += AGAIN_NS << DOUBLINGS_MOST;
            self.outboxes.retry(&mut self.connections, BOUNDS, self.now).len()
        }

        fn unread(&self, tenant: u32) -> usize {
            self.outboxes.unread(Cause::Tenant(vram::TenantId(tenant)))
        }
    }

    #[test]
    fn unread_descriptors_are_bounded_per_tenant() {
        let mut sides = Sides::new(&[1, 1, 1, 1, 1, 1, 1, 1, 2]);
        let file = Arc::clone(&sides.file);
        for to in 0..8 {
            for _ in 0..50 {
                sides.send(to, grant(&file)).expect("it waits");
            }
        }
        assert_eq!(sides.unread(1), BOUNDS.of_tenant());
        sides.send(8, grant(&file)).expect("sent");
        assert_eq!(sides.programs[8].receive().expect("received").descriptors.len(), MAX_CHUNKS);
        // Once the processes read their messages, they receive all of them.
        let mut received = 0;
        for _ in 0..1000 {
            for program in &sides.programs[..8] {
                while program.try_receive_from_owner().is_ok() {
                    received += 1;
                }
            }
            if received == 8 * 50 {
                break;
            }
            assert_eq!(sides.retry(), 0);
        }
        assert_eq!(received, 8 * 50);
        assert_eq!(sides.outboxes.due(&sides.connections), None, "nothing waits");
    }

    #[test]
    fn slice_message_overtakes_chunks_and_others_keep_order() {
        let mut sides = Sides::new(&[1]);
        let file = Arc::clone(&sides.file);
        for _ in 0..10 {
            sides.send(0, grant(&file)).expect("it waits");
        }
        sides.send(0, plain(7)).expect("it waits");
        sides.send(0, (FromOwner::Stop { card: 0, turn: 1 }, Vec::new())).expect("sent");
        let mut kinds = Vec::new();
        for _ in 0..100 {
            while let Ok(received) = sides.programs[0].try_receive_from_owner() {
                kinds.push(received.message);
            }
            sides.retry();
        }
        let stop = kinds.iter().position(|message| matches!(message, FromOwner::Stop { .. })).expect("it came");
        assert_eq!(stop, UNREAD_MOST / MAX_CHUNKS, "after earlier messages only");
        assert_eq!(kinds.last(), Some(&FromOwner::Fixed { request: 7 }));
        assert_eq!(kinds.len(), 12);
    }

    #[test]
    fn program_that_reads_no_answers_is_cut_off_and_frees_credit() {
        let mut sides = Sides::new(&[1]);
        let file = Arc::clone(&sides.file);
        sides.send(0, grant(&file)).expect("sent");
        let sent = (0..10_000).map(|request| sides.send(0, plain(request))).take_while(Result::is_ok).count();
        assert!((WAITING_MOST..10_000).contains(&sent), "{sent}");
        let connection = sides.connections.remove(&SessionId(0)).expect("there");
        sides.outboxes.ended(SessionId(0), connection);
        assert_eq!((sides.unread(1), sides.outboxes.due(&sides.connections)), (0, None));
    }
}
