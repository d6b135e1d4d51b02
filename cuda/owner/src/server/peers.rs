//! Peer processes of connections: their identity, their state, and signals to them.
//!
//! The tenants' turns and memory do not depend on this module. When a process is signalled, the state machine has
//! already revoked its turn and memory. A failed signal is reported, and retried at later polls.
//!
//! UNSAFETY: queries the peer of a socket with system options that no library supports.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use crate::core::SessionId;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};
use vram::TenantId;

/// Interval between polls of the processes without a connection, in ns.
const LOOK_NS: u64 = 100_000_000;
/// Number of polls after which a process without a connection is killed. The process could otherwise keep chunks that
/// are not in any account.
// TIMEOUT: a program that lost its connection accidentally reconnects within `cuda_protocol::RECONNECT_MS`; the limit
// is 5 s.
const MAX_POLLS_AFTER_LEAVE: u32 = 50;
/// Maximum number of processes that have left and may reconnect. Further processes are killed at the next poll.
const LEFT_MOST: usize = 1024;
/// Maximum number of attempts to signal one process, one per poll.
const SIGNALS_MOST: u32 = 50;
/// `SO_PEERPIDFD` (Linux 6.5), which returns a pidfd of the connected process.
const SO_PEERPIDFD: libc::c_int = 77;
/// Maximum number of exited processes that are handled at a time.
const ENDS_AT_ONCE: usize = 64;

/// Identity of a connected process.
#[derive(Debug)]
pub(super) struct Peer {
    pid: Pid,
    uid: u32,
    /// Identifies the process even if its process ID is reused.
    handle: OwnedFd,
}

/// Reason for rejecting a connection immediately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    /// The process that connected has exited, so an unknown process uses the connection.
    #[error("the process that made the connection has exited: connect from the process that uses the card")]
    Exited,
    /// The process cannot be signalled or identified.
    #[error("the process is in a PID namespace that the owner cannot see: run the daemon in the host's PID namespace")]
    Invisible,
    /// The owner has abandoned the process, but the process still runs.
    #[error("the owner has given up the process because it did not respond: end it")]
    GivenUp,
    /// The system cannot identify the process.
    #[error("the process cannot be identified: {0}")]
    System(Errno),
}

/// A process without a connection.
#[derive(Debug)]
struct Left {
    peer: Peer,
    tenant: Option<TenantId>,
    looks: u32,
    signals: u32,
    /// Set if the owner has abandoned the process, which is then signalled and never served again.
    given_up: bool,
    /// Set if a failure to signal the process has been reported.
    failed: bool,
}

/// State change of a process that was abandoned or has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// SIGKILL was sent to a process of the tenant or, if the flag is unset, could not be sent.
    Signalled(Option<TenantId>, bool),
    /// An abandoned process has exited.
    Ended(u32),
}

/// Connected processes, and processes that have left or are expected to connect.
#[derive(Debug)]
pub(super) struct Peers {
    peers: BTreeMap<SessionId, Peer>,
    left: Vec<Left>,
    looked: Option<Instant>,
    /// Epoll descriptor that is readable when a process in `peers` has exited.
    ends: OwnedFd,
}

impl Peer {
    /// Returns the process at the other end of `socket`.
    pub(super) fn from_socket(socket: BorrowedFd<'_>) -> Result<Self, Refused> {
        // SAFETY: all zeros is a valid value of the type.
        let mut named: libc::ucred = unsafe { std::mem::zeroed() };
        option(socket, libc::SO_PEERCRED, &mut named).map_err(Refused::System)?;
        let pid = Pid::from_raw(named.pid).ok_or(Refused::Invisible)?;
        let mut number: libc::c_int = -1;
        let handle = match option(socket, SO_PEERPIDFD, &mut number) {
            // SAFETY: the descriptor is new and has no other owner.
            Ok(()) => unsafe { OwnedFd::from_raw_fd(number) },
            // Before Linux 6.5, the process ID may already belong to another process, if the first one has exited.
            Err(Errno::NOPROTOOPT) => pidfd_open(pid, PidfdFlags::empty()).map_err(refused)?,
            Err(error) => return Err(refused(error)),
        };
        let peer = Self { pid, uid: named.uid, handle };
        if peer.lives() { Ok(peer) } else { Err(Refused::Exited) }
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    pub(super) fn uid(&self) -> u32 {
        self.uid
    }

    fn kill(&self) -> Result<(), Errno> {
        pidfd_send_signal(&self.handle, Signal::KILL)
    }

    fn lives(&self) -> bool {
        let mut polled = [PollFd::from_borrowed_fd(self.handle.as_fd(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok_and(|ready| ready == 0)
    }
}

/// Reads an option of a socket into `value`.
fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int, value: &mut T) -> Result<(), Errno> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointers refer to local variables of the given length. Any bytes are valid for both types.
    let done = unsafe {
        let value = std::ptr::from_mut(value).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, value, &raw mut length)
    };
    if done == 0 { Ok(()) } else { Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)) }
}

fn refused(error: Errno) -> Refused {
    match error {
        // The error depends on the kernel version.
        Errno::SRCH | Errno::INVAL | Errno::NODATA => Refused::Exited,
        other => Refused::System(other),
    }
}

impl Peers {
    pub(super) fn new() -> io::Result<Self> {
        let ends = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { peers: BTreeMap::new(), left: Vec::new(), looked: None, ends })
    }

    /// Adds a process, unless the owner has abandoned it.
    pub(super) fn add(&mut self, session: SessionId, peer: Peer) -> Result<(), Refused> {
        if self.left.iter().any(|left| left.given_up && left.peer.pid == peer.pid && left.peer.lives()) {
            return Err(Refused::GivenUp);
        }
        let data = epoll::EventData::new_u64(session.0);
        epoll::add(&self.ends, &peer.handle, data, epoll::EventFlags::IN).map_err(Refused::System)?;
        self.peers.insert(session, peer);
        Ok(())
    }

    /// Returns a descriptor that becomes readable when a connected process has exited.
    pub(super) fn ends(&self) -> BorrowedFd<'_> {
        self.ends.as_fd()
    }

    /// Returns connections whose processes have exited. Other processes may keep these connections open.
    pub(super) fn ended(&self) -> Vec<SessionId> {
        let mut events = Vec::with_capacity(ENDS_AT_ONCE);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.ends, rustix::buffer::spare_capacity(&mut events), Some(&now)) {
            Ok(_) => events.iter().map(|event: &epoll::Event| SessionId(event.data.u64())).collect(),
            Err(_) => Vec::new(),
        }
    }

    pub(super) fn pid(&self, session: SessionId) -> Option<u32> {
        Some(self.peers.get(&session)?.pid())
    }

    /// Returns true if the process of a connection has not exited.
    pub(super) fn lives(&self, session: SessionId) -> bool {
        self.peers.get(&session).is_some_and(Peer::lives)
    }

    /// Kills an abandoned process, and keeps it among the processes without a connection. If `waits` is set, the kill
    /// is delayed by a poll interval: killing a client during its work terminates all clients of its MPS server, so the
    /// server terminates this work first.
    pub(super) fn give_up(&mut self, session: SessionId, tenant: TenantId, waits: bool) -> Option<News> {
        let peer = self.remove(session)?;
        self.left.retain(|left| left.peer.pid != peer.pid);
        let (given_up, failed) = (true, false);
        let looks = u32::from(!waits);
        let mut left = Left { peer, tenant: Some(tenant), looks, signals: 0, given_up, failed };
        let news = if waits { None } else { left.signal() };
        self.left.push(left);
        news
    }

    /// Records that a connection was closed. `held` is set if the process had chunks.
    pub(super) fn gone(&mut self, session: SessionId, tenant: Option<TenantId>, held: bool) {
        let Some(peer) = self.remove(session).filter(|_| held) else { return };
        // Keep one entry per process, however often it reconnects.
        if self.left.iter().all(|left| left.peer.pid != peer.pid || !left.peer.lives()) {
            let (given_up, failed) = (false, false);
            // Each such process uses one of the owner's descriptors. A large number of such processes is deliberate, so
            // signal further ones at the next poll.
            let looks = if self.left.len() < LEFT_MOST { 0 } else { MAX_POLLS_AFTER_LEAVE };
            self.left.push(Left { peer, tenant, looks, signals: 0, given_up, failed });
        }
    }

    /// Records that the process of a connection has reported all its memory to the owner.
    pub(super) fn adopted(&mut self, session: SessionId) {
        if let Some(peer) = self.peers.get(&session) {
            self.left.retain(|left| left.given_up || left.peer.pid != peer.pid);
        }
    }

    /// Adds a process that has left another card's owner and must connect to this one.
    pub(super) fn expect(&mut self, pid: u32, tenant: TenantId) {
        let connected = self.peers.values().any(|peer| peer.pid() == pid);
        let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw).filter(|_| !connected) else { return };
        // The call fails if the process has exited.
        let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        let (given_up, failed, peer) = (false, false, Peer { pid, uid: 0, handle });
        self.left.push(Left { peer, tenant: Some(tenant), looks: 0, signals: 0, given_up, failed });
    }

    /// Removes a tenant's processes without a connection, except abandoned ones.
    pub(super) fn forget(&mut self, tenant: TenantId) {
        self.left.retain(|left| left.given_up || left.tenant != Some(tenant));
    }

    fn remove(&mut self, session: SessionId) -> Option<Peer> {
        let peer = self.peers.remove(&session)?;
        let _ = epoll::delete(&self.ends, &peer.handle);
        Some(peer)
    }

    /// Returns the time until the next poll of the processes without a connection, in ns.
    pub(super) fn next_look(&self) -> Option<u64> {
        (!self.left.is_empty()).then_some(LOOK_NS)
    }

    /// Removes exited processes, and kills abandoned processes and those that run without a connection for too long.
    /// `adopts` returns true if the process of a connection is reporting its memory to the owner.
    pub(super) fn look(&mut self, adopts: impl Fn(SessionId) -> bool) -> Vec<News> {
        if self.left.is_empty() || self.looked.is_some_and(|at| at.elapsed() < Duration::from_nanos(LOOK_NS)) {
            return Vec::new();
        }
        self.looked = Some(Instant::now());
        let own = Pid::from_raw(std::process::id().cast_signed());
        let adopting: Vec<Pid> =
            self.peers.iter().filter(|(session, _)| adopts(**session)).map(|(_, peer)| peer.pid).collect();
        let mut news = Vec::new();
        self.left.retain_mut(|left| {
            if !left.peer.lives() {
                news.extend(left.given_up.then(|| News::Ended(left.peer.pid())));
                return false;
            }
            if Some(left.peer.pid) == own {
                return false;
            }
            if left.given_up && left.looks == 0 {
                left.looks = 1;
                return true;
            }
            if !left.given_up {
                left.looks += u32::from(!adopting.contains(&left.peer.pid));
            }
            if left.given_up || left.looks >= MAX_POLLS_AFTER_LEAVE {
                if !left.given_up {
                    let pid = left.peer.pid();
                    tracing::warn!(
                        pid,
                        "killing a program that continues without its connection and has memory of the card"
                    );
                }
                left.given_up = true;
                news.extend(left.signal());
            }
            true
        });
        news
    }
}

impl Left {
    /// Sends SIGKILL, unless it was already sent or sending failed too often. Reports the first failure, and success.
    fn signal(&mut self) -> Option<News> {
        if self.signals >= SIGNALS_MOST {
            return None;
        }
        self.signals += 1;
        match self.peer.kill() {
            Ok(()) => {
                self.signals = SIGNALS_MOST;
                Some(News::Signalled(self.tenant, true))
            }
            // The process has exited. The next poll detects this.
            Err(Errno::SRCH) => None,
            Err(error) => {
                let first = !std::mem::replace(&mut self.failed, true);
                first.then(|| {
                    tracing::error!(
                        pid = self.peer.pid(), uid = self.peer.uid, %error,
                        "a program that was given up cannot be killed: it has lost its connection, its turn and its \
                         accounted memory, but still runs. End it manually, and give the daemon CAP_KILL \
                         (docs/guides/operating.md)"
                    );
                    News::Signalled(self.tenant, false)
                })
            }
        }
    }
}

/// Kills a process by its ID, which must be recent, because IDs are reused.
pub(super) fn kill(pid: u32) {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
    let killed = pidfd_open(pid, PidfdFlags::empty()).and_then(|handle| pidfd_send_signal(handle, Signal::KILL));
    if let Err(error) = killed {
        tracing::warn!(?pid, %error, "a process that bypasses the card's owner cannot be killed");
    }
}

/// Logs a warning if this process may not signal programs of other users.
pub(super) fn report_rights() {
    use rustix::thread::{CapabilitySet, capabilities};
    let may = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::KILL));
    if !may {
        tracing::warn!(
            uid = rustix::process::geteuid().as_raw(),
            "the owner of the card lacks CAP_KILL: programs of other users that do not answer lose their connection, turn and \
             memory, but are not killed. Set CapabilityBoundingSet=CAP_KILL and AmbientCapabilities=CAP_KILL in the unit, as \
             the drop-in cuda.conf of the package does"
        );
    }
}
