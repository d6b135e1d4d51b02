//! The card's MMU: GPU virtual addresses to places on the memory bus.
//!
//! Parts: [`AddressSpace`], what an instance block says; [`walk`], the page walker; [`tlb`], which keeps translations
//! until they are flushed, so that a missing flush shows; [`Session`], accesses in a row through one address space;
//! [`Mmu`], all of it, shared by engines, host and apertures.
//!
//! Guarantees. A flush returns only when accesses under way that used the old translations have ended, and nothing
//! translated before it is used after it. Entries that fault are not kept.
//!
//! Lock order: the flush gate, then a TLB set or the table of host memory; neither of the latter two is held while
//! another lock is taken.
//!
//! Not modelled: 64 KiB large pages, the single-page flush of one size only (it drops both sizes), encrypted pages and
//! other cards' memory (both fault), compression (kinds that compress in VRAM hold plain data and need no tags), the
//! low-level order of bytes that a storage kind brings (it is hidden behind the MMU on the card; here a page read
//! through another kind shows the same bytes), the debug mode that redirects faults to a sink.

mod session;
pub mod tlb;
pub mod walk;

#[cfg(test)]
pub(crate) mod tests;

use crate::memory::{BusAddr, Memory};
use nvspec::addr::{GpuVa, Target};
use nvspec::instance::vm;
use nvspec::mmu::fault;
use parking_lot::RwLock;

pub use session::{CopyFault, Session};
pub use tlb::TlbCounters;
use tlb::{Tlb, TlbKey};

/// An access that the MMU refused. Where it came from (unit, client, channel) is for the caller to add.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("MMU fault {reason:#x} at GPU virtual address {va}{}", if *write { ", a write" } else { "" })]
pub struct MmuFault {
    /// A number of [`nvspec::mmu::fault`].
    pub reason: u32,
    /// First byte that could not be accessed.
    pub va: GpuVa,
    /// Set for a write.
    pub write: bool,
}

/// TLB of the card that an access goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// Behind the hub: host, copy engines, M2MF, apertures, context switching.
    Hub,
    /// In a graphics processing cluster: shaders, textures.
    Gpc,
}

/// Permissions that an access needs, and its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// It may use privileged pages.
    pub privileged: bool,
    /// The TLBs that it goes through.
    pub client: Client,
}

impl Access {
    /// Of an engine or the host, for a channel.
    pub const USER: Self = Self { privileged: false, client: Client::Hub };
    /// Of the apertures and of context switching.
    pub const PRIVILEGED: Self = Self { privileged: true, client: Client::Hub };
}

/// An address space: a page directory and a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressSpace {
    /// Address of the page directory.
    pub directory: BusAddr,
    /// Last address that is valid.
    pub limit: GpuVa,
}

impl AddressSpace {
    /// Returns what the instance block at `instance` says.
    ///
    /// # Errors
    /// [`fault::UNBOUND_INST`] at address 0 when the block cannot be read or its directory has the reserved target.
    pub fn from_instance(memory: &Memory, instance: (Target, u64)) -> Result<Self, MmuFault> {
        let unbound = MmuFault { reason: fault::UNBOUND_INST, va: GpuVa(0), write: false };
        let block = BusAddr::from_target(instance.0, instance.1).ok_or(unbound)?;
        let word = |offset| {
            memory.read32(block.offset(offset)).map_err(|error| {
                memory.count_lost(error);
                unbound
            })
        };
        let (low, high) = (word(vm::PDB_LO)?, word(vm::PDB_HI)?);
        let address = u64::from(vm::PDB_ADDRESS_HI.get(high)) << 32 | u64::from(low & vm::PDB_ADDRESS_LO.mask());
        let directory = BusAddr::from_target(Target::from_bits(vm::PDB_TARGET.get(low)), address).ok_or(unbound)?;
        let limit = u64::from(vm::LIMIT_ADDRESS_HI.get(word(vm::LIMIT_HI)?)) << 32 | u64::from(word(vm::LIMIT_LO)?);
        Ok(Self { directory, limit: GpuVa(limit) })
    }
}

/// Result of translating a virtual address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The byte on the bus.
    pub address: BusAddr,
    /// Bytes from there to the end of the page, at least 1.
    pub bytes: u64,
    /// Storage kind of the page.
    pub kind: u8,
}

/// Entries that a flush drops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flush {
    /// Only translations of this directory; all directories without.
    pub directory: Option<BusAddr>,
    /// Only translations of the page at this address; all pages without.
    pub page: Option<GpuVa>,
    /// Only the hub's TLB.
    pub hub_only: bool,
}

/// The MMU. All functions may be called from any thread.
#[derive(Debug, Default)]
pub struct Mmu {
    /// Held for reading by accesses, for writing by flushes.
    gate: RwLock<()>,
    hub: Tlb,
    gpc: Tlb,
}

impl Mmu {
    /// An MMU with empty TLBs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn tlb(&self, client: Client) -> &Tlb {
        match client {
            Client::Hub => &self.hub,
            Client::Gpc => &self.gpc,
        }
    }

    /// Begins accesses in a row. Flushes and withdrawals of host memory wait until the session ends: keep it short
    /// (about 256 KiB of copying), and call nothing else of this `Mmu` or `memory` on the same thread meanwhile.
    #[must_use]
    pub fn session<'a>(&'a self, memory: &'a Memory, space: &'a AddressSpace, access: Access) -> Session<'a> {
        Session::new(self, memory, space, access)
    }

    /// Translates one address, for reading or for writing.
    ///
    /// # Errors
    /// [`MmuFault`].
    pub fn translate(
        &self,
        memory: &Memory,
        space: &AddressSpace,
        va: GpuVa,
        write: bool,
        access: Access,
    ) -> Result<Translation, MmuFault> {
        self.session(memory, space, access).translate(va, write)
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// [`MmuFault`]; `data` may be filled in part.
    pub fn read(
        &self,
        memory: &Memory,
        space: &AddressSpace,
        va: GpuVa,
        data: &mut [u8],
        access: Access,
    ) -> Result<(), MmuFault> {
        self.session(memory, space, access).read(va, data)
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// [`MmuFault`]; the bytes before the bad one are written.
    pub fn write(
        &self,
        memory: &Memory,
        space: &AddressSpace,
        va: GpuVa,
        data: &[u8],
        access: Access,
    ) -> Result<(), MmuFault> {
        self.session(memory, space, access).write(va, data)
    }

    /// Reads 32 bits, in one access when aligned.
    ///
    /// # Errors
    /// [`MmuFault`].
    pub fn read32(&self, memory: &Memory, space: &AddressSpace, va: GpuVa, access: Access) -> Result<u32, MmuFault> {
        self.session(memory, space, access).read32(va)
    }

    /// Writes 32 bits, in one access when aligned.
    ///
    /// # Errors
    /// [`MmuFault`].
    pub fn write32(
        &self,
        memory: &Memory,
        space: &AddressSpace,
        va: GpuVa,
        value: u32,
        access: Access,
    ) -> Result<(), MmuFault> {
        self.session(memory, space, access).write32(va, value)
    }

    /// Drops translations. When it returns, no access uses what was dropped.
    pub fn flush(&self, what: Flush) {
        let _gate = self.gate.write();
        self.hub.flush(what.directory, what.page);
        if !what.hub_only {
            self.gpc.flush(what.directory, what.page);
        }
    }

    /// Hits, misses and flushes of a client's TLB.
    #[must_use]
    pub fn counters(&self, client: Client) -> TlbCounters {
        self.tlb(client).counters()
    }
}
