//! Options of a server.

use std::time::Duration;

use crate::memory::MemoryLimits;

/// Options of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Limits on the memory that a client may lend.
    pub memory: MemoryLimits,
    /// Maximum size of the data in one message in bytes, 4 KiB to 1 MiB.
    pub max_transfer: usize,
    /// Time to poll for the next message before sleeping; zero disables polling. Polling halves the latency of
    /// reads, costs nothing while the client is idle, and is suspended while it does not help.
    pub spin: Duration,
    /// Maximum total size of the queued replies of a client, in bytes. A client that does not read is disconnected if
    /// its replies exceed this size.
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
