//! Overlays pages under mapped apertures on guest memory that is read for saving, because the contents of these pages
//! are not in their chunks.

use card::HostMemory;
use nvspec::addr::SMALL_PAGE;
use std::collections::BTreeMap;
use std::sync::Arc;
use vm_memory::Bytes;

/// Guest VRAM pages under mapped apertures.
pub(crate) struct Overlay(BTreeMap<u64, (Arc<dyn HostMemory>, usize)>);

impl Overlay {
    /// Creates the overlay from each page's memory and its offset in that memory, by page number.
    pub(crate) fn from_pages(pages: BTreeMap<u64, (Arc<dyn HostMemory>, usize)>) -> Self {
        Self(pages)
    }

    /// Returns the addresses of all pages in ascending order.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.keys().map(|page| page * SMALL_PAGE)
    }

    /// Copies these pages over `data`, whose pages start at address `at`. Returns true if any page was copied.
    pub(crate) fn lay_over(&self, at: u64, data: &mut [u8]) -> bool {
        let first = at / SMALL_PAGE;
        let pages = first..first.saturating_add(data.len() as u64 / SMALL_PAGE);
        let mut any = false;
        for (page, (memory, from)) in self.0.range(pages) {
            let within = ((page - first) * SMALL_PAGE) as usize;
            let Some(place) = data.get_mut(within..within + SMALL_PAGE as usize) else { continue };
            if let Err(error) = memory.as_volatile_slice().read_slice(place, *from) {
                tracing::error!(%error, page, "cannot read a page under an aperture, so it is saved as zeros");
                place.fill(0);
            }
            any = true;
        }
        any
    }
}
