//! The domain list, with memory sizes.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

use thiserror::Error;

use crate::hypervisor::DomainId;
use crate::wire::{Connection, DEVICE, kind};

/// Maximum length of a domain name in bytes.
const MAX_NAME: usize = 255;
/// First reserved domain ID, above the IDs of all domains.
const RESERVED: DomainId = 0x7ff0;

/// Port of an event channel that never exists. Before libxl requests a suspend, it binds the port that the domain has
/// set for this purpose, and cancels the suspend if this fails.
const NO_PORT: &str = "0";

/// The domain to serve: its ID, or its name, which persists across reboots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DomainName {
    /// Domain ID.
    Id(DomainId),
    /// Domain name.
    Name(String),
}

/// Text that is not a domain name or ID.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{0}` is not a domain, expected a name or an ID from 1 to {max}", max = RESERVED - 1)]
pub struct BadDomainName(String);

impl FromStr for DomainName {
    type Err = BadDomainName;

    fn from_str(text: &str) -> Result<Self, BadDomainName> {
        let bad = || BadDomainName(text.to_owned());
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            let id = text.parse().ok().filter(|id| (1..RESERVED).contains(id));
            return id.map(Self::Id).ok_or_else(bad);
        }
        let good = text.len() <= MAX_NAME && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
        if good { Ok(Self::Name(text.to_owned())) } else { Err(bad()) }
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// An existing domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// ID of the domain.
    pub id: DomainId,
    /// Maximum size of the domain's memory, in KiB.
    pub most_kib: u64,
    /// Current target of the domain's memory, in KiB.
    pub target_kib: u64,
}

/// A domain list that reports changes.
pub trait Store: Send + fmt::Debug {
    /// Returns the domain with the given name or ID, or `None` if it does not exist.
    ///
    /// # Errors
    /// Returns an error if the list cannot be read.
    fn find(&mut self, name: &DomainName) -> io::Result<Option<Found>>;

    /// Returns true if a domain exists and is not about to be destroyed.
    ///
    /// # Errors
    /// Returns an error if the list cannot be read.
    fn exists(&mut self, id: DomainId) -> io::Result<bool>;

    /// Makes the toolstack refuse to save or migrate a domain before the toolstack asks the domain to suspend. If
    /// `refused` is false, permits both again.
    ///
    /// # Errors
    /// Returns an error if xenstore rejects the change, or the domain no longer exists.
    fn refuse_saves(&mut self, id: DomainId, refused: bool) -> io::Result<()>;

    /// Consumes all reported changes. Returns true if there were any.
    ///
    /// # Errors
    /// Returns an error if the list cannot be read.
    fn changed(&mut self) -> io::Result<bool>;

    /// Returns a descriptor that is readable after a change.
    fn events(&self) -> BorrowedFd<'_>;
}

/// A connection to xenstore.
#[derive(Debug)]
pub struct XenStore(Connection);

impl XenStore {
    /// Opens the kernel's device and subscribes to the creation and destruction of domains.
    ///
    /// # Errors
    /// Returns an error if this is not a Xen host, or xenstored is not running.
    pub fn open() -> io::Result<Self> {
        let explain = |error: io::Error| {
            io::Error::new(error.kind(), format!("{DEVICE}: {error}; is this domain 0 of a Xen host, with xenstored?"))
        };
        let mut connection = Connection::open().map_err(explain)?;
        for watch in ["@introduceDomain", "@releaseDomain"] {
            connection.ask(kind::WATCH, &[watch, "gpu-mediator"]).map_err(explain)?;
        }
        Ok(Self(connection))
    }

    fn text(&mut self, path: &str) -> io::Result<Option<String>> {
        let value = self.0.ask(kind::READ, &[path])?;
        Ok(value.map(|value| String::from_utf8_lossy(&value).into_owned()))
    }

    fn number(&mut self, id: DomainId, what: &str) -> io::Result<u64> {
        let text = self.text(&format!("/local/domain/{id}/memory/{what}"))?;
        Ok(text.and_then(|text| text.parse().ok()).unwrap_or(0))
    }

    fn found(&mut self, id: DomainId) -> io::Result<Option<Found>> {
        if !self.exists(id)? {
            return Ok(None);
        }
        Ok(Some(Found { id, most_kib: self.number(id, "static-max")?, target_kib: self.number(id, "target")? }))
    }
}

impl Store for XenStore {
    fn find(&mut self, name: &DomainName) -> io::Result<Option<Found>> {
        let wanted = match name {
            DomainName::Id(id) => return self.found(*id),
            DomainName::Name(name) => name,
        };
        let list = self.0.ask(kind::DIRECTORY, &["/local/domain"])?.unwrap_or_default();
        let ids = list.split(|byte| *byte == 0).filter_map(|id| std::str::from_utf8(id).ok()?.parse().ok());
        let mut ids: Vec<DomainId> = ids.filter(|id| *id != 0).collect();
        // While a domain reboots, the old and the new domain may both exist for some time, so try the highest ID first.
        ids.sort_unstable_by(|a, b| b.cmp(a));
        for id in ids {
            if self.text(&format!("/local/domain/{id}/name"))?.as_ref() == Some(wanted)
                && let Some(found) = self.found(id)?
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn exists(&mut self, id: DomainId) -> io::Result<bool> {
        let introduced = self.0.ask(kind::IS_INTRODUCED, &[&id.to_string()])?;
        Ok(introduced.is_some_and(|answer| answer.starts_with(b"T")))
    }

    fn refuse_saves(&mut self, id: DomainId, refused: bool) -> io::Result<()> {
        let path = format!("/local/domain/{id}/device/suspend/event-channel");
        // By default, the domain owns this node. While saves are refused, only domain 0 may write to the node.
        let (value, permissions) = match refused {
            true => (NO_PORT, ["n0".to_owned(), format!("r{id}")].to_vec()),
            false => ("", [format!("n{id}")].to_vec()),
        };
        let words: Vec<&str> = [path.as_str()].into_iter().chain(permissions.iter().map(String::as_str)).collect();
        let written = self.0.ask_with(kind::WRITE, &[&path], value)?;
        let done = written.and(self.0.ask(kind::SET_PERMISSIONS, &words)?);
        done.map(drop).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    fn changed(&mut self) -> io::Result<bool> {
        self.0.changed()
    }

    fn events(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_a_number_and_the_rest_a_name() {
        assert_eq!("7".parse(), Ok(DomainName::Id(7)));
        assert_eq!("guest-7".parse(), Ok(DomainName::Name("guest-7".to_owned())));
        for bad in ["", "0", "32752", "70000", "a/b", "a b", "a\n", &"x".repeat(256)] {
            assert!(bad.parse::<DomainName>().is_err(), "{bad:?}");
        }
    }
}
