//! Saved form of a table's contents.

use super::{Contents, PAGE_ENTRIES, Page};
use crate::operation::Kind;
use saved_state::{Invalid, ascend};
use zerocopy::little_endian::U64;

/// Entries of a page.
pub(crate) type SavedPage = Vec<u64>;

impl Contents {
    /// Returns the numbers and contents of nonempty pages.
    pub(in crate::objects) fn save(&self) -> Vec<(u8, SavedPage)> {
        let Self { pages } = self;
        let held = (0u8..).zip(pages).filter_map(|(number, page)| Some((number, page.as_ref()?)));
        held.map(|(number, page)| (number, page.iter().map(|entry| entry.get()).collect())).collect()
    }

    pub(in crate::objects) fn restored(kind: Kind, saved: Vec<(u8, SavedPage)>) -> Result<Self, Invalid> {
        let mut contents = Self::new(kind);
        Invalid::unless(ascend(saved.iter().map(|(number, _)| number)), || {
            "the pages of a table are not in ascending order".into()
        })?;
        for (number, entries) in saved {
            let entries: Vec<U64> = entries.into_iter().map(U64::new).collect();
            let full = entries.len() == PAGE_ENTRIES as usize && entries.iter().any(|entry| entry.get() != 0);
            let slot = contents.pages.get_mut(usize::from(number)).filter(|_| full);
            let page = <Box<Page>>::try_from(entries.into_boxed_slice()).ok();
            let (Some(slot), Some(page)) = (slot, page) else {
                return Err(Invalid::new(format_args!(
                    "page {number} of a table is empty, truncated, or out of range"
                )));
            };
            *slot = Some(page);
        }
        Ok(contents)
    }
}
