//! The binary interface between a guest's driver and the mediator, version 1. Both sides must agree on it.
//!
//! The C header of the guest's kernel module is generated from this file: the macros below keep the needed parts
//! (`pv::header`). All numbers are little-endian. [docs/design/paravirtual.md](../../docs/design/paravirtual.md)
//! describes their use.
//!
//! A vGPU that offers the interface has a vendor-specific PCI capability ([`Capability`]), which contains the location
//! of its registers ([`register`]). The guest sets up one split virtqueue (VIRTIO 1.2, 2.7, without indirect
//! descriptors and event indices) in its RAM, and rings [`register::DOORBELL`]. Each chain of descriptors is one batch.
//! Its device-readable part is a [`BatchHeader`] and its operations; its device-writable part is an [`AnswerHeader`]
//! and one [`Answer`] for each operation.

use crate::section::{Constant, Field, Section, Structure};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

// The structures are read and written in their memory layout.
const _: () = assert!(cfg!(target_endian = "little"));

/// Declares constants, of a module or of this file, together with their descriptions.
macro_rules! constants {
    (@of [$($about:literal)*] $( $(#[doc = $doc:literal])* pub const $name:ident: $ty:ty = $value:expr; )*) => {
        $( $(#[doc = $doc])* pub const $name: $ty = $value; )*
        /// Description of these constants.
        pub(crate) const SECTION: Section = Section {
            path: module_path!(),
            doc: &[$($about),*],
            constants: &[$( Constant {
                name: stringify!($name),
                value: $name as u64,
                bytes: size_of::<$ty>(),
                doc: &[$($doc),*],
            } ),*],
        };
    };
    ($(#[doc = $doc:literal])* pub mod $module:ident { $($constants:tt)* } $(containing { $($inner:tt)* })?) => {
        $(#[doc = $doc])*
        pub mod $module {
            use super::{Constant, Section};
            constants! { @of [$($doc)*] $($constants)* }
            $($($inner)*)?
        }
    };
    ($($constants:tt)*) => {
        constants! { @of [] $($constants)* }
    };
}

/// Declares structures, together with their descriptions.
macro_rules! structures {
    ($described:ident: $( $(#[doc = $doc:literal])* pub struct $name:ident {
        $( $(#[doc = $field_doc:literal])* pub $field:ident: $ty:ty, )*
    } )*) => {
        $(
            $(#[doc = $doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
            #[repr(C)]
            pub struct $name { $( $(#[doc = $field_doc])* pub $field: $ty, )* }
        )*
        /// Descriptions of these structures.
        pub(crate) const $described: &[Structure] = &[$( Structure {
            name: stringify!($name),
            bytes: size_of::<$name>(),
            doc: &[$($doc),*],
            fields: &[$( Field { name: stringify!($field), ty: stringify!($ty), doc: &[$($field_doc),*] } ),*],
        } ),*];
    };
}

/// Declares [`Status`] together with its description.
macro_rules! statuses {
    ($(#[doc = $doc:literal])* pub enum Status {
        $( $(#[doc = $variant_doc:literal])* #[error($text:literal)] $variant:ident = $value:literal, )*
    }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
        #[repr(u32)]
        pub enum Status { $( $(#[doc = $variant_doc])* #[error($text)] $variant = $value, )* }
        /// Description of these statuses.
        pub(crate) const STATUSES: Section = Section {
            path: concat!(module_path!(), "::Status"),
            doc: &[$($doc),*],
            constants: &[$( Constant {
                name: stringify!($variant),
                value: $value,
                bytes: 4,
                doc: &[$($variant_doc),*],
            } ),*],
        };
    };
}

constants! {
    /// Version of this interface. A driver must not use a device with another major version; a higher minor version
    /// only adds to the interface.
    pub const VERSION_MAJOR: u8 = 1;
    /// See [`VERSION_MAJOR`].
    pub const VERSION_MINOR: u8 = 0;
    /// Id of a vendor-specific capability. Source: PCI Local Bus 3.0, appendix H.
    pub const CAPABILITY_ID: u8 = 0x09;
    /// Marks the capability as the mediator's: "GMPV".
    pub const SIGNATURE: u32 = u32::from_le_bytes(*b"GMPV");
    /// Maximum number of entries of the queue.
    pub const MAX_QUEUE: u16 = 256;
    /// Maximum size of a batch in bytes, including its header.
    pub const MAX_BATCH_BYTES: u32 = 64 << 10;
    /// Maximum number of operations in a batch.
    pub const MAX_BATCH_OPS: u32 = 1024;
    /// Sizes of operations are multiples of this number of bytes.
    pub const UNIT: u32 = 8;
    /// Maximum number of bytes that one operation fills or copies.
    pub const MAX_MEMORY_BYTES: u64 = 16 << 20;
}

structures! {
    HEADERS:
    /// The PCI capability.
    pub struct Capability {
        /// [`CAPABILITY_ID`].
        pub id: u8,
        /// Offset of the next capability.
        pub next: u8,
        /// Size of this capability in bytes.
        pub length: u8,
        /// BAR that contains the registers.
        pub bar: u8,
        /// [`SIGNATURE`].
        pub signature: u32,
        /// [`VERSION_MAJOR`].
        pub version_major: u8,
        /// [`VERSION_MINOR`].
        pub version_minor: u8,
        /// Always 0.
        pub reserved: u16,
        /// Byte offset of the registers in the BAR.
        pub offset: u32,
        /// Features of the device: [`feature`].
        pub features: u32,
    }

    /// Header of a batch.
    pub struct BatchHeader {
        /// Number of operations that follow: 1 to [`MAX_BATCH_OPS`].
        pub ops: u32,
        /// Size of the operations in bytes; bytes after them are ignored.
        pub bytes: u32,
    }

    /// Header of an operation.
    pub struct OpHeader {
        /// Code of the operation: [`op`].
        pub code: u16,
        /// Size of the operation in units of [`UNIT`] bytes, including this header.
        pub units: u16,
        /// Handle of the object; 0 if the operation does not act on an object.
        pub handle: u32,
    }

    /// Header of the answer to a batch.
    pub struct AnswerHeader {
        /// [`Status::Done`] if all operations are done; [`Status::Malformed`] if the batch cannot be read, so that no
        /// operation was started; otherwise the status of the operation that failed.
        pub status: u32,
        /// Number of operations that are done: all operations before the one that failed. Later operations were not
        /// started.
        pub done: u32,
    }

    /// Answer to an operation. Answers that do not fit into the chain are omitted.
    pub struct Answer {
        /// One of [`Status`].
        pub status: u32,
        /// Always 0.
        pub reserved: u32,
        /// Result of a query, if the operation is a query.
        pub value: u64,
    }
}

constants! {
    /// Features of a device, one bit each. A driver accepts some of them through [`register::FEATURES`]; operations of
    /// other features are refused with [`Status::Unsupported`].
    pub mod feature {
        /// Page tables that the device keeps.
        pub const TABLES: u32 = 1 << 0;
        /// Channels and the runlist.
        pub const CHANNELS: u32 = 1 << 1;
        /// Filling and copying VRAM.
        pub const MEMORY: u32 = 1 << 2;
        /// Priority of ranges of VRAM.
        pub const PRIORITY: u32 = 1 << 3;
        /// Segments of device memory that several channels can map.
        pub const SHARE: u32 = 1 << 4;
        /// Segments that channels of other virtual machines can map.
        pub const SHARE_ABROAD: u32 = 1 << 5;
        /// Queries about the virtual machine's memory and limits.
        pub const QUERY: u32 = 1 << 6;
        /// Interrupt at the end of a batch.
        pub const INTERRUPT: u32 = 1 << 7;
    }
}

constants! {
    /// The device's registers: 32 bits each, at byte offsets from [`Capability::offset`].
    pub mod register {
        /// Read: [`super::SIGNATURE`].
        pub const SIGNATURE: u32 = 0x00;
        /// Read: offered features. Write, before [`STATUS`] is set: accepted features.
        pub const FEATURES: u32 = 0x04;
        /// One of [`super::status`]. Writing 0 resets the interface, which drops the queue, all tables, and the segment
        /// attachments and bindings that were made through it.
        pub const STATUS: u32 = 0x08;
        /// Number of entries of the queue: a power of two up to [`super::MAX_QUEUE`].
        pub const QUEUE_SIZE: u32 = 0x0c;
        /// Guest physical address of the descriptor table, low and high half; a multiple of 16.
        pub const QUEUE_DESCRIPTORS: u32 = 0x10;
        /// Guest physical address of the available ring, low and high half; a multiple of 2.
        pub const QUEUE_AVAILABLE: u32 = 0x18;
        /// Guest physical address of the used ring, low and high half; a multiple of 4.
        pub const QUEUE_USED: u32 = 0x20;
        /// Write, of any value: the available ring contains new batches. A posted write. Batches are processed in
        /// order.
        pub const DOORBELL: u32 = 0x28;
        /// Read: number of batches that have ended since the queue was set up, modulo 2^32. Because reads are not
        /// posted, all batches whose doorbells were rung before the read are included.
        pub const ENDED: u32 = 0x2c;
        /// Read: 1 while the device requests an interrupt. Write 1: acknowledges the interrupt.
        pub const INTERRUPT: u32 = 0x30;
        /// 1: the device requests an interrupt when batches have ended, unless the available ring's flags forbid it.
        pub const INTERRUPT_ENABLE: u32 = 0x34;
        /// Size of the registers in bytes.
        pub const BYTES: u32 = 0x40;
    }
}

constants! {
    /// Values of [`register::STATUS`].
    pub mod status {
        /// Nothing is set up.
        pub const RESET: u32 = 0;
        /// Written by the driver when features and queue are set up. Reads as this value once the device has accepted
        /// them.
        pub const READY: u32 = 1;
        /// The queue is set up incorrectly, or has become unusable. Only [`RESET`] ends this state.
        pub const FAILED: u32 = 0x80;
    }
}

statuses! {
    /// Outcome of an operation.
    pub enum Status {
        /// The operation is done.
        #[error("done")]
        Done = 0,
        /// An operation before it failed.
        #[error("an operation before it failed")]
        NotBegun = 1,
        /// The batch cannot be read: sizes that do not fit, or a code that version 1 does not have.
        #[error("the batch is malformed")]
        Malformed = 2,
        /// The operation belongs to a feature that was not offered or not accepted.
        #[error("the feature was not offered, or not accepted")]
        Unsupported = 3,
        /// The table, segment or channel does not exist.
        #[error("there is no such object")]
        NoObject = 4,
        /// An object with this handle already exists.
        #[error("there is one already")]
        Exists = 5,
        /// The object is of another type.
        #[error("the object is of another type")]
        WrongType = 6,
        /// An index, count, address or size that the object does not have.
        #[error("out of range")]
        Range = 7,
        /// A reserved bit or field is not 0, or a value has no meaning.
        #[error("a value that means nothing")]
        Invalid = 8,
        /// The operation exceeds a limit of the virtual machine or of the card.
        #[error("a limit is reached")]
        Limit = 9,
        /// The owner of the segment, or the operator, does not permit the operation.
        #[error("not allowed")]
        Denied = 10,
        /// The card failed to execute the operation. The mediator's log contains the reason.
        #[error("the card did not do it")]
        Failed = 11,
    }
}

constants! {
    /// Types of page tables.
    pub mod kind {
        /// A page directory: 8192 entries, each with a small-page table and a large-page table.
        pub const DIRECTORY: u32 = 1;
        /// A table of 32768 pages of 4 KiB.
        pub const SMALL: u32 = 2;
        /// A table of 1024 pages of 128 KiB.
        pub const LARGE: u32 = 3;
    }
}

constants! {
    /// Codes of operations, and the bodies after their headers.
    pub mod op {
        /// Creates a table. The guest chooses the handle, which must not be 0 or belong to another table. All entries
        /// are empty.
        pub const TABLE_CREATE: u16 = 0x01;
        /// Frees the table's handle. The table itself is freed when no directory names it and no address space is bound
        /// to it.
        pub const TABLE_DESTROY: u16 = 0x02;
        /// Sets an entry of the directory `handle`.
        pub const DIRECTORY_SET: u16 = 0x03;
        /// Writes consecutive entries of the table `handle`, whose values increase by a fixed step.
        pub const ENTRIES_RUN: u16 = 0x04;
        /// Writes entries of the table `handle` from a list.
        pub const ENTRIES_LIST: u16 = 0x05;
        /// Empties entries of the table `handle`.
        pub const ENTRIES_ZERO: u16 = 0x06;
        /// Binds the address space of an instance block (of a channel or an aperture) to the directory `handle`,
        /// regardless of the directory in the block; with handle 0, to the block's own directory again. Takes effect
        /// when the block is next assigned to a channel or an aperture, or immediately for an aperture that already has
        /// the block.
        pub const DIRECTORY_BIND: u16 = 0x07;
        /// Flushes the TLB: afterwards, memory that was unmapped before cannot be reached. Handle: a directory, or 0
        /// for all address spaces.
        pub const FLUSH: u16 = 0x08;

        /// Reserves the channel `handle`; fails with [`Status::Limit`](super::Status::Limit) if the virtual machine has
        /// its maximum number of channels.
        pub const CHANNEL_CREATE: u16 = 0x10;
        /// Binds the channel `handle` to its instance block.
        pub const CHANNEL_BIND: u16 = 0x11;
        /// Lets the channel `handle` run while it is in the runlist.
        pub const CHANNEL_ENABLE: u16 = 0x12;
        /// Keeps the channel `handle` from running.
        pub const CHANNEL_DISABLE: u16 = 0x13;
        /// Unbinds the channel `handle`.
        pub const CHANNEL_DESTROY: u16 = 0x14;
        /// Sets the channels that may run.
        pub const RUNLIST: u16 = 0x15;

        /// Fills guest VRAM with a word.
        pub const MEMORY_FILL: u16 = 0x20;
        /// Copies guest VRAM; the two ranges must not overlap.
        pub const MEMORY_COPY: u16 = 0x21;
        /// Sets the priority with which a range of guest VRAM stays on the card; chunks of the lowest priority are
        /// evicted first.
        pub const BUFFER_PRIORITY: u16 = 0x22;

        /// Finds or creates a segment by its key; the answer's value is its handle.
        pub const SHARE_GET: u16 = 0x30;
        /// Maps the segment `handle` for a channel; the answer's value is its GPU virtual address there.
        pub const SHARE_ATTACH: u16 = 0x31;
        /// Unmaps the segment `handle` for a channel; work that still uses it faults.
        pub const SHARE_DETACH: u16 = 0x32;
        /// Queries or changes the segment `handle`.
        pub const SHARE_CONTROL: u16 = 0x33;

        /// Executes the query `handle`, one of [`query`](super::query); the answer's value is the result.
        pub const QUERY: u16 = 0x40;
    }
}

structures! {
    BODIES:
    /// Body of [`op::TABLE_CREATE`].
    pub struct TableCreate {
        /// One of [`kind`].
        pub kind: u32,
        /// Always 0.
        pub reserved: u32,
    }
    /// Body of [`op::DIRECTORY_SET`].
    pub struct DirectorySet {
        /// Index of the entry.
        pub index: u32,
        /// Handle of the small-page table, or 0 for none.
        pub small: u32,
        /// Handle of the large-page table, or 0 for none.
        pub large: u32,
        /// Always 0.
        pub reserved: u32,
    }
    /// Body of [`op::ENTRIES_RUN`].
    pub struct EntriesRun {
        /// Index of the first entry.
        pub first: u32,
        /// Number of entries.
        pub count: u32,
        /// The first entry, in the hardware's format, with the guest's addresses.
        pub entry: u64,
        /// Difference between consecutive entries.
        pub step: u64,
    }
    /// Body of [`op::ENTRIES_LIST`] (followed by the entries) and of [`op::ENTRIES_ZERO`].
    pub struct Entries {
        /// Index of the first entry.
        pub first: u32,
        /// Number of entries.
        pub count: u32,
    }
    /// Body of [`op::DIRECTORY_BIND`] and [`op::CHANNEL_BIND`].
    pub struct Instance {
        /// Guest VRAM address of an instance block; a multiple of 4 KiB.
        pub instance: u64,
    }
    /// Body of [`op::RUNLIST`]. The channels' numbers follow, 32 bits each, with 32 zero bits after an odd count.
    pub struct Runlist {
        /// Number of channels.
        pub count: u32,
        /// Always 0.
        pub reserved: u32,
    }
    /// Body of [`op::MEMORY_FILL`].
    pub struct MemoryFill {
        /// Guest VRAM address; a multiple of 4.
        pub address: u64,
        /// Size in bytes; a multiple of 4, at most [`MAX_MEMORY_BYTES`].
        pub bytes: u64,
        /// The word to write.
        pub value: u32,
        /// Always 0.
        pub reserved: u32,
    }
    /// Body of [`op::MEMORY_COPY`].
    pub struct MemoryCopy {
        /// Guest VRAM address; a multiple of 4.
        pub to: u64,
        /// Guest VRAM address; a multiple of 4.
        pub from: u64,
        /// Size in bytes; a multiple of 4, at most [`MAX_MEMORY_BYTES`].
        pub bytes: u64,
    }
    /// Body of [`op::BUFFER_PRIORITY`].
    pub struct BufferPriority {
        /// Guest VRAM address.
        pub address: u64,
        /// Number of bytes.
        pub bytes: u64,
        /// Priority: initially 0 for all memory. Memory of a higher priority stays longer.
        pub priority: i32,
        /// Always 0.
        pub reserved: u32,
    }
    /// Body of [`op::SHARE_GET`].
    pub struct ShareGet {
        /// Key on which the users agree; 0 for a segment that other machines cannot find by a key.
        pub key: u64,
        /// Size in bytes, rounded up to 4 KiB. At most the segment's size if the segment exists.
        pub bytes: u64,
        /// Flags from [`share`].
        pub flags: u32,
        /// Rights from [`share::mode`]. Used only if the segment is created.
        pub mode: u32,
    }
    /// Body of [`op::SHARE_ATTACH`] and [`op::SHARE_DETACH`].
    pub struct ShareAttach {
        /// Channel whose address space the segment is mapped in.
        pub channel: u32,
        /// Flags from [`share`]; 0 to detach.
        pub flags: u32,
    }
    /// Body of [`op::SHARE_CONTROL`].
    pub struct ShareControl {
        /// One of [`share::control`].
        pub command: u32,
        /// New value; 0 for queries.
        pub argument: u32,
    }
}

constants! {
    /// Shared segments.
    pub mod share {
        /// Creates the segment if no segment has that key.
        pub const CREATE: u32 = 1 << 0;
        /// With [`CREATE`]: fails if a segment has that key.
        pub const EXCLUSIVE: u32 = 1 << 1;
        /// Uses the segments of the group to which the operator has assigned the virtual machine, instead of the
        /// virtual machine's own segments.
        pub const ABROAD: u32 = 1 << 2;
        /// Attaches the segment read-only.
        pub const READ_ONLY: u32 = 1 << 3;
    } containing {
        constants! {
            /// Rights of virtual machines other than the segment's creator.
            pub mod mode {
                /// Other machines may attach the segment for reading.
                pub const READ: u32 = 1 << 0;
                /// Other machines may attach the segment for writing.
                pub const WRITE: u32 = 1 << 1;
            }
        }

        constants! {
            /// Commands of [`op::SHARE_CONTROL`](super::op::SHARE_CONTROL).
            pub mod control {
                /// Returns the segment's size in bytes as the answer's value.
                pub const SIZE: u32 = 1;
                /// Returns the number of address spaces of all virtual machines to which the segment is attached.
                pub const ATTACHED: u32 = 2;
                /// Returns the segment's [`mode`](super::mode).
                pub const MODE: u32 = 3;
                /// Sets the segment's mode. Only the owner may do this.
                pub const SET_MODE: u32 = 4;
                /// Removes the key; the segment is freed when it is no longer attached. Only the owner may do this.
                pub const REMOVE: u32 = 5;
            }
        }
    }
}

constants! {
    /// Queries of [`op::QUERY`]. Memory is in bytes.
    pub mod query {
        /// Size of the vGPU's VRAM.
        pub const VRAM: u32 = 1;
        /// Maximum amount of this VRAM that may be on the card; all ones without a limit.
        pub const QUOTA: u32 = 2;
        /// Guaranteed amount of this VRAM on the card.
        pub const GUARANTEE: u32 = 3;
        /// Amount of this VRAM that is on the card now.
        pub const PLACED: u32 = 4;
        /// Amount of this VRAM that is in host memory now.
        pub const HOST: u32 = 5;
        /// Amount of this VRAM that would be on the card if all virtual machines used their entitlements.
        pub const ENTITLEMENT: u32 = 6;
        /// Amount of free memory on the card.
        pub const FREE: u32 = 7;
        /// Shortage of the card's memory: 0 for none, 1 if memory of other virtual machines is in host memory, 2 if
        /// memory of this one is.
        pub const PRESSURE: u32 = 8;
        /// Share of the card's time to which the virtual machine is entitled, in millionths.
        pub const TIME_SHARE: u32 = 9;
        /// Total size of the page tables that the virtual machine may still create.
        pub const TABLE_BYTES_LEFT: u32 = 10;
    }
}
