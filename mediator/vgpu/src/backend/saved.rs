//! One VM's side of the card as it is saved.

use super::{Counts, Description, VmBackend};
use crate::memory::{Memory, Restored, SavedMemory};
use crate::pending::SavedPending;
use crate::pv::{PvSettings, SavedInterface};
use crate::work::{Bound, SavedWork};
use crate::write_wait::WriteWait;
use nvspec::fifo::VirtualChannelId;
use owner::{HostCard, HostError};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedBackend {
    memory: SavedMemory,
    work: SavedWork,
    pending: SavedPending,
    /// By name.
    counts: Vec<(String, u64)>,
    pv: Option<SavedInterface>,
}

/// Channels that are to be rung once the card goes on, with GP_PUT.
pub(crate) type Rung = Vec<(VirtualChannelId, u32)>;

impl VmBackend {
    /// Writes the side down.
    ///
    /// # Errors
    /// [`HostError::Unsettled`] when something is under way.
    pub(crate) fn save_side(&self) -> Result<SavedBackend, HostError> {
        let Self {
            host: _,
            vm: _,
            link: _,
            memory,
            work,
            pending,
            // Nobody serves the VM.
            writes: _,
            stop,
            faults,
            // It is found out again.
            quiet: _,
            counts,
            pv,
        } = self;
        if stop.is_some() || !faults.is_empty() {
            return Err(HostError::Unsettled("an access of a VM is under way"));
        }
        Ok(SavedBackend {
            memory: memory.save_own(),
            work: work.save().ok_or(HostError::Unsettled("a channel leaves the card"))?,
            pending: pending.save().ok_or(HostError::Unsettled("a channel of a VM waits for memory"))?,
            counts: counts.named().map(|(name, count)| (name.to_owned(), count)).collect(),
            pv: pv.as_ref().map(|pv| pv.save()).transpose()?,
        })
    }

    /// Puts all address spaces on the card as the guest has them: what was restored of them maps nothing of its.
    pub(crate) fn prepare_all(&mut self) -> Result<(), HostError> {
        self.memory.prepare_all()
    }

    /// The side as it was, of a card that is not taken over yet.
    ///
    /// # Errors
    /// When it is none that there can be, or the client has not lent what it had.
    pub(crate) fn restored(
        host: Arc<HostCard>,
        description: Description,
        settings: Option<(&PvSettings, u32)>,
        (saved, restored): (SavedBackend, Restored),
    ) -> Result<(Self, Rung), HostError> {
        let SavedBackend { memory, work, pending, counts, pv } = saved;
        let Description { vm, link, shadow: _, vram_bytes, queue_limit } = description;
        let memory = Memory::restored(Arc::clone(&host), vm, link.clone(), vram_bytes, (memory, restored))?;
        let (work, all) = {
            let state = host.lock();
            let channels = state.channels();
            let bound = |channel| {
                let space = memory.space_of(channels.directory_of(vm, channel)?)?;
                Some(Bound { space, physical: channels.physical(vm, channel)? })
            };
            (work.restored(bound)?, channels.bound_of(vm).count())
        };
        Invalid::unless(work.all_bound().count() == all, || {
            format!("{all} channels are on the card, of which the guest knows {}", work.all_bound().count())
        })?;
        let (pending, rung) = pending.restored(vm, queue_limit)?;
        let pv = match (pv, settings) {
            (None, None) => None,
            (Some(pv), Some((settings, cap))) => {
                Some(Box::new(pv.restored(settings, (vm, cap), &link.memory().snapshot())?))
            }
            (Some(_), None) | (None, Some(_)) => {
                return Err(Invalid::new("its paravirtual interface was offered otherwise").into());
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
            faults: Vec::new(),
            quiet: false,
            counts: Counts::of(|name| counts.get(name).copied()),
            pv,
        };
        Ok((this, rung))
    }
}
