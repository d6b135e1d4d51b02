//! Segments in a VM's address spaces: their addresses, and the channels that use them.

use super::VmBackend;
use crate::pv::{Attachment, segment_va};
use crate::work::Bound;
use nvspec::addr::{SMALL_PAGE, VramAddr};
use nvspec::fifo::VirtualChannelId;
use nvspec::mmu::Rights;
use pv::abi::Status;
use shadow_pt::{HostPage, SpaceId};
use std::collections::BTreeSet;

/// Returns the pages of a range, each with its VRAM address and access rights, for mapping or unmapping.
fn pages(first: u32, count: u32, at: VramAddr, rights: Rights) -> Vec<(HostPage, VramAddr, Rights)> {
    let page = |nth: u32| (HostPage::Shared(first + nth), at.offset(u64::from(nth) * SMALL_PAGE), rights);
    (0..count).map(page).collect()
}

impl VmBackend {
    /// Maps a segment for a channel and returns its address. Further calls for the same address space return the same
    /// address.
    pub(crate) fn attach(&mut self, segment: u32, channel: VirtualChannelId, read_only: bool) -> Result<u64, Status> {
        let Bound { space, .. } = self.work.bound(channel).ok_or(Status::NoObject)?;
        let pv = self.pv.as_mut().ok_or(Status::Unsupported)?;
        if let Some(there) = pv.attachments_mut().get_mut(space, segment) {
            // An address space can map a segment only with a single set of access rights.
            if there.read_only != read_only {
                return Err(Status::Exists);
            }
            there.channels.insert(channel);
            return Ok(segment_va(there.first));
        }
        while self.host.lock().memory_mut().share_zero(pv.party(), segment)? {}
        let (at, bytes) = self.host.lock().memory_mut().share_attach(pv.party(), segment, !read_only)?;
        let count = (bytes / SMALL_PAGE) as u32;
        let first = match pv.attachments().room(space, count) {
            Some(first) => {
                let pages = pages(first, count, at, if read_only { Rights::ReadOnly } else { Rights::ReadWrite });
                let mapped = self.memory.map_host(space, &pages);
                if let Err(error) = mapped {
                    tracing::warn!(vm = %self.vm, ?channel, segment, %error, "cannot attach a shared segment");
                    self.unmap_segment(space, segment, &pages);
                    return Err(Status::Limit);
                }
                first
            }
            None => {
                self.host.lock().memory_mut().share_detach(self.vm, segment);
                return Err(Status::Limit);
            }
        };
        let channels = BTreeSet::from([channel]);
        let attachment = Attachment { first, pages: count, at, read_only, channels };
        if let Some(pv) = &mut self.pv {
            pv.attachments_mut().insert(space, segment, attachment);
        }
        Ok(segment_va(first))
    }

    /// Detaches a segment from a channel, and unmaps it if no other channel of the address space uses it.
    pub(crate) fn detach(&mut self, segment: u32, channel: VirtualChannelId) -> Result<(), Status> {
        let Bound { space, .. } = self.work.bound(channel).ok_or(Status::NoObject)?;
        let pv = self.pv.as_mut().ok_or(Status::Unsupported)?;
        let there = pv.attachments_mut().get_mut(space, segment).ok_or(Status::NoObject)?;
        if !there.channels.remove(&channel) {
            return Err(Status::NoObject);
        }
        self.drop_unused();
        Ok(())
    }

    /// Detaches all segments of a channel.
    pub(crate) fn detach_channel(&mut self, channel: VirtualChannelId) {
        let Some(pv) = &mut self.pv else { return };
        for attachment in pv.attachments_mut().all_mut() {
            attachment.channels.remove(&channel);
        }
        self.drop_unused();
    }

    /// Detaches all segments of all channels.
    pub(crate) fn detach_all(&mut self) {
        let Some(pv) = &mut self.pv else { return };
        pv.attachments_mut().all_mut().for_each(|attachment| attachment.channels.clear());
        self.drop_unused();
    }

    /// Unmaps segments that are no longer attached to any channel.
    fn drop_unused(&mut self) {
        let Some(pv) = &mut self.pv else { return };
        let unused = pv.attachments_mut().take_unused();
        for ((space, segment), Attachment { first, pages: count, at, .. }) in unused {
            self.unmap_segment(space, segment, &pages(first, count, at, Rights::ReadOnly));
        }
    }

    /// Unmaps a segment from an address space. If the card's TLBs may still contain translations to the segment, the
    /// segment stays attached permanently, and its memory is never reused.
    fn unmap_segment(&mut self, space: SpaceId, segment: u32, pages: &[(HostPage, VramAddr, Rights)]) {
        match self.memory.unmap_host(space, pages) {
            Ok(()) => self.host.lock().memory_mut().share_detach(self.vm, segment),
            Err(error) => tracing::error!(vm = %self.vm, segment, %error,
                "the card may still access a shared segment; its memory stays unusable until the card is reset"),
        }
    }
}
