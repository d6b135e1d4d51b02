//! Host memory that takes chunks of guests' VRAM when the card has no room: mapped for the card for as long as it is used.
//!
//! A slot is as large as a chunk and a mapping of its own. It comes into being when it gets an owner, and goes when it
//! loses it, so that the next owner finds zeros and the host has the memory back; the I/O addresses of all slots follow
//! one another and stay. Some slots are zeroed and stay instead: finding fresh memory takes longer than copying to it.

use super::iova::IovaSpace;
use super::pages;
use crate::HostError;
use card::{Card, DmaMemory};
use nvspec::addr::Iova;
use std::collections::BTreeSet;
use std::sync::Arc;
use vm_memory::Bytes;
use vram::HostAddr;

/// Most bytes of slots without an owner that keep their memory: as much as moves in a few milliseconds.
const KEPT_BYTES: u64 = 32 << 20;

/// The slots.
pub struct PinnedPool {
    card: Arc<dyn Card>,
    base: Iova,
    slot_bytes: u64,
    slots: Vec<Option<DmaMemory>>,
    /// Slots without an owner that have memory, full of zeros.
    kept: BTreeSet<usize>,
}

impl PinnedPool {
    /// Room for `slots` slots of `slot_bytes` bytes, none of which takes memory yet.
    ///
    /// # Errors
    /// When the card's I/O address space has no such gap.
    pub fn new(card: Arc<dyn Card>, iova: &mut IovaSpace, slots: u32, slot_bytes: u64) -> Result<Self, HostError> {
        let len = u64::from(slots) * slot_bytes;
        // Large pages are large on both sides.
        let base = if slots == 0 { Iova(0) } else { iova.allocate(len, 0).ok_or(HostError::OutOfIova { len })? };
        Ok(Self { card, base, slot_bytes, slots: (0..slots).map(|_| None).collect(), kept: BTreeSet::new() })
    }

    /// First I/O address of the slots, and bytes of all.
    #[must_use]
    pub fn range(&self) -> (Iova, u64) {
        (self.base, self.slots.len() as u64 * self.slot_bytes)
    }

    /// Returns where the card sees an address in the slots.
    #[must_use]
    pub fn iova(&self, address: HostAddr) -> Iova {
        self.base.offset(address.0)
    }

    /// Bytes that the slot at `address` lacks: all, or none when it has memory.
    #[must_use]
    pub fn lacks(&self, address: HostAddr) -> Option<usize> {
        let (index, _) = self.at(address);
        self.slots[index].is_none().then_some(self.slot_bytes as usize)
    }

    /// The slot at `address` has an owner, and needs memory, zeroed and mapped for the card. Nothing when it has.
    ///
    /// # Errors
    /// When the host has no memory for it, or may not pin it.
    pub fn fill(&mut self, address: HostAddr) -> Result<(), HostError> {
        if let Some(bytes) = self.lacks(address) {
            self.give(address, pages::found(bytes)?)?;
        }
        let (index, _) = self.at(address);
        self.kept.remove(&index);
        Ok(())
    }

    /// Gives the slot at `address`, which lacks memory, some that was [found](pages::found) for it.
    ///
    /// # Errors
    /// When the host may not pin it.
    pub(crate) fn give(&mut self, address: HostAddr, memory: DmaMemory) -> Result<(), HostError> {
        let (index, _) = self.at(address);
        let (iova, bytes) = (self.base.offset(index as u64 * self.slot_bytes), memory.len());
        let mapped = self.card.map_dma(iova.0, memory.clone());
        mapped.map_err(|error| HostError::Pinned { bytes, why: error.to_string() })?;
        self.slots[index] = Some(memory);
        Ok(())
    }

    /// The slot that begins at `address` has no owner any more. Whether it keeps its memory, which is to be zeroed then; else it
    /// has given it back to the host, or had none.
    ///
    /// # Errors
    /// When the card keeps it; the slot keeps its memory then, which is not to be used again.
    pub fn leave(&mut self, address: HostAddr) -> Result<bool, HostError> {
        let (index, _) = self.at(address);
        let keeps = self.slots[index].is_some() && (self.kept.len() as u64 + 1) * self.slot_bytes <= KEPT_BYTES;
        if keeps {
            self.kept.insert(index);
        } else {
            self.release(index)?;
        }
        Ok(keeps)
    }

    fn release(&mut self, index: usize) -> Result<(), HostError> {
        if self.slots[index].is_some() {
            self.card.unmap_dma(self.base.offset(index as u64 * self.slot_bytes).0, self.slot_bytes)?;
            self.slots[index] = None;
        }
        Ok(())
    }

    /// Reads from `address` on, within one slot. A slot without memory reads as zeros.
    pub fn read(&self, address: HostAddr, data: &mut [u8]) {
        let (index, offset) = self.at(address);
        let read = self.slots[index].as_ref().map(|memory| {
            let slice = memory.slice(offset, data.len()).map_err(|error| error.to_string())?;
            slice.read_slice(data, 0).map_err(|error| error.to_string())
        });
        match read {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::error!(error, %address, "an access beyond a slot of host memory"),
            None => data.fill(0),
        }
    }

    /// Writes from `address` on, within one slot that has memory.
    pub fn write(&self, address: HostAddr, data: &[u8]) {
        let (index, offset) = self.at(address);
        let written = self.slots[index].as_ref().ok_or("the slot has no memory".to_owned()).and_then(|memory| {
            let slice = memory.slice(offset, data.len()).map_err(|error| error.to_string())?;
            slice.write_slice(data, 0).map_err(|error| error.to_string())
        });
        if let Err(error) = written {
            tracing::error!(error, %address, "a write to host memory of a guest is lost");
        }
    }

    fn at(&self, address: HostAddr) -> (usize, usize) {
        ((address.0 / self.slot_bytes) as usize, (address.0 % self.slot_bytes) as usize)
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        for index in 0..self.slots.len() {
            if let Err(error) = self.release(index) {
                tracing::error!(%error, "the card keeps host memory");
            }
        }
    }
}
