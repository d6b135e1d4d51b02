//! Slots that use another card's memory. A VM that moves between cards uses this memory at first, and its contents are
//! copied only after the VM has arrived.

use super::PinnedPool;
use crate::ManagerError;
use card::DmaMemory;
use vm_memory::VolatileMemoryError;
use vram::HostAddr;

impl PinnedPool {
    /// Makes the slot at `address` use `theirs`, which must have the same size, instead of its own zeroed memory.
    /// `theirs` is neither zeroed nor freed when [`Self::own`] is called or the slot loses its owner. Returns `false`
    /// if the slot has no memory or already borrows memory, if `theirs` does not fit, or if the card rejects it.
    ///
    /// # Errors
    /// Returns an error if the card then also rejects the slot's own memory.
    pub fn borrow(&mut self, address: HostAddr, theirs: DmaMemory) -> Result<bool, ManagerError> {
        let (index, offset) = self.at(address);
        let fits = offset == 0 && theirs.len() as u64 == self.slot_bytes && !self.borrowed.contains_key(&index);
        let Some(own) = self.slots[index].clone().filter(|_| fits) else { return Ok(false) };
        let taken = self.exchange(index, theirs);
        if taken.is_err() {
            self.give(address, own)?;
            return Ok(false);
        }
        self.borrowed.insert(index, own);
        Ok(true)
    }

    /// Switches the slot at `address` back to its own memory without copying. Does nothing if the slot already uses its
    /// own memory.
    ///
    /// # Errors
    /// Returns an error if the card fails to unmap the other memory, or rejects the slot's own memory.
    pub fn own(&mut self, address: HostAddr) -> Result<(), ManagerError> {
        let (index, _) = self.at(address);
        if let Some(own) = self.borrowed.get(&index).cloned() {
            self.exchange(index, own)?;
            self.borrowed.remove(&index);
        }
        Ok(())
    }

    /// Returns the borrowed memory and the slot's own memory if the slot at `address` borrows memory.
    #[must_use]
    pub fn borrowed(&self, address: HostAddr) -> Option<Borrowed> {
        let (index, _) = self.at(address);
        let own = self.borrowed.get(&index)?.clone();
        Some(Borrowed { theirs: self.slots.get(index)?.clone()?, own })
    }

    /// Returns true if any slot borrows another card's memory.
    #[must_use]
    pub fn borrows(&self) -> bool {
        !self.borrowed.is_empty()
    }

    /// Maps `memory` into a slot instead of the slot's current memory. If the card rejects `memory`, the slot stays
    /// unmapped.
    fn exchange(&mut self, index: usize, memory: DmaMemory) -> Result<(), ManagerError> {
        let at = index as u64 * self.slot_bytes;
        self.card.unmap_dma(self.base.offset(at).0, self.slot_bytes)?;
        self.give(HostAddr(at), memory)
    }
}

/// The memory that a slot borrows, and the slot's own memory.
#[derive(Clone, Debug)]
pub struct Borrowed {
    /// Memory of the other card, which the slot currently uses.
    pub theirs: DmaMemory,
    /// The slot's own memory.
    pub own: DmaMemory,
}

impl Borrowed {
    /// Copies `len` bytes at offset `at` from the other card's memory to the slot's own memory.
    ///
    /// # Errors
    /// Returns an error if the bytes extend beyond the end of the slot.
    pub fn copy(&self, at: u64, len: u64) -> Result<(), VolatileMemoryError> {
        let from = self.theirs.slice(at as usize, len as usize)?;
        from.copy_to_volatile_slice(self.own.slice(at as usize, len as usize)?);
        Ok(())
    }
}
