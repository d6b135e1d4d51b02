//! Validates a guest's GPFIFO entries, and selects the parts that reach the card.

use nvspec::fifo::{GpEntry, gp_opcode};
use nvspec::mmu::HOST_VA_BASE;

/// An entry that may be passed to the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The entry for the card.
    pub(crate) raw: u64,
    /// End address of the entry's range; `None` if it has no range.
    pub(crate) end: Option<u64>,
}

impl Entry {
    /// Keeps address, length, level and sync, and clears all other bits. The resulting entry has no privilege and no
    /// condition, and does not prevent channel switches. Returns `None` for unsupported entries: a range that extends
    /// into the host's addresses, or a control entry other than NOP (CRCs would be wrong in the host's ring).
    pub(crate) fn check(raw: u64) -> Option<Self> {
        let entry = GpEntry::from(raw);
        if entry.dwords() == 0 {
            return (entry.opcode() == gp_opcode::NOP).then_some(Self { raw: 0, end: None });
        }
        let end = entry.address().checked_add(u64::from(entry.dwords()).checked_mul(4)?)?;
        if end > HOST_VA_BASE.0 {
            return None;
        }
        let clean = GpEntry::new()
            .with_address_dwords(entry.address_dwords())
            .with_not_main(entry.not_main())
            .with_dwords(entry.dwords())
            .with_sync(entry.sync());
        Some(Self { raw: clean.into(), end: Some(end) })
    }
}

#[cfg(test)]
mod tests;
