//! Server options.

use std::time::Duration;

use vmm_memory::memory::MemoryLimits;

/// Options of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Limits on a client's memory.
    pub memory: MemoryLimits,
    /// Maximum size of the data in one message in bytes, from 4 KiB to 1 MiB.
    pub max_transfer: usize,
    /// Time to poll for the next message before sleeping. Zero disables polling. Polling halves the latency of reads,
    /// costs nothing while the client is idle, and is suspended while it does not help.
    pub spin: Duration,
    /// Maximum total size of a client's queued replies in bytes. A client whose replies exceed this size is
    /// disconnected.
    pub max_queued: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            memory: MemoryLimits::default(),
            max_transfer: 64 << 10,
            spin: Duration::from_micros(50),
            max_queued: 1 << 20,
        }
    }
}
