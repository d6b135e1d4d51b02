//! Errors of a handover.

use std::io;
use std::time::Duration;
use thiserror::Error;

/// Reason why a handover failed.
#[derive(Debug, Error)]
pub enum Error {
    /// The other process violated the protocol.
    #[error("the other process violates the protocol: {0}")]
    Protocol(String),
    /// The other process uses a different protocol version.
    #[error(
        "the other process uses protocol version {0}, this process uses {1}; upgrade through an intermediate version"
    )]
    Version(u32, u32),
    /// The other process rejected the package.
    #[error("the next process rejected the handover: {0}")]
    Refused(String),
    /// The other process exited or disconnected.
    #[error("the other process exited or disconnected {0}")]
    Ended(&'static str),
    /// The other process did not send a message in time.
    #[error("the other process sent no message for {0:?} {1}")]
    Silent(Duration, &'static str),
    /// The package exceeds a limit.
    #[error("too much to hand over: {1} {0}, at most {2}")]
    TooMuch(&'static str, u64, u64),
    /// A system call failed.
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
}

impl Error {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io(what, errno.into())
    }
}
