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
        "the other process uses version {0} of the protocol, this one {1}: upgrade through an intermediate version"
    )]
    Version(u32, u32),
    /// The other process rejected the package.
    #[error("the next process did not take over: {0}")]
    Refused(String),
    /// The other process has exited or disconnected.
    #[error("the other process exited, or closed the connection, {0}")]
    Ended(&'static str),
    /// The other process did not send a message in time.
    #[error("the other process sent nothing for {0:?}, {1}")]
    Silent(Duration, &'static str),
    /// The package exceeds a limit.
    #[error("{0} cannot be handed over: {1} exceed the limit of {2}")]
    TooMuch(&'static str, u64, u64),
    /// The operating system reported an error.
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
}

impl Error {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io(what, errno.into())
    }
}
