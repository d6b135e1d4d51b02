//! The card's MMU: translates GPU virtual addresses to bus addresses.
//!
//! Modules and types:
//! - [`AddressSpace`]: an address space, read from an instance block
//! - [`walk`]: the page walker
//! - [`tlb`]: caches translations until they are flushed, so that a missing flush has an effect
//! - [`Session`]: a sequence of accesses through one address space
//! - [`Mmu`]: combines these, and is shared by the engines, the host unit and the apertures
//!
//! Guarantees: a flush returns only after all accesses that use old translations have ended. Later accesses do not use
//! them. Faulting entries are not cached.
//!
//! Lock order: the flush gate, then either a TLB set or the host memory table, both of which are innermost.
//!
//! Not modelled:
//! - 64 KiB large pages
//! - flushing a page of only one size (a flush drops pages of both sizes)
//! - encrypted pages and peer memory (both fault)
//! - compression (compressible kinds store plain data and need no tags)
//! - the byte permutation of a storage kind, which the card's MMU hides (in the model, a page shows the same bytes
//!   through a different kind)
//! - the debug mode that redirects faults to a sink

mod session;
pub mod tlb;
pub mod walk;

#[cfg(any(test, feature = "test-rig"))]
pub mod fixture;

#[cfg(test)]
mod tests;

use crate::memory::{BusAddr, Memory};
use nvspec::addr::{GpuVa, Target};
use nvspec::instance::vm;
use nvspec::mmu::fault;
use parking_lot::RwLock;

pub use session::{CopyFault, Session};
pub use tlb::TlbCounters;
use tlb::{Tlb, TlbKey};

/// An access rejected by the MMU. The caller adds its origin (unit, client, channel).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("MMU fault {reason:#x} at GPU virtual address {va}{}", if *write { ", a write" } else { "" })]
pub struct MmuFault {
    /// Fault reason, as in [`nvspec::mmu::fault`].
    pub reason: u32,
    /// Address of the first inaccessible byte.
    pub va: GpuVa,
    /// Set for a write.
    pub write: bool,
}

/// The TLB that an access uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// The TLB of the hub: host unit, copy engines, M2MF, apertures, and context switching.
    Hub,
    /// The TLB of a GPC: shaders and textures.
    Gpc,
}

/// Privilege and path of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Set if the access may use privileged pages.
    pub privileged: bool,
    /// The TLB that the access uses.
    pub client: Client,
}

impl Access {
    /// An access for a channel by an engine or the host unit.
    pub const USER: Self = Self { privileged: false, client: Client::Hub };
    /// An access by the apertures or by context switching.
    pub const PRIVILEGED: Self = Self { privileged: true, client: Client::Hub };
}

/// An address space: a page directory and a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressSpace {
    /// Bus address of the page directory.
    pub directory: BusAddr,
    /// Last valid address of the space.
    pub limit: GpuVa,
}

impl AddressSpace {
    /// Reads the address space from the instance block at `instance`.
    ///
    /// # Errors
    /// Returns [`fault::UNBOUND_INST`] at address 0 if the block is unreadable or its directory has a reserved target.
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
    /// The translated bus address.
    pub address: BusAddr,
    /// Number of bytes from that address to the end of the page, at least 1.
    pub bytes: u64,
    /// Storage kind of the page.
    pub kind: u8,
}

/// Selects the entries that a flush drops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flush {
    /// Drop only translations of this directory, or of all directories if `None`.
    pub directory: Option<BusAddr>,
    /// Drop only translations of the page at this address, or of all pages if `None`.
    pub page: Option<GpuVa>,
    /// Drop only the translations in the hub's TLB.
    pub hub_only: bool,
}

/// The MMU. All functions may be called from any thread.
#[derive(Debug, Default)]
pub struct Mmu {
    /// Gate that accesses lock for reading, and flushes for writing.
    gate: RwLock<()>,
    hub: Tlb,
    gpc: Tlb,
}

impl Mmu {
    /// Creates an MMU with empty TLBs.
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

    /// Starts an access session. Flushes and removals of host memory mappings wait for it to end. Keep the session
    /// short (about 256 KiB of copying). During the session, do not call other functions of this `Mmu` or of `memory`
    /// on the same thread.
    #[must_use]
    pub fn session<'a>(&'a self, memory: &'a Memory, space: &'a AddressSpace, access: Access) -> Session<'a> {
        Session::new(self, memory, space, access)
    }

    /// Translates one address for a read or a write.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if the page is inaccessible.
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

    /// Reads the bytes at `va` into `data`.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if a page is inaccessible. `data` may then be partially filled.
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

    /// Writes `data` to `va`.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if a page is inaccessible. The bytes before that page have then been written.
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

    /// Reads 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if the page is inaccessible.
    pub fn read32(&self, memory: &Memory, space: &AddressSpace, va: GpuVa, access: Access) -> Result<u32, MmuFault> {
        self.session(memory, space, access).read32(va)
    }

    /// Writes 32 bits, in a single access if aligned.
    ///
    /// # Errors
    /// Returns [`MmuFault`] if the page is inaccessible.
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

    /// Drops translations. Once the function returns, no access uses them.
    pub fn flush(&self, what: Flush) {
        let _gate = self.gate.write();
        self.hub.flush(what.directory, what.page);
        if !what.hub_only {
            self.gpc.flush(what.directory, what.page);
        }
    }

    /// Returns a client's TLB counters: hits, misses and flushes.
    #[must_use]
    pub fn counters(&self, client: Client) -> TlbCounters {
        self.tlb(client).counters()
    }
}
