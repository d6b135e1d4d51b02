//! The process that hands over the state.

use crate::package::sealed;
use crate::wire::{MAX_DESCRIPTORS, Message, Wire};
use crate::{Error, Introduction, Package};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// The sender's end of the socket.
#[derive(Debug)]
pub struct Sender(Wire);

impl Sender {
    /// Connects to the receiver at the other end of a `SOCK_SEQPACKET` socket, which must introduce itself within
    /// `limit`.
    ///
    /// # Errors
    /// Returns an error if the process does not introduce itself, or is not a receiver.
    pub fn meet(socket: OwnedFd, limit: Duration) -> Result<(Self, Introduction), Error> {
        let wire = Wire::new(socket);
        match wire.receive(limit, "before it introduced itself")? {
            (Message::Hello(introduction), fds) if fds.is_empty() => Ok((Self(wire), introduction)),
            (message, _) => Err(unexpected(message)),
        }
    }

    /// Sends the package, but retains ownership of its contents.
    ///
    /// # Errors
    /// Returns an error if the package exceeds a limit, or if the receiver does not read it.
    pub fn give(&self, package: &Package) -> Result<(), Error> {
        package.check()?;
        let Package { file, descriptors } = package;
        let bytes = file.len() as u64;
        let count = u32::try_from(descriptors.len()).unwrap_or(u32::MAX);
        self.0.send(&Message::Offer { bytes, descriptors: count }, &[sealed(file)?.as_fd()])?;
        for batch in descriptors.chunks(MAX_DESCRIPTORS) {
            let names = batch.iter().map(|(name, _)| name.clone()).collect();
            let fds: Vec<_> = batch.iter().map(|(_, fd)| fd.as_fd()).collect();
            self.0.send(&Message::Descriptors(names), &fds)?;
        }
        Ok(())
    }

    /// Waits for at most `limit` until the receiver has rebuilt everything. The sender retains ownership.
    ///
    /// # Errors
    /// Returns an error if the receiver rejects the package, exits, or does not respond in time.
    pub fn await_ready(&self, limit: Duration) -> Result<(), Error> {
        match self.0.receive(limit, "before it was ready")? {
            (Message::Ready, _) => Ok(()),
            (message, _) => Err(unexpected(message)),
        }
    }

    /// Transfers ownership of everything to the receiver, which has reported that it is ready.
    ///
    /// # Errors
    /// Returns an error if the receiver has exited.
    pub fn let_go(self) -> Result<(), Error> {
        self.0.send(&Message::Yours, &[])
    }
}

fn unexpected(message: Message) -> Error {
    match message {
        Message::Refused(why) => Error::Refused(why),
        other => Error::Protocol(format!("{other:?}").chars().take(100).collect()),
    }
}
