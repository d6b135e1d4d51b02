//! Saved form of a VM's use of the card.

use super::channels::own_pages;
use super::{Counts, Description, Pace, VmBackend};
use crate::memory::{Memory, Restored, SavedMemory};
use crate::pending::SavedPending;
use crate::pv::{Around, Attachments, PvSettings, SavedAttachments, SavedInterface};
use crate::work::{Bound, SavedWork};
use crate::write_wait::WriteWait;
use card_manager::{Departing, ManagedCard, ManagerError};
use nvspec::addr::VramAddr;
use nvspec::fifo::VirtualChannelId;
use pv::Tables;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use shadow_pt::SavedSpaces;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Saved form of a [`VmBackend`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedBackend {
    memory: SavedMemory,
    work: SavedWork,
    pending: SavedPending,
    /// Names and values of the counters.
    counts: Vec<(String, u64)>,
    pv: Option<SavedInterface>,
}

/// Returns a guest channel's address space and physical channels, or `None` if the channel is not on the card.
fn bound_of(
    channels: &channels::Channels,
    memory: &Memory,
    vm: vram::TenantId,
    channel: VirtualChannelId,
) -> Option<Bound> {
    let space = memory.space_of(channels.directory_of(vm, channel)?)?;
    let physical = channels.physical(vm, channel)?;
    Some(Bound { space, physical, span: channels.span(physical)? })
}

/// Channels whose doorbells are submitted when the card resumes, with their GP_PUT values.
pub(crate) type WaitingDoorbells = Vec<(VirtualChannelId, u32)>;

impl VmBackend {
    /// Saves the VM's use of the card. Returns [`ManagerError::Unsettled`] if an access is in progress, or if a channel
    /// waits for memory or is leaving the card.
    pub(crate) fn save_side(&self) -> Result<SavedBackend, ManagerError> {
        let Self {
            host: _,
            vm: _,
            link: _,
            memory,
            work,
            pending,
            // No write waits, because the VM is not served.
            writes: _,
            stop,
            faults,
            // The next process computes this flag again.
            quiet: _,
            doorbell,
            counts,
            // The next process starts with a full budget.
            pace: _,
            pv,
        } = self;
        if stop.is_some() || !faults.is_empty() || doorbell.is_some() {
            return Err(ManagerError::Unsettled("an access of a VM is in progress"));
        }
        Ok(SavedBackend {
            memory: memory.save_own(),
            work: work.save().ok_or(ManagerError::Unsettled("a channel is leaving the card"))?,
            pending: pending.save().ok_or(ManagerError::Unsettled("a channel of a VM waits for memory"))?,
            counts: counts.named().map(|(name, count)| (name.to_owned(), count)).collect(),
            pv: pv.as_ref().map(|pv| pv.save()).transpose()?,
        })
    }

    /// Saves the mapped segments, if any.
    pub(crate) fn save_attachments(&self) -> Option<SavedAttachments> {
        self.pv.as_ref()?.attachments().save(|space| self.memory.directory(space))
    }

    /// Returns true if any segment is mapped.
    pub(crate) fn has_segments(&self) -> bool {
        self.pv.as_ref().is_some_and(|pv| !pv.attachments().is_empty())
    }

    /// Builds all address spaces on the card from the guest's tables. Restored spaces have no memory mapped yet.
    pub(crate) fn prepare_all(&mut self) -> Result<(), ManagerError> {
        self.memory.prepare_all()
    }

    /// Restores the state of a VM migrated from another card: its address spaces, and the state that its channels had
    /// on that card. The VM's memory is already on this card, and the VM is paused and not served yet. After an error,
    /// the caller must discard the VM. Returns an error if the state is invalid, or if the card has too little memory
    /// or too few channels.
    pub(crate) fn arrive(
        &mut self,
        saved: SavedBackend,
        spaces: SavedSpaces,
        tables: Option<Tables>,
        departing: Departing,
        settings: Option<(&PvSettings, u32)>,
    ) -> Result<WaitingDoorbells, ManagerError> {
        let SavedBackend { memory, work, pending, counts, pv } = saved;
        let places = self.memory.arrive(memory, spaces, tables)?;
        let place = |there: VramAddr| places.iter().find(|(old, _)| *old == there).map(|(_, new)| *new);
        let (host, vm) = (Arc::clone(&self.host), self.vm);
        host.lock().arrive(vm, departing, place)?;
        self.work = {
            let state = host.lock();
            work.restored(|channel| bound_of(state.channels(), &self.memory, vm, channel))?
        };
        let all: Vec<Bound> = self.work.all_bound().map(|(_, bound)| bound).collect();
        let there = host.lock().channels().bound_of(vm).count();
        Invalid::unless(all.len() == there, || {
            format!("{there} channels have arrived, but the guest has bound {} of them", all.len())
        })?;
        for bound in all {
            self.memory.map_host(bound.space, &own_pages(host.layout(), bound))?;
        }
        let (pending, rung) = pending.restored(vm, self.pending.limit())?;
        self.pending = pending;
        self.pv = match (pv, settings) {
            (None, None) => None,
            (Some(pv), Some((settings, cap))) => {
                Some(Box::new(pv.restored(settings, vm, cap, &self.link.memory().snapshot())?))
            }
            (Some(_), None) | (None, Some(_)) => {
                return Err(Invalid::new("its paravirtual interface had different features").into());
            }
        };
        let counts: BTreeMap<String, u64> = counts.into_iter().collect();
        self.counts = Counts::restore(|name| counts.get(name).copied());
        self.quiet = false;
        Ok(rung)
    }

    /// Restores the saved state for a card that has not been taken over yet. Returns an error if the state is invalid
    /// or the client lends different memory.
    pub(crate) fn restored(
        host: Arc<ManagedCard>,
        description: Description,
        settings: Option<(&PvSettings, u32)>,
        saved: SavedBackend,
        segments: Option<SavedAttachments>,
        restored: Restored,
    ) -> Result<(Self, WaitingDoorbells), ManagerError> {
        let SavedBackend { memory, work, pending, counts, pv } = saved;
        let Description { vm, link, shadow: _, vram_bytes, queue_limit } = description;
        let memory = Memory::restored(Arc::clone(&host), vm, link.clone(), vram_bytes, memory, restored)?;
        let (work, all) = {
            let state = host.lock();
            let channels = state.channels();
            let bound = |channel| bound_of(channels, &memory, vm, channel);
            (work.restored(bound)?, channels.bound_of(vm).count())
        };
        Invalid::unless(work.all_bound().count() == all, || {
            format!("{all} channels are on the card, but the guest has bound {} of them", work.all_bound().count())
        })?;
        let attachments = Attachments::restored(
            segments,
            &Around {
                segments: host.lock().memory().segments_attached(vm),
                space: &|directory| memory.space_of(directory),
                of_channel: &|channel| work.bound(channel).map(|bound| bound.space),
            },
        )?;
        let (pending, rung) = pending.restored(vm, queue_limit)?;
        let pv = match (pv, settings) {
            (None, None) if attachments.is_empty() => None,
            (Some(pv), Some((settings, cap))) => {
                let mut pv = pv.restored(settings, vm, cap, &link.memory().snapshot())?;
                *pv.attachments_mut() = attachments;
                Some(Box::new(pv))
            }
            (Some(_) | None, None) | (None, Some(_)) => {
                return Err(Invalid::new("its paravirtual interface had different features").into());
            }
        };
        let counts: BTreeMap<String, u64> = counts.into_iter().collect();
        let this = Self {
            host,
            vm,
            link,
            memory,
            work,
            pending,
            writes: WriteWait::new(queue_limit),
            stop: None,
            pace: Pace::default(),
            faults: Vec::new(),
            quiet: false,
            doorbell: None,
            counts: Counts::restore(|name| counts.get(name).copied()),
            pv,
        };
        Ok((this, rung))
    }
}
