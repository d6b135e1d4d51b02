//! Counts of one server's traffic, readable by any thread while it runs.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use crate::protocol::Command;

/// Number of commands with their own count; a higher number counts as number 0.
const COMMANDS: usize = 19;

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// The counts. They only grow, across clients, except gauges.
        #[derive(Debug, Default)]
        pub struct Counters {
            /// Number of requests by command number; index 0 counts unknown commands.
            messages: [AtomicU64; COMMANDS],
            $($(#[$doc])* pub $field: AtomicU64,)*
        }

        /// A snapshot of the counts.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Snapshot {
            /// Requests by command name, without commands that never occurred.
            pub messages: std::collections::BTreeMap<&'static str, u64>,
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Counters {
            /// Reads all counts; each is exact, but they may be a few messages apart.
            pub fn snapshot(&self) -> Snapshot {
                let messages = (0u16..)
                    .zip(&self.messages)
                    .map(|(number, count)| (Command(number).name().unwrap_or("unknown"), count.load(Relaxed)))
                    .filter(|&(_, count)| count != 0)
                    .collect();
                Snapshot { messages, $($field: self.$field.load(Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Clients that have negotiated.
    clients,
    /// Connections refused because another client was connected.
    clients_refused,
    /// Connections closed because they sent nothing, or no valid message.
    connections_closed,
    /// Connections that the server ended because of an error of the client.
    clients_dropped,
    /// Messages that needed no reply (posted writes, including batched writes).
    posted,
    /// Region writes inside batches.
    batched_writes,
    /// Region reads. Parts of a batch or of an access with an odd size count separately if the client sent them
    /// separately.
    region_reads,
    /// Region writes, including those in batches.
    region_writes,
    /// Number of bytes received.
    bytes_in,
    /// Number of bytes sent.
    bytes_out,
    /// `recvmsg` calls that returned bytes.
    receives,
    /// `sendmsg` calls that sent bytes.
    sends,
    /// Messages that arrived while the server was spinning, before it had to sleep.
    spin_hits,
    /// Accesses that the device refused.
    denied,
    /// Requests answered with an error.
    errors,
    /// Posted requests that failed without a reply.
    posted_errors,
    /// File descriptors that arrived with the wrong message and were closed.
    stray_fds,
    /// Gauge: memory regions that are mapped now.
    dma_regions,
    /// Gauge: bytes of memory that are mapped now.
    dma_bytes,
    /// `DMA_READ` and `DMA_WRITE` messages sent to the client.
    dma_requests,
    /// `DMA_READ` and `DMA_WRITE` messages that the client answered with an error.
    dma_request_errors,
    /// Memory regions found to be private to the client.
    not_shared,
    /// Memory regions that were withdrawn under a mapping.
    withdrawn,
    /// Checks for private memory.
    share_checks,
    /// Number of daemons that were killed while they served the current or last client. Each time, its device was reset
    /// and its connection continued.
    daemon_deaths_survived,
}

impl Counters {
    /// Returns the number of requests with the given command number.
    pub fn messages(&self, command: Command) -> u64 {
        self.slot(command).load(Relaxed)
    }

    /// Returns the number of requests, all commands together.
    pub fn all_messages(&self) -> u64 {
        self.messages.iter().map(|count| count.load(Relaxed)).fold(0, u64::wrapping_add)
    }

    /// Counts a request.
    pub fn count_message(&self, command: Command) {
        add(self.slot(command), 1);
    }

    fn slot(&self, command: Command) -> &AtomicU64 {
        let [unknown, ..] = &self.messages;
        self.messages.get(usize::from(command.0)).unwrap_or(unknown)
    }
}

/// Adds to a count; returns its old value.
pub fn add(count: &AtomicU64, n: u64) -> u64 {
    count.fetch_add(n, Relaxed)
}

/// Adds a length to a count.
pub(crate) fn add_len(count: &AtomicU64, n: usize) {
    count.fetch_add(u64::try_from(n).unwrap_or(u64::MAX), Relaxed);
}

/// Returns true if a client's error number `count` belongs in the log: the first errors always, and later errors less
/// and less often.
pub fn worth_logging(count: u64) -> bool {
    count <= 16 || count.is_power_of_two()
}
