//! Server options.

use std::time::Duration;

use vmm_glue::memory::MemoryLimits;

use crate::store::DomainName;

/// Options for serving a domain.
#[derive(Clone, Debug)]
pub struct XenOptions {
    /// Domain to serve.
    pub domain: DomainName,
    /// Slot of the function on bus 0 of the domain.
    pub slot: u8,
    /// Limits on the domain's mapped memory.
    pub memory: MemoryLimits,
    /// Time to poll for the next request before sleeping. Zero disables polling.
    pub spin: Duration,
}

impl XenOptions {
    /// A slot that is free in ordinary domains.
    pub const SLOT: u8 = 0x10;

    /// Returns the default options for a domain.
    #[must_use]
    pub fn new(domain: DomainName) -> Self {
        Self { domain, slot: Self::SLOT, memory: MemoryLimits::default(), spin: Duration::from_micros(100) }
    }
}
