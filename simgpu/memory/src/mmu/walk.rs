//! The page walker: reads a directory entry, then the large-page table, then the small-page table.

use super::tlb::TlbEntry;
use super::{AddressSpace, MmuFault};
use crate::memory::{BusAddr, View};
use nvspec::addr::{GpuVa, LARGE_PAGE, SMALL_PAGE, VA_BITS};
use nvspec::mmu::{ENTRY_BYTES, PDE_SHIFT, PDE_SPAN, Pde, Pte, TableTarget, fault, kind};

/// Finds the page table entry of `va`. [`check`] checks permissions, and `write` appears only in the fault.
///
/// # Errors
/// Returns an [`MmuFault`] with the card's fault reason if the address is not mapped.
pub fn walk(view: &View<'_>, space: &AddressSpace, va: GpuVa, write: bool) -> Result<TlbEntry, MmuFault> {
    let fail = |reason| MmuFault { reason, va, write };
    if va.0 > space.limit.0 || va.0 >> VA_BITS != 0 {
        return Err(fail(fault::VA_LIMIT));
    }
    let entry = |table: BusAddr, index: u64| {
        view.read64(table.offset(index * ENTRY_BYTES)).map_err(|error| view.memory().count_lost(error))
    };
    // GUESS: a table address without a memory target causes the same fault as a missing table.
    let pde = Pde::from(entry(space.directory, va.0 >> PDE_SHIFT).map_err(|()| fail(fault::PDE))?);
    let large = BusAddr::from_table(pde.large_target(), pde.large_address());
    let small = BusAddr::from_table(pde.small_target(), pde.small_address());
    if large.is_none() && small.is_none() {
        return Err(fail(fault::PDE));
    }
    let within = va.0 % PDE_SPAN;
    if within >= PDE_SPAN >> pde.large_size() {
        return Err(fail(fault::PDE_SIZE));
    }
    for (table, page, large) in [(large, LARGE_PAGE, true), (small, SMALL_PAGE, false)] {
        let Some(table) = table else { continue };
        let pte = Pte::from(entry(table, within / page).map_err(|()| fail(fault::PTE))?);
        if pte.valid() {
            return Ok(TlbEntry { pte, large });
        }
    }
    Err(fail(fault::PTE))
}

/// Checks that the page permits the access.
///
/// # Errors
/// Returns the card's fault reason if the access is not permitted.
pub fn check(pte: Pte, write: bool, privileged: bool) -> Result<(), u32> {
    if pte.privileged() && !privileged {
        return Err(fault::PRIVILEGE);
    }
    if write && pte.read_only() {
        return Err(fault::READ_ONLY);
    }
    let system = pte.aperture().is_system();
    match kind::uncompressed(pte.kind()) {
        None => Err(fault::KIND),
        // GUESS: encrypted pages are not supported, and this fault reason fits best.
        Some(_) if pte.encrypted() => Err(fault::KIND),
        Some(plain) if system && plain != pte.kind() => Err(fault::COMPRESSED_SYSRAM),
        Some(_) => Ok(()),
    }
}

/// Returns the bus address of `va`, and the number of bytes to the end of the page. Returns `None` for peer memory.
#[must_use]
pub fn place(entry: TlbEntry, va: GpuVa) -> Option<(BusAddr, u64)> {
    let bytes = entry.page_bytes();
    let offset = va.0 % bytes;
    // GUESS: the card ignores address bits below the large page size.
    let page = BusAddr::from_aperture(entry.pte.aperture(), entry.pte.address() & !(bytes - 1))?;
    Some((page.offset(offset), bytes - offset))
}

const _: () = assert!(TableTarget::None as u8 == 0, "a zeroed directory entry has no table");
