//! Messages between a CUDA program's library (the *tenant's side*) and the owner of a CUDA card.
//!
//! Each process has one `SOCK_SEQPACKET` UNIX connection. A packet contains one [`FromTenant`] or [`FromOwner`]
//! message, encoded by `postcard`. It has at most [`MAX_PACKET`] bytes and at most [`MAX_DESCRIPTORS`] descriptors
//! (`SCM_RIGHTS`), in the order in which the message refers to them.
//!
//! # Opening
//!
//! ```text
//! tenant -> owner   Hello
//! owner  -> tenant  Welcome or WelcomeAmong, or Goodbye
//! tenant -> owner   Sees, only after WelcomeAmong, once the driver is initialized
//! tenant -> owner   Adopt..., only after a reconnection, until `more` is false
//! ```
//!
//! The tenant's side does not use a card before [`FromOwner::Welcome`]. The owner identifies the tenant by the socket
//! and the peer's credentials. The name in [`Hello`] only selects one of the tenants that the credentials permit.
//! Memory and work belong to the connection: when it is closed, the owner frees all resources of the process.
//!
//! # Memory
//!
//! A chunk is an allocation of [`Welcome::chunk_bytes`] by the owner (`cuMemCreate`), on the card or in pinned host
//! memory. It is exported as a POSIX descriptor. A chunk belongs to one process and has the same [`ChunkId`] throughout
//! its lifetime, even if it is relocated. The tenant's side imports the chunk and maps it at an address of its choice.
//! It then closes the descriptor, or keeps it for [`FromTenant::Adopt`].
//!
//! ```text
//! tenant -> owner   Allocate { request, chunks }
//! owner  -> tenant  Granted { request, .. } one or more, until `more` is false; or Refused { request, .. }
//! tenant -> owner   Free { chunks }: unmapped and released; the IDs are invalid from here on
//! ```
//!
//! The owner sends chunks as they become available. The reply may be delayed if the tenant's exhaustion policy is to
//! queue. If the request fails after some chunks have been granted, the tenant's side frees these chunks.
//! [`FromTenant::Fix`] reserves memory that chunks cannot back (arrays, exported memory, memory allocated by the
//! driver, registered host memory). The owner replies with [`FromOwner::Fixed`] or `Refused`, and [`FromTenant::Unfix`]
//! returns the memory.
//!
//! The library keeps empty chunks for later allocations. If another process needs memory, the owner requests these
//! chunks:
//!
//! ```text
//! owner  -> tenant  Reclaim { order }
//! tenant -> owner   Free ...: empty chunks, including those freed in stream order
//! tenant -> owner   Reclaimed { order }: all empty chunks that could be obtained within [`RECLAIM_MS`]
//! ```
//!
//! The library also returns empty chunks before it sends `Quiet`, so that they are not copied.
//!
//! # Relocation
//!
//! The owner copies contents through its own mappings. The tenant's side chooses addresses.
//!
//! ```text
//! owner  -> tenant  Quiesce { order }
//! tenant -> owner   Quiet { order }: gate closed, no work in flight (the owner copies);
//!                   or Busy { order }: declined, gate unchanged
//! owner  -> tenant  Redirect { order, moves } any number: each chunk's new place and descriptor
//! tenant -> owner   Redirected { order, moved } one each: the first `moved` chunks are mapped at their old addresses
//! owner  -> tenant  Resume { order }
//! ```
//!
//! Only one order is in progress at a time. `Redirect` can contain a chunk that the tenant's side freed after
//! `Quiesce`. In this case, the tenant's side closes the descriptor and counts the chunk as moved. If `moved` is less
//! than the number of moves, the mappings of the remaining chunks do not change, and the owner keeps the old memory.
//! Programs can allocate and free memory while an order is in progress.
//!
//! # Turns
//!
//! The submission gate is closed after `Welcome`.
//!
//! ```text
//! owner  -> tenant  Run { turn, .. }: the gate opens
//! owner  -> tenant  Stop { turn }: close the gate and drain
//! tenant -> owner   Stopped { turn, usage, waiting }: no work is in flight, or it completes within `EARLY_US`
//! tenant -> owner   Waiting: a submission waits at the closed gate; once per closing of the gate
//! tenant -> owner   Used { turn, usage }: every [`Run::report_us`], unless that is 0
//! owner  -> tenant  Yield { turn }: end the turn when the program waits for a result
//! owner  -> tenant  Drain { turn }: like `Stop`, for a tenant with several cards: no work is in flight at the reply
//! owner  -> tenant  Step { turn, .. }: one waiting submission passes the closed gate; then drain and send `Stopped`
//! ```
//!
//! The tenant's side stops without `Stop` after [`Run::length_us`], or if no work was submitted or in flight for
//! [`Run::idle_us`] (`waiting` is then false). A `Run` with a length of 0 lasts until `Stop`. If `run_ahead_us` is 0,
//! the tenant is alone and the library does not measure its work. A `Run` during a turn replaces the turn's terms.
//! `Quiesce` closes the gate during any turn, and `Resume` restores the state of the turn. After `Yield`, the turn also
//! ends when the program waits for a result, that is, if it has not submitted anything for a while and its last work is
//! about to complete. A process that is a client of the card's MPS server sends `Concurrent` once, directly after
//! `Welcome`. The owner verifies this with the server. The gates of a share group's processes listed by the server can
//! be open concurrently. When the turn of a tenant with several cards ends, cards without work get a `Step`, because
//! kernels on the other cards may wait for a kernel that the closed gate blocks. A process without a waiting submission
//! replies immediately.
//!
//! # Moves between cards
//!
//! The owners of both cards use the tenant's socket in turn.
//!
//! ```text
//! owner  -> tenant  Leave { .. }: all chunks are in host memory
//! tenant -> owner   Left { obstacle: None }: gate closed, all chunks unmapped, no request in progress
//! owner  -> tenant  Goodbye(Moved)
//!                   (the tenant's side connects again, and gets `Welcome` from the owner of the other card)
//! tenant -> owner   Elsewhere { uuid }
//!                   (the owner checkpoints the process and restores it on its card)
//! owner  -> tenant  Fetched, or Goodbye(Moved)
//! tenant -> owner   Adopt..., as after any reconnection
//! ```
//!
//! The tenant's side compares the card of each [`Welcome`] with the driver's card, and reports chunks only to the owner
//! of the process's card. If no owner serves the process in time, it maps its chunks on that card, and runs without an
//! owner.
//!
//! The driver imports chunks of another card only if that card was visible to the process when the driver was
//! initialized. `WelcomeAmong` names the cards that the library makes visible to the driver and hides from the program,
//! and `Sees` reports the result.
//!
//! # Ends
//!
//! [`FromTenant::Goodbye`] and [`FromOwner::Goodbye`] give the reason, and the connection is closed afterwards. If a
//! connection is closed without a `Goodbye`, the owner considers the process dead, and the tenant's side considers the
//! owner absent. The tenant's side then opens its gate, keeps its memory, lets allocations in chunks wait for a limited
//! time, and tries to reconnect every [`RECONNECT_MS`]. The new `Hello` has the same `instance`, and `adopts` is set.
//! Neither side waits indefinitely for the other, and the owner never blocks when it sends a message
//! ([`Link::try_send`]). Messages wait while the queue of their connection is full, or while the connection, its tenant
//! or all tenants together have the maximum number of unread descriptors. A full queue makes the owner close a
//! connection only if the process does not read replies that it has requested.
//!
//! # Bounds
//!
//! The owner has one serving thread. Each message costs this thread a bounded number of steps. A step is one or two
//! searches in an ordered map. Each event performs up to 1,024 steps of deferrable work (placing and releasing chunks).
//! Later events perform the remaining steps. A tenant gets 64 messages and 4,096 steps before the other tenants are
//! served.
//!
//! | message | own steps | deferred |
//! |---|---|---|
//! | `Hello`, the end of a connection | connections | all chunks of the process |
//! | `Left`, `Elsewhere`, `Sees`, `Unusable` | connections | |
//! | `Adopt`, `Free` | [`MAX_CHUNKS`] | |
//! | `Allocate` | 1 | its chunks; 32 pieces are created at a time per tenant |
//! | `Fix`, `Unfix` | 1 | their size in chunks |
//! | `Export` | 6 times [`MAX_EXPORTED`]: its chunks, and those of four examined tokens | |
//! | `Open` | twice [`MAX_EXPORTED`] | |
//! | `AskProcesses`, `Waiting`, `Stopped`, `Ending`, `Used`, `Concurrent` | connections and tenants | |
//! | `AskMemory`, `Quiet`, `Busy`, `Redirected` | [`MAX_CHUNKS`] for each of 6 batches | |
//!
//! | resource of a tenant | limit | beyond the limit |
//! |---|---|---|
//! | connections | 1,024, and a fraction of the owner's descriptors | [`End::Crowded`] |
//! | time before `Hello` | 5 s | the owner closes the connection |
//! | pending requests of a process | [`MAX_PENDING`] | [`Refusal::Crowded`] |
//! | unread descriptors | 256 per connection, 4,096 per tenant | the message waits |
//! | unread replies of a process | 256 | the owner closes the connection |
//! | tokens | 65,536, which refer to at most 262,144 chunks | [`Refusal::Exhausted`] |
//! | chunk numbers of all processes | 8 per chunk of the memory limit, at least 65,536 | [`Refusal::Exhausted`] |
//! | adopted chunk numbers | the tenant's chunk limit; all must be new | [`End::Violation`], [`End::Evicted`] |
//!
//! # Versions
//!
//! [`VERSION`] is incremented with each change. Variants and fields can only be added at the end. Both sides use the
//! lower of their versions. A side that does not support this version sends `Goodbye`.
//!
//! This crate contains only the messages and the connection. It does not manage memory, set policy or start threads.

#![forbid(unsafe_code)]

mod link;
mod message;

pub use link::{Link, LinkError, Received};
pub use message::{
    Adopted, CardInfo, Chunk, ChunkId, End, FixedKind, FromOwner, FromTenant, Hello, Malformed, Obstacle, Place,
    Refusal, Run, Share, Usage, Welcome,
};

/// Version of the messages.
pub const VERSION: u16 = 9;
/// Oldest version that an owner supports. Programs outlive owners, and keep the library with which they started.
pub const VERSION_OLDEST: u16 = 1;
/// First version with [`FromTenant::Ending`] and [`FromOwner::Soon`].
pub const VERSION_HANDOVER: u16 = 2;
/// First version with [`FromTenant::AskProcesses`] and [`FromOwner::Processes`].
pub const VERSION_PROCESSES: u16 = 3;
/// First version with [`Refusal::Crowded`] and [`End::Crowded`].
pub const VERSION_CROWDED: u16 = 4;
/// First version with [`FromOwner::Reclaim`] and [`FromTenant::Reclaimed`].
pub const VERSION_RECLAIM: u16 = 5;
/// First version with [`FromTenant::Concurrent`] and [`FromOwner::Yield`].
pub const VERSION_CONCURRENT: u16 = 6;
/// First version with [`FromOwner::Drain`] and [`FromOwner::Step`].
pub const VERSION_GANGS: u16 = 7;
/// First version with [`FromOwner::Leave`], [`FromTenant::Elsewhere`] and [`End::Moved`].
pub const VERSION_MOVES: u16 = 8;
/// First version with [`FromOwner::WelcomeAmong`], [`FromTenant::Sees`] and [`FromTenant::Unusable`].
pub const VERSION_VISIBLE_CARDS: u16 = 9;
/// Maximum number of pending [`FromTenant::Allocate`] and [`FromTenant::Fix`] requests of a process.
pub const MAX_PENDING: usize = 64;
/// Maximum size of a packet in bytes.
pub const MAX_PACKET: usize = 16 << 10;
/// Maximum number of descriptors in one packet.
pub const MAX_DESCRIPTORS: usize = 64;
/// Maximum number of chunks in one message.
pub const MAX_CHUNKS: usize = 64;
/// Maximum number of chunks in one [`FromTenant::Export`].
pub const MAX_EXPORTED: usize = MAX_PACKET / 10;
/// Maximum length of a name in bytes.
pub const MAX_NAME: usize = 64;
/// Maximum number of processes in one message.
pub const MAX_PROCESSES: usize = 2048;
/// Maximum number of cards of one owner.
pub const MAX_CARDS: usize = 16;
/// Maximum number of a driver's visible cards in one message.
pub const MAX_SEEN: usize = 64;
/// Time in microseconds before the end of a turn's last work at which the turn can end. The next tenant's first work
/// takes this long to reach the card. If it arrived earlier, the hardware would time-slice between both tenants.
pub const EARLY_US: u32 = 250;
/// Maximum time in milliseconds for which the tenant's side waits for work that uses freed memory before it replies to
/// a request for empty chunks.
pub const RECLAIM_MS: u64 = 20;
/// Interval at which a tenant tries to reconnect to its owner, in milliseconds.
pub const RECONNECT_MS: u64 = 200;

/// Environment variable with the path of the owner's socket. Without this variable, the library only forwards calls.
/// For a program with several cards, the variable contains the paths of the owners' sockets, in the order of the
/// program's devices and separated by [`SOCKET_SEPARATOR`].
pub const SOCKET_VARIABLE: &str = "GPU_MEDIATOR_CUDA_SOCKET";
/// Separator between the sockets in [`SOCKET_VARIABLE`].
pub const SOCKET_SEPARATOR: u8 = b':';
/// Environment variable with the name of the tenant.
pub const TENANT_VARIABLE: &str = "GPU_MEDIATOR_CUDA_TENANT";
/// Environment variable with the absolute path of the real driver's library.
pub const DRIVER_VARIABLE: &str = "GPU_MEDIATOR_CUDA_DRIVER";
/// Environment variable that makes the library report errors on standard error if the value is `1`.
pub const LOG_VARIABLE: &str = "GPU_MEDIATOR_CUDA_LOG";
