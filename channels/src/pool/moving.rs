//! Channels of a VM that migrates to another card, with their data on the card (instance blocks, rings, records,
//! images).
//!
//! A channel keeps its [`Span`] on the target card, because its own structures contain addresses in that span. It gets
//! a new physical channel number, new VRAM addresses, and new submission numbers.

mod saved;

pub use saved::SavedMoving;

use super::saved::{SavedBound, SavedSlot, SavedVm, page};
use super::{Bound, Channels, Slot, Vm};
use crate::block::BLOCK;
use crate::image::image_vas;
use crate::instance::{context_words, put_wide};
use crate::state::Permit;
use crate::work::{Span, WORK_BYTES};
use crate::{BindError, Host, RunState, Submission, TenantId, card};
use nvspec::addr::VramAddr;
use nvspec::fifo::{CHANNELS, ChannelId, VirtualChannelId};
use nvspec::instance::{context, ramfc, vm as instance_vm};
use saved_state::Invalid;
use std::collections::BTreeSet;

/// A migrating VM's channels, none of which is on an engine.
#[derive(Debug)]
pub struct Moving {
    vm: SavedVm,
    channels: Vec<Channel>,
}

/// A channel and its data from the card.
#[derive(Debug)]
struct Channel {
    bound: SavedBound,
    block: Box<[u8; BLOCK]>,
    userd: Box<[u8; BLOCK]>,
    work: Vec<u8>,
    images: [Vec<u8>; 3],
}

/// A channel that has arrived on this card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Guest channel number.
    pub channel: VirtualChannelId,
    /// Physical channel number.
    pub physical: ChannelId,
    /// Submissions in flight, oldest first. The flag is true if the card may have fetched the submission.
    pub flights: Vec<(Submission, bool)>,
}

/// Reason why channels cannot arrive on a card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// Too few channels are free.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The channels are invalid on this card.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

impl Channels {
    /// Copies a VM's channels and their data on the card, for transfer to another card. Does not change this card's
    /// state. The VM must be paused and off the engines. Returns `None` if it is not paused, while a channel is still
    /// on an engine, or while the guest's runlist has not taken effect.
    pub fn moving(&self, host: &mut impl Host, vm: TenantId) -> Option<Moving> {
        let record = self.vms.get(&vm)?;
        let leaves = |physical: &ChannelId| self.preemptions.waiting.contains(physical);
        if record.paused == 0 || !record.unlisted.is_empty() || record.channels.values().any(leaves) {
            return None;
        }
        let channels = record.channels.values().filter_map(|physical| self.copied(host, *physical)).collect();
        Some(Moving { vm: record.save(vm), channels })
    }

    fn copied(&self, host: &mut impl Host, physical: ChannelId) -> Option<Channel> {
        let (bound, layout) = (self.bound(physical)?, self.layout);
        let mut block = Box::new([0; BLOCK]);
        host.vram_read(layout.instance(physical), &mut *block);
        // The channel may run without its PGRAPH context on this card.
        let ([pointer, ..], [image, ..]) = (bound.contexts, image_vas(bound.span));
        put_wide(&mut block, context::GR, context_words(pointer.map(|_| image)));
        let mut userd = Box::new([0; BLOCK]);
        host.vram_read(layout.userd(physical), &mut *userd);
        let work = read_pages(host, layout.work_area(physical), WORK_BYTES);
        let images = layout.images_of(physical).map(|(at, bytes)| read_pages(host, at, bytes));
        Some(Channel { bound: bound.save(), block, userd, work, images })
    }

    /// Binds channels from another card, for a VM that has no channels here and is [paused](crate::Pause). `directory`
    /// maps a directory of the source card to one of this card. The caller must map each channel's own pages in its
    /// address space before the VM resumes. Channels with work that had started are [withheld](Self::withhold).
    ///
    /// # Errors
    /// Returns [`MoveError`] if the channels cannot arrive. In this case, nothing is changed.
    pub fn arrive(
        &mut self,
        host: &mut impl Host,
        vm: TenantId,
        moving: Moving,
        directory: impl Fn(VramAddr) -> Option<VramAddr>,
    ) -> Result<Vec<Arrived>, MoveError> {
        let Moving { vm: saved, channels } = moving;
        let record = self.vms.get(&vm).ok_or(BindError::NoSuchVm)?;
        let new = record.paused != 0 && record.channels.is_empty();
        Invalid::unless(new, || format!("VM {vm} already has channels here, or is not paused"))?;
        if channels.len() > record.cap as usize {
            return Err(BindError::Cap { cap: record.cap }.into());
        }
        if self.slots.iter().filter(|slot| matches!(slot, Slot::Free)).count() < channels.len() {
            return Err(BindError::Full.into());
        }
        check_distinct(&channels)?;
        let made = channels.into_iter().map(|channel| {
            let at = directory(VramAddr(channel.bound.directory));
            let at = at.ok_or_else(|| Invalid::new("the address space of a channel is missing"))?;
            self.check_images(&channel)?;
            let bound = SavedBound { vm: vm.0, directory: page(at.0)?.0, ..channel.bound.clone() };
            Ok((Bound::restored(bound, &self.vms)?, channel))
        });
        let made: Vec<(Bound, Channel)> = made.collect::<Result<_, Invalid>>()?;
        let Vm { list, refused, saved, news, told, .. } = record_of(saved, &made)?;
        let mut arrived = Vec::new();
        for (bound, channel) in made {
            arrived.push(self.install(host, vm, bound, &channel)?);
        }
        if let Some(record) = self.vms.get_mut(&vm) {
            (record.list, record.refused, record.saved) = (list, refused, saved);
            (record.news, record.told) = (news, told);
        }
        host.vram_flush();
        self.submit(host);
        Ok(arrived)
    }

    /// Assigns a physical channel number to an arriving channel, and writes the channel's data to the card.
    fn install(
        &mut self,
        host: &mut impl Host,
        vm: TenantId,
        mut bound: Bound,
        channel: &Channel,
    ) -> Result<Arrived, BindError> {
        let physical = self.take_free()?;
        self.serial = self.serial.wrapping_add(1);
        bound.serial = self.serial;
        (bound.told, bound.stranded, bound.still) = (RunState::Stopped, false, None);
        let with_card = bound.ring.with_card();
        if bound.permit != Permit::Ended {
            bound.permit = if with_card > 0 { Permit::Withheld } else { Permit::Granted };
        }
        let mut flights = Vec::new();
        for (index, record) in bound.ring.records.iter_mut().enumerate() {
            record.submission = Submission(self.submissions);
            self.submissions = self.submissions.wrapping_add(1);
            flights.push((record.submission, index < with_card));
        }
        let number = bound.channel;
        if let Some(record) = self.vms.get_mut(&vm) {
            record.channels.insert(number.0, physical);
        }
        let layout = self.layout;
        let mut block = *channel.block;
        put_wide(&mut block, ramfc::USERD_LO, layout.userd(physical).0);
        put_wide(&mut block, instance_vm::PDB_LO, bound.directory.0);
        self.go(physical, Slot::Bound(Box::new(bound)));
        card::stop(host, physical);
        for ((at, _), image) in layout.images_of(physical).into_iter().zip(&channel.images) {
            write_pages(host, at, image);
        }
        host.vram_write(layout.userd(physical), &*channel.userd);
        write_pages(host, layout.work_area(physical), &channel.work);
        host.vram_write(layout.instance(physical), &block);
        host.vram_flush();
        card::make_known(host, &layout, physical);
        Ok(Arrived { channel: number, physical, flights })
    }

    /// Checks that contexts have the same size on both cards.
    fn check_images(&self, channel: &Channel) -> Result<(), Invalid> {
        let here = self.layout.images_of(ChannelId(0)).map(|(_, bytes)| bytes);
        let same = here.into_iter().eq(channel.images.iter().map(|image| image.len() as u64));
        Invalid::unless(same, || "PGRAPH contexts have another size on this card".into())
    }

    /// Returns the span for a VM's next channel. This is the span with the channel's physical number, unless a migrated
    /// channel of the VM already has it.
    pub(super) fn take_span(&self, vm: TenantId, physical: ChannelId) -> Result<Span, BindError> {
        let taken = self.slots.iter().filter_map(|slot| match slot {
            Slot::Bound(bound) => (bound.vm == vm).then_some(bound.span),
            Slot::Stuck { vm: of, span, .. } => (*of == vm).then_some(*span),
            Slot::Free => None,
        });
        let taken: Vec<Span> = taken.collect();
        let all = (0u8..).take(CHANNELS as usize).map(Span);
        [physical.into()].into_iter().chain(all).find(|span| !taken.contains(span)).ok_or(BindError::Full)
    }

    /// Returns the span of a bound physical channel.
    #[must_use]
    pub fn span(&self, physical: ChannelId) -> Option<Span> {
        self.bound(physical).map(|bound| bound.span)
    }
}

/// Reads `bytes` bytes of VRAM page by page, starting at the page-aligned address `at`.
fn read_pages(host: &mut impl Host, at: VramAddr, bytes: u64) -> Vec<u8> {
    let mut data = vec![0; usize::try_from(bytes).unwrap_or(0)];
    for (page, offset) in data.chunks_mut(BLOCK).zip((0..).step_by(BLOCK)) {
        host.vram_read(at.offset(offset), page);
    }
    data
}

/// Writes VRAM page by page, starting at the page-aligned address `at`.
fn write_pages(host: &mut impl Host, at: VramAddr, data: &[u8]) {
    for (page, offset) in data.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        host.vram_write(at.offset(offset), page);
    }
}

/// Checks that no two channels have the same guest number or the same span.
fn check_distinct(channels: &[Channel]) -> Result<(), Invalid> {
    let (mut numbers, mut spans) = (BTreeSet::new(), BTreeSet::new());
    for Channel { bound: SavedBound { channel, span, .. }, .. } in channels {
        let sound = u32::from(*channel) < CHANNELS && u32::from(*span) < CHANNELS;
        Invalid::unless(sound && numbers.insert(*channel) && spans.insert(*span), || {
            format!("channel {channel} is listed twice, or has the span of another channel ({span})")
        })?;
    }
    Ok(())
}

/// Restores the VM's state other than its channels, and checks that it is consistent with them.
fn record_of(saved: SavedVm, channels: &[(Bound, Channel)]) -> Result<Vm, Invalid> {
    let numbered = || (0u8..).map(ChannelId).zip(channels);
    let by_guest = numbered().map(|(number, (bound, _))| (bound.channel.0, number)).collect();
    let slots: Vec<SavedSlot> =
        channels.iter().map(|(_, channel)| SavedSlot::Bound(Box::new(channel.bound.clone()))).collect();
    Vm::restored(saved, by_guest, &slots)
}

#[cfg(test)]
mod tests;
