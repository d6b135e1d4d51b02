//! The virtio-gpu commands that the device executes: layouts, decoding, and responses.
//!
//! Sources: VIRTIO 1.2 section 5.7; `linux/virtio_gpu.h`.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum number of command bytes that are copied from the guest. Further bytes are ignored.
pub(crate) const MAX_COMMAND_BYTES: usize = 256;
/// Maximum size of a response in bytes. The response to [`Command::DisplayInfo`] has this size.
#[cfg(any(test, feature = "fuzz"))]
pub const MAX_ANSWER_BYTES: usize = 24 + DISPLAYS_BYTES;
/// Maximum size of a submission in bytes. A larger submission is malformed.
const MAX_SUBMIT_BYTES: usize = 64;
/// Size of the descriptions of 16 displays, in bytes.
const DISPLAYS_BYTES: usize = 16 * 24;

/// The capability set of CUDA contexts. Linux before 6.18 cannot use IDs above 30.
pub const CAPSET: u32 = 24;
/// The only version of the capability set.
pub const CAPSET_VERSION: u32 = 1;

/// Header flag: the command has a fence.
const FLAG_FENCE: u32 = 1 << 0;
/// Header flag: the fence belongs to a ring of the context.
const FLAG_RING_IDX: u32 = 1 << 1;

/// Blob memory type: host memory, accessed through the window.
const MEM_HOST3D: u32 = 2;
/// Blob flag: the guest can map the blob.
const BLOB_MAPPABLE: u32 = 1 << 0;
/// The guest maps the blob with caching (write-back).
const MAP_CACHED: u32 = 1;

/// Command types.
mod number {
    pub(super) const DISPLAY_INFO: u32 = 0x0100;
    pub(super) const RESOURCE_UNREF: u32 = 0x0102;
    pub(super) const CAPSET_INFO: u32 = 0x0108;
    pub(super) const CAPSET: u32 = 0x0109;
    pub(super) const CREATE_BLOB: u32 = 0x010c;
    pub(super) const CTX_CREATE: u32 = 0x0200;
    pub(super) const CTX_DESTROY: u32 = 0x0201;
    pub(super) const CTX_ATTACH: u32 = 0x0202;
    pub(super) const CTX_DETACH: u32 = 0x0203;
    pub(super) const SUBMIT_3D: u32 = 0x0207;
    pub(super) const MAP_BLOB: u32 = 0x0208;
    pub(super) const UNMAP_BLOB: u32 = 0x0209;
}

/// Response types.
mod answer {
    pub(super) const OK: u32 = 0x1100;
    pub(super) const DISPLAY_INFO: u32 = 0x1101;
    pub(super) const CAPSET_INFO: u32 = 0x1102;
    pub(super) const CAPSET: u32 = 0x1103;
    pub(super) const MAP_INFO: u32 = 0x1106;
    pub(super) const UNSPECIFIED: u32 = 0x1200;
    pub(super) const OUT_OF_MEMORY: u32 = 0x1201;
    pub(super) const INVALID_RESOURCE: u32 = 0x1203;
    pub(super) const INVALID_PARAMETER: u32 = 0x1205;
}

/// Header of every command and response.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    kind: U32,
    flags: U32,
    fence: U64,
    context: U32,
    ring: u8,
    padding: [u8; 3],
}

impl From<[u8; 24]> for Header {
    fn from(bytes: [u8; 24]) -> Self {
        zerocopy::transmute!(bytes)
    }
}

impl Header {
    /// Returns the bytes of the header.
    #[must_use]
    pub(crate) fn to_bytes(self) -> [u8; 24] {
        zerocopy::transmute!(self)
    }

    /// Returns the command's context ID.
    #[must_use]
    pub fn context(&self) -> u32 {
        self.context.get()
    }

    /// Returns true if the guest waits for the command's fence.
    #[must_use]
    fn is_fenced(&self) -> bool {
        self.flags.get() & FLAG_FENCE != 0
    }
}

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct CreateContext {
    name_bytes: U32,
    init: U32,
    name: [u8; 64],
}

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct CreateBlob {
    resource: U32,
    memory: U32,
    flags: U32,
    entries: U32,
    blob: U64,
    size: U64,
}

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct MapBlob {
    resource: U32,
    padding: U32,
    offset: U64,
}

/// A body of two 32-bit words.
#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct TwoWords {
    first: U32,
    second: U32,
}

/// A decoded command. All fields are copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Queries the displays.
    DisplayInfo,
    /// Queries the description of a capability set.
    CapsetInfo {
        /// Index of the set in the list.
        index: u32,
    },
    /// Queries a capability set.
    Capset {
        /// ID of the set.
        id: u32,
        /// Version of the set.
        version: u32,
    },
    /// Creates a context.
    CreateContext {
        /// ID of the context's capability set, or 0 if the program selected none.
        capset: u8,
        /// Name of the program, if the kernel sends it.
        name: String,
    },
    /// Destroys a context.
    DestroyContext,
    /// Creates a mappable blob in host memory.
    CreateBlob {
        /// Resource ID, chosen by the guest kernel.
        resource: u32,
        /// Blob ID, chosen by the program.
        blob: u64,
        /// Size in bytes.
        size: u64,
    },
    /// Maps a blob at an offset in the window.
    MapBlob {
        /// Resource ID.
        resource: u32,
        /// Offset in bytes.
        offset: u64,
    },
    /// Unmaps a blob.
    UnmapBlob {
        /// Resource ID.
        resource: u32,
    },
    /// Drops a resource.
    Unref {
        /// Resource ID.
        resource: u32,
    },
    /// Attaches a resource to a context, or detaches it.
    Attach,
    /// Submits bytes to a context.
    Submit(Submission),
    /// A command that the device does not support.
    Unknown(u32),
}

/// A decoded submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submission {
    /// The submission has no bytes. Only its fence matters.
    Empty,
    /// Wakes the worker.
    Doorbell,
    /// Waits until the word at `offset` of blob `blob` has reached `value`.
    Wait {
        /// Blob number, chosen by the program.
        blob: u32,
        /// Offset of a 64-bit word in the blob, in bytes.
        offset: u64,
        /// Value that the word must reach.
        value: u64,
    },
    /// Identifies the program for operators.
    Identify {
        /// The program's process ID in the guest.
        pid: u32,
    },
    /// Invalid bytes.
    Malformed,
}

/// Submission types.
mod submission {
    pub(super) const DOORBELL: u32 = 1;
    pub(super) const WAIT: u32 = 2;
    pub(super) const IDENTIFY: u32 = 3;
}

#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Wait {
    kind: U32,
    blob: U32,
    offset: U64,
    value: U64,
}

impl Submission {
    /// Decodes a submission of `size` bytes from its copied `bytes`, which may be fewer.
    fn decode(size: u32, bytes: &[u8]) -> Self {
        let Ok(size) = usize::try_from(size) else { return Self::Malformed };
        if size == 0 {
            return Self::Empty;
        }
        let Some(bytes) = bytes.get(..size).filter(|_| size <= MAX_SUBMIT_BYTES) else { return Self::Malformed };
        let Ok((kind, _)) = U32::read_from_prefix(bytes) else { return Self::Malformed };
        match kind.get() {
            submission::DOORBELL if size == 4 => Self::Doorbell,
            submission::WAIT => match Wait::read_from_bytes(bytes) {
                Ok(Wait { blob, offset, value, .. }) => {
                    Self::Wait { blob: blob.get(), offset: offset.get(), value: value.get() }
                }
                Err(_) => Self::Malformed,
            },
            submission::IDENTIFY => match TwoWords::read_from_bytes(bytes) {
                Ok(TwoWords { second, .. }) => Self::Identify { pid: second.get() },
                Err(_) => Self::Malformed,
            },
            _ => Self::Malformed,
        }
    }
}

impl Command {
    /// Decodes a command from its copied bytes. Returns `None` if the command is too short for its type.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<(Header, Self)> {
        let (header, body) = Header::read_from_prefix(bytes).ok()?;
        let words = || TwoWords::read_from_prefix(body).ok().map(|(words, _)| (words.first.get(), words.second.get()));
        let command = match header.kind.get() {
            number::DISPLAY_INFO => Self::DisplayInfo,
            number::CAPSET_INFO => Self::CapsetInfo { index: words()?.0 },
            number::CAPSET => {
                let (id, version) = words()?;
                Self::Capset { id, version }
            }
            number::CTX_CREATE => {
                let (body, _) = CreateContext::read_from_prefix(body).ok()?;
                let [capset, ..] = body.init.get().to_le_bytes();
                Self::CreateContext { capset, name: printable(&body.name, body.name_bytes.get()) }
            }
            number::CTX_DESTROY => Self::DestroyContext,
            number::CTX_ATTACH | number::CTX_DETACH => Self::Attach,
            number::CREATE_BLOB => {
                let (body, _) = CreateBlob::read_from_prefix(body).ok()?;
                if body.memory.get() != MEM_HOST3D || body.flags.get() & BLOB_MAPPABLE == 0 {
                    return Some((header, Self::Unknown(number::CREATE_BLOB)));
                }
                Self::CreateBlob { resource: body.resource.get(), blob: body.blob.get(), size: body.size.get() }
            }
            number::MAP_BLOB => {
                let (body, _) = MapBlob::read_from_prefix(body).ok()?;
                Self::MapBlob { resource: body.resource.get(), offset: body.offset.get() }
            }
            number::UNMAP_BLOB => Self::UnmapBlob { resource: words()?.0 },
            number::RESOURCE_UNREF => Self::Unref { resource: words()?.0 },
            number::SUBMIT_3D => {
                let (words, bytes) = TwoWords::read_from_prefix(body).ok()?;
                Self::Submit(Submission::decode(words.first.get(), bytes))
            }
            other => Self::Unknown(other),
        };
        Some((header, command))
    }
}

/// Returns the first `len` bytes of a name from the guest, up to a NUL byte, with `?` in place of unprintable bytes.
fn printable(name: &[u8], len: u32) -> String {
    let len = usize::try_from(len).unwrap_or(usize::MAX).min(name.len());
    let name = name.iter().take(len).take_while(|&&byte| byte != 0);
    name.map(|&byte| char::from(byte)).map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).collect()
}

/// A response to a command, excluding the header's copy of the fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The command was executed.
    Ok,
    /// No display is connected.
    NoDisplays,
    /// Description of the capability set.
    CapsetInfo,
    /// The capability set, which contains the window size.
    Capset {
        /// Size of the window in bytes.
        window_bytes: u64,
    },
    /// The blob is mapped with caching.
    Mapped,
    /// The command is unknown or cannot be executed.
    Unspecified,
    /// A limit is reached.
    OutOfMemory,
    /// No such resource exists.
    NoResource,
    /// An argument is invalid.
    Invalid,
}

/// Size of the capability set in bytes.
const CAPSET_BYTES: usize = 16;

impl Answer {
    /// Encodes the response to a command with `header`, including the fence from that header.
    #[must_use]
    pub fn encode(self, header: &Header) -> Vec<u8> {
        let (kind, body): (u32, Vec<u8>) = match self {
            Self::Ok => (answer::OK, Vec::new()),
            Self::NoDisplays => (answer::DISPLAY_INFO, vec![0; DISPLAYS_BYTES]),
            Self::CapsetInfo => {
                let size = u32::try_from(CAPSET_BYTES).unwrap_or(0);
                (answer::CAPSET_INFO, words(&[CAPSET, CAPSET_VERSION, size, 0]))
            }
            Self::Capset { window_bytes } => {
                let mut body = words(&[CAPSET_VERSION, 0]);
                body.extend(window_bytes.to_le_bytes());
                (answer::CAPSET, body)
            }
            Self::Mapped => (answer::MAP_INFO, words(&[MAP_CACHED, 0])),
            Self::Unspecified => (answer::UNSPECIFIED, Vec::new()),
            Self::OutOfMemory => (answer::OUT_OF_MEMORY, Vec::new()),
            Self::NoResource => (answer::INVALID_RESOURCE, Vec::new()),
            Self::Invalid => (answer::INVALID_PARAMETER, Vec::new()),
        };
        let flags = U32::new(header.flags.get() & (FLAG_FENCE | FLAG_RING_IDX));
        let header = if header.is_fenced() {
            Header { kind: U32::new(kind), flags, padding: [0; 3], ..*header }
        } else {
            Header { kind: U32::new(kind), ..Header::default() }
        };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(body);
        bytes
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(kind: u32, body: &[u32]) -> Vec<u8> {
        let header = Header { kind: U32::new(kind), context: U32::new(5), ..Header::default() };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(words(body));
        bytes
    }

    fn decoded(kind: u32, body: &[u32]) -> Option<Command> {
        Command::decode(&command(kind, body)).map(|(header, command)| {
            assert_eq!(header.context(), 5);
            command
        })
    }

    #[test]
    fn commands_of_the_driver_are_decoded() {
        let blob = [7, MEM_HOST3D, BLOB_MAPPABLE, 0, 3, 9, 0x1_0000, 0];
        let expected = Command::CreateBlob { resource: 7, blob: 9 << 32 | 3, size: 0x1_0000 };
        assert_eq!(decoded(number::CREATE_BLOB, &blob), Some(expected));
        let expected = Command::MapBlob { resource: 7, offset: 2 << 32 | 0x1000 };
        assert_eq!(decoded(number::MAP_BLOB, &[7, 0, 0x1000, 2]), Some(expected));
        let mut context = vec![4, 0x118];
        context.extend([u32::from_le_bytes(*b"py\x01n"); 16]);
        let expected = Command::CreateContext { capset: 24, name: "py?n".to_owned() };
        assert_eq!(decoded(number::CTX_CREATE, &context), Some(expected));
    }

    #[test]
    fn blob_in_guest_memory_is_unknown() {
        let blob = [7, 1, BLOB_MAPPABLE, 0, 3, 9, 0x1_0000, 0];
        assert_eq!(decoded(number::CREATE_BLOB, &blob), Some(Command::Unknown(number::CREATE_BLOB)));
    }

    #[test]
    fn submissions_are_decoded_and_others_are_malformed() {
        let submit = |body: &[u32]| match decoded(number::SUBMIT_3D, body) {
            Some(Command::Submit(submission)) => submission,
            other => panic!("{other:?}"),
        };
        assert_eq!(submit(&[0, 0]), Submission::Empty);
        assert_eq!(submit(&[4, 0, 1]), Submission::Doorbell);
        let wait = Submission::Wait { blob: 6, offset: 64, value: 1 << 32 };
        assert_eq!(submit(&[24, 0, 2, 6, 64, 0, 0, 1]), wait);
        assert_eq!(submit(&[8, 0, 3, 1234]), Submission::Identify { pid: 1234 });
        for body in [&[8, 0, 1, 0][..], &[20, 0, 2, 6, 64, 0, 0], &[4, 0, 9], &[68, 0, 1], &[3, 0, 1], &[4, 0]] {
            assert_eq!(submit(body), Submission::Malformed, "{body:?}");
        }
        assert_eq!(submit(&[u32::MAX, 0, 1]), Submission::Malformed);
    }

    #[test]
    fn short_commands_are_refused() {
        let whole = command(number::CREATE_BLOB, &[0; 8]);
        for len in 0..whole.len() {
            assert_eq!(Command::decode(&whole[..len]).map(|it| it.1), None, "{len}");
        }
    }

    #[test]
    fn answer_repeats_the_fence_of_its_command_only() {
        let header = Header {
            flags: U32::new(FLAG_FENCE | FLAG_RING_IDX | 0x80),
            fence: U64::new(77),
            context: U32::new(4),
            ring: 9,
            ..Header::default()
        };
        let bytes = Answer::Unspecified.encode(&header);
        let answered = Header::read_from_bytes(&bytes).unwrap();
        assert_eq!((answered.kind.get(), answered.flags.get(), answered.fence.get()), (0x1200, 3, 77));
        assert_eq!((answered.context(), answered.ring), (4, 9));
        let plain = Header { flags: U32::new(0), ..header };
        assert_eq!(Answer::Ok.encode(&plain)[4..24], [0; 20]);
        assert_eq!(Answer::NoDisplays.encode(&plain).len(), MAX_ANSWER_BYTES);
    }
}
