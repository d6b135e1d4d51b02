//! Processes at the other ends of connections.

use crate::core::SessionId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Time between two looks at processes that have left, in ns.
const LOOK_NS: u64 = 100_000_000;
/// Looks after which a process that has left is killed if it goes on: it would keep chunks that count for no one.
const LOOKS: u32 = 50;

#[derive(Debug)]
struct Peer {
    pid: Pid,
    /// Names the process even when its number is used again.
    handle: Option<OwnedFd>,
}

/// All of them, and those that have left but go on.
#[derive(Debug, Default)]
pub(super) struct Peers {
    peers: BTreeMap<SessionId, Peer>,
    left: Vec<(Peer, u32)>,
    looked: Option<Instant>,
}

impl Peers {
    pub(super) fn add(&mut self, session: SessionId, pid: Pid) {
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok();
        self.peers.insert(session, Peer { pid, handle });
    }

    pub(super) fn pid(&self, session: SessionId) -> Option<u32> {
        Some(self.peers.get(&session)?.pid.as_raw_nonzero().get() as u32)
    }

    pub(super) fn kill(&self, session: SessionId) {
        if let Some(peer) = self.peers.get(&session) {
            peer.kill();
        }
    }

    /// A connection has ended. `held`: the process had chunks.
    pub(super) fn gone(&mut self, session: SessionId, held: bool) {
        if let Some(peer) = self.peers.remove(&session).filter(|_| held) {
            self.left.push((peer, 0));
        }
    }

    /// Returns when to look at those that have left, in ns.
    pub(super) fn next_look(&self) -> Option<u64> {
        (!self.left.is_empty()).then_some(LOOK_NS)
    }

    /// Forgets processes that have ended, and kills those that have left and go on.
    pub(super) fn look(&mut self) {
        if self.left.is_empty() || self.looked.is_some_and(|at| at.elapsed() < Duration::from_nanos(LOOK_NS)) {
            return;
        }
        self.looked = Some(Instant::now());
        let own = Pid::from_raw(std::process::id() as i32);
        self.left.retain_mut(|(peer, looks)| {
            *looks += 1;
            if !peer.lives() || Some(peer.pid) == own {
                return false;
            }
            if *looks >= LOOKS {
                tracing::warn!(pid = ?peer.pid, "program goes on without its connection: killed");
                peer.kill();
                return false;
            }
            true
        });
    }
}

impl Peer {
    fn kill(&self) {
        if let Some(handle) = &self.handle {
            let _ = pidfd_send_signal(handle, Signal::KILL);
        }
    }

    fn lives(&self) -> bool {
        let Some(handle) = &self.handle else { return false };
        let mut polled = [PollFd::from_borrowed_fd(handle.as_fd(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok_and(|ready| ready == 0)
    }
}

/// Kills a process that was found by its number a moment ago.
pub(super) fn kill(pid: u32) {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
    let killed = pidfd_open(pid, PidfdFlags::empty()).and_then(|handle| pidfd_send_signal(handle, Signal::KILL));
    if let Err(error) = killed {
        tracing::warn!(?pid, %error, "a process that uses the card past its owner cannot be killed");
    }
}
