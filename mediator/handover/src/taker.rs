//! The process that takes.

use crate::package::{DESCRIPTORS_MAX, NAME_MAX, unsealed};
use crate::wire::{Message, Wire};
use crate::{Error, Introduction, Package};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Longest reason that is told, in characters.
const REASON_MAX: usize = 1000;

/// The taker's end.
#[derive(Debug)]
pub struct Taker(Wire);

impl Taker {
    /// Says to the giver at the other end of a `SOCK_SEQPACKET` socket who this is.
    ///
    /// # Errors
    /// When it has ended.
    pub fn connect(socket: OwnedFd, introduction: &Introduction) -> Result<Self, Error> {
        let wire = Wire::new(socket);
        wire.send(&Message::Hello(introduction.clone()), &[])?;
        Ok(Self(wire))
    }

    /// Says, in the place of who this is, why it does not take anything over. Nothing waits for it then.
    ///
    /// # Errors
    /// When the giver has ended.
    pub fn decline(socket: OwnedFd, why: &str) -> Result<(), Error> {
        Wire::new(socket).send(&Message::Refused(why.chars().take(REASON_MAX).collect()), &[])
    }

    /// Waits for what is given, for `limit` at most. It is still the giver's.
    ///
    /// # Errors
    /// When nothing is given, or not what was said.
    pub fn take(&self, limit: Duration) -> Result<Package, Error> {
        let awaits = "before it has given anything";
        let (message, fds) = self.0.receive(limit, awaits)?;
        let (Message::Offer { bytes, descriptors: count }, [file]) = (&message, fds.as_slice()) else {
            return Err(unexpected(&message));
        };
        let count = usize::try_from(*count).unwrap_or(usize::MAX);
        if count > DESCRIPTORS_MAX {
            return Err(Error::TooMuch("descriptors", count as u64, DESCRIPTORS_MAX as u64));
        }
        let file = unsealed(file, *bytes)?;
        let mut descriptors = Vec::new();
        while descriptors.len() < count {
            let (message, fds) = self.0.receive(limit, awaits)?;
            let Message::Descriptors(names) = message else { return Err(unexpected(&message)) };
            let sound = !names.is_empty()
                && names.len() == fds.len()
                && names.iter().all(|name| name.len() <= NAME_MAX)
                && names.len() <= count.saturating_sub(descriptors.len());
            if !sound {
                return Err(Error::Protocol(format!("{} names came with {} descriptors", names.len(), fds.len())));
            }
            descriptors.extend(names.into_iter().zip(fds));
        }
        Ok(Package { file, descriptors })
    }

    /// Says that everything is made of what was given.
    ///
    /// # Errors
    /// When the giver has ended, or closed the connection.
    pub fn ready(&self) -> Result<(), Error> {
        self.0.send(&Message::Ready, &[])
    }

    /// Says why it does not take over.
    ///
    /// # Errors
    /// When the giver has ended, or closed the connection.
    pub fn refuse(self, why: &str) -> Result<(), Error> {
        self.0.send(&Message::Refused(why.chars().take(REASON_MAX).collect()), &[])
    }

    /// Waits until all is this process's, for `limit` at most. When it fails nothing is.
    ///
    /// # Errors
    /// When the giver does not let go.
    pub fn wait(self, limit: Duration) -> Result<(), Error> {
        match self.0.receive(limit, "before it has let go")? {
            (Message::Yours, _) => Ok(()),
            (message, _) => Err(unexpected(&message)),
        }
    }
}

fn unexpected(message: &Message) -> Error {
    Error::Protocol(format!("{message:?}").chars().take(100).collect())
}
