//! Operations with typed arguments.
//!
//! This module performs all checks that depend only on the operation. The executor performs the checks that depend on
//! the virtual machine: its handles, its channels, and the end of its VRAM.

use crate::abi::{
    BufferPriority, DirectorySet, Entries, EntriesRun, Instance, MAX_MEMORY_BYTES, MemoryCopy, MemoryFill, Runlist,
    ShareAttach, ShareControl, ShareGet, Status, TableCreate, kind, op, query, share,
};
use crate::raw::{Problem, RawOp};
use nvspec::addr::{GuestVramAddr, SMALL_PAGE};
use nvspec::mmu::{LPT_BYTES, LPT_ENTRIES, PD_BYTES, PD_ENTRIES, SPT_BYTES, SPT_ENTRIES};
use std::num::NonZeroU32;
use zerocopy::little_endian::{U32, U64};

/// A guest's handle for a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableId(pub NonZeroU32);

impl TableId {
    /// Converts a handle. Returns `None` for 0, which is not a valid handle.
    #[must_use]
    pub const fn new(handle: u32) -> Option<Self> {
        match NonZeroU32::new(handle) {
            Some(handle) => Some(Self(handle)),
            None => None,
        }
    }
}

/// Type of a page table: a value of [`kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A page directory.
    Directory,
    /// A 4 KiB page table.
    Small,
    /// A 128 KiB page table.
    Large,
}

impl Kind {
    /// All types.
    pub const ALL: [Self; 3] = [Self::Directory, Self::Small, Self::Large];

    /// Returns the number of entries of a table.
    #[must_use]
    pub const fn entries(self) -> u32 {
        match self {
            Self::Directory => PD_ENTRIES,
            Self::Small => SPT_ENTRIES,
            Self::Large => LPT_ENTRIES,
        }
    }

    /// Returns the size of a table in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Directory => PD_BYTES,
            Self::Small => SPT_BYTES,
            Self::Large => LPT_BYTES,
        }
    }

    const fn from_code(code: u32) -> Option<Self> {
        match code {
            kind::DIRECTORY => Some(Self::Directory),
            kind::SMALL => Some(Self::Small),
            kind::LARGE => Some(Self::Large),
            _ => None,
        }
    }
}

/// Code of an [`Op::Query`]: a value of [`query`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
#[expect(missing_docs, reason = "documented at the constants of the same names")]
pub enum Question {
    Vram = query::VRAM,
    Quota = query::QUOTA,
    Guarantee = query::GUARANTEE,
    Placed = query::PLACED,
    Host = query::HOST,
    Entitlement = query::ENTITLEMENT,
    Free = query::FREE,
    Pressure = query::PRESSURE,
    TimeShare = query::TIME_SHARE,
    TableBytesLeft = query::TABLE_BYTES_LEFT,
}

impl Question {
    const ALL: [Self; 10] = [
        Self::Vram,
        Self::Quota,
        Self::Guarantee,
        Self::Placed,
        Self::Host,
        Self::Entitlement,
        Self::Free,
        Self::Pressure,
        Self::TimeShare,
        Self::TableBytesLeft,
    ];
}

/// Query or change of a segment: a value of [`share::control`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Queries the segment's size in bytes.
    Size,
    /// Queries the number of address spaces to which the segment is attached.
    Attached,
    /// Queries the segment's mode.
    Mode,
    /// Sets the segment's mode to a combination of [`share::mode`].
    SetMode(u32),
    /// Removes the segment's key.
    Remove,
}

/// An operation. Each one is described at its code in [`op`]. Channel numbers are the guest's. The existence of
/// channels and the bounds of guest VRAM have not been checked yet.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(
    missing_docs,
    reason = "documented at the structures of the same names, which follow the headers of operations"
)]
pub enum Op<'a> {
    TableCreate { table: TableId, kind: Kind },
    TableDestroy { table: TableId },
    DirectorySet { directory: TableId, index: u32, small: Option<TableId>, large: Option<TableId> },
    EntriesRun { table: TableId, first: u32, count: u32, entry: u64, step: u64 },
    EntriesList { table: TableId, first: u32, entries: &'a [U64] },
    EntriesZero { table: TableId, first: u32, count: u32 },
    DirectoryBind { directory: Option<TableId>, instance: GuestVramAddr },
    Flush { directory: Option<TableId> },
    ChannelCreate { channel: u32 },
    ChannelBind { channel: u32, instance: GuestVramAddr },
    ChannelEnable { channel: u32 },
    ChannelDisable { channel: u32 },
    ChannelDestroy { channel: u32 },
    Runlist { channels: &'a [U32] },
    MemoryFill { address: GuestVramAddr, bytes: u64, value: u32 },
    MemoryCopy { to: GuestVramAddr, from: GuestVramAddr, bytes: u64 },
    BufferPriority { address: GuestVramAddr, bytes: u64, priority: i32 },
    ShareGet { key: u64, bytes: u64, create: bool, exclusive: bool, abroad: bool, mode: u32 },
    ShareAttach { segment: u32, channel: u32, read_only: bool },
    ShareDetach { segment: u32, channel: u32 },
    ShareControl { segment: u32, control: Control },
    Query { question: Question },
}

/// Reason for rejecting an encoded operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The whole batch is malformed.
    Structure(Problem),
    /// A value is invalid. The operation is rejected with this status.
    Value(Status),
}

impl From<Problem> for Fault {
    fn from(problem: Problem) -> Self {
        Self::Structure(problem)
    }
}

impl From<Status> for Fault {
    fn from(status: Status) -> Self {
        Self::Value(status)
    }
}

impl<'a> Op<'a> {
    /// Decodes an operation. Checks the structure before the values.
    pub(crate) fn decode(raw: RawOp<'a>) -> Result<Self, Fault> {
        let handle = raw.handle;
        Ok(match raw.code {
            op::TABLE_CREATE => {
                let TableCreate { kind, reserved } = raw.exact()?;
                zero(reserved)?;
                let kind = Kind::from_code(kind).ok_or(Status::Invalid)?;
                Self::TableCreate { table: TableId::new(handle).ok_or(Status::Invalid)?, kind }
            }
            op::TABLE_DESTROY => {
                let () = raw.exact()?;
                Self::TableDestroy { table: table(handle)? }
            }
            op::DIRECTORY_SET => {
                let DirectorySet { index, small, large, reserved } = raw.exact()?;
                zero(reserved)?;
                let (small, large) = (TableId::new(small), TableId::new(large));
                Self::DirectorySet { directory: table(handle)?, index, small, large }
            }
            op::ENTRIES_RUN => {
                let EntriesRun { first, count, entry, step } = raw.exact()?;
                Self::EntriesRun { table: table(handle)?, first, count, entry, step }
            }
            op::ENTRIES_LIST => {
                let (Entries { first, .. }, entries, _) = raw.list(|body: &Entries| body.count)?;
                Self::EntriesList { table: table(handle)?, first, entries }
            }
            op::ENTRIES_ZERO => {
                let Entries { first, count } = raw.exact()?;
                Self::EntriesZero { table: table(handle)?, first, count }
            }
            op::DIRECTORY_BIND => {
                let Instance { instance } = raw.exact()?;
                Self::DirectoryBind { directory: TableId::new(handle), instance: block(instance)? }
            }
            op::FLUSH => {
                let () = raw.exact()?;
                Self::Flush { directory: TableId::new(handle) }
            }
            op::CHANNEL_CREATE => {
                let () = raw.exact()?;
                Self::ChannelCreate { channel: handle }
            }
            op::CHANNEL_BIND => {
                let Instance { instance } = raw.exact()?;
                Self::ChannelBind { channel: handle, instance: block(instance)? }
            }
            op::CHANNEL_ENABLE => {
                let () = raw.exact()?;
                Self::ChannelEnable { channel: handle }
            }
            op::CHANNEL_DISABLE => {
                let () = raw.exact()?;
                Self::ChannelDisable { channel: handle }
            }
            op::CHANNEL_DESTROY => {
                let () = raw.exact()?;
                Self::ChannelDestroy { channel: handle }
            }
            op::RUNLIST => {
                let (Runlist { reserved, .. }, channels, padding) = raw.list(|body: &Runlist| body.count)?;
                zero(handle | reserved)?;
                zero(padding.iter().any(|byte| *byte != 0).into())?;
                Self::Runlist { channels }
            }
            op::MEMORY_FILL => {
                let MemoryFill { address, bytes, value, reserved } = raw.exact()?;
                zero(handle | reserved)?;
                words(&[address], bytes)?;
                Self::MemoryFill { address: GuestVramAddr(address), bytes, value }
            }
            op::MEMORY_COPY => {
                let MemoryCopy { to, from, bytes } = raw.exact()?;
                zero(handle)?;
                words(&[to, from], bytes)?;
                if to.abs_diff(from) < bytes {
                    return Err(Status::Invalid.into());
                }
                Self::MemoryCopy { to: GuestVramAddr(to), from: GuestVramAddr(from), bytes }
            }
            op::BUFFER_PRIORITY => {
                let BufferPriority { address, bytes, priority, reserved } = raw.exact()?;
                zero(handle | reserved)?;
                Self::BufferPriority { address: GuestVramAddr(address), bytes, priority }
            }
            op::SHARE_GET => {
                let ShareGet { key, bytes, flags, mode } = raw.exact()?;
                zero(handle)?;
                let [create, exclusive, abroad] =
                    [share::CREATE, share::EXCLUSIVE, share::ABROAD].map(|flag| flags & flag != 0);
                zero(flags & !(share::CREATE | share::EXCLUSIVE | share::ABROAD))?;
                zero((exclusive && !create).into())?;
                Self::ShareGet { key, bytes, create, exclusive, abroad, mode: rights(mode)? }
            }
            op::SHARE_ATTACH => {
                let ShareAttach { channel, flags } = raw.exact()?;
                zero(flags & !share::READ_ONLY)?;
                Self::ShareAttach { segment: handle, channel, read_only: flags & share::READ_ONLY != 0 }
            }
            op::SHARE_DETACH => {
                let ShareAttach { channel, flags } = raw.exact()?;
                zero(flags)?;
                Self::ShareDetach { segment: handle, channel }
            }
            op::SHARE_CONTROL => {
                let ShareControl { command, argument } = raw.exact()?;
                let control = match command {
                    share::control::SET_MODE => Control::SetMode(rights(argument)?),
                    _ => {
                        zero(argument)?;
                        match command {
                            share::control::SIZE => Control::Size,
                            share::control::ATTACHED => Control::Attached,
                            share::control::MODE => Control::Mode,
                            share::control::REMOVE => Control::Remove,
                            _ => return Err(Status::Invalid.into()),
                        }
                    }
                };
                Self::ShareControl { segment: handle, control }
            }
            op::QUERY => {
                let () = raw.exact()?;
                let question = Question::ALL.into_iter().find(|question| *question as u32 == handle);
                Self::Query { question: question.ok_or(Status::Invalid)? }
            }
            code => return Err(Problem::Code(code).into()),
        })
    }
}

/// Converts the handle of an operation's table.
fn table(handle: u32) -> Result<TableId, Status> {
    TableId::new(handle).ok_or(Status::NoObject)
}

/// Checks that a reserved value is 0.
fn zero(value: u32) -> Result<(), Status> {
    if value == 0 { Ok(()) } else { Err(Status::Invalid) }
}

/// Validates the address of an instance block.
fn block(address: u64) -> Result<GuestVramAddr, Status> {
    if address.is_multiple_of(SMALL_PAGE) { Ok(GuestVramAddr(address)) } else { Err(Status::Invalid) }
}

/// Checks that ranges consist of aligned 32-bit words, and that their size is within the limit for an operation.
fn words(addresses: &[u64], bytes: u64) -> Result<(), Status> {
    if bytes > MAX_MEMORY_BYTES {
        return Err(Status::Range);
    }
    let whole = addresses.iter().chain([&bytes]).all(|number| number.is_multiple_of(4));
    if whole { Ok(()) } else { Err(Status::Invalid) }
}

/// Validates the mode of a segment.
fn rights(mode: u32) -> Result<u32, Status> {
    zero(mode & !(share::mode::READ | share::mode::WRITE))?;
    Ok(mode)
}
