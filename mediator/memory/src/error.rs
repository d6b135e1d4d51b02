//! Errors of the card and its memory.

use crate::shortage::Shortage;
use bringup::CardError;
use card::DmaError;
use channels::{BindError, DoorbellError, RingFault, Stuck};
use saved_state::Invalid;
use saved_state::stream::StreamError;
use shadow_pt::NoMemory;
use std::io;
use vm_memory::VolatileMemoryError;
use vram::PoolError;

/// Error of a card or its manager.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The card cannot be initialized, or does not respond.
    #[error(transparent)]
    Card(#[from] CardError),
    /// The card is currently out of memory for the mediator's own tables. Evicting guest memory may help.
    #[error("the card has no memory left for the mediator's own tables; give it a larger `reserve_mib`")]
    Lacking,
    /// A memory limit was reached.
    #[error(transparent)]
    OutOfMemory(#[from] Shortage),
    /// The host did not provide memory for chunks.
    #[error(
        "the host cannot provide {bytes:#x} bytes of memory for the card: {why}; lower `memory.host_mib` of the \
         card, or raise the daemon's LimitMEMLOCK"
    )]
    Pinned {
        /// Number of bytes requested.
        bytes: usize,
        /// Error from the host.
        why: String,
    },
    /// No I/O addresses are left.
    #[error("the card's 40-bit I/O address space has no gap of {len:#x} bytes; remove VMs or give them less RAM")]
    OutOfIova {
        /// Number of bytes requested.
        len: u64,
    },
    /// A VM tried to lend more RAM than its quota permits.
    #[error(
        "the VM lends another {len:#x} bytes of RAM, which exceed its `memory.ram.quota_mib` of {quota:#x} bytes; raise it with \
         `mediatorctl memory set-ram`, give the VM less RAM, or lend only what the guest uses for the card (an IOMMU in the VM)"
    )]
    RamQuota {
        /// Size in bytes of the region that does not fit into the quota.
        len: u64,
        /// Quota in bytes.
        quota: u64,
    },
    /// Host memory cannot be mapped for the card.
    #[error("guest memory cannot be mapped for the card: {0}")]
    Dma(#[from] DmaError),
    /// The memory to be mapped for the card is invalid.
    #[error("memory for the card: {0}")]
    Memory(#[from] VolatileMemoryError),
    /// The host did not provide a file descriptor, timer, thread, or mapping.
    #[error("{what}: {source}")]
    Host {
        /// Requested resource.
        what: &'static str,
        /// Error from the host.
        #[source]
        source: io::Error,
    },
    /// The chunk table rejected the request.
    #[error(transparent)]
    Chunks(#[from] vram::Error),
    /// A card memory pool cannot grow any further.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A shadow page table cannot be created.
    #[error(transparent)]
    Tables(#[from] NoMemory),
    /// A scheduler setting is out of range.
    #[error(transparent)]
    Scheduler(#[from] sched::ConfigError),
    /// No physical channel is free.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A channel does not leave its engines.
    #[error(transparent)]
    Stuck(#[from] Stuck),
    /// A doorbell of the mediator's own channel was rejected.
    #[error("the mediator's own channel: {0}")]
    OwnDoorbell(#[from] DoorbellError),
    /// The mediator's own ring cannot be read.
    #[error("the mediator's own channel: {0}")]
    OwnRing(#[from] RingFault),
    /// The card fetches no entries from the mediator's own ring.
    #[error("the mediator's own channel does not fetch from its ring")]
    OwnRingStill,
    /// The kernel that clears PGRAPH between VMs is invalid.
    #[error("the mediator's own kernel cannot be assembled: {why}; please report this bug")]
    OwnKernel {
        /// Error from the assembler.
        why: String,
    },
    /// The mediator's own channels do not leave the card, so they may still write to memory.
    #[error("the mediator's own channels do not leave the card")]
    OwnChannelsStay,
    /// The memory does not fit into the mediator's address space.
    #[error("{what} has {bytes:#x} bytes, but the mediator can move at most {most:#x}")]
    Unmovable {
        /// Name of the memory.
        what: &'static str,
        /// Size of the memory in bytes.
        bytes: u64,
        /// Maximum size in bytes.
        most: u64,
    },
    /// A channel of a removed VM is still on the card.
    #[error(
        "a channel of the VM does not leave the card; until it leaves, or the card is reset, the VM's memory is unusable"
    )]
    ChannelStays,
    /// The saved state of a card or a VM is invalid, or belongs to another card or VM.
    #[error("the saved state was rejected: {0}")]
    Saved(#[from] Invalid),
    /// The state to be saved is not quiescent yet.
    #[error("the card is not quiescent: {0}; it keeps running; try again")]
    Unsettled(&'static str),
    /// The card, or a VM's state on it, cannot be handed over.
    #[error("the card cannot be handed over: {0}")]
    Stays(&'static str),
    /// A channel does not leave its engines although they were reset.
    #[error(
        "a channel does not leave the card's engines, so the card is not quiescent; remove its VM, or restart the daemon"
    )]
    NotStill,
    /// An address space no longer exists.
    #[error("the channel's address space no longer exists")]
    SpaceGone,
    /// A panic may have left the VM in an inconsistent state.
    #[error("the VM is out of service")]
    OutOfService,
    /// The card has failed.
    #[error("the card has failed: {why}; restart the daemon")]
    Failed {
        /// Cause of the failure.
        why: String,
    },
}

impl From<StreamError> for ManagerError {
    fn from(error: StreamError) -> Self {
        Self::Saved(Invalid::new(error))
    }
}

impl ManagerError {
    /// Creates the error for a failed request to the host. `what` names the requested resource.
    #[must_use]
    pub fn host(what: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Host { what, source: source.into() }
    }
}
