//! Reasons why a card cannot be taken over or no longer responds.

use card::DmaError;
use nvspec::falcon::Falcon;

/// Reason why the mediator cannot use the card.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    /// The card does not behave as hardware should.
    #[error("the card does not respond: {0}; reset it or the host")]
    Unresponsive(&'static str),
    /// This version does not support the card's chip.
    #[error("the card's identity register reads {boot0:#010x}, which is not a chip that this version supports")]
    UnknownChip {
        /// Value of PMC_BOOT_0.
        boot0: u32,
    },
    /// The card's VBIOS has not run, so its memory is disabled.
    #[error(
        "the card has not been initialised by its VBIOS: register {register:#08x} reads {value:#x}, without bit 1; let the \
         host's firmware run the VBIOS (restart the host), and choose a reset method that keeps what the VBIOS has set up"
    )]
    NotPosted {
        /// The register.
        register: u32,
        /// Value of the register.
        value: u32,
    },
    /// The card's memory is too small for the mediator's own structures.
    #[error("the card has {available:#x} bytes for the mediator, which needs {needed:#x}")]
    TooSmall {
        /// Required number of bytes.
        needed: u64,
        /// Number of available bytes.
        available: u64,
    },
    /// PGRAPH's contexts are too large for the mediator's part of an address space.
    #[error("the card's PGRAPH contexts have {bytes} bytes, more than the mediator's maximum of {most}")]
    Contexts {
        /// Size of a context in bytes, as reported by the card's firmware.
        bytes: u64,
        /// Maximum size in bytes.
        most: u64,
    },
    /// The firmware is too large for a falcon's memory.
    #[error(
        "the firmware approved for {falcon} has {bytes} bytes of code, but the falcon has space for {room}: it is for another chip"
    )]
    Firmware {
        /// The falcon.
        falcon: Falcon,
        /// Size of the code in bytes.
        bytes: u32,
        /// Size of the falcon's code memory in bytes.
        room: u32,
    },
    /// The barrier page in host memory could not be mapped for the card.
    #[error("a page of host memory cannot be mapped for the card: {0}")]
    Dma(#[from] DmaError),
}
