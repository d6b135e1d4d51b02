//! The process that takes over the state.

use crate::package::{DESCRIPTORS_MAX, NAME_MAX, unsealed};
use crate::wire::{Message, Wire};
use crate::{Error, Introduction, Package};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Maximum length of a reason in characters.
const REASON_MAX: usize = 1000;

/// The receiver's end of the socket.
#[derive(Debug)]
pub struct Receiver(Wire);

impl Receiver {
    /// Introduces this process to the sender at the other end of a `SOCK_SEQPACKET` socket.
    ///
    /// # Errors
    /// Returns an error if the sender has exited.
    pub fn connect(socket: OwnedFd, introduction: &Introduction) -> Result<Self, Error> {
        let wire = Wire::new(socket);
        wire.send(&Message::Hello(introduction.clone()), &[])?;
        Ok(Self(wire))
    }

    /// Rejects the handover instead of introducing this process, so that the sender does not have to wait.
    ///
    /// # Errors
    /// Returns an error if the sender has exited.
    pub fn decline(socket: OwnedFd, why: &str) -> Result<(), Error> {
        Wire::new(socket).send(&Message::Refused(why.chars().take(REASON_MAX).collect()), &[])
    }

    /// Waits for at most `limit` for the package, which the sender still owns.
    ///
    /// # Errors
    /// Returns an error if no package arrives, or if its contents do not match the announcement.
    pub fn take(&self, limit: Duration) -> Result<Package, Error> {
        let awaits = "before it sent the package";
        let (message, fds) = self.0.receive(limit, awaits)?;
        let (Message::Offer { bytes, descriptors: count }, [file]) = (&message, fds.as_slice()) else {
            return Err(unexpected(&message));
        };
        let count = usize::try_from(*count).unwrap_or(usize::MAX);
        if count > DESCRIPTORS_MAX {
            return Err(Error::TooMuch("file descriptors", count as u64, DESCRIPTORS_MAX as u64));
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
                return Err(Error::Protocol(format!("{} names for {} file descriptors", names.len(), fds.len())));
            }
            descriptors.extend(names.into_iter().zip(fds));
        }
        Ok(Package { file, descriptors })
    }

    /// Reports to the sender that everything has been rebuilt.
    ///
    /// # Errors
    /// Returns an error if the sender has exited or disconnected.
    pub fn ready(&self) -> Result<(), Error> {
        self.0.send(&Message::Ready, &[])
    }

    /// Rejects the package with this reason.
    ///
    /// # Errors
    /// Returns an error if the sender has exited or disconnected.
    pub fn refuse(self, why: &str) -> Result<(), Error> {
        self.0.send(&Message::Refused(why.chars().take(REASON_MAX).collect()), &[])
    }

    /// Waits for at most `limit` until this process owns everything. If the wait fails, this process owns nothing.
    ///
    /// # Errors
    /// Returns an error if the sender does not transfer ownership.
    pub fn wait(self, limit: Duration) -> Result<(), Error> {
        match self.0.receive(limit, "before it released the cards")? {
            (Message::Yours, _) => Ok(()),
            (message, _) => Err(unexpected(&message)),
        }
    }
}

fn unexpected(message: &Message) -> Error {
    Error::Protocol(format!("{message:?}").chars().take(100).collect())
}
