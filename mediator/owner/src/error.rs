//! What can go wrong with the card or its memory.

use crate::shortage::Shortage;
use bringup::CardError;
use card::DmaError;

/// Why the host side of the mediator cannot do something.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The card does not come up, or does not answer.
    #[error(transparent)]
    Card(#[from] CardError),
    /// The card has no memory for the mediator's own tables now; guests' may move for them.
    #[error("the card has no memory left for the mediator's own tables; give it a larger `reserve_mib`")]
    Lacking,
    /// A limit of memory is in the way.
    #[error(transparent)]
    OutOfMemory(#[from] Shortage),
    /// Host memory for chunks could not be had.
    #[error(
        "the host does not give {bytes:#x} bytes of memory that the card may reach: {why}; lower `memory.host_mib` of the \
         card, or raise the daemon's LimitMEMLOCK"
    )]
    Pinned {
        /// Bytes wanted.
        bytes: usize,
        /// What the host says.
        why: String,
    },
    /// No I/O addresses left.
    #[error("the card's 40-bit I/O address space has no gap of {len:#x} bytes; remove VMs or give them less RAM")]
    OutOfIova {
        /// Bytes wanted.
        len: u64,
    },
    /// A VM lends more than it may.
    #[error(
        "{len:#x} bytes more than the VM's `memory.ram.quota_mib`, {quota:#x} bytes, lets it lend of its RAM; raise it with \
         `mediatorctl memory set-ram`, give the VM less RAM, or lend only what the guest uses for the card (an IOMMU in the VM)"
    )]
    RamQuota {
        /// Bytes wanted.
        len: u64,
        /// Bytes allowed.
        quota: u64,
    },
    /// Host memory could not be mapped for the card.
    #[error("guest memory cannot be mapped for the card: {0}")]
    Dma(#[from] DmaError),
    /// A pure state machine refused.
    #[error("{0}")]
    Refused(String),
}
