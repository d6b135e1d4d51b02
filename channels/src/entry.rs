//! Validates guest GPFIFO entries, and selects the bits that reach the card.

use nvspec::fifo::{GpEntry, gp_opcode};
use nvspec::mmu::HOST_VA_BASE;

/// A validated entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Entry to pass to the card.
    pub(crate) raw: u64,
    /// End address of the entry's push buffer range, or `None` if it has no range.
    pub(crate) end: Option<u64>,
}

impl Entry {
    /// Keeps the address, length, level and sync bits, and clears all others. The resulting entry is unprivileged and
    /// unconditional, and does not prevent channel switches. Returns `None` for unsupported entries: ranges that extend
    /// into the host's addresses, and control entries other than NOP. CRC entries would be wrong in the host's ring.
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
