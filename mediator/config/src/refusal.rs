//! Reasons against a virtual machine or a tenant.

/// Kinds of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// A value that is wrong in any circumstances.
    Invalid,
    /// No card has the name.
    UnknownCard,
    /// Another object has the name, the socket or the card already.
    Conflict,
    /// The card has not enough left.
    Quota,
}

/// A reason against a virtual machine or a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of the refusal.
    pub kind: RefusalKind,
    /// The key.
    pub field: &'static str,
    /// The mistake, and the expected value.
    pub what: String,
}
