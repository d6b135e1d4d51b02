//! Messages that are not described calls: their numbers and layouts.
//!
//! Each message begins with two words: the ring's header, and [`Route`]. The description of each number lists the
//! following words after a colon.

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
/// Starts the connection: version of the messages, number of described calls, process of the program.
pub const START: u16 = FIRST;
/// Waits for a stream: its handle. The worker replies when the stream's work is done.
pub const WAIT_STREAM: u16 = FIRST + 1;
/// Waits for an event: its handle.
pub const WAIT_EVENT: u16 = FIRST + 2;
/// Waits for all streams of the current context.
pub const WAIT_CONTEXT: u16 = FIRST + 3;
/// Requests the parameters of a function: its handle. The reply has their number, and `offset | size << 32` of each.
pub const FUNCTION_INFO: u16 = FIRST + 4;
/// Launches a kernel: function, grid x and y, grid z and block x, block y and z, shared bytes and number of attributes,
/// stream, cooperative, words of parameters; the parameters; nine words for each attribute.
pub const LAUNCH: u16 = FIRST + 5;
/// Copies to the card: address, size, stream; the bytes. If requested, the worker replies when the copy is complete.
pub const COPY_INLINE: u16 = FIRST + 6;
/// Copies from a staging piece to the card: piece, address, size, stream. The end increments the piece's counter.
pub const COPY_IN: u16 = FIRST + 7;
/// Copies from the card to a staging piece: piece, address, size, stream. The worker replies at the end.
pub const COPY_OUT: u16 = FIRST + 8;
/// Sends the next part of an image: `1` if the part begins an image, or 0; its size in bytes; the words of the part.
pub const IMAGE_PART: u16 = FIRST + 9;
/// Maps a pinned blob and registers it with the card: blob, address, size, flags. The worker replies.
pub const PIN: u16 = FIRST + 10;
/// Undoes [`PIN`]: blob. The worker replies.
pub const UNPIN: u16 = FIRST + 11;
/// Runs a function of the guest in a stream's order: stream, number for the callback ring. The worker adds
/// [`CAPTURED`] to the number if the stream is capturing.
pub const HOST_FUNCTION: u16 = FIRST + 12;
/// Bit of a number in the callback ring: the function is part of a graph and may run again.
pub const CAPTURED: u64 = 1 << 63;
/// Registers the staging blob with the card: blob. The worker replies.
pub const STAGING: u16 = FIRST + 13;

/// Requests the number of clusters of a launch that fit on the card: like [`LAUNCH`], without parameters.
pub const MAX_CLUSTERS: u16 = FIRST + 14;

/// Copies a box between the program's pageable memory and the card: piece or [`INLINE`], stream, 1 for a copy from the
/// card, the words of a `CUDA_MEMCPY3D`; the bytes, if inline. The pageable end is the piece or the bytes, with
/// adjacent rows and layers. Otherwise like [`COPY_INLINE`], [`COPY_IN`] and [`COPY_OUT`].
pub const COPY_BOX: u16 = FIRST + 15;
/// Number of the piece in a [`COPY_BOX`] whose bytes are in the message.
pub const INLINE: u64 = u64::MAX;
/// Edits a kernel node: [`edit`], graph or executable graph, node, 1 for a kernel of a library, context or 0, number of
/// nodes before it; these nodes; a launch like [`LAUNCH`] without attributes. The worker replies.
pub const GRAPH_KERNEL: u16 = FIRST + 16;
/// Edits a node with a function of the guest: [`edit`], graph or executable graph, node, number for the callback ring,
/// number of nodes before it; these nodes. The worker replies.
pub const GRAPH_HOST: u16 = FIRST + 17;
/// Completes a link: its handle. The reply has the size of the result in bytes.
pub const LINK_COMPLETE: u16 = FIRST + 18;
/// Requests the result of a completed link: its handle, first byte. The reply has the bytes from there on that fit.
pub const LINK_READ: u16 = FIRST + 19;

/// Requests the name of a function: its handle, 1 if it is a kernel of a library. The reply has the size and the bytes.
pub const FUNCTION_NAME: u16 = FIRST + 32;

/// Effects of messages about nodes.
pub mod edit {
    /// Adds a node to a graph.
    pub const ADD: u64 = 0;
    /// Changes a node; the graph is 0.
    pub const SET: u64 = 1;
    /// Changes the node's copy in an executable graph.
    pub const SET_EXEC: u64 = 2;
}

/// Number of words of a launch before its parameters.
pub const LAUNCH_WORDS: usize = 8;
/// Number of words of a launch attribute: its number, and 64 bytes.
pub const ATTRIBUTE_WORDS: usize = 9;
/// Attributes whose values contain neither handles nor addresses of the worker: cooperative, cluster dimension and
/// policy, programmatic serialization, priority, memory synchronization domains, preferred cluster, shared memory.
pub const PLAIN_ATTRIBUTES: [u64; 9] = [2, 4, 5, 6, 8, 9, 10, 11, 14];
/// Maximum number of attributes of a launch.
pub const MAX_ATTRIBUTES: usize = 16;
/// Maximum number of parameters of a function.
pub const MAX_PARAMETERS: usize = 1024;
/// Maximum size of a function's name in bytes.
pub const MAX_NAME_BYTES: usize = 60 << 10;
/// Maximum size of a launch's parameters in bytes.
pub const MAX_PARAMETER_BYTES: usize = 16 << 10;
/// Maximum size of a copy in the ring, in bytes.
pub const MAX_INLINE_BYTES: usize = 16 << 10;
/// Maximum number of nodes before a node.
pub const MAX_NODES: usize = 1024;
/// Maximum size of an image in bytes.
pub const MAX_IMAGE_BYTES: usize = 1 << 30;
/// Number of bytes of an image in one message.
pub const IMAGE_PART_BYTES: usize = 16 << 10;
