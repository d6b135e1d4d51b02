//! Reasons why a card cannot be used, or no longer responds.

use card::DmaError;
use nvspec::falcon::Falcon;

/// Reason why the mediator cannot use the card.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    /// The card does not respond as real hardware does.
    #[error("the card does not respond: {0}; reset it or the host")]
    Unresponsive(&'static str),
    /// This version does not support the chip.
    #[error("the card's identity register reads {boot0:#010x}, which is not a chip that this version supports")]
    UnknownChip {
        /// Value of PMC_BOOT_0.
        boot0: u32,
    },
    /// The VBIOS has not run, so the card's memory is disabled.
    #[error(
        "the VBIOS has not initialized the card: register {register:#08x} reads {value:#x}, without bit 1; let the \
         host's firmware run the VBIOS (restart the host), and choose a reset method that keeps what the VBIOS has set up"
    )]
    NotPosted {
        /// Register offset.
        register: u32,
        /// Register value.
        value: u32,
    },
    /// The card's memory is too small for the mediator's structures.
    #[error("the mediator needs {needed:#x} bytes of the card's memory, but only {available:#x} are available")]
    TooSmall {
        /// Required memory in bytes.
        needed: u64,
        /// Available memory in bytes.
        available: u64,
    },
    /// PGRAPH contexts are too large for the mediator's part of an address space.
    #[error("a PGRAPH context of the card has {bytes} bytes, at most {most} are supported")]
    Contexts {
        /// Context size in bytes, as reported by the firmware.
        bytes: u64,
        /// Maximum context size in bytes.
        most: u64,
    },
    /// The firmware is too large for the falcon's code memory.
    #[error(
        "the firmware approved for {falcon} has {bytes} bytes of code, but the falcon has space for {room}: it is for another chip"
    )]
    Firmware {
        /// The falcon.
        falcon: Falcon,
        /// Code size in bytes.
        bytes: u32,
        /// Size of the falcon's code memory in bytes.
        room: u32,
    },
    /// The host memory page for barriers could not be mapped for the card.
    #[error("cannot map a page of host memory for the card: {0}")]
    Dma(#[from] DmaError),
}
