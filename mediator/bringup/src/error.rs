//! Why a card cannot be taken over, or does not answer any more.

use card::DmaError;
use nvspec::falcon::Falcon;

/// Why the card is not as the mediator needs it.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
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
    /// A falcon's memory does not hold its firmware.
    #[error(
        "the firmware approved for {falcon} has {bytes} bytes of code, and the falcon has room for {room}: it is another chip's"
    )]
    Firmware {
        /// The falcon.
        falcon: Falcon,
        /// Bytes of code.
        bytes: u32,
        /// Bytes there is room for.
        room: u32,
    },
    /// Host memory that barriers need could not be mapped for the card.
    #[error("a page of host memory cannot be mapped for the card: {0}")]
    Dma(#[from] DmaError),
}
