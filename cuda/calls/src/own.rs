//! Messages that are not described calls: their numbers and layouts.
//!
//! Each message begins with two words: the ring's header, and [`Route`]. The following words are listed with each
//! number.

/// Bits of the header's flags.
pub mod flags {
    /// The call requests an answer.
    pub const ANSWER: u16 = 1 << 4;
    /// Results go to the area whose number is in the lowest four bits.
    pub const AREA: u16 = 1 << 5;
    /// Mask of the area's number.
    pub const AREA_NUMBER: u16 = 0xf;
}

/// The second word of each message: the context in which the call happens, and the slot of the calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Number of the current context's handle; 0 without one.
    pub context: u32,
    /// The thread's slot.
    pub slot: u16,
    /// The thread's capture mode (`CUstreamCaptureMode`).
    pub capture_mode: u16,
}

impl Route {
    /// Encodes the word.
    pub const fn word(self) -> u64 {
        self.context as u64 | (self.slot as u64) << 32 | (self.capture_mode as u64) << 48
    }

    /// Decodes the word.
    pub const fn from_word(word: u64) -> Self {
        Self { context: word as u32, slot: (word >> 32) as u16, capture_mode: (word >> 48) as u16 }
    }
}

/// Number of the first of these messages; lower numbers are indices of [`CALLS`](crate::CALLS).
pub const FIRST: u16 = 0x8000;
/// First message: version of the messages, number of described calls, process of the program.
pub const START: u16 = FIRST;
/// Waits for a stream: handle. Answered when its work is done.
pub const WAIT_STREAM: u16 = FIRST + 1;
/// Waits for an event: handle.
pub const WAIT_EVENT: u16 = FIRST + 2;
/// Waits for all streams of the current context.
pub const WAIT_CONTEXT: u16 = FIRST + 3;
/// Offsets and sizes of a function's parameters: handle. Answered with the number, then `offset | size << 32` of each.
pub const FUNCTION_INFO: u16 = FIRST + 4;
/// Launch: function, grid x and y, grid z and block x, block y and z, shared bytes and number of attributes, stream,
/// cooperative, words of parameters; the parameters; nine words for each attribute.
pub const LAUNCH: u16 = FIRST + 5;
/// Copy to the card: address, bytes, stream; the bytes. Answered when it is done, if requested.
pub const COPY_INLINE: u16 = FIRST + 6;
/// Copy from a staging piece to the card: piece, address, bytes, stream. Counts the piece's word when it is done.
pub const COPY_IN: u16 = FIRST + 7;
/// Copy from the card to a staging piece: piece, address, bytes, stream. Answered when the bytes are there.
pub const COPY_OUT: u16 = FIRST + 8;
/// Part of an image: words that follow the earlier parts. `1` as first word begins a new image; then bytes of this
/// part.
pub const IMAGE_PART: u16 = FIRST + 9;
/// Maps a pinned blob at an address and registers it with the card: blob, address, bytes, flags. Answered.
pub const PIN: u16 = FIRST + 10;
/// Undoes [`PIN`]: blob. Answered.
pub const UNPIN: u16 = FIRST + 11;
/// Runs a function of the guest in a stream's order: stream, number for the callback ring. The worker adds
/// [`CAPTURED`] to the number if the stream is capturing.
pub const HOST_FUNCTION: u16 = FIRST + 12;
/// Bit of a number in the callback ring: the function is part of a graph and may run again.
pub const CAPTURED: u64 = 1 << 63;
/// The staging blob, which the worker registers with the card: blob. Answered.
pub const STAGING: u16 = FIRST + 13;

/// Number of clusters of a launch that fit on the card: like [`LAUNCH`], without parameters. Answered with the number.
pub const MAX_CLUSTERS: u16 = FIRST + 14;

/// Number of words of a launch before its parameters.
pub const LAUNCH_WORDS: usize = 8;
/// Number of words of a launch attribute: its number, and 64 bytes.
pub const ATTRIBUTE_WORDS: usize = 9;
/// Maximum number of attributes of a launch.
pub const MAX_ATTRIBUTES: usize = 16;
/// Maximum number of parameters of a function.
pub const MAX_PARAMETERS: usize = 1024;
/// Maximum size of a launch's parameters in bytes.
pub const MAX_PARAMETER_BYTES: usize = 16 << 10;
/// Maximum size of a copy in the ring, in bytes.
pub const MAX_INLINE_BYTES: usize = 16 << 10;
/// Maximum size of an image in bytes.
pub const MAX_IMAGE_BYTES: usize = 1 << 30;
/// Number of bytes of an image in one message.
pub const IMAGE_PART_BYTES: usize = 16 << 10;
