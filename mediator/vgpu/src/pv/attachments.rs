//! Segments that a VM maps: their addresses in its address spaces, and the channels that use them.

use nvspec::addr::{SMALL_PAGE, VramAddr};
use nvspec::fifo::VirtualChannelId;
use saved_state::{Invalid, first_version};
use serde::{Deserialize, Serialize};
use shadow_pt::{SHARED_BASE, SHARED_PAGES, SpaceId};
use std::collections::{BTreeMap, BTreeSet};

/// A segment in one address space.
#[derive(Clone, Debug)]
pub(crate) struct Attachment {
    /// Number of the segment's first page in the shared memory range.
    pub(crate) first: u32,
    pub(crate) pages: u32,
    pub(crate) at: VramAddr,
    pub(crate) read_only: bool,
    /// Channels that have attached the segment.
    pub(crate) channels: BTreeSet<VirtualChannelId>,
}

/// A VM's attached segments.
#[derive(Debug, Default)]
pub(crate) struct Attachments(BTreeMap<(SpaceId, u32), Attachment>);

impl Attachments {
    /// Returns the number of mappings of segments in address spaces.
    pub(super) fn count(&self) -> u64 {
        self.0.len() as u64
    }

    /// Returns true if no segment is mapped.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the attachment of a segment in an address space, if there is one.
    pub(crate) fn get_mut(&mut self, space: SpaceId, segment: u32) -> Option<&mut Attachment> {
        self.0.get_mut(&(space, segment))
    }

    /// Records the attachment of a segment in an address space.
    pub(crate) fn insert(&mut self, space: SpaceId, segment: u32, attachment: Attachment) {
        self.0.insert((space, segment), attachment);
    }

    /// Returns all attachments.
    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Attachment> {
        self.0.values_mut()
    }

    /// Removes attachments without channels. Returns them with their address spaces and segments.
    pub(crate) fn take_unused(&mut self) -> Vec<((SpaceId, u32), Attachment)> {
        self.0.extract_if(.., |_, it| it.channels.is_empty()).collect()
    }

    /// Finds contiguous free pages in the shared memory range of an address space. Returns the number of the first one.
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

/// Saved form of a VM's attached segments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedAttachments(Vec<SavedAttachment>);

first_version!(SavedAttachments, "vgpu.segments");

/// Saved form of an attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedAttachment {
    /// VRAM address of the address space's shadow directory.
    directory: u64,
    segment: u32,
    first: u32,
    read_only: bool,
    channels: Vec<u8>,
}

/// Context for restoring attachments.
pub(crate) struct Around<'a> {
    /// Mapped segments in the card's records: the number of address spaces that map each, its VRAM address, and its
    /// size in bytes, by segment.
    pub(crate) segments: BTreeMap<u32, (u32, VramAddr, u64)>,
    /// Returns the address space with the given directory.
    pub(crate) space: &'a dyn Fn(VramAddr) -> Option<SpaceId>,
    /// Returns the address space of a bound channel.
    pub(crate) of_channel: &'a dyn Fn(VirtualChannelId) -> Option<SpaceId>,
}

impl Attachments {
    /// Saves the attachments. Returns `None` if there are none. `directory` returns an address space's directory.
    pub(crate) fn save(&self, directory: impl Fn(SpaceId) -> Option<VramAddr>) -> Option<SavedAttachments> {
        let one = |((space, segment), attachment): (&(SpaceId, u32), &Attachment)| {
            // The pages and the address follow from the segment.
            let Attachment { first, pages: _, at: _, read_only, channels } = attachment;
            Some(SavedAttachment {
                directory: directory(*space)?.0,
                segment: *segment,
                first: *first,
                read_only: *read_only,
                channels: channels.iter().map(|channel| channel.0).collect(),
            })
        };
        (!self.0.is_empty()).then(|| SavedAttachments(self.0.iter().filter_map(one).collect()))
    }

    /// Restores the attachments. Returns an error if the attachments are invalid or inconsistent with the card's
    /// records.
    pub(crate) fn restored(saved: Option<SavedAttachments>, around: &Around<'_>) -> Result<Self, Invalid> {
        let mut made = Self::default();
        let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
        for saved in saved.map(|SavedAttachments(all)| all).unwrap_or_default() {
            let SavedAttachment { directory, segment, first, read_only, channels } = saved;
            let wrong = |what: &str| Invalid::new(format_args!("shared segment {segment} is mapped {what}"));
            let space =
                (around.space)(VramAddr(directory)).ok_or_else(|| wrong("in an address space that does not exist"))?;
            let (_, at, bytes) = *around.segments.get(&segment).ok_or_else(|| wrong("but does not exist"))?;
            let pages = u32::try_from(bytes / SMALL_PAGE).unwrap_or(u32::MAX);
            let end = first.checked_add(pages).filter(|end| *end <= SHARED_PAGES);
            let end = end.ok_or_else(|| wrong("beyond the range of shared memory"))?;
            let others = made.0.range((space, 0)..=(space, u32::MAX));
            if others.into_iter().any(|(_, it)| it.first < end && first < it.first + it.pages) {
                return Err(wrong("over another segment"));
            }
            let channels: BTreeSet<VirtualChannelId> = channels.into_iter().map(VirtualChannelId).collect();
            if channels.is_empty() || channels.iter().any(|channel| (around.of_channel)(*channel) != Some(space)) {
                return Err(wrong("for channels with a different address space, or without one"));
            }
            *counts.entry(segment).or_default() += 1;
            let attachment = Attachment { first, pages, at, read_only, channels };
            if made.0.insert((space, segment), attachment).is_some() {
                return Err(wrong("twice in one address space"));
            }
        }
        let same = around.segments.iter().map(|(id, (count, ..))| (*id, *count)).eq(counts);
        Invalid::unless(same, || "the mapped shared segments differ from the card's records".into())?;
        Ok(made)
    }
}

/// Returns the virtual address of a segment that starts at page `first` of the shared memory range.
pub(crate) fn segment_va(first: u32) -> u64 {
    SHARED_BASE.0 + u64::from(first) * SMALL_PAGE
}
