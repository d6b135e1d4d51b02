//! The socket that workers use to connect to a new daemon after their own daemon has exited.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use worker_link::Link;

/// Maximum number of pending connections.
const BACKLOG: i32 = 64;

/// Listening socket for workers that reconnect.
#[derive(Debug)]
pub(crate) struct RejoinSocket(OwnedFd);

impl RejoinSocket {
    /// Listens at a path, replacing an earlier daemon's socket. The daemon's user and group may connect, because
    /// workers may run as separate users in this group. Their process IDs distinguish workers from other processes.
    pub(crate) fn listen(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let hidden = path.with_extension("new");
        match std::fs::remove_file(&hidden) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        rustix::net::bind(&socket, &SocketAddrUnix::new(&hidden)?)?;
        // No process can connect before `listen`.
        rustix::fs::chmod(&hidden, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP)?;
        rustix::net::listen(&socket, BACKLOG)?;
        std::fs::rename(&hidden, path)?;
        Ok(Self(socket))
    }

    /// Accepts a connection. Returns it with its peer's process ID, or `None` if no connection is pending.
    pub(crate) fn accept(&self) -> Result<Option<(i32, Link)>, Errno> {
        match rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC) {
            Ok(socket) => {
                let peer = rustix::net::sockopt::socket_peercred(&socket)?;
                Ok(Some((peer.pid.as_raw_nonzero().get(), Link::new(socket))))
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for RejoinSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
