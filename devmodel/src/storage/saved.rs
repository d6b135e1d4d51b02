//! Saved form of plain registers.

use super::{PAGE_DWORDS, PAGES, Storage};
use crate::policy::{self, RangeKind, Target};
use nvspec::regs::windows;
use saved_state::{Invalid, ascend};

impl Storage {
    /// Returns the offsets and values of all nonzero registers, in ascending order of offset.
    pub(crate) fn save(&self) -> Vec<(u32, u32)> {
        let Self { pages } = self;
        let pages = (0u32..).step_by(4 * PAGE_DWORDS).zip(pages);
        let dwords = pages
            .filter_map(|(base, page)| Some((base, page.as_ref()?)))
            .flat_map(|(base, page)| (base..).step_by(4).zip(page.iter().copied()));
        dwords.filter(|(_, value)| *value != 0).collect()
    }

    /// Restores the saved registers, and sets all others to 0.
    pub(crate) fn restored(saved: &[(u32, u32)]) -> Result<Self, Invalid> {
        let mut storage = Self { pages: Vec::new() };
        storage.pages.resize_with(PAGES, || None);
        Invalid::unless(ascend(saved.iter().map(|(offset, _)| offset)), || {
            "registers are not in ascending order".into()
        })?;
        for (offset, value) in saved {
            let inside = u64::from(*offset) < windows::BAR0_BYTES && offset.is_multiple_of(4);
            let is_kept = || {
                let target = policy::find(*offset);
                !matches!(target, Target::Nothing | Target::Range(RangeKind::Prom | RangeKind::Pramin))
            };
            Invalid::unless(inside && is_kept(), || format!("{offset:#x} is not the offset of a stored register"))?;
            storage.set(*offset, *value);
        }
        Ok(storage)
    }
}
