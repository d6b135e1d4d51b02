//! Types that describe the driver API's functions.

/// Maximum number of arguments of a described function.
pub const MAX_ARGUMENTS: usize = 12;

/// Number of words in `CUDA_RESOURCE_DESC`.
pub(crate) const RESOURCE_WORDS: usize = 18;

/// Kind of the object that a handle refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `CUcontext`.
    Context = 1,
    /// `CUstream`.
    Stream,
    /// `CUevent`.
    Event,
    /// `CUmodule`.
    Module,
    /// `CUfunction` or `CUkernel`. Most functions accept both.
    Function,
    /// `CUlibrary`.
    Library,
    /// `CUgraph`.
    Graph,
    /// `CUgraphExec`.
    Exec,
    /// `CUgraphNode`.
    Node,
    /// `CUmemoryPool`.
    Pool,
    /// `CUmemGenericAllocationHandle`.
    Memory,
    /// `CUlinkState`.
    Link,
    /// `CUarray`.
    Array,
    /// `CUmipmappedArray`.
    Mipmap,
    /// `nvmlDevice_t`. The last kind that fits into handles.
    Gpu,
}

/// Kind of an object that keeps the driver's number, because kernels get the number as a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numbered {
    /// `CUtexObject`.
    Texture,
    /// `CUsurfObject`.
    Surface,
}

/// All kinds, in the order of their numbers.
const KINDS: [Kind; 15] = [
    Kind::Context,
    Kind::Stream,
    Kind::Event,
    Kind::Module,
    Kind::Function,
    Kind::Library,
    Kind::Graph,
    Kind::Exec,
    Kind::Node,
    Kind::Pool,
    Kind::Memory,
    Kind::Link,
    Kind::Array,
    Kind::Mipmap,
    Kind::Gpu,
];

/// Start of the address range for handles. Handles are addresses in pages that the guest library keeps inaccessible.
pub const FIRST_HANDLE: u64 = 0x1f00_0000_0000;

/// Number of low bits of a handle that contain the object's number. The bits above contain the kind.
const NUMBER_BITS: u32 = 36;

/// Returns the handle of an object. The objects of each kind are numbered from 1.
pub const fn handle(kind: Kind, index: u32) -> u64 {
    FIRST_HANDLE | (kind as u64) << NUMBER_BITS | (index as u64) << 4
}

/// Returns the kind encoded in a handle.
pub fn kind_of(handle: u64) -> Option<Kind> {
    let kind = handle.checked_sub(FIRST_HANDLE)? >> NUMBER_BITS;
    let number = handle & ((1 << NUMBER_BITS) - 1);
    if number.trailing_zeros() < 4 || number == 0 {
        return None;
    }
    KINDS.get(usize::try_from(kind).ok()?.checked_sub(1)?).copied()
}

/// Returns the object number encoded in a handle of this kind.
pub fn index_of(kind: Kind, handle: u64) -> Option<u32> {
    (kind_of(handle)? == kind).then_some((handle >> 4) as u32)
}

/// Handling of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// The guest library implements the function, without the worker or with messages of [`own`](crate::own).
    Guest,
    /// A message without a reply. If it fails, the thread's next call returns the error.
    Posted,
    /// A message with a reply.
    Answered,
}

/// An argument of a described function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// A number or a card address, passed by value.
    Word,
    /// An address of card memory or of pinned guest memory.
    Address,
    /// Like [`Self::Address`], for a range whose size in bytes is the argument with this index.
    Range(u8),
    /// A handle. For streams, 0, 1 and 2 are also valid: the default streams.
    Handle(Kind),
    /// A handle or 0.
    Optional(Kind),
    /// A handle of an object that the function destroys.
    Drop(Kind),
    /// A pointer to the handle of a new object.
    New(Kind),
    /// A pointer to a result of this many bytes.
    Out(u16),
    /// A pointer to a result, or null.
    OutOptional(u16),
    /// A pointer to a result: its size in bytes, and the number of leading bytes that are returned to the guest. The
    /// guest gets zeros for the rest, because it would contain worker addresses.
    OutPart(u16, u16),
    /// A pointer to this number of input bytes.
    In(u16),
    /// Like [`Self::In`], but the first word is an address like [`Self::Address`].
    InAddressed(u16),
    /// A pointer to this number of input bytes, or null.
    InOptional(u16),
    /// A pointer to this number of bytes that the function reads and writes.
    InOut(u16),
    /// A pointer to a NUL-terminated string.
    Text,
    /// A pointer to an array: element size in bytes, and index of the argument with the number of elements.
    Array(u8, u8),
    /// Like [`Self::Array`], but with one fewer element.
    ArrayButOne(u8, u8),
    /// A pointer to handles: their kind, and the index of the argument with the number of handles.
    Handles(Kind, u8),
    /// A pointer to a buffer for one-byte results. The argument with this index is the number of results.
    OutBytes(u8),
    /// The image sent in parts by earlier messages, or null.
    Image,
    /// Size of the image in bytes.
    ImageBytes,
    /// A pointer to a `CUDA_MEMCPY2D`: its arrays are handles, and its addresses are like [`Self::Range`].
    Copy2d,
    /// Like [`Self::Copy2d`], for a `CUDA_MEMCPY3D`.
    Copy3d,
    /// A pointer to a `CUDA_RESOURCE_DESC`: an array's handle, or a range like [`Self::Range`].
    Resource,
    /// The number of a launch attribute whose value contains neither handles nor addresses.
    PlainAttribute,
    /// A pointer to the number of a new object.
    NewNumber(Numbered),
    /// The number of an object that the function destroys.
    DropNumber(Numbered),
    /// A pointer that must be null.
    Null,
}

/// Description of a function.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Symbol of the function, without the suffix of the per-thread variants.
    pub name: &'static str,
    /// Handling of the function.
    pub treatment: Treatment,
    /// Arguments of the function. Empty if the guest library handles the function.
    pub args: &'static [Arg],
}

/// Describes a function that the guest library implements.
pub(crate) const fn guest(name: &'static str) -> Call {
    Call { name, treatment: Treatment::Guest, args: &[] }
}

/// Describes a function whose caller does not wait for a reply.
pub(crate) const fn posted(name: &'static str, args: &'static [Arg]) -> Call {
    Call { name, treatment: Treatment::Posted, args }
}

/// Describes a function whose caller waits for a reply.
pub(crate) const fn answered(name: &'static str, args: &'static [Arg]) -> Call {
    Call { name, treatment: Treatment::Answered, args }
}
