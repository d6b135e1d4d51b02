//! Translates guest accesses through BAR1 and BAR3 with a software page table walk.

use crate::{GuestMemory, Place};
use nvspec::addr::{Gpa, GpuVa, GuestVramAddr, LARGE_PAGE, SMALL_PAGE, Target};
use nvspec::instance::vm;
use nvspec::mmu::{ENTRY_BYTES, LPT_ENTRIES, PDE_SHIFT, PDE_SPAN, Pde, Pte, PteAperture, SPT_ENTRIES, TableTarget};

/// Number of cached translations per aperture, a power of two. They cover 2 MiB, more than a driver uses at a time.
const SLOTS: usize = 512;
const PAGE_SHIFT: u32 = SMALL_PAGE.trailing_zeros();

/// Mapping of an aperture offset or a GPU virtual address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Guest address that the offset or virtual address maps to. It is not checked against the guest's memory size.
    pub place: Place,
    /// Number of bytes from the address to the end of its 4 KiB page.
    pub bytes: u64,
    /// True if the guest may write the page.
    pub writable: bool,
}

/// Reason why an aperture access faults, numbered like the hardware's fault reasons (`nvspec::mmu::fault`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkFault {
    /// The aperture has no instance block, or the instance block is unreadable.
    Unbound,
    /// The offset exceeds the instance block's limit.
    Limit,
    /// The directory entry does not refer to a table, or the table is unreadable.
    Pde,
    /// The offset is beyond the end of a reduced-size table.
    PdeSize,
    /// The entry is invalid, or refers to peer memory.
    Pte,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    page: u64,
    place: Place,
    writable: bool,
}

impl Slot {
    /// Returns the mapping of aperture byte `offset`, which must be in the page of this slot.
    fn mapping(&self, offset: u64) -> Option<Mapping> {
        let within = offset & SMALL_PAGE.wrapping_sub(1);
        let place = self.place.checked_add(within)?;
        Some(Mapping { place, bytes: SMALL_PAGE.saturating_sub(within), writable: self.writable })
    }
}

/// Returns the slot for the page that contains byte `offset`.
fn index(offset: u64) -> usize {
    usize::try_from(offset >> PAGE_SHIFT).unwrap_or(usize::MAX) & SLOTS.wrapping_sub(1)
}

/// The address space described by an instance block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Space {
    directory: Place,
    limit: u64,
}

/// Translates accesses through one aperture. Uses a direct-mapped cache.
#[derive(Debug)]
pub struct ApertureTlb {
    instance: Option<Place>,
    /// Directory that overrides the one in the instance block.
    named: Option<Place>,
    space: Option<Space>,
    slots: Box<[Option<Slot>]>,
}

impl Default for ApertureTlb {
    fn default() -> Self {
        Self::new()
    }
}

impl ApertureTlb {
    /// Creates an aperture that has no instance block.
    #[must_use]
    pub fn new() -> Self {
        Self { instance: None, named: None, space: None, slots: vec![None; SLOTS].into() }
    }

    /// Sets or removes the guest's instance block. `directory`, if given, overrides the instance block's directory.
    pub fn bind(&mut self, instance: Option<Place>, directory: Option<Place>) {
        (self.instance, self.named) = (instance, directory);
        self.flush();
    }

    /// Returns the guest address of the aperture's instance block, if one is bound.
    #[must_use]
    pub fn instance(&self) -> Option<Place> {
        self.instance
    }

    /// Drops all cached translations. Call this on guest TLB flushes.
    pub fn flush(&mut self) {
        self.space = None;
        self.slots.fill(None);
    }

    /// Returns the guest's directory for this aperture, or `None` if the instance block is unreadable.
    pub fn directory(&mut self, guest: &mut impl GuestMemory) -> Option<Place> {
        self.space(guest).ok().map(|space| space.directory)
    }

    /// Translates aperture byte `offset`.
    ///
    /// # Errors
    /// Returns the fault that the hardware would raise. Faults are not cached.
    pub fn translate(&mut self, offset: u64, guest: &mut impl GuestMemory) -> Result<Mapping, WalkFault> {
        if let Some(mapping) = self.cached(offset) {
            return Ok(mapping);
        }
        let space = self.space(guest)?;
        let (place, writable) = walk(space, GpuVa(offset).page(), guest)?;
        let page = offset >> PAGE_SHIFT;
        let slot = Slot { page, place, writable };
        if let Some(entry) = self.slots.get_mut(index(offset)) {
            *entry = Some(slot);
        }
        slot.mapping(offset).ok_or(WalkFault::Pte)
    }

    /// Returns the cached translation of aperture byte `offset`, if any.
    #[must_use]
    pub fn cached(&self, offset: u64) -> Option<Mapping> {
        let page = offset >> PAGE_SHIFT;
        self.slots.get(index(offset)).copied().flatten().filter(|slot| slot.page == page)?.mapping(offset)
    }

    /// Calls `visit` for `pages` consecutive pages of the aperture, starting at byte `start`, which must be a multiple
    /// of 2 MiB. Passes the address of each page according to the guest's current tables, or `None` if an access would
    /// fault. Per 2 MiB, reads two blocks of up to 4 KiB from the tables. Does not use the cache.
    pub fn survey(
        &mut self,
        start: u64,
        pages: u64,
        guest: &mut impl GuestMemory,
        mut visit: impl FnMut(u64, Option<Place>),
    ) {
        let space = self.space(guest).ok();
        let first = start >> PAGE_SHIFT;
        let end = first.saturating_add(pages);
        let mut block = Block::new();
        for page in first..end {
            if page == first || page % BLOCK_PAGES == 0 {
                block.read(space, GpuVa(page << PAGE_SHIFT), guest);
            }
            let va = GpuVa(page << PAGE_SHIFT);
            visit(page, space.filter(|space| va.0 <= space.limit).and_then(|_| block.page(page)));
        }
    }

    fn space(&mut self, guest: &mut impl GuestMemory) -> Result<Space, WalkFault> {
        if let Some(space) = self.space {
            return Ok(space);
        }
        let instance = self.instance.ok_or(WalkFault::Unbound)?;
        let space = read_space(instance, self.named, guest).ok_or(WalkFault::Unbound)?;
        self.space = Some(space);
        Ok(space)
    }
}

/// Number of 4 KiB pages whose small entries fill exactly one page of the table.
const BLOCK_PAGES: u64 = BLOCK_SMALLS as u64;
/// [`BLOCK_PAGES`] as a `usize`.
const BLOCK_SMALLS: usize = 1 << (SMALL_PAGE.trailing_zeros() - ENTRY_BYTES.trailing_zeros());
/// Number of large entries that cover the same address range.
const BLOCK_LARGES: usize = BLOCK_SMALLS >> LARGE_SHIFT;
/// Log2 of the number of small pages in a large page.
const LARGE_SHIFT: u32 = LARGE_PAGE.trailing_zeros() - PAGE_SHIFT;

/// Table entries for 2 MiB of an aperture. Entries of a missing table are 0.
struct Block {
    large: [[u8; 8]; BLOCK_LARGES],
    small: [[u8; 8]; BLOCK_SMALLS],
}

impl Block {
    fn new() -> Self {
        Self { large: [[0; 8]; BLOCK_LARGES], small: [[0; 8]; BLOCK_SMALLS] }
    }

    /// Reads the entries for the 2 MiB at `va`.
    fn read(&mut self, space: Option<Space>, va: GpuVa, guest: &mut impl GuestMemory) {
        self.large.as_flattened_mut().fill(0);
        self.small.as_flattened_mut().fill(0);
        let Some(space) = space.filter(|space| va.0 <= space.limit) else { return };
        let Ok(pde) = read_entry(space.directory, va.0 >> PDE_SHIFT, guest) else { return };
        let pde = Pde::from(pde);
        // Table sizes are powers of two, so a block is either entirely within the table or entirely beyond its end.
        let within = va.0 & PDE_SPAN.wrapping_sub(1);
        let (large, small) = (within >> LARGE_PAGE.trailing_zeros(), within >> PAGE_SHIFT);
        if large >= u64::from(pde.large_entries()) {
            return;
        }
        let mut fill = |table: Option<Place>, index: u64, entries: &mut [u8]| {
            let place = table.and_then(|table| table.checked_add(index.saturating_mul(ENTRY_BYTES)));
            if place.is_none_or(|place| guest.read(place, entries).is_err()) {
                entries.fill(0);
            }
        };
        fill(table(pde.large_target(), pde.large_address()), large, self.large.as_flattened_mut());
        fill(table(pde.small_target(), pde.small_address()), small, self.small.as_flattened_mut());
    }

    /// Returns the guest address that page `number` within the 2 MiB maps to, if any.
    fn page(&self, number: u64) -> Option<Place> {
        let at = usize::try_from(number % BLOCK_PAGES).ok()?;
        let entry =
            |entries: &[[u8; 8]], at: usize| Pte::from(entries.get(at).map_or(0, |raw| u64::from_le_bytes(*raw)));
        let large = entry(&self.large, at >> LARGE_SHIFT);
        let (pte, address) = if large.valid() {
            const WITHIN: u64 = LARGE_PAGE - 1;
            (large, (large.address() & !WITHIN) | ((number << PAGE_SHIFT) & WITHIN))
        } else {
            let small = entry(&self.small, at);
            (small, small.address())
        };
        if pte.valid() { page(pte, address).ok().map(|(place, _)| place) } else { None }
    }
}

fn read_space(instance: Place, named: Option<Place>, guest: &mut impl GuestMemory) -> Option<Space> {
    let mut bytes = [0u8; 16];
    guest.read(instance.checked_add(vm::PDB_LO)?, &mut bytes).ok()?;
    let [directory, limit] = bytes.as_chunks().0 else { return None };
    let (directory, limit) = (u64::from_le_bytes(*directory), u64::from_le_bytes(*limit));
    const ADDRESS: u64 = 0xff_ffff_f000;
    let target = Target::from_bits(u32::from_le_bytes([(directory & 3) as u8, 0, 0, 0]));
    let directory = named.or_else(|| Place::new(target, directory & ADDRESS))?;
    Some(Space { directory, limit: limit & 0xff_ffff_ffff })
}

/// Returns the address and write permission of the guest page at `va`. Like the hardware, uses the small-page table
/// only if the large-page table has no valid entry.
fn walk(space: Space, va: GpuVa, guest: &mut impl GuestMemory) -> Result<(Place, bool), WalkFault> {
    if va.0 > space.limit {
        return Err(WalkFault::Limit);
    }
    let pde = read_entry(space.directory, va.0 >> PDE_SHIFT, guest).map_err(|_| WalkFault::Pde)?;
    let pde = Pde::from(pde);
    let mut fault = WalkFault::Pde;
    if let Some(table) = table(pde.large_target(), pde.large_address()) {
        let index = (va.0 >> 17) & u64::from(LPT_ENTRIES.wrapping_sub(1));
        if index >= u64::from(pde.large_entries()) {
            fault = WalkFault::PdeSize;
        } else {
            // An unreadable table has no valid entries, as in the shadow tables.
            let pte = Pte::from(read_entry(table, index, guest).unwrap_or(0));
            if pte.valid() {
                // Page addresses are aligned to the page size. The virtual address selects the 4 KiB page within a
                // large page.
                const WITHIN: u64 = 0x1_f000;
                return page(pte, (pte.address() & !0x1_ffff) | (va.0 & WITHIN));
            }
            fault = WalkFault::Pte;
        }
    }
    let Some(table) = table(pde.small_target(), pde.small_address()) else { return Err(fault) };
    let index = (va.0 >> PAGE_SHIFT) & u64::from(SPT_ENTRIES.wrapping_sub(1));
    if index >= u64::from(pde.small_entries()) {
        return Err(WalkFault::PdeSize);
    }
    let pte = Pte::from(read_entry(table, index, guest)?);
    if pte.valid() { page(pte, pte.address()) } else { Err(WalkFault::Pte) }
}

fn page(pte: Pte, address: u64) -> Result<(Place, bool), WalkFault> {
    let place = match pte.aperture() {
        PteAperture::Vram => Place::Vram(GuestVramAddr(address)),
        PteAperture::Peer => return Err(WalkFault::Pte),
        PteAperture::SysCoherent | PteAperture::SysNonCoherent => Place::Ram(Gpa(address)),
    };
    Ok((place, !pte.read_only()))
}

fn table(target: TableTarget, address: u64) -> Option<Place> {
    match target {
        TableTarget::None => None,
        TableTarget::Vram => Some(Place::Vram(GuestVramAddr(address))),
        TableTarget::SysCoherent | TableTarget::SysNonCoherent => Some(Place::Ram(Gpa(address))),
    }
}

fn read_entry(table: Place, index: u64, guest: &mut impl GuestMemory) -> Result<u64, WalkFault> {
    let mut entry = [0u8; size_of::<u64>()];
    let place = table.checked_add(index.saturating_mul(ENTRY_BYTES)).ok_or(WalkFault::Pde)?;
    guest.read(place, &mut entry).map_err(|_| WalkFault::Pde)?;
    Ok(u64::from_le_bytes(entry))
}

#[cfg(test)]
mod tests;
