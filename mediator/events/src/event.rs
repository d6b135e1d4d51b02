//! Events before they are added to the log.

use std::time::Duration;

use api::{EventKind, Subject, SubjectKind};

/// Subject of the daemon's own events.
const DAEMON: &str = "mediatord";

/// An event without its number, time and author.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    pub(crate) kind: EventKind,
    pub(crate) subject: Subject,
    pub(crate) text: String,
    pub(crate) card: Option<String>,
    pub(crate) waited: Option<Duration>,
}

impl NewEvent {
    /// Creates an event about any object.
    #[must_use]
    pub fn about(kind: EventKind, subject: Subject, text: impl Into<String>) -> Self {
        Self { kind, subject, text: text.into(), card: None, waited: None }
    }

    /// Creates an event about a virtual machine.
    #[must_use]
    pub fn vm(kind: EventKind, name: &str, text: impl Into<String>) -> Self {
        Self::about(kind, Subject { kind: SubjectKind::Vm, name: name.to_owned() }, text)
    }

    /// Creates an event about a tenant.
    #[must_use]
    pub fn tenant(kind: EventKind, name: &str, text: impl Into<String>) -> Self {
        Self::about(kind, Subject { kind: SubjectKind::Tenant, name: name.to_owned() }, text)
    }

    /// Creates an event about a card.
    #[must_use]
    pub fn card(kind: EventKind, name: &str, text: impl Into<String>) -> Self {
        Self::about(kind, Subject { kind: SubjectKind::Card, name: name.to_owned() }, text)
    }

    /// Creates an event about the daemon.
    #[must_use]
    pub fn daemon(kind: EventKind, text: impl Into<String>) -> Self {
        Self::about(kind, Subject { kind: SubjectKind::Daemon, name: DAEMON.to_owned() }, text)
    }

    /// Sets the card of a virtual machine or tenant.
    #[must_use]
    pub fn on(self, card: &str) -> Self {
        Self { card: Some(card.to_owned()), ..self }
    }

    /// Sets the duration of a wait.
    #[must_use]
    pub fn waited(self, waited: Duration) -> Self {
        Self { waited: Some(waited), ..self }
    }
}
