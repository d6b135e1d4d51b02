//! Reasons to refuse a virtual machine or a tenant.

/// Kinds of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// The value is always invalid.
    Invalid,
    /// No card has the name.
    UnknownCard,
    /// Another object already has the name, the socket or the card.
    Conflict,
    /// The card has too few resources left.
    Quota,
}

/// A reason to refuse a virtual machine or a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of the refusal.
    pub kind: RefusalKind,
    /// The refused key.
    pub field: &'static str,
    /// The error, and the expected value.
    pub what: String,
}
