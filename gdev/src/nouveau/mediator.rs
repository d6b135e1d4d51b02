//! The mediator's interface in the guest: `/dev/gpu-mediator`, provided by the module `gpu_mediator_pv`.
//!
//! Names and layouts match `gpu_mediator_uapi.h` and `gpu_mediator_abi.h` in the module's folder.

use std::fs::{File, OpenOptions};
use std::sync::Arc;

use super::device::call;
use super::uapi::{READ, Request, WRITE, requests};
use crate::{Error, Result};

const NODE: &str = "/dev/gpu-mediator";

/// Flag that creates the segment if the key is unused.
pub const CREATE: u32 = 1 << 0;
/// Flag that selects the keys of the virtual machine's sharing group.
pub const ABROAD: u32 = 1 << 2;
/// Flag that attaches the segment read-only.
pub const READ_ONLY: u32 = 1 << 3;
/// Permission for other virtual machines to read.
pub const ABROAD_READ: u32 = 1;
/// Permission for other virtual machines to read and write.
pub const ABROAD_READ_WRITE: u32 = 3;
/// Command that removes the key of a segment.
const REMOVE: u32 = 5;
/// Command that queries the number of address spaces that have the segment attached.
const ATTACHED: u32 = 2;

/// Query numbers, from `gpu_mediator_abi.h`.
pub mod question {
    /// Size of the VRAM visible to the machine, in bytes.
    pub const VRAM: u32 = 1;
    /// Size of the part of the machine's VRAM that is on the card, in bytes.
    pub const PLACED: u32 = 4;
}

requests! { b'M':
    ShareGet,     READ | WRITE, 0x60;
    ShareAttach,  READ | WRITE, 0x61;
    ShareDetach,  WRITE,        0x62;
    ShareControl, READ | WRITE, 0x63;
    Query,        READ | WRITE, 0x64;
}

#[repr(C)]
#[derive(Debug, Default)]
struct ShareGet {
    key: u64,
    bytes: u64,
    flags: u32,
    mode: u32,
    abroad: u32,
    id: u32,
}

#[repr(C)]
#[derive(Debug, Default)]
struct ShareAttach {
    id: u32,
    channel: u32,
    flags: u32,
    reserved: u32,
    address: u64,
}

#[repr(C)]
#[derive(Debug, Default)]
struct ShareDetach {
    id: u32,
    channel: u32,
}

#[repr(C)]
#[derive(Debug, Default)]
struct ShareControl {
    id: u32,
    command: u32,
    argument: u32,
    reserved: u32,
    value: u64,
}

#[repr(C)]
#[derive(Debug, Default)]
struct Query {
    what: u32,
    reserved: u32,
    value: u64,
}

/// The open device node.
#[derive(Debug)]
pub struct Mediator {
    file: File,
}

/// A request for a segment.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// Key of the segment, or 0 if it has no key.
    pub key: u64,
    /// Size of the segment in bytes.
    pub bytes: u64,
    /// Combination of [`CREATE`] and [`ABROAD`].
    pub flags: u32,
    /// File-style permissions in this machine: 0600 for the owner, 0006 for others.
    pub mode: u32,
    /// Permissions for other virtual machines.
    pub abroad: u32,
}

impl Mediator {
    /// Opens the device node.
    ///
    /// # Errors
    /// Returns an error if the module is not loaded, or if the mediator does not offer its interface to this machine.
    pub fn open() -> Result<Arc<Self>> {
        let file = OpenOptions::new().read(true).write(true).open(NODE).map_err(|error| Error::Open {
            device: NODE.to_owned(),
            why: error.to_string(),
            remedy: "load gpu_mediator_pv, and check that the operator offers the paravirtual interface to this machine",
        })?;
        Ok(Arc::new(Self { file }))
    }

    fn call<T: Request>(&self, argument: &mut T, what: impl Fn() -> String) -> Result<()> {
        call(&self.file, argument).map_err(|source| Error::Driver { what: what(), source })
    }

    /// Finds or creates a segment. Returns its ID.
    ///
    /// # Errors
    /// Returns an error if the key is not allowed, or if no such segment exists.
    pub fn share_get(&self, wanted: Wanted) -> Result<u32> {
        let Wanted { key, bytes, flags, mode, abroad } = wanted;
        let mut argument = ShareGet { key, bytes, flags, mode, abroad, id: 0 };
        self.call(&mut argument, || format!("a segment of {bytes} bytes, key {key}"))?;
        Ok(argument.id)
    }

    /// Maps a segment for a channel. Returns its GPU virtual address in the channel's address space.
    ///
    /// # Errors
    /// Returns an error if the segment is unknown or does not permit the access, or if another process owns the
    /// channel.
    pub fn attach(&self, id: u32, channel: i32, flags: u32) -> Result<u64> {
        let mut argument = ShareAttach { id, channel: channel.cast_unsigned(), flags, ..Default::default() };
        self.call(&mut argument, || format!("attaching segment {id} to channel {channel}"))?;
        Ok(argument.address)
    }

    /// Unmaps a segment.
    ///
    /// # Errors
    /// Returns an error if the channel does not have the segment attached.
    pub fn detach(&self, id: u32, channel: i32) -> Result<()> {
        let mut argument = ShareDetach { id, channel: channel.cast_unsigned() };
        self.call(&mut argument, || format!("detaching segment {id} from channel {channel}"))
    }

    /// Removes the key of a segment. The segment is freed when the last address space detaches it.
    ///
    /// # Errors
    /// Returns an error if the segment does not exist, or belongs to another user.
    pub fn remove(&self, id: u32) -> Result<()> {
        self.control(id, REMOVE).map(drop)
    }

    /// Returns the number of address spaces that have a segment attached.
    ///
    /// # Errors
    /// Returns an error if the segment does not exist.
    pub fn attached(&self, id: u32) -> Result<u64> {
        self.control(id, ATTACHED)
    }

    fn control(&self, id: u32, command: u32) -> Result<u64> {
        let mut argument = ShareControl { id, command, ..Default::default() };
        self.call(&mut argument, || format!("command {command} on segment {id}"))?;
        Ok(argument.value)
    }

    /// Returns the result of a query, one of [`question`].
    ///
    /// # Errors
    /// Returns an error if the mediator does not support the query.
    pub fn query(&self, what: u32) -> Result<u64> {
        let mut argument = Query { what, ..Default::default() };
        self.call(&mut argument, || format!("question {what}"))?;
        Ok(argument.value)
    }
}
