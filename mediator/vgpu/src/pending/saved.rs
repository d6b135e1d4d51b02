//! Saved form of work that waits for memory. The time waited so far is not saved, so the limit starts again.

use super::Pending;
use nvspec::fifo::{CHANNELS, VirtualChannelId};
use saved_state::{Invalid, ascend};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use vram::TenantId;

/// Saved form of work that waits for memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedPending {
    /// Channels whose work waits for memory, and the GP_PUT values of their doorbells.
    rung: Vec<(u8, u32)>,
    /// Last runlist that the guest submitted.
    listed: Vec<u8>,
}

impl Pending {
    /// Saves the work that waits for memory. Returns `None` while any bind is pending.
    pub(crate) fn save(&self) -> Option<SavedPending> {
        let Self { vm: _, limit: _, binds, work, listed } = self;
        let rung = work.iter().map(|(channel, (doorbell, _))| (channel.0, doorbell.gp_put)).collect();
        let listed = listed.iter().map(|channel| channel.0).collect();
        binds.is_empty().then_some(SavedPending { rung, listed })
    }
}

impl SavedPending {
    /// Restores an empty queue. Also returns the channels whose doorbells must be submitted again when the card
    /// resumes, with the doorbells' GP_PUT values. Returns an error if the saved state is invalid.
    pub(crate) fn restored(
        self,
        vm: TenantId,
        limit: Duration,
    ) -> Result<(Pending, Vec<(VirtualChannelId, u32)>), Invalid> {
        let Self { rung, listed } = self;
        let numbers =
            rung.iter().map(|(channel, _)| channel).chain(&listed).all(|channel| u32::from(*channel) < CHANNELS);
        let sound = numbers && ascend(rung.iter().map(|(channel, _)| channel)) && listed.len() <= 2 * CHANNELS as usize;
        Invalid::unless(sound, || "work waits on channels that do not exist".into())?;
        let mut pending = Pending::new(vm, limit);
        pending.listed = listed.into_iter().map(VirtualChannelId).collect();
        Ok((pending, rung.into_iter().map(|(channel, gp_put)| (VirtualChannelId(channel), gp_put)).collect()))
    }
}
