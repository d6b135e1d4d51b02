//! Binary interface between a guest driver and the mediator, version 1.
//!
//! The C header of the guest's kernel module is generated from this file: the macros below also record names and
//! descriptions (`pv::header`). All numbers are little-endian.
//! [docs/design/paravirtual.md](../../docs/design/paravirtual.md) describes the use of the interface.
//!
//! A vGPU with this interface has a vendor-specific PCI capability ([`Capability`]) that contains the location of its
//! registers ([`register`]). The guest sets up a split virtqueue in its RAM (VIRTIO 1.2, 2.7, without indirect
//! descriptors or event indices), and rings [`register::DOORBELL`]. Each descriptor chain is a batch. Its
//! device-readable part consists of a [`BatchHeader`] and operations, and its device-writable part of an
//! [`AnswerHeader`] and an [`Answer`] for each operation.

use crate::section::{Constant, Field, Section, Structure};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

// The representation of structures in memory is their wire format.
const _: () = assert!(cfg!(target_endian = "little"));

/// Declares the constants of a module or of this file, with their descriptions.
macro_rules! constants {
    (@of [$($about:literal)*] $( $(#[doc = $doc:literal])* pub const $name:ident: $ty:ty = $value:expr; )*) => {
        $( $(#[doc = $doc])* pub const $name: $ty = $value; )*
        /// Description of the following constants.
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

/// Declares structures with their descriptions.
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
        /// Descriptions of the following structures.
        pub(crate) const $described: &[Structure] = &[$( Structure {
            name: stringify!($name),
            bytes: size_of::<$name>(),
            doc: &[$($doc),*],
            fields: &[$( Field { name: stringify!($field), ty: stringify!($ty), doc: &[$($field_doc),*] } ),*],
        } ),*];
    };
}

/// Declares [`Status`] and its description.
macro_rules! statuses {
    ($(#[doc = $doc:literal])* pub enum Status {
        $( $(#[doc = $variant_doc:literal])* #[error($text:literal)] $variant:ident = $value:literal, )*
    }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
        #[repr(u32)]
        pub enum Status { $( $(#[doc = $variant_doc])* #[error($text)] $variant = $value, )* }
        /// Description of the status codes.
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
    /// Version of the interface. A driver must not use a device with a different major version. A higher minor version
    /// only adds features.
    pub const VERSION_MAJOR: u8 = 1;
    /// See [`VERSION_MAJOR`].
    pub const VERSION_MINOR: u8 = 0;
    /// ID of a vendor-specific capability. Source: PCI Local Bus 3.0, appendix H.
    pub const CAPABILITY_ID: u8 = 0x09;
    /// Signature of the mediator's capability: "GMPV".
    pub const SIGNATURE: u32 = u32::from_le_bytes(*b"GMPV");
    /// Maximum number of queue entries.
    pub const MAX_QUEUE: u16 = 256;
    /// Maximum size of a batch in bytes, including its header.
    pub const MAX_BATCH_BYTES: u32 = 64 << 10;
    /// Maximum number of operations in a batch.
    pub const MAX_BATCH_OPS: u32 = 1024;
    /// Unit of operation sizes in bytes.
    pub const UNIT: u32 = 8;
    /// Maximum number of bytes that an operation can fill or copy.
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
        /// Number of operations, from 1 to [`MAX_BATCH_OPS`].
        pub ops: u32,
        /// Total size of the operations in bytes. The device ignores any bytes after the last operation.
        pub bytes: u32,
    }

    /// Header of an operation.
    pub struct OpHeader {
        /// Operation code: a value of [`op`].
        pub code: u16,
        /// Size of the operation, including this header, in units of [`UNIT`] bytes.
        pub units: u16,
        /// Handle of the object, or 0 if the operation has no object.
        pub handle: u32,
    }

    /// Header of the answer to a batch.
    pub struct AnswerHeader {
        /// [`Status::Done`] if all operations were completed. [`Status::Malformed`] if the batch is malformed, in which
        /// case no operation was started. Otherwise the status of the failed operation.
        pub status: u32,
        /// Number of completed operations, which precede the failed one. Operations after the failed one were not
        /// started.
        pub done: u32,
    }

    /// Answer to an operation. Answers that do not fit in the chain are omitted.
    pub struct Answer {
        /// Status of the operation: a value of [`Status`].
        pub status: u32,
        /// Always 0.
        pub reserved: u32,
        /// Result, if the operation is a query.
        pub value: u64,
    }
}

constants! {
    /// Features of a device, as a bit mask. A driver accepts a subset by writing [`register::FEATURES`]. Operations of
    /// all other features are rejected with [`Status::Unsupported`].
    pub mod feature {
        /// Page tables maintained by the device.
        pub const TABLES: u32 = 1 << 0;
        /// Channels and the runlist.
        pub const CHANNELS: u32 = 1 << 1;
        /// Filling and copying of VRAM.
        pub const MEMORY: u32 = 1 << 2;
        /// Eviction priorities of VRAM ranges.
        pub const PRIORITY: u32 = 1 << 3;
        /// Segments of device memory that several channels can map.
        pub const SHARE: u32 = 1 << 4;
        /// Segments that channels of other virtual machines can map.
        pub const SHARE_ABROAD: u32 = 1 << 5;
        /// Queries of the virtual machine's memory and limits.
        pub const QUERY: u32 = 1 << 6;
        /// Interrupts on completion of batches.
        pub const INTERRUPT: u32 = 1 << 7;
    }
}

constants! {
    /// The device's 32-bit registers, at byte offsets relative to the offset in [`Capability`].
    pub mod register {
        /// Read: [`super::SIGNATURE`].
        pub const SIGNATURE: u32 = 0x00;
        /// Read: features offered by the device. Write, before [`STATUS`] is set: features accepted by the driver.
        pub const FEATURES: u32 = 0x04;
        /// Status: a value of [`super::status`]. Writing 0 resets the interface, which removes the queue, all tables,
        /// and all segment attachments and bindings made through the interface.
        pub const STATUS: u32 = 0x08;
        /// Number of queue entries, a power of two of at most [`super::MAX_QUEUE`].
        pub const QUEUE_SIZE: u32 = 0x0c;
        /// Guest-physical address of the descriptor table (low and high half), a multiple of 16.
        pub const QUEUE_DESCRIPTORS: u32 = 0x10;
        /// Guest-physical address of the available ring (low and high half), a multiple of 2.
        pub const QUEUE_AVAILABLE: u32 = 0x18;
        /// Guest-physical address of the used ring (low and high half), a multiple of 4.
        pub const QUEUE_USED: u32 = 0x20;
        /// Write (any value): notifies the device of new batches in the available ring. The write is posted. Batches
        /// are processed in order.
        pub const DOORBELL: u32 = 0x28;
        /// Read: number of batches completed since the queue was set up, modulo 2^32. Reads are not posted, so the
        /// number includes all batches whose doorbell was rung before the read.
        pub const ENDED: u32 = 0x2c;
        /// Read: 1 while the device asserts its interrupt. Write 1: acknowledges the interrupt.
        pub const INTERRUPT: u32 = 0x30;
        /// Value 1: the device asserts its interrupt on completion of batches, unless the flags of the available ring
        /// suppress it.
        pub const INTERRUPT_ENABLE: u32 = 0x34;
        /// Size of the registers in bytes.
        pub const BYTES: u32 = 0x40;
    }
}

constants! {
    /// Values of [`register::STATUS`].
    pub mod status {
        /// The interface is not set up.
        pub const RESET: u32 = 0;
        /// Written by the driver after it has set up the features and the queue. Reads as this value once the device
        /// has accepted them.
        pub const READY: u32 = 1;
        /// The configuration of the queue is invalid, or the queue has become unusable. The driver can only write
        /// [`RESET`].
        pub const FAILED: u32 = 0x80;
    }
}

statuses! {
    /// Result of an operation.
    pub enum Status {
        /// The operation was completed.
        #[error("done")]
        Done = 0,
        /// A previous operation of the batch failed.
        #[error("a previous operation failed")]
        NotBegun = 1,
        /// The batch is malformed: its sizes are inconsistent, or it contains a code that version 1 does not define.
        #[error("the batch is malformed")]
        Malformed = 2,
        /// The operation belongs to a feature that was not offered or not accepted.
        #[error("the feature was not offered or not accepted")]
        Unsupported = 3,
        /// The table, segment or channel does not exist.
        #[error("the object does not exist")]
        NoObject = 4,
        /// An object with this handle already exists.
        #[error("the object already exists")]
        Exists = 5,
        /// The object has a different type.
        #[error("the object has a different type")]
        WrongType = 6,
        /// An index, count, address or size is out of range for the object.
        #[error("out of range")]
        Range = 7,
        /// A reserved bit or field is nonzero, or a value is undefined.
        #[error("a reserved bit is set, or a value is undefined")]
        Invalid = 8,
        /// The operation exceeds a limit of the virtual machine or the card.
        #[error("a limit is exceeded")]
        Limit = 9,
        /// The owner of the segment, or the operator, does not permit the operation.
        #[error("permission denied")]
        Denied = 10,
        /// The card failed to execute the operation. The mediator's log contains the reason.
        #[error("the card failed to execute the operation")]
        Failed = 11,
    }
}

constants! {
    /// Types of page tables.
    pub mod kind {
        /// A page directory with 8192 entries, each of which refers to a small-page table and a large-page table.
        pub const DIRECTORY: u32 = 1;
        /// A table that maps 32768 pages of 4 KiB.
        pub const SMALL: u32 = 2;
        /// A table that maps 1024 pages of 128 KiB.
        pub const LARGE: u32 = 3;
    }
}

constants! {
    /// Operation codes. The body of the operation follows the header.
    pub mod op {
        /// Creates an empty table. The guest chooses the handle, which must be nonzero and unused.
        pub const TABLE_CREATE: u16 = 0x01;
        /// Frees a table's handle. The table itself is freed once no directory refers to it, and no address space is
        /// bound to it.
        pub const TABLE_DESTROY: u16 = 0x02;
        /// Sets an entry of directory `handle`.
        pub const DIRECTORY_SET: u16 = 0x03;
        /// Writes consecutive entries of table `handle`, with values that increase by a constant.
        pub const ENTRIES_RUN: u16 = 0x04;
        /// Writes a list of consecutive entries of table `handle`.
        pub const ENTRIES_LIST: u16 = 0x05;
        /// Clears entries of table `handle`.
        pub const ENTRIES_ZERO: u16 = 0x06;
        /// Binds the address space of an instance block to directory `handle`, or to the directory in the instance
        /// block if the handle is 0. The binding takes effect when the block is next assigned to a channel or an
        /// aperture, or immediately if an aperture already uses the block.
        pub const DIRECTORY_BIND: u16 = 0x07;
        /// Flushes the TLB for directory `handle`, or for all address spaces if the handle is 0. Afterwards, memory
        /// that was unmapped before the flush is inaccessible.
        pub const FLUSH: u16 = 0x08;

        /// Reserves channel `handle`. Fails with [`Status::Limit`](super::Status::Limit) if the virtual machine has its
        /// maximum number of channels.
        pub const CHANNEL_CREATE: u16 = 0x10;
        /// Binds channel `handle` to its instance block.
        pub const CHANNEL_BIND: u16 = 0x11;
        /// Permits channel `handle` to run while it is on the runlist.
        pub const CHANNEL_ENABLE: u16 = 0x12;
        /// Stops channel `handle`.
        pub const CHANNEL_DISABLE: u16 = 0x13;
        /// Unbinds channel `handle`.
        pub const CHANNEL_DESTROY: u16 = 0x14;
        /// Sets the runnable channels.
        pub const RUNLIST: u16 = 0x15;

        /// Fills guest VRAM with a 32-bit value.
        pub const MEMORY_FILL: u16 = 0x20;
        /// Copies guest VRAM between two ranges, which must not overlap.
        pub const MEMORY_COPY: u16 = 0x21;
        /// Sets the eviction priority of a guest VRAM range. Chunks with the lowest priority are evicted first.
        pub const BUFFER_PRIORITY: u16 = 0x22;

        /// Finds or creates a segment by its key. The value of the answer is the segment's handle.
        pub const SHARE_GET: u16 = 0x30;
        /// Maps segment `handle` for a channel. The value of the answer is the GPU virtual address.
        pub const SHARE_ATTACH: u16 = 0x31;
        /// Unmaps segment `handle` for a channel. Work that still accesses it faults.
        pub const SHARE_DETACH: u16 = 0x32;
        /// Queries or modifies segment `handle`.
        pub const SHARE_CONTROL: u16 = 0x33;

        /// Executes query `handle`, a value of [`query`](super::query). The value of the answer is the result.
        pub const QUERY: u16 = 0x40;
    }
}

structures! {
    BODIES:
    /// Body of [`op::TABLE_CREATE`].
    pub struct TableCreate {
        /// Type of the table: a value of [`kind`].
        pub kind: u32,
        /// Always 0.
        pub reserved: u32,
    }
    /// Body of [`op::DIRECTORY_SET`].
    pub struct DirectorySet {
        /// Index of the entry.
        pub index: u32,
        /// Handle of the small-page table, or 0 if there is none.
        pub small: u32,
        /// Handle of the large-page table, or 0 if there is none.
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
        /// First entry in hardware format, with guest addresses.
        pub entry: u64,
        /// Difference between consecutive entries, modulo 2^64.
        pub step: u64,
    }
    /// Body of [`op::ENTRIES_LIST`], followed by the entries, and of [`op::ENTRIES_ZERO`].
    pub struct Entries {
        /// Index of the first entry.
        pub first: u32,
        /// Number of entries.
        pub count: u32,
    }
    /// Body of [`op::DIRECTORY_BIND`] and [`op::CHANNEL_BIND`].
    pub struct Instance {
        /// Guest VRAM address of an instance block, a multiple of 4 KiB.
        pub instance: u64,
    }
    /// Body of [`op::RUNLIST`], followed by 32-bit channel numbers. An odd number of channels is padded with 32 zero
    /// bits.
    pub struct Runlist {
        /// Number of channels.
        pub count: u32,
        /// Always 0.
        pub reserved: u32,
    }
    /// Body of [`op::MEMORY_FILL`].
    pub struct MemoryFill {
        /// Guest VRAM address, a multiple of 4.
        pub address: u64,
        /// Size in bytes, a multiple of 4 of at most [`MAX_MEMORY_BYTES`].
        pub bytes: u64,
        /// 32-bit value to write.
        pub value: u32,
        /// Always 0.
        pub reserved: u32,
    }
    /// Body of [`op::MEMORY_COPY`].
    pub struct MemoryCopy {
        /// Destination address in guest VRAM, a multiple of 4.
        pub to: u64,
        /// Source address in guest VRAM, a multiple of 4.
        pub from: u64,
        /// Size in bytes, a multiple of 4 of at most [`MAX_MEMORY_BYTES`].
        pub bytes: u64,
    }
    /// Body of [`op::BUFFER_PRIORITY`].
    pub struct BufferPriority {
        /// Guest VRAM address.
        pub address: u64,
        /// Size in bytes.
        pub bytes: u64,
        /// Eviction priority, initially 0 for all memory. Memory with a higher priority is evicted later.
        pub priority: i32,
        /// Always 0.
        pub reserved: u32,
    }
    /// Body of [`op::SHARE_GET`].
    pub struct ShareGet {
        /// Key agreed upon by the users of the segment, or 0 for a segment that other machines cannot find.
        pub key: u64,
        /// Size in bytes, rounded up to a multiple of 4 KiB. An existing segment must have at least this size.
        pub bytes: u64,
        /// Flags of [`share`].
        pub flags: u32,
        /// Permissions of [`share::mode`], used only if the segment is created.
        pub mode: u32,
    }
    /// Body of [`op::SHARE_ATTACH`] and [`op::SHARE_DETACH`].
    pub struct ShareAttach {
        /// Channel in whose address space the segment is mapped.
        pub channel: u32,
        /// Flags of [`share`], or 0 to detach.
        pub flags: u32,
    }
    /// Body of [`op::SHARE_CONTROL`].
    pub struct ShareControl {
        /// Command: a value of [`share::control`].
        pub command: u32,
        /// New value, or 0 for queries.
        pub argument: u32,
    }
}

constants! {
    /// Flags for shared segments.
    pub mod share {
        /// Creates the segment if none has the key.
        pub const CREATE: u32 = 1 << 0;
        /// With [`CREATE`]: fails if a segment has the key.
        pub const EXCLUSIVE: u32 = 1 << 1;
        /// Uses the segments of the group that the operator has assigned to the virtual machine, instead of the virtual
        /// machine's own segments.
        pub const ABROAD: u32 = 1 << 2;
        /// Attaches the segment for reading only.
        pub const READ_ONLY: u32 = 1 << 3;
    } containing {
        constants! {
            /// Permissions of virtual machines other than the creator of the segment.
            pub mod mode {
                /// Other machines can attach the segment for reading.
                pub const READ: u32 = 1 << 0;
                /// Other machines can attach the segment for writing.
                pub const WRITE: u32 = 1 << 1;
            }
        }

        constants! {
            /// Commands of [`op::SHARE_CONTROL`](super::op::SHARE_CONTROL).
            pub mod control {
                /// Returns the segment's size in bytes as the value of the answer.
                pub const SIZE: u32 = 1;
                /// Returns the number of address spaces of all virtual machines to which the segment is attached.
                pub const ATTACHED: u32 = 2;
                /// Returns the segment's [`mode`](super::mode).
                pub const MODE: u32 = 3;
                /// Sets the segment's mode. Only the owner may do so.
                pub const SET_MODE: u32 = 4;
                /// Removes the key. The segment is freed once it is not attached anywhere. Only the owner may remove
                /// the key.
                pub const REMOVE: u32 = 5;
            }
        }
    }
}

constants! {
    /// Queries of [`op::QUERY`]. All memory sizes are in bytes.
    pub mod query {
        /// Size of the vGPU's VRAM.
        pub const VRAM: u32 = 1;
        /// Maximum part of this VRAM on the card, or all ones if there is no limit.
        pub const QUOTA: u32 = 2;
        /// Guaranteed part of this VRAM on the card.
        pub const GUARANTEE: u32 = 3;
        /// Part of this VRAM that is currently on the card.
        pub const PLACED: u32 = 4;
        /// Part of this VRAM that is currently in host memory.
        pub const HOST: u32 = 5;
        /// Part of this VRAM that would be on the card if all virtual machines used their full entitlements.
        pub const ENTITLEMENT: u32 = 6;
        /// Free memory on the card.
        pub const FREE: u32 = 7;
        /// Memory pressure on the card: 0 if there is none, 1 if memory of other virtual machines is in host memory, 2
        /// if memory of this virtual machine is in host memory.
        pub const PRESSURE: u32 = 8;
        /// Entitlement to the card's time, in millionths.
        pub const TIME_SHARE: u32 = 9;
        /// Total size of page tables that the virtual machine can still create.
        pub const TABLE_BYTES_LEFT: u32 = 10;
    }
}
