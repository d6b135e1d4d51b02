//! Slots that hold another card's memory: a VM that goes from card to card has it there before it is there itself, and nothing of it is
//! copied until it has come.

use super::PinnedPool;
use crate::HostError;
use card::DmaMemory;
use vm_memory::VolatileMemoryError;
use vram::HostAddr;

impl PinnedPool {
    /// The slot that begins at `address`, which has memory, full of zeros, holds `theirs` in its place, which is as large. It is let go of by
    /// [`Self::own`] or when the slot loses its owner, and neither zeroed then nor given back to the host. `false` if the card does not take it.
    ///
    /// # Errors
    /// When the card takes its own memory no more either.
    pub fn borrow(&mut self, address: HostAddr, theirs: DmaMemory) -> Result<bool, HostError> {
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

    /// The slot at `address` holds its own memory from now on, whatever is in that; nothing if it does already.
    ///
    /// # Errors
    /// When the card keeps the other, or does not take its own.
    pub fn own(&mut self, address: HostAddr) -> Result<(), HostError> {
        let (index, _) = self.at(address);
        if let Some(own) = self.borrowed.get(&index).cloned() {
            self.exchange(index, own)?;
            self.borrowed.remove(&index);
        }
        Ok(())
    }

    /// Memory that the slot at `address` has borrowed, and its own.
    #[must_use]
    pub fn borrowed(&self, address: HostAddr) -> Option<Borrowed> {
        let (index, _) = self.at(address);
        let own = self.borrowed.get(&index)?.clone();
        Some(Borrowed { theirs: self.slots.get(index)?.clone()?, own })
    }

    /// Returns whether any slot holds another card's memory.
    #[must_use]
    pub fn borrows(&self) -> bool {
        !self.borrowed.is_empty()
    }

    /// Has the card see other memory in a slot. When it does not take that, it sees none there.
    fn exchange(&mut self, index: usize, memory: DmaMemory) -> Result<(), HostError> {
        let at = index as u64 * self.slot_bytes;
        self.card.unmap_dma(self.base.offset(at).0, self.slot_bytes)?;
        self.give(HostAddr(at), memory)
    }
}

/// Both memories of a slot.
#[derive(Clone, Debug)]
pub struct Borrowed {
    /// The other card's, which the slot holds.
    pub theirs: DmaMemory,
    /// The slot's own.
    pub own: DmaMemory,
}

impl Borrowed {
    /// Copies `len` bytes from `at` on into the slot's own.
    ///
    /// # Errors
    /// When they are beyond the slot.
    pub fn copy(&self, at: u64, len: u64) -> Result<(), VolatileMemoryError> {
        let from = self.theirs.slice(at as usize, len as usize)?;
        from.copy_to_volatile_slice(self.own.slice(at as usize, len as usize)?);
        Ok(())
    }
}
