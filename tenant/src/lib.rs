//! The ID of a tenant. A tenant owns memory, time, quotas and telemetry on a card.
//!
//! A VM is one kind of tenant, and a process with a CUDA context is another. Memory (`vram`), channels (`channels`),
//! time (`sched`) and a card's owner all identify a tenant with the same type, so that IDs cannot be confused.
//!
//! This crate does not assign IDs, and does not distinguish kinds of tenants. A card's owner assigns the IDs and knows
//! the kinds.

use std::fmt;

/// ID of a card's tenant. An ID is not reused while any state of its tenant exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize, schemars::JsonSchema))]
pub struct TenantId(pub u32);

impl TenantId {
    /// The mediator itself, as the owner of the channels through which it moves memory. This ID is never assigned to a
    /// tenant.
    pub const MEDIATOR: Self = Self(u32::MAX);
    /// The mediator itself, as the owner of the channel through which it clears tenants' residue from PGRAPH. This ID
    /// is never assigned to a tenant.
    pub const CLEARER: Self = Self(u32::MAX - 1);

    /// Returns true if the ID belongs to the mediator itself.
    #[must_use]
    pub const fn is_mediator(self) -> bool {
        self.0 >= Self::CLEARER.0
    }
}

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_mediator() { f.write_str("mediator") } else { self.0.fmt(f) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mediator_tenant_id_is_displayed_by_name() {
        assert_eq!(TenantId(7).to_string(), "7");
        assert_eq!(TenantId::MEDIATOR.to_string(), "mediator");
    }
}
