//! The segments that a VM has mapped: where each is in its address spaces, and for which channels.

use nvspec::addr::{SMALL_PAGE, VramAddr};
use nvspec::fifo::VirtualChannelId;
use shadow_pt::{SHARED_BASE, SHARED_PAGES, SpaceId};
use std::collections::{BTreeMap, BTreeSet};

/// One segment in one address space.
#[derive(Clone, Debug)]
pub(crate) struct Attachment {
    /// First page of the span of shared memory.
    pub(crate) first: u32,
    pub(crate) pages: u32,
    pub(crate) at: VramAddr,
    pub(crate) read_only: bool,
    /// Channels that have it attached.
    pub(crate) channels: BTreeSet<VirtualChannelId>,
}

/// A VM's attached segments.
#[derive(Debug, Default)]
pub(crate) struct Attachments(BTreeMap<(SpaceId, u32), Attachment>);

impl Attachments {
    /// Returns how many segments are mapped, each counted for each address space.
    pub(super) fn count(&self) -> u64 {
        self.0.len() as u64
    }

    /// A segment in a space.
    pub(crate) fn get_mut(&mut self, space: SpaceId, segment: u32) -> Option<&mut Attachment> {
        self.0.get_mut(&(space, segment))
    }

    /// Notes a segment in a space.
    pub(crate) fn insert(&mut self, space: SpaceId, segment: u32, attachment: Attachment) {
        self.0.insert((space, segment), attachment);
    }

    /// All of them.
    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Attachment> {
        self.0.values_mut()
    }

    /// Takes those out that no channel has attached, with their space and segment.
    pub(crate) fn take_unused(&mut self) -> Vec<((SpaceId, u32), Attachment)> {
        self.0.extract_if(.., |_, it| it.channels.is_empty()).collect()
    }

    /// Pages in a row that are free in a space.
    pub(crate) fn room(&self, space: SpaceId, pages: u32) -> Option<u32> {
        let mut taken: Vec<(u32, u32)> =
            self.0.range((space, 0)..=(space, u32::MAX)).map(|(_, it)| (it.first, it.pages)).collect();
        taken.sort_unstable();
        let mut next = 0;
        for (first, pages_there) in taken {
            if first - next >= pages {
                return Some(next);
            }
            next = first + pages_there;
        }
        (SHARED_PAGES - next >= pages).then_some(next)
    }
}

/// Returns the address of the segment that begins at a page of the span of shared memory.
pub(crate) fn segment_va(first: u32) -> u64 {
    SHARED_BASE.0 + u64::from(first) * SMALL_PAGE
}
