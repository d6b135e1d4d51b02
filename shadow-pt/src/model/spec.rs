//! What an entry must become, said once more, with shifts and masks and page by page.

use super::world::{Grants, LARGE, PAGE};

/// The shadow of the guest entry `raw`; 0 when any 4 KiB of it is not granted or the entry is not legal.
pub(crate) fn entry(raw: u64, large: bool, grants: &Grants) -> u64 {
    let bytes = if large { LARGE } else { PAGE };
    let (aperture, address) = ((raw >> 33) & 3, ((raw >> 4) & 0xfff_ffff) * PAGE);
    let Some(kind) = nvspec::mmu::kind::uncompressed((raw >> 36) as u8) else { return 0 };
    if raw & 1 == 0 || aperture == 1 || !address.is_multiple_of(bytes) {
        return 0;
    }
    let mut read_only = raw & 4 != 0;
    let mut first = None;
    for page in 0..bytes / PAGE {
        let at = address + page * PAGE;
        let frame = if aperture == 0 {
            grants.vram_page(at).map(|at| (at / PAGE, true))
        } else {
            grants.ram.get(&(at / PAGE)).copied()
        };
        let Some((frame, writable)) = frame else { return 0 };
        read_only |= !writable;
        if frame != *first.get_or_insert(frame) + page {
            return 0;
        }
    }
    let first = first.unwrap_or(0);
    if first >> 28 != 0 || !(first * PAGE).is_multiple_of(bytes) {
        return 0;
    }
    1 | raw & 2 | u64::from(read_only) << 2 | first << 4 | raw & 1 << 32 | aperture << 33 | u64::from(kind) << 36
}
