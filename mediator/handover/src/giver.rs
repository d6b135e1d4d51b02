//! The process that gives.

use crate::package::sealed;
use crate::wire::{BATCH, Message, Wire};
use crate::{Error, Introduction, Package};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// The giver's end.
#[derive(Debug)]
pub struct Giver(Wire);

impl Giver {
    /// Meets the taker at the other end of a `SOCK_SEQPACKET` socket, which says who it is within `limit`.
    ///
    /// # Errors
    /// When it does not, or is no taker.
    pub fn meet(socket: OwnedFd, limit: Duration) -> Result<(Self, Introduction), Error> {
        let wire = Wire::new(socket);
        match wire.receive(limit, "before it has said who it is")? {
            (Message::Hello(introduction), fds) if fds.is_empty() => Ok((Self(wire), introduction)),
            (message, _) => Err(unexpected(message)),
        }
    }

    /// Gives all of it, which is the giver's still.
    ///
    /// # Errors
    /// When it is too much, or the taker does not take it in.
    pub fn give(&self, package: &Package) -> Result<(), Error> {
        package.check()?;
        let Package { file, descriptors } = package;
        let bytes = file.len() as u64;
        let count = u32::try_from(descriptors.len()).unwrap_or(u32::MAX);
        self.0.send(&Message::Offer { bytes, descriptors: count }, &[sealed(file)?.as_fd()])?;
        for batch in descriptors.chunks(BATCH) {
            let names = batch.iter().map(|(name, _)| name.clone()).collect();
            let fds: Vec<_> = batch.iter().map(|(_, fd)| fd.as_fd()).collect();
            self.0.send(&Message::Descriptors(names), &fds)?;
        }
        Ok(())
    }

    /// Waits until the taker has made everything of what it was given, for `limit` at most. All is still the giver's.
    ///
    /// # Errors
    /// When the taker refuses, has ended, or takes longer.
    pub fn await_ready(&self, limit: Duration) -> Result<(), Error> {
        match self.0.receive(limit, "before it was ready")? {
            (Message::Ready, _) => Ok(()),
            (message, _) => Err(unexpected(message)),
        }
    }

    /// Tells the taker, which is ready, that all is its own.
    ///
    /// # Errors
    /// When it has ended.
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
