//! Traffic counters of one server, readable by any thread while the server runs.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use crate::protocol::Command;

/// Number of message counters, indexed by command number. Higher command numbers are counted as number 0.
const COMMANDS: usize = 19;

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// The counters, which cover all clients. Except for gauges, they only increase.
        #[derive(Debug, Default)]
        pub struct Counters {
            /// Number of requests by command number. Index 0 counts unknown commands.
            messages: [AtomicU64; COMMANDS],
            $($(#[$doc])* pub $field: AtomicU64,)*
        }

        /// A snapshot of the counters.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Snapshot {
            /// Number of requests by command name. Commands that never occurred are omitted.
            pub messages: std::collections::BTreeMap<&'static str, u64>,
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Counters {
            /// Reads all counters. Each value is exact, but the values may be a few messages apart.
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
    /// Number of clients that negotiated successfully.
    clients,
    /// Number of connections rejected because another client was connected.
    clients_refused,
    /// Number of connections closed because they sent no data, or no valid message.
    connections_closed,
    /// Number of connections closed by the server because of a client error.
    clients_dropped,
    /// Number of messages that needed no reply (posted writes, including batched writes).
    posted,
    /// Number of region writes inside batches.
    batched_writes,
    /// Number of region reads, including each part of an access that the client has split.
    region_reads,
    /// Number of region writes, including those in batches.
    region_writes,
    /// Number of bytes received.
    bytes_in,
    /// Number of bytes sent.
    bytes_out,
    /// Number of `recvmsg` calls that returned data.
    receives,
    /// Number of `sendmsg` calls that sent data.
    sends,
    /// Number of `recvmsg` calls that returned while the server was polling.
    spin_hits,
    /// Number of accesses that the device denied or could not perform.
    denied,
    /// Number of requests that failed with an error reply, and of replies that match no request.
    errors,
    /// Number of posted requests that failed, without a reply.
    posted_errors,
    /// Number of file descriptors closed because their message must not carry them.
    stray_fds,
    /// Gauge: number of client memory regions, with or without a file.
    dma_regions,
    /// Gauge: mapped memory in bytes.
    dma_bytes,
    /// Number of `DMA_READ` and `DMA_WRITE` messages sent to the client.
    dma_requests,
    /// Number of `DMA_READ` and `DMA_WRITE` messages that the client answered with an error.
    dma_request_errors,
    /// Number of memory files found to be private to the client.
    not_shared,
    /// Number of connections closed because the client withdrew mapped memory.
    withdrawn,
    /// Number of checks for private memory.
    share_checks,
    /// Number of daemons killed while serving the current or last client. After each kill, the next daemon continued
    /// the connection, and reset the device unless the device had a journal.
    daemon_deaths_survived,
}

impl Counters {
    /// Returns the number of requests with this command number.
    pub fn messages(&self, command: Command) -> u64 {
        self.slot(command).load(Relaxed)
    }

    /// Returns the total number of requests.
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

/// Adds to a counter and returns its previous value.
pub fn add(count: &AtomicU64, n: u64) -> u64 {
    count.fetch_add(n, Relaxed)
}

/// Adds a length to a counter.
pub(crate) fn add_len(count: &AtomicU64, n: usize) {
    count.fetch_add(u64::try_from(n).unwrap_or(u64::MAX), Relaxed);
}

/// Returns true if client error number `count` should be logged: all of the first errors, and increasingly fewer of the
/// later ones.
pub fn worth_logging(count: u64) -> bool {
    count <= 16 || count.is_power_of_two()
}
