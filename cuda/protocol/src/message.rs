//! Messages and their encoding.

use serde::{Deserialize, Serialize};

use crate::{MAX_CARDS, MAX_CHUNKS, MAX_EXPORTED, MAX_NAME, MAX_PACKET, MAX_PROCESSES, MAX_SEEN};

/// ID of a process's chunk. Unique during the lifetime of the connection and across restarts of the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ChunkId(pub u64);

/// Kind of memory that a chunk is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Place {
    /// Card memory.
    Device,
    /// Pinned host memory, which the card accesses over its link.
    Host,
}

/// First message from a tenant's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The tenant side's [`crate::VERSION`].
    pub version: u16,
    /// Process ID in the process's own namespace. In a container, the owner sees a different process ID.
    pub pid: u32,
    /// Random number that identifies the library instance in this process. Unchanged after a reconnection.
    pub instance: u128,
    /// Requested tenant, from [`crate::TENANT_VARIABLE`]. If empty, the owner selects a tenant from the credentials.
    pub tenant: String,
    /// Name of the program, for display.
    pub program: String,
    /// Set if chunks from an earlier connection follow in [`FromTenant::Adopt`].
    pub adopts: bool,
}

/// A card that the tenant can use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardInfo {
    /// UUID of the card (`cuDeviceGetUuid`).
    pub uuid: [u8; 16],
    /// Memory size that `cuDeviceTotalMem` reports to this tenant, in bytes.
    pub total_bytes: u64,
}

/// Reply to [`Hello`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Version to use on this connection.
    pub version: u16,
    /// Number of the tenant, for display and logs.
    pub tenant: u32,
    /// Size of a chunk in bytes. A power of two, at least 2 MiB.
    pub chunk_bytes: u64,
    /// Cards of the tenant. Messages refer to a card by its index in this list.
    pub cards: Vec<CardInfo>,
}

/// A chunk and its place. The packet contains the chunk's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// ID of the chunk.
    pub id: ChunkId,
    /// Kind of memory that the descriptor refers to.
    pub place: Place,
}

/// A chunk that the process kept across the owner's restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adopted {
    /// Index of the chunk's card.
    pub card: u8,
    /// ID of the chunk.
    pub id: ChunkId,
    /// Kind of memory of the chunk.
    pub place: Place,
    /// Set if the packet contains the chunk's descriptor. Otherwise, the chunk cannot be relocated.
    pub descriptor: bool,
}

/// Kind of memory that is charged to the tenant but cannot be relocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FixedKind {
    /// Arrays and mipmapped arrays.
    Array,
    /// Managed memory.
    Managed,
    /// Memory shared with other processes or cards.
    Shared,
    /// The driver's own memory: pools, graphs, modules, and contexts.
    Driver,
    /// Pinned host memory, allocated or registered by the program.
    Host,
}

/// Reason why a request was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Refusal {
    /// The tenant's quota is reached.
    Quota,
    /// The card is full and the tenant's policy is `refuse`, or the tenant's share of host memory is exhausted.
    Exhausted,
    /// The request was malformed or refers to an object of another tenant.
    Invalid,
    /// This owner does not support the request.
    Unsupported,
    /// The owner failed. Its log contains the details.
    Failed,
    /// The chunks are being relocated, so the request must be repeated later. Sent only in reply to
    /// [`FromTenant::Export`].
    Moving,
    /// The process already has [`crate::MAX_PENDING`] pending requests, so the request must be repeated after a reply.
    /// Since version 4.
    Crowded,
}

/// Terms of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Index of the turn's card.
    pub card: u8,
    /// Number of the turn. Increases with each turn.
    pub turn: u32,
    /// Length in microseconds, or 0 if the turn lasts until `Stop`.
    pub length_us: u32,
    /// Limit on the work in flight, in microseconds of card time. 0 disables limiting and measuring.
    pub run_ahead_us: u32,
    /// Idle time in microseconds after which the turn ends by itself, or 0 if it does not. If it is not 0 and the
    /// completion of the turn's last work is predictable, [`FromTenant::Ending`] announces the completion.
    pub idle_us: u32,
    /// Interval of [`FromTenant::Used`] in microseconds, or 0 for no reports.
    pub report_us: u32,
}

/// A process's use of the card, measured with driver events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Time since the last report during which the process had work in flight on the card, in nanoseconds.
    pub busy_ns: u64,
    /// Part of `busy_ns` during which only copies were in flight, in nanoseconds.
    pub copy_ns: u64,
    /// Number of submissions completed since the last report.
    pub launches: u32,
}

/// Reason why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum End {
    /// The process is exiting, or the owner is shutting down and will be restarted.
    Leaving,
    /// The other side's version is not supported.
    Version,
    /// The credentials or the name do not match any tenant.
    Denied,
    /// The other side violated the protocol.
    Violation,
    /// The operator or a policy has removed the tenant.
    Evicted,
    /// The tenant or user has reached its connection limit. Since version 4.
    Crowded,
    /// The tenant moves between cards: connect to the same socket again, where the owner of its card listens. Since
    /// version 8.
    Moved,
}

/// Reason why a process cannot leave its card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Obstacle {
    /// The process's work, a request or a relocation does not complete in time. The message can be repeated later.
    Busy,
    /// The process uses several cards.
    Cards,
    /// The process manages mappings of chunks itself (`cuMemCreate`), or has not kept the descriptor of a chunk.
    Mappings,
    /// The process shares memory with other processes.
    Shared,
    /// The process has a chunk that is not in host memory.
    NotEvicted,
}

/// Token for memory shared between processes of one tenant: the first 32 bytes of a `CUipcMemHandle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Share(pub [u8; 32]);

/// A message from a tenant's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromTenant {
    /// First message.
    Hello(Hello),
    /// Reports chunks that the process kept across the owner's restart. The packet contains a descriptor for each chunk
    /// with `descriptor` set.
    Adopt {
        /// The reported chunks.
        chunks: Vec<Adopted>,
        /// Set if another `Adopt` message follows.
        more: bool,
    },
    /// Requests chunks of a card.
    Allocate {
        /// Number of the request, for the reply.
        request: u32,
        /// Index of the card.
        card: u8,
        /// Number of requested chunks, which the protocol does not limit.
        chunks: u32,
    },
    /// Returns chunks that have been unmapped and released.
    Free {
        /// IDs of the returned chunks.
        chunks: Vec<ChunkId>,
    },
    /// Charges memory that cannot be relocated to the tenant.
    Fix {
        /// Number of the request, for the reply.
        request: u32,
        /// Index of the card.
        card: u8,
        /// Kind of the memory.
        kind: FixedKind,
        /// Size in bytes.
        bytes: u64,
    },
    /// Returns memory that was charged by `Fix`.
    Unfix {
        /// Index of the card.
        card: u8,
        /// Kind of the memory.
        kind: FixedKind,
        /// Size in bytes.
        bytes: u64,
    },
    /// Queries the total and free memory of the tenant. The owner replies with `Memory`.
    AskMemory {
        /// Number of the request, for the reply.
        request: u32,
        /// Index of the card.
        card: u8,
    },
    /// The gate is closed and no work is in flight.
    Quiet {
        /// Number of the order.
        order: u32,
    },
    /// The work in flight did not complete within the order's time limit. The gate is unchanged.
    Busy {
        /// Number of the order.
        order: u32,
    },
    /// Reply to one `Redirect`.
    Redirected {
        /// Number of the order.
        order: u32,
        /// Number of leading chunks in the list that have been redirected.
        moved: u32,
    },
    /// A submission is waiting at the closed gate.
    Waiting {
        /// Index of the card.
        card: u8,
    },
    /// The turn has ended. No work is in flight, or all work in flight completes within [`crate::EARLY_US`].
    Stopped {
        /// Index of the card.
        card: u8,
        /// Number of the turn.
        turn: u32,
        /// Usage since the last report.
        usage: Usage,
        /// Set if a submission is waiting at the gate.
        waiting: bool,
    },
    /// Reports usage during a turn.
    Used {
        /// Index of the card.
        card: u8,
        /// Number of the turn.
        turn: u32,
        /// Usage since the last report.
        usage: Usage,
    },
    /// Requests a token that lets other processes of the tenant map these chunks. From then on, the chunks are not
    /// relocated. The owner replies with `Shared` or `Refused`.
    Export {
        /// Number of the request, for the reply.
        request: u32,
        /// The chunks, ordered by address.
        chunks: Vec<ChunkId>,
    },
    /// Requests the chunks of a token. The replies are the same as for `Allocate`.
    Open {
        /// Number of the request, for the reply.
        request: u32,
        /// The token from another process of the tenant.
        share: Share,
    },
    /// Last message.
    Goodbye(End),
    /// Announces the end of the turn and the expected completion of its last work. `Stopped` follows. Since version 2.
    Ending {
        /// Index of the card.
        card: u8,
        /// Number of the turn.
        turn: u32,
        /// Expected time until the work completes, in microseconds.
        in_us: u32,
    },
    /// Queries the tenant's processes. The owner replies with `Processes`. Since version 3.
    AskProcesses {
        /// Number of the request, for the reply.
        request: u32,
        /// Index of the card.
        card: u8,
    },
    /// Reply to `Reclaim`, sent after the chunks have been freed. Since version 5.
    Reclaimed {
        /// Number of the order.
        order: u32,
    },
    /// Reports that the process is a client of the card's MPS server, so that its work can run concurrently with other
    /// clients' work. Since version 6.
    Concurrent {
        /// Index of the card.
        card: u8,
    },
    /// Reply to `Leave`. Since version 8.
    Left {
        /// Reason why the process stays, or `None` if its gate is closed and it has unmapped all chunks.
        obstacle: Option<Obstacle>,
    },
    /// Reports that the process is on a card other than the owner's, with all chunks unmapped. The owner replies with
    /// `Fetched`, or closes the connection. Since version 8.
    Elsewhere {
        /// UUID of the process's card.
        uuid: [u8; 16],
    },
    /// Reports the cards that the process's driver sees, including those that the library hides from the program.
    /// Since version 9.
    Sees {
        /// UUIDs of the cards, at most [`crate::MAX_SEEN`].
        uuids: Vec<[u8; 16]>,
    },
    /// Reports that the process cannot import its chunks on the owner's card, to which the driver has moved it. The
    /// owner ends the connection. Since version 9.
    Unusable {
        /// `CUresult` of the import.
        code: i32,
    },
}

/// A message from the owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromOwner {
    /// Reply to `Hello`.
    Welcome(Welcome),
    /// Granted chunks, each with its descriptor.
    Granted {
        /// Number of the request.
        request: u32,
        /// The granted chunks.
        chunks: Vec<Chunk>,
        /// Set if more chunks for this request follow.
        more: bool,
    },
    /// The memory has been charged to the tenant.
    Fixed {
        /// Number of the request.
        request: u32,
    },
    /// The request failed.
    Refused {
        /// Number of the request.
        request: u32,
        /// Reason for the rejection.
        reason: Refusal,
    },
    /// Reply to `AskMemory`: the tenant's free and total memory.
    Memory {
        /// Number of the request.
        request: u32,
        /// Number of bytes that `cuMemGetInfo` reports as free.
        free_bytes: u64,
        /// Total number of bytes that `cuMemGetInfo` and `cuDeviceTotalMem` report.
        total_bytes: u64,
    },
    /// Orders the tenant's side to close the gate and drain, for a relocation.
    Quiesce {
        /// Number of the order. Increases with each order.
        order: u32,
        /// Time limit in microseconds, after which the tenant's side gives up and sends `Busy`.
        patience_us: u32,
    },
    /// New places of chunks, each with its descriptor.
    Redirect {
        /// Number of the order.
        order: u32,
        /// The chunks with their new places.
        moves: Vec<Chunk>,
    },
    /// The relocation has completed.
    Resume {
        /// Number of the order.
        order: u32,
    },
    /// Opens the gate.
    Run(Run),
    /// Ends the turn.
    Stop {
        /// Index of the card.
        card: u8,
        /// Number of the turn.
        turn: u32,
    },
    /// Reply to `Export`.
    Shared {
        /// Number of the request.
        request: u32,
        /// The token, which other processes of the tenant can open.
        share: Share,
    },
    /// Last message.
    Goodbye(End),
    /// A turn is expected to begin, so a waiting process can poll for `Run` without sleeping. Since version 2.
    Soon {
        /// Index of the card.
        card: u8,
        /// Expected time until the turn begins, in microseconds.
        in_us: u32,
    },
    /// Reply to `AskProcesses`: process IDs in the owner's namespace. Since version 3.
    Processes {
        /// Number of the request.
        request: u32,
        /// The processes, at most [`crate::MAX_PROCESSES`].
        pids: Vec<u32>,
    },
    /// Requests the process's empty chunks. Since version 5.
    Reclaim {
        /// Number of the order. Increases with each order, and is independent of the numbers of relocation orders.
        order: u32,
    },
    /// Another tenant is waiting, so the turn must end when the program waits for a result. Since version 6.
    Yield {
        /// Index of the card.
        card: u8,
        /// Number of the turn.
        turn: u32,
    },
    /// Ends the turn like `Stop`, but the reply is sent only when all work has completed, because the end of work that
    /// waits for another card is not predictable. Since version 7.
    Drain {
        /// Index of the card.
        card: u8,
        /// Number of the turn.
        turn: u32,
    },
    /// Lets one waiting submission pass the closed gate. The reply is `Stopped` with this turn's number, and is sent
    /// when all work has completed, or immediately if no submission is waiting. Since version 7.
    Step(Run),
    /// Orders the process to close its gate and unmap all chunks, because it moves to another card. All chunks are in
    /// host memory. The process keeps their descriptors. Since version 8.
    Leave {
        /// Time limit in microseconds, after which the process gives up and replies with [`Obstacle::Busy`].
        patience_us: u32,
    },
    /// The driver has moved the process, or has resumed it after an interrupted move. The process can call the driver
    /// again. Since version 8.
    Fetched,
    /// Reply to `Hello`, like `Welcome`, for a process that may move to another card later. Since version 9.
    WelcomeAmong {
        /// Same as in `Welcome`.
        welcome: Welcome,
        /// UUIDs of the other cards to which the process could move, at most [`crate::MAX_SEEN`].
        others: Vec<[u8; 16]>,
    },
}

/// Reason why a packet is not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes are not a message of this version.
    #[error("a packet of {bytes} bytes is not a message")]
    Encoding {
        /// Length of the packet in bytes.
        bytes: usize,
    },
    /// A list or name is too long.
    #[error("a message has {count} {item} (at most {most})")]
    TooMany {
        /// Kind of the items.
        item: &'static str,
        /// Number of items.
        count: usize,
        /// Maximum number of items.
        most: usize,
    },
    /// The number of descriptors does not match the message.
    #[error("a packet has {found} descriptors instead of {wanted}")]
    Descriptors {
        /// Number of received descriptors.
        found: usize,
        /// Number of descriptors that the message refers to.
        wanted: usize,
    },
}

/// A message that is sent in one direction.
pub(crate) trait Message: Serialize + for<'a> Deserialize<'a> {
    /// Number of descriptors that must accompany the message.
    fn descriptors(&self) -> usize;
    /// Checks that lists and names are within their limits.
    fn check(&self) -> Result<(), Malformed>;
}

fn within(item: &'static str, count: usize, most: usize) -> Result<(), Malformed> {
    if count <= most { Ok(()) } else { Err(Malformed::TooMany { item, count, most }) }
}

impl Message for FromTenant {
    fn descriptors(&self) -> usize {
        match self {
            Self::Adopt { chunks, .. } => chunks.iter().filter(|c| c.descriptor).count(),
            _ => 0,
        }
    }

    fn check(&self) -> Result<(), Malformed> {
        match self {
            Self::Hello(hello) => {
                within("bytes of a tenant name", hello.tenant.len(), MAX_NAME)?;
                within("bytes of a program name", hello.program.len(), MAX_NAME)
            }
            Self::Adopt { chunks, .. } => within("chunks", chunks.len(), MAX_CHUNKS),
            Self::Free { chunks } => within("chunks", chunks.len(), MAX_CHUNKS),
            Self::Export { chunks, .. } => within("chunks", chunks.len(), MAX_EXPORTED),
            Self::Sees { uuids } => within("cards", uuids.len(), MAX_SEEN),
            _ => Ok(()),
        }
    }
}

impl Message for FromOwner {
    fn descriptors(&self) -> usize {
        match self {
            Self::Granted { chunks, .. } => chunks.len(),
            Self::Redirect { moves, .. } => moves.len(),
            _ => 0,
        }
    }

    fn check(&self) -> Result<(), Malformed> {
        match self {
            Self::Welcome(welcome) => within("cards", welcome.cards.len(), MAX_CARDS),
            Self::WelcomeAmong { welcome, others } => {
                within("cards", welcome.cards.len(), MAX_CARDS)?;
                within("other cards", others.len(), MAX_SEEN)
            }
            Self::Granted { chunks, .. } => within("chunks", chunks.len(), MAX_CHUNKS),
            Self::Redirect { moves, .. } => within("chunks", moves.len(), MAX_CHUNKS),
            Self::Processes { pids, .. } => within("processes", pids.len(), MAX_PROCESSES),
            _ => Ok(()),
        }
    }
}

/// Encodes `message` into `buffer`. Returns the used part of the buffer.
pub(crate) fn encode<'a, M: Message>(message: &M, buffer: &'a mut [u8; MAX_PACKET]) -> Result<&'a [u8], Malformed> {
    message.check()?;
    match postcard::to_slice(message, buffer) {
        Ok(bytes) => Ok(bytes),
        Err(_) => Err(Malformed::TooMany { item: "bytes or more", count: MAX_PACKET + 1, most: MAX_PACKET }),
    }
}

/// Decodes a packet that arrived with `found` descriptors.
pub(crate) fn decode<M: Message>(packet: &[u8], found: usize) -> Result<M, Malformed> {
    let encoding = Malformed::Encoding { bytes: packet.len() };
    let (message, rest) = postcard::take_from_bytes::<M>(packet).map_err(|_| encoding)?;
    if !rest.is_empty() {
        return Err(encoding);
    }
    message.check()?;
    let wanted = message.descriptors();
    if wanted == found { Ok(message) } else { Err(Malformed::Descriptors { found, wanted }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_returns_as_it_was_sent() {
        let mut buffer = [0; MAX_PACKET];
        let chunks = vec![Chunk { id: ChunkId(7), place: Place::Host }; MAX_CHUNKS];
        let message = FromOwner::Granted { request: 3, chunks, more: true };
        let bytes = encode(&message, &mut buffer).expect("encodes").to_vec();
        assert_eq!(decode::<FromOwner>(&bytes, MAX_CHUNKS), Ok(message));
        let wanted = Malformed::Descriptors { found: 1, wanted: MAX_CHUNKS };
        assert_eq!(decode::<FromOwner>(&bytes, 1), Err(wanted), "a chunk without its descriptor");
    }

    #[test]
    fn lists_beyond_their_bound_are_refused_on_both_sides() {
        let mut buffer = [0; MAX_PACKET];
        let message = FromTenant::Free { chunks: vec![ChunkId(1); MAX_CHUNKS + 1] };
        let problem = Malformed::TooMany { item: "chunks", count: MAX_CHUNKS + 1, most: MAX_CHUNKS };
        assert_eq!(encode(&message, &mut buffer), Err(problem));
        let bytes = postcard::to_slice(&message, &mut buffer).expect("fits").to_vec();
        assert_eq!(decode::<FromTenant>(&bytes, 0), Err(problem));
    }

    #[test]
    fn trailing_bytes_after_message_are_rejected() {
        let mut buffer = [0; MAX_PACKET];
        let mut bytes = encode(&FromTenant::Waiting { card: 0 }, &mut buffer).expect("encodes").to_vec();
        bytes.push(0);
        assert_eq!(decode::<FromTenant>(&bytes, 0), Err(Malformed::Encoding { bytes: bytes.len() }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = decode::<FromTenant>(&bytes, 0);
            let _ = decode::<FromOwner>(&bytes, 0);
        }
    }
}
