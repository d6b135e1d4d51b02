//! Host memory for guest VRAM chunks that do not fit on the card. It is mapped for the card while it is in use.
//!
//! A slot has the size of a chunk and its own mapping. Its memory is allocated when the slot is assigned to an owner,
//! and freed when the owner releases the slot, so that the next owner reads zeros and the memory returns to the host.
//! The I/O addresses of all slots are contiguous and fixed. Some slots without an owner keep their memory, which is
//! then zeroed, because allocating memory takes longer than copying a chunk.

mod borrowed;
mod saved;

pub use borrowed::Borrowed;
pub(crate) use saved::SavedSlots;

use super::iova::IovaSpace;
use super::pages::Wanted;
use crate::ManagerError;
use card::{Card, DmaMemory};
use nvspec::addr::Iova;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;
use vm_memory::Bytes;
use vram::HostAddr;

/// Maximum number of bytes that slots without an owner keep. This is about as much as can be moved in a few
/// milliseconds.
const KEPT_BYTES: u64 = 32 << 20;

/// Seals that fix the file's length, because an access beyond the end would kill the process.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A pool of slots.
pub struct PinnedPool {
    card: Arc<dyn Card>,
    base: Iova,
    slot_bytes: u64,
    slots: Vec<Option<DmaMemory>>,
    /// Slots without an owner that have kept their memory.
    kept: BTreeSet<usize>,
    /// File that contains the memory of all slots, each at its own offset, if another process can take over the memory.
    file: Option<Arc<File>>,
    /// Slots that currently use another card's memory, with their own memory.
    borrowed: BTreeMap<usize, DmaMemory>,
    /// Set while another process owns the memory and its mappings for the card.
    handed: bool,
}

impl PinnedPool {
    /// Creates `slots` slots of `slot_bytes` bytes, without memory. If `shared` is true, one file backs their memory,
    /// so that another process can take it over.
    ///
    /// # Errors
    /// Returns an error if the card's I/O address space has no gap that is large enough, or if the host cannot create
    /// the file.
    pub fn new(
        card: Arc<dyn Card>,
        iova: &mut IovaSpace,
        slots: u32,
        slot_bytes: u64,
        shared: bool,
    ) -> Result<Self, ManagerError> {
        let len = u64::from(slots) * slot_bytes;
        // This alignment permits large pages in the card's and in the host's mappings.
        let base = if slots == 0 { Iova(0) } else { iova.allocate(len, 0).ok_or(ManagerError::OutOfIova { len })? };
        let file = (shared && slots != 0).then(|| memory_file(len)).transpose()?.map(Arc::new);
        let slots = (0..slots).map(|_| None).collect();
        let (kept, borrowed) = (BTreeSet::new(), BTreeMap::new());
        Ok(Self { card, base, slot_bytes, slots, kept, file, borrowed, handed: false })
    }

    /// Returns the file with the memory of all slots, to be passed to another process, or `None` if there is none.
    #[must_use]
    pub fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }

    /// Returns true if another process could take over the slots.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.file.is_some() || self.slots.is_empty()
    }

    /// Hands the slots over to another process. Their memory remains allocated and mapped for the card.
    pub fn hand_over(&mut self) {
        self.handed = true;
    }

    /// Returns the first I/O address of the slots and their total size in bytes.
    #[must_use]
    pub fn range(&self) -> (Iova, u64) {
        (self.base, self.slots.len() as u64 * self.slot_bytes)
    }

    /// Returns the I/O address that corresponds to an address in the host pool.
    #[must_use]
    pub fn iova(&self, address: HostAddr) -> Iova {
        self.base.offset(address.0)
    }

    /// Returns the memory to allocate for the slot at `address`, or `None` if it already has memory.
    #[must_use]
    pub fn lacks(&self, address: HostAddr) -> Option<Wanted> {
        let (index, _) = self.at(address);
        let file = self.file.as_ref().map(|file| (Arc::clone(file), index as u64 * self.slot_bytes));
        self.slots[index].is_none().then_some(Wanted { bytes: self.slot_bytes as usize, file })
    }

    /// Allocates zeroed memory for the slot at `address`, which must have an owner, and maps it for the card. Does
    /// nothing if the slot already has memory.
    ///
    /// # Errors
    /// Returns an error if the host has too little memory or does not permit pinning it.
    pub fn fill(&mut self, address: HostAddr) -> Result<(), ManagerError> {
        if let Some(wanted) = self.lacks(address) {
            self.give(address, wanted.find()?)?;
        }
        let (index, _) = self.at(address);
        self.kept.remove(&index);
        Ok(())
    }

    /// Assigns memory that [`Wanted::find`] returned to the slot at `address`, which must not have memory.
    ///
    /// # Errors
    /// Returns an error if the host does not permit pinning the memory.
    pub fn give(&mut self, address: HostAddr, memory: DmaMemory) -> Result<(), ManagerError> {
        let (index, _) = self.at(address);
        let (iova, bytes) = (self.base.offset(index as u64 * self.slot_bytes), memory.len());
        let mapped = self.card.map_dma(iova.0, memory.clone());
        mapped.map_err(|error| ManagerError::Pinned { bytes, why: error.to_string() })?;
        self.slots[index] = Some(memory);
        Ok(())
    }

    /// Releases the slot at `address` from its owner. Returns true if the slot keeps its memory, which must then be
    /// zeroed, or false if it has freed its memory or had none. Memory borrowed from another card is released
    /// unchanged.
    ///
    /// # Errors
    /// Returns an error if the card fails to remove the mapping. In this case, the slot keeps its memory, which must
    /// never be used again.
    pub fn leave(&mut self, address: HostAddr) -> Result<bool, ManagerError> {
        let (index, _) = self.at(address);
        let own = self.slots[index].is_some() && !self.borrowed.contains_key(&index);
        let keeps = own && (self.kept.len() as u64 + 1) * self.slot_bytes <= KEPT_BYTES;
        if keeps {
            self.kept.insert(index);
        } else {
            self.release(index)?;
        }
        Ok(keeps)
    }

    fn release(&mut self, index: usize) -> Result<(), ManagerError> {
        if self.slots[index].is_some() {
            let offset = index as u64 * self.slot_bytes;
            self.card.unmap_dma(self.base.offset(offset).0, self.slot_bytes)?;
            self.slots[index] = None;
            self.borrowed.remove(&index);
            if let Some(file) = &self.file {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(file, flags, offset, self.slot_bytes)
                    .map_err(|error| ManagerError::host("cannot free a host memory slot", error))?;
            }
        }
        Ok(())
    }

    /// Reads from `address` into `data`, within one slot. A slot without memory reads as zeros.
    pub fn read(&self, address: HostAddr, data: &mut [u8]) {
        let (index, offset) = self.at(address);
        let read = self.slots[index].as_ref().map(|memory| {
            let slice = memory.slice(offset, data.len()).map_err(|error| error.to_string())?;
            slice.read_slice(data, 0).map_err(|error| error.to_string())
        });
        match read {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::error!(error, %address, "an access is beyond the end of a host memory slot"),
            None => data.fill(0),
        }
    }

    /// Writes `data` to `address`, within one slot that has memory.
    pub fn write(&self, address: HostAddr, data: &[u8]) {
        let (index, offset) = self.at(address);
        let written = self.slots[index].as_ref().ok_or("the slot has no memory".to_owned()).and_then(|memory| {
            let slice = memory.slice(offset, data.len()).map_err(|error| error.to_string())?;
            slice.write_slice(data, 0).map_err(|error| error.to_string())
        });
        if let Err(error) = written {
            tracing::error!(error, %address, "a write to guest memory in a host memory slot is lost");
        }
    }

    /// Returns the memory of the slot that contains `address`, and the offset in it, or `None` if the slot has no
    /// memory. If the slot changes owners, the memory passes to the new owner.
    #[must_use]
    pub fn memory(&self, address: HostAddr) -> Option<(DmaMemory, usize)> {
        let (index, offset) = self.at(address);
        self.slots.get(index)?.clone().map(|memory| (memory, offset))
    }

    fn at(&self, address: HostAddr) -> (usize, usize) {
        ((address.0 / self.slot_bytes) as usize, (address.0 % self.slot_bytes) as usize)
    }
}

/// Creates an unnamed file of `bytes` bytes.
fn memory_file(bytes: u64) -> Result<File, ManagerError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let made = memfd_create("swapped-vram", flags).and_then(|file| {
        ftruncate(&file, bytes)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(File::from(file))
    });
    made.map_err(|error| ManagerError::host("cannot create a file for the card's host memory", error))
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        if self.handed {
            return;
        }
        for index in 0..self.slots.len() {
            if let Err(error) = self.release(index) {
                tracing::error!(%error, "host memory stays mapped for the card");
            }
        }
    }
}
