//! Reasons to reject a virtual machine or a tenant.

use super::CardSpec;

/// Kind of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// The value is invalid in any situation.
    Invalid,
    /// No card has this name.
    UnknownCard,
    /// Another object already uses the name, the socket or the card.
    Conflict,
    /// The card has too few resources left.
    Quota,
}

/// A reason to reject a virtual machine or a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of the refusal.
    pub kind: RefusalKind,
    /// The rejected key.
    pub field: &'static str,
    /// Description of the error and the expected value.
    pub what: String,
}

/// Returns a refusal if the card accepts no new virtual machines or tenants.
#[must_use]
pub fn drained(card: &CardSpec) -> Option<Refusal> {
    let what = format!(
        "card `{}` is drained, expected another card; `mediatorctl card undrain {}` makes it accept VMs and tenants again",
        card.name, card.name
    );
    card.drained.then_some(Refusal { kind: RefusalKind::Conflict, field: "card", what })
}
