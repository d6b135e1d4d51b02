//! Numbers and layouts of the messages that are not described calls.
//!
//! Each message begins with two words: the ring's header, and [`Route`]. The comment on each number lists, after a
//! colon, the words that follow.

/// Flag bits in the ring header.
pub mod flags {
    /// The call requests a reply.
    pub const ANSWER: u16 = 1 << 4;
    /// The worker writes results to the area whose number is in the lowest four bits.
    pub const AREA: u16 = 1 << 5;
    /// Mask of the area number.
    pub const AREA_NUMBER: u16 = 0xf;
}

/// The second word of each message: context, slot and capture mode of the calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Number of the current context's handle, or 0 if no context is current.
    pub context: u32,
    /// Slot of the thread.
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

/// First number of these messages. Lower numbers are indices of [`CALLS`](crate::CALLS).
pub const FIRST: u16 = 0x8000;
/// Starts the connection: message version, number of described calls, process ID of the program.
pub const START: u16 = FIRST;
/// Waits for a stream: its handle. The worker replies when the stream's work is done.
pub const WAIT_STREAM: u16 = FIRST + 1;
/// Waits for an event: its handle.
pub const WAIT_EVENT: u16 = FIRST + 2;
/// Waits for all streams of the current context.
pub const WAIT_CONTEXT: u16 = FIRST + 3;
/// Queries the parameters of a function: its handle. The reply contains their number, and `offset | size << 32` for
/// each.
pub const FUNCTION_INFO: u16 = FIRST + 4;
/// Launches a kernel: function, grid x and y, grid z and block x, block y and z, shared memory in bytes and number of
/// attributes, stream, cooperative flag, size of the parameters in words; the parameters; nine words per attribute.
pub const LAUNCH: u16 = FIRST + 5;
/// Copies to the card: address, size, stream; the data. If requested, the worker replies when the copy is complete.
pub const COPY_INLINE: u16 = FIRST + 6;
/// Copies from a staging buffer to the card: buffer, address, size, stream. Completion increments the buffer's counter.
pub const COPY_IN: u16 = FIRST + 7;
/// Copies from the card to a staging buffer: buffer, address, size, stream. The worker replies on completion.
pub const COPY_OUT: u16 = FIRST + 8;
/// Sends the next part of an image: 1 for the first part, or 0; the part's size in bytes; the part's words.
pub const IMAGE_PART: u16 = FIRST + 9;
/// Maps a pinned blob and registers it with the card: blob, address. The worker replies.
pub const PIN: u16 = FIRST + 10;
/// Reverts [`PIN`]: blob. The worker replies.
pub const UNPIN: u16 = FIRST + 11;
/// Runs a host function of the guest in stream order: stream, number for the callback ring. The worker sets
/// [`CAPTURED`] in the number if the stream is being captured.
pub const HOST_FUNCTION: u16 = FIRST + 12;
/// Bit of a number in the callback ring: the host function is part of a graph and may run repeatedly.
pub const CAPTURED: u64 = 1 << 63;
/// Registers the staging blob with the card: blob. The worker replies.
pub const STAGING: u16 = FIRST + 13;

/// Queries the maximum number of a launch's clusters that can be active on the card: like [`LAUNCH`], without
/// parameters.
pub const MAX_CLUSTERS: u16 = FIRST + 14;

/// Copies a box between the program's pageable memory and the card: staging buffer or [`INLINE`], stream, 1 for a copy
/// from the card or 0, the words of a `CUDA_MEMCPY3D`; the data, if inline. The pageable end is the buffer or the
/// inline data, with contiguous rows and layers. Otherwise like [`COPY_INLINE`], [`COPY_IN`] and [`COPY_OUT`].
pub const COPY_BOX: u16 = FIRST + 15;
/// Buffer number of a [`COPY_BOX`] whose data is in the message.
pub const INLINE: u64 = u64::MAX;
/// Edits a kernel node: [`edit`], graph or executable graph, node, 1 for a library kernel or 0, context or 0, number of
/// dependencies; the dependencies; a launch like [`LAUNCH`] without attributes. The worker replies.
pub const GRAPH_KERNEL: u16 = FIRST + 16;
/// Edits a host node: [`edit`], graph or executable graph, node, number for the callback ring, number of dependencies;
/// the dependencies. The worker replies.
pub const GRAPH_HOST: u16 = FIRST + 17;
/// Completes a link: its handle. The reply contains the size of the result in bytes.
pub const LINK_COMPLETE: u16 = FIRST + 18;
/// Reads the result of a completed link: its handle, offset in bytes. The reply contains as many bytes from this offset
/// as fit.
pub const LINK_READ: u16 = FIRST + 19;
/// Takes output of kernels, without further words. The reply contains the number of bytes that the worker still has,
/// the number of bytes that follow, and the bytes. The worker replies even if the context is not usable.
pub const OUTPUT: u16 = FIRST + 20;

/// Queries the name of a function: its handle, 1 for a library kernel or 0. The reply contains the length and the bytes
/// of the name.
pub const FUNCTION_NAME: u16 = FIRST + 32;

/// Operations on graph nodes.
pub mod edit {
    /// Adds a node to a graph.
    pub const ADD: u64 = 0;
    /// Changes a node. The graph is 0.
    pub const SET: u64 = 1;
    /// Changes the node in an executable graph.
    pub const SET_EXEC: u64 = 2;
}

/// Number of words in a launch before its parameters.
pub const LAUNCH_WORDS: usize = 8;
/// Size of a launch attribute in words: its number and a 64-byte value.
pub const ATTRIBUTE_WORDS: usize = 9;
/// Attributes whose values contain neither handles nor worker addresses: cooperative, cluster dimension and policy,
/// programmatic serialization, priority, memory synchronization domains, preferred cluster, shared memory.
pub const PLAIN_ATTRIBUTES: [u64; 9] = [2, 4, 5, 6, 8, 9, 10, 11, 14];
/// Maximum number of attributes of a launch.
pub const MAX_ATTRIBUTES: usize = 16;
/// Maximum number of parameters of a function.
pub const MAX_PARAMETERS: usize = 1024;
/// Maximum length of a function's name in bytes.
pub const MAX_NAME_BYTES: usize = 60 << 10;
/// Maximum total size of a launch's parameters in bytes.
pub const MAX_PARAMETER_BYTES: usize = 16 << 10;
/// Maximum size of a copy with inline data, in bytes.
pub const MAX_INLINE_BYTES: usize = 16 << 10;
/// Maximum number of dependencies of a node.
pub const MAX_NODES: usize = 1024;
/// Maximum size of an image in bytes.
pub const MAX_IMAGE_BYTES: usize = 1 << 30;
/// Maximum number of image bytes per message.
pub const IMAGE_PART_BYTES: usize = 16 << 10;
