//! An independent specification of shadow entries, page by page, using shifts and masks.

use super::world::{Grants, LARGE, PAGE};

/// Number of 4 KiB pages in a large page.
const PAGES: u64 = LARGE / PAGE;

/// Returns the shadow of the guest entry `raw` as one entry per 4 KiB page, or `None` if the entry is invalid or not
/// granted.
fn pages(raw: u64, large: bool, grants: &Grants) -> Option<Vec<u64>> {
    let bytes = if large { LARGE } else { PAGE };
    let (aperture, address) = ((raw >> 33) & 3, ((raw >> 4) & 0xfff_ffff) * PAGE);
    let kind = nvspec::mmu::kind::uncompressed((raw >> 36) as u8)?;
    if raw & 1 == 0 || aperture == 1 || !address.is_multiple_of(bytes) {
        return None;
    }
    let page = |page: u64| {
        let at = address + page * PAGE;
        let (side, frame, writable) = if aperture == 0 {
            let (host, at) = grants.home(at)?;
            (if host { 2 } else { 0 }, at / PAGE, true)
        } else {
            let (frame, writable) = *grants.ram.get(&(at / PAGE))?;
            (aperture, frame, writable)
        };
        let read_only = u64::from(raw & 4 != 0 || !writable) << 2;
        let bits = 1 | raw & 2 | read_only | frame << 4 | raw & 1 << 32 | side << 33 | u64::from(kind) << 36;
        (frame >> 28 == 0).then_some(bits)
    };
    (0..bytes / PAGE).map(page).collect()
}

/// Returns the shadow of the guest entry `raw` as a single entry, which is 0 if the memory is not granted or not
/// contiguous.
pub(crate) fn entry(raw: u64, large: bool, grants: &Grants) -> u64 {
    let Some(pages) = pages(raw, large, grants) else { return 0 };
    let first = pages[0];
    let frame = (first >> 4) & 0xfff_ffff;
    if large && frame % PAGES != 0 {
        return 0;
    }
    let read_only = pages.iter().fold(0, |bits, page| bits | page & 4);
    let follows = |(page, number): (&u64, u64)| page & !4 == (first & !4) + (number << 4);
    if pages.iter().zip(0..).all(follows) { first | read_only } else { 0 }
}

/// Returns the small entries that must replace a large entry, or `None` if its memory is contiguous or not granted.
pub(crate) fn pieces(raw: u64, grants: &Grants) -> Option<Vec<u64>> {
    pages(raw, true, grants).filter(|_| entry(raw, true, grants) == 0)
}

/// Returns entry `index` of the card's small-page table. `large` and `small` are the guest's entries for that address.
pub(crate) fn small(index: u64, large: u64, small: u64, grants: &Grants) -> u64 {
    match pieces(large, grants) {
        Some(pieces) => pieces[(index % PAGES) as usize],
        None => entry(small, false, grants),
    }
}
