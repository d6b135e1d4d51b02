//! What can go wrong with the card or its memory.

use crate::shortage::Shortage;
use card::DmaError;

/// Why the host side of the mediator cannot do something.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The card does not do what hardware must.
    #[error("the card does not respond: {0}; reset it or the host")]
    Unresponsive(&'static str),
    /// Not a chip that this version knows.
    #[error("the card's identity register reads {boot0:#010x}, which is no chip that this version knows")]
    UnknownChip {
        /// PMC_BOOT_0.
        boot0: u32,
    },
    /// Its VBIOS has not run: its memory is off.
    #[error(
        "the card has not been initialised by its VBIOS: register {register:#08x} reads {value:#x}, without bit 1; let the \
         host's firmware run the VBIOS (restart the host), and choose no reset that loses what it has set up"
    )]
    NotPosted {
        /// The register.
        register: u32,
        /// Its value.
        value: u32,
    },
    /// The card's memory does not hold what the mediator itself needs.
    #[error("the card has {available:#x} bytes for the mediator, which needs {needed:#x}")]
    TooSmall {
        /// Bytes needed.
        needed: u64,
        /// Bytes there are.
        available: u64,
    },
    /// PGRAPH's contexts are larger than the mediator's part of an address space has room for.
    #[error("the card's PGRAPH contexts have {bytes} bytes, more than the {most} that the mediator has room for")]
    Contexts {
        /// Bytes by its firmware.
        bytes: u64,
        /// The most there may be.
        most: u64,
    },
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
