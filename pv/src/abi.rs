//! The binary interface between a guest's driver and the mediator, version 1: both sides must agree on it.
//!
//! The C header of the guest's kernel module is made from this file: the macros below keep the needed parts
//! (`pv::header`). All numbers are little-endian. [docs/design/paravirtual.md](../../docs/design/paravirtual.md)
//! describes their use.
//!
//! A vGPU that offers it has a vendor-specific PCI capability ([`Capability`]), which says where its registers
//! ([`register`]) are. The guest sets up one split virtqueue (VIRTIO 1.2, 2.7, without indirect descriptors and event
//! indices) in its RAM, and rings [`register::DOORBELL`]. Each chain of descriptors is one batch: device-readable first
//! a [`BatchHeader`] and its operations, device-writable then an [`AnswerHeader`] and one [`Answer`] for each
//! operation.

use crate::section::{Constant, Field, Section, Structure};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

// The structures are read and written in their memory layout.
const _: () = assert!(cfg!(target_endian = "little"));

/// Constants, of a module or of this file, and their description.
macro_rules! constants {
    (@of [$($about:literal)*] $( $(#[doc = $doc:literal])* pub const $name:ident: $ty:ty = $value:expr; )*) => {
        $( $(#[doc = $doc])* pub const $name: $ty = $value; )*
        /// These constants.
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

/// Structures, with their descriptions.
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
        /// These structures.
        pub(crate) const $described: &[Structure] = &[$( Structure {
            name: stringify!($name),
            bytes: size_of::<$name>(),
            doc: &[$($doc),*],
            fields: &[$( Field { name: stringify!($field), ty: stringify!($ty), doc: &[$($field_doc),*] } ),*],
        } ),*];
    };
}

/// [`Status`] and its description.
macro_rules! statuses {
    ($(#[doc = $doc:literal])* pub enum Status {
        $( $(#[doc = $variant_doc:literal])* #[error($text:literal)] $variant:ident = $value:literal, )*
    }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
        #[repr(u32)]
        pub enum Status { $( $(#[doc = $variant_doc])* #[error($text)] $variant = $value, )* }
        /// These statuses.
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
    /// Version of this interface. A device of another major version is not to be used; a higher minor version only
    /// adds.
    pub const VERSION_MAJOR: u8 = 1;
    /// See [`VERSION_MAJOR`].
    pub const VERSION_MINOR: u8 = 0;
    /// Id of a vendor-specific capability. Source: PCI Local Bus 3.0, appendix H.
    pub const CAPABILITY_ID: u8 = 0x09;
    /// Marks the capability as ours: "GMPV".
    pub const SIGNATURE: u32 = u32::from_le_bytes(*b"GMPV");
    /// Most entries of the queue.
    pub const MAX_QUEUE: u16 = 256;
    /// Most bytes of a batch, its header included.
    pub const MAX_BATCH_BYTES: u32 = 64 << 10;
    /// Most operations of a batch.
    pub const MAX_BATCH_OPS: u32 = 1024;
    /// Operations are multiples of this, in bytes.
    pub const UNIT: u32 = 8;
    /// Most bytes that one operation fills or copies.
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
        /// Bytes of this one.
        pub length: u8,
        /// BAR that the registers are in.
        pub bar: u8,
        /// [`SIGNATURE`].
        pub signature: u32,
        /// [`VERSION_MAJOR`].
        pub version_major: u8,
        /// [`VERSION_MINOR`].
        pub version_minor: u8,
        /// 0.
        pub reserved: u16,
        /// Byte offset of the registers in the BAR.
        pub offset: u32,
        /// Features of the device: [`feature`].
        pub features: u32,
    }

    /// Begins a batch.
    pub struct BatchHeader {
        /// Operations that follow; at least 1, at most [`MAX_BATCH_OPS`].
        pub ops: u32,
        /// Bytes of the operations; bytes after them are ignored.
        pub bytes: u32,
    }

    /// Begins an operation.
    pub struct OpHeader {
        /// Code of the operation: [`op`].
        pub code: u16,
        /// Size of the operation, this header included, in units of [`UNIT`] bytes.
        pub units: u16,
        /// Handle of the object; 0 where the operation is not done to anything.
        pub handle: u32,
    }

    /// Begins the answer to a batch.
    pub struct AnswerHeader {
        /// [`Status::Done`] when all operations are done; [`Status::Malformed`] when none was begun, for the batch
        /// cannot be read; else the status of the operation that was not done.
        pub status: u32,
        /// Operations that are done: all before the one that failed. None after it was begun.
        pub done: u32,
    }

    /// The answer to an operation. Answers for which the chain has no room are not given.
    pub struct Answer {
        /// One of [`Status`].
        pub status: u32,
        /// 0.
        pub reserved: u32,
        /// Answer to a question, if one was asked.
        pub value: u64,
    }
}

constants! {
    /// Features of a device, one bit each. A driver accepts some of them by [`register::FEATURES`]; operations of a
    /// feature that it has not accepted are refused as [`Status::Unsupported`].
    pub mod feature {
        /// Page tables that the device keeps.
        pub const TABLES: u32 = 1 << 0;
        /// Channels and the runlist.
        pub const CHANNELS: u32 = 1 << 1;
        /// Filling and copying VRAM.
        pub const MEMORY: u32 = 1 << 2;
        /// Importance of ranges of VRAM.
        pub const PRIORITY: u32 = 1 << 3;
        /// Segments of device memory that several channels map.
        pub const SHARE: u32 = 1 << 4;
        /// Segments that channels of other virtual machines map.
        pub const SHARE_ABROAD: u32 = 1 << 5;
        /// Questions about the memory of the virtual machine and its limits.
        pub const QUERY: u32 = 1 << 6;
        /// An interrupt when a batch has ended.
        pub const INTERRUPT: u32 = 1 << 7;
    }
}

constants! {
    /// The device's registers: 32 bits each, at byte offsets from [`Capability::offset`].
    pub mod register {
        /// Read: [`super::SIGNATURE`].
        pub const SIGNATURE: u32 = 0x00;
        /// Read: features that are offered. Write, before [`STATUS`] is set: those that are accepted.
        pub const FEATURES: u32 = 0x04;
        /// One of [`super::status`]. Writing 0 resets the interface: the queue is forgotten, and all tables, segments'
        /// attachments and bindings that were made by it.
        pub const STATUS: u32 = 0x08;
        /// Entries of the queue: a power of two up to [`super::MAX_QUEUE`].
        pub const QUEUE_SIZE: u32 = 0x0c;
        /// Guest-physical address of the descriptor table, low and high half; a multiple of 16.
        pub const QUEUE_DESCRIPTORS: u32 = 0x10;
        /// Guest-physical address of the available ring, low and high half; a multiple of 2.
        pub const QUEUE_AVAILABLE: u32 = 0x18;
        /// Guest-physical address of the used ring, low and high half; a multiple of 4.
        pub const QUEUE_USED: u32 = 0x20;
        /// Write, of any value: the available ring has new batches. A posted write. Batches are dealt with in order.
        pub const DOORBELL: u32 = 0x28;
        /// Read: batches that have ended since the queue was set up, modulo 2^32. As reads are not posted, all batches
        /// whose doorbells were rung before are among them.
        pub const ENDED: u32 = 0x2c;
        /// Read: 1 while the device asks for an interrupt. Write 1: it has been seen.
        pub const INTERRUPT: u32 = 0x30;
        /// 1: the device asks for an interrupt when batches have ended, unless the available ring's flags say not to.
        pub const INTERRUPT_ENABLE: u32 = 0x34;
        /// Bytes of the registers.
        pub const BYTES: u32 = 0x40;
    }
}

constants! {
    /// Values of [`register::STATUS`].
    pub mod status {
        /// Nothing is set up.
        pub const RESET: u32 = 0;
        /// Written by the driver: features and queue are set up. Reads back so when the device has accepted them.
        pub const READY: u32 = 1;
        /// The queue cannot be used as it was set up, or can no longer be used. Only [`RESET`] ends it.
        pub const FAILED: u32 = 0x80;
    }
}

statuses! {
    /// Outcome of an operation.
    pub enum Status {
        /// It is done.
        #[error("done")]
        Done = 0,
        /// An operation before it failed.
        #[error("an operation before it failed")]
        NotBegun = 1,
        /// The batch cannot be read: sizes that do not fit, or a code that version 1 does not have.
        #[error("the batch is malformed")]
        Malformed = 2,
        /// Of a feature that was not offered, or not accepted.
        #[error("the feature was not offered, or not accepted")]
        Unsupported = 3,
        /// The table, segment or channel does not exist.
        #[error("there is no such object")]
        NoObject = 4,
        /// One of that name exists already.
        #[error("there is one already")]
        Exists = 5,
        /// The object is of another type.
        #[error("the object is of another type")]
        WrongType = 6,
        /// An index, count, address or size that the object does not have.
        #[error("out of range")]
        Range = 7,
        /// A reserved bit or field is not 0, or a value means nothing.
        #[error("a value that means nothing")]
        Invalid = 8,
        /// A limit of the virtual machine, or of the card.
        #[error("a limit is reached")]
        Limit = 9,
        /// The owner of the segment, or the operator, has not allowed it.
        #[error("not allowed")]
        Denied = 10,
        /// The card did not do it. It is in the mediator's log.
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
        /// Makes a table. The handle is the guest's choice: not 0, and of no other table. All entries are empty.
        pub const TABLE_CREATE: u16 = 0x01;
        /// The guest no longer uses the table: its handle is free. It goes when no directory names it and no address
        /// space is bound to it.
        pub const TABLE_DESTROY: u16 = 0x02;
        /// Sets an entry of the directory `handle`.
        pub const DIRECTORY_SET: u16 = 0x03;
        /// Writes consecutive entries of the table `handle`, whose values increase by a fixed step.
        pub const ENTRIES_RUN: u16 = 0x04;
        /// Writes entries of the table `handle` from a list.
        pub const ENTRIES_LIST: u16 = 0x05;
        /// Empties entries of the table `handle`.
        pub const ENTRIES_ZERO: u16 = 0x06;
        /// Binds the address space of an instance block (of a channel, or of an aperture) to the directory `handle`,
        /// whatever the block says; with handle 0, to the block's own again. It counts from when the block is next
        /// named to a channel or an aperture, or at once for an aperture that has it already.
        pub const DIRECTORY_BIND: u16 = 0x07;
        /// As a flush of the TLB: memory that was unmapped before cannot be reached when it is done. Handle: a
        /// directory, or 0 for all address spaces.
        pub const FLUSH: u16 = 0x08;

        /// Sets the channel `handle` aside: [`Status::Limit`](super::Status::Limit) when the virtual machine has as
        /// many as it may.
        pub const CHANNEL_CREATE: u16 = 0x10;
        /// Binds the channel `handle` to its instance block.
        pub const CHANNEL_BIND: u16 = 0x11;
        /// Lets the channel `handle` run when it is in the runlist.
        pub const CHANNEL_ENABLE: u16 = 0x12;
        /// Keeps the channel `handle` from running.
        pub const CHANNEL_DISABLE: u16 = 0x13;
        /// Unbinds the channel `handle`.
        pub const CHANNEL_DESTROY: u16 = 0x14;
        /// Says which channels may run.
        pub const RUNLIST: u16 = 0x15;

        /// Fills guest VRAM with a word.
        pub const MEMORY_FILL: u16 = 0x20;
        /// Copies guest VRAM; the two ranges do not overlap.
        pub const MEMORY_COPY: u16 = 0x21;
        /// Sets how important it is that a range of guest VRAM is on the card; chunks of the lowest priority leave
        /// first.
        pub const BUFFER_PRIORITY: u16 = 0x22;

        /// Finds or makes a segment by its key; the answer's value is its id.
        pub const SHARE_GET: u16 = 0x30;
        /// Maps the segment `handle` for a channel; the answer's value is its GPU virtual address there.
        pub const SHARE_ATTACH: u16 = 0x31;
        /// Unmaps the segment `handle` for a channel; work that still uses it faults.
        pub const SHARE_DETACH: u16 = 0x32;
        /// Asks about the segment `handle`, or changes it.
        pub const SHARE_CONTROL: u16 = 0x33;

        /// Asks one of [`query`](super::query), which is the handle; the answer's value is the number.
        pub const QUERY: u16 = 0x40;
    }
}

structures! {
    BODIES:
    /// Of [`op::TABLE_CREATE`].
    pub struct TableCreate {
        /// One of [`kind`].
        pub kind: u32,
        /// 0.
        pub reserved: u32,
    }
    /// Of [`op::DIRECTORY_SET`].
    pub struct DirectorySet {
        /// Of the entry.
        pub index: u32,
        /// Handle of the small-page table, or 0 for none.
        pub small: u32,
        /// Handle of the large-page table, or 0 for none.
        pub large: u32,
        /// 0.
        pub reserved: u32,
    }
    /// Of [`op::ENTRIES_RUN`].
    pub struct EntriesRun {
        /// Index of the first entry.
        pub first: u32,
        /// Entries.
        pub count: u32,
        /// The first entry, as the hardware has it, with the guest's addresses.
        pub entry: u64,
        /// Difference of each entry from the one before.
        pub step: u64,
    }
    /// Of [`op::ENTRIES_LIST`] (the entries follow) and [`op::ENTRIES_ZERO`].
    pub struct Entries {
        /// Index of the first entry.
        pub first: u32,
        /// Entries.
        pub count: u32,
    }
    /// Of [`op::DIRECTORY_BIND`] and [`op::CHANNEL_BIND`].
    pub struct Instance {
        /// Guest VRAM address of an instance block; a multiple of 4 KiB.
        pub instance: u64,
    }
    /// Of [`op::RUNLIST`]; the channels' numbers follow, 32 bits each, and 32 bits of 0 after an odd count.
    pub struct Runlist {
        /// Channels.
        pub count: u32,
        /// 0.
        pub reserved: u32,
    }
    /// Of [`op::MEMORY_FILL`].
    pub struct MemoryFill {
        /// Guest VRAM address; a multiple of 4.
        pub address: u64,
        /// A multiple of 4, at most [`MAX_MEMORY_BYTES`].
        pub bytes: u64,
        /// The word.
        pub value: u32,
        /// 0.
        pub reserved: u32,
    }
    /// Of [`op::MEMORY_COPY`].
    pub struct MemoryCopy {
        /// Guest VRAM address; a multiple of 4.
        pub to: u64,
        /// Guest VRAM address; a multiple of 4.
        pub from: u64,
        /// A multiple of 4, at most [`MAX_MEMORY_BYTES`].
        pub bytes: u64,
    }
    /// Of [`op::BUFFER_PRIORITY`].
    pub struct BufferPriority {
        /// Guest VRAM address.
        pub address: u64,
        /// Number of bytes.
        pub bytes: u64,
        /// 0 is the priority of all memory at first; higher stays longer.
        pub priority: i32,
        /// 0.
        pub reserved: u32,
    }
    /// Of [`op::SHARE_GET`].
    pub struct ShareGet {
        /// The name that the users agree on; 0 for a segment that no other machine finds by a key.
        pub key: u64,
        /// Size; rounded up to 4 KiB. When the segment exists: at most its size.
        pub bytes: u64,
        /// Of [`share`].
        pub flags: u32,
        /// Rights: [`share::mode`]. Counts when the segment is made.
        pub mode: u32,
    }
    /// Of [`op::SHARE_ATTACH`] and [`op::SHARE_DETACH`].
    pub struct ShareAttach {
        /// The channel in whose address space it is mapped.
        pub channel: u32,
        /// Of [`share`]; 0 to detach.
        pub flags: u32,
    }
    /// Of [`op::SHARE_CONTROL`].
    pub struct ShareControl {
        /// One of [`share::control`].
        pub command: u32,
        /// New value; 0 for questions.
        pub argument: u32,
    }
}

constants! {
    /// Shared segments.
    pub mod share {
        /// Make the segment if none has that key.
        pub const CREATE: u32 = 1 << 0;
        /// With [`CREATE`]: only if none has that key.
        pub const EXCLUSIVE: u32 = 1 << 1;
        /// Find or make a segment of the group that the operator has put the virtual machine into, not of itself alone.
        pub const ABROAD: u32 = 1 << 2;
        /// Attach for reading only.
        pub const READ_ONLY: u32 = 1 << 3;
    } containing {
        constants! {
            /// Rights of other virtual machines than the one that has made the segment.
            pub mod mode {
                /// They may attach it for reading.
                pub const READ: u32 = 1 << 0;
                /// They may attach it for writing.
                pub const WRITE: u32 = 1 << 1;
            }
        }

        constants! {
            /// Commands of [`op::SHARE_CONTROL`](super::op::SHARE_CONTROL).
            pub mod control {
                /// The answer's value: the segment's size in bytes.
                pub const SIZE: u32 = 1;
                /// The answer's value: address spaces that it is attached to, of all virtual machines.
                pub const ATTACHED: u32 = 2;
                /// The answer's value: its [`mode`](super::mode).
                pub const MODE: u32 = 3;
                /// Sets its mode. The owner's alone.
                pub const SET_MODE: u32 = 4;
                /// Removes the key; the segment goes when nothing has it attached. The owner's alone.
                pub const REMOVE: u32 = 5;
            }
        }
    }
}

constants! {
    /// Questions of [`op::QUERY`]. Memory is in bytes.
    pub mod query {
        /// VRAM that the vGPU shows.
        pub const VRAM: u32 = 1;
        /// Bytes of it that may be on the card; all ones without a limit.
        pub const QUOTA: u32 = 2;
        /// Bytes of it that are guaranteed.
        pub const GUARANTEE: u32 = 3;
        /// Bytes of it that are on the card now.
        pub const PLACED: u32 = 4;
        /// Bytes of it that are in host memory now.
        pub const HOST: u32 = 5;
        /// Bytes of it that would be on the card if all took their entitlements.
        pub const ENTITLEMENT: u32 = 6;
        /// Bytes that are free on the card.
        pub const FREE: u32 = 7;
        /// Shortage of the card's memory: 0 none, 1 some virtual machine's memory is in host memory, 2 this one's is.
        pub const PRESSURE: u32 = 8;
        /// The part of the card's time that it is entitled to, in millionths.
        pub const TIME_SHARE: u32 = 9;
        /// Bytes of page tables that it may still make.
        pub const TABLE_BYTES_LEFT: u32 = 10;
    }
}
