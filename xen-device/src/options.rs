//! Options of a server.

use std::time::Duration;

use vmm_glue::memory::MemoryLimits;

use crate::store::DomainName;

/// Options of a server for its domain.
#[derive(Clone, Debug)]
pub struct XenOptions {
    /// The domain.
    pub domain: DomainName,
    /// The function's slot on bus 0 of the domain.
    pub slot: u8,
    /// Limits on the mapped memory of the domain.
    pub memory: MemoryLimits,
    /// Time to poll for the next request before sleeping; zero disables polling.
    pub spin: Duration,
}

impl XenOptions {
    /// A slot that ordinary domains leave free.
    pub const SLOT: u8 = 0x10;

    /// Returns the usual options for a domain.
    #[must_use]
    pub fn new(domain: DomainName) -> Self {
        Self { domain, slot: Self::SLOT, memory: MemoryLimits::default(), spin: Duration::from_micros(100) }
    }
}
