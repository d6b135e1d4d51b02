//! Context switches that do not complete: the scheduler's reports to the driver about a channel that stays on an
//! engine.
//!
//! The error has one reason register and one interrupt bit for all engines, and a driver acknowledges it after it has
//! checked the engines; an error that occurs in between is lost. So only one error is visible at a time, and the next
//! error waits until the driver has acknowledged it and has removed the channel, by resetting the engine or unbinding
//! the channel.

use super::Backlog;
use nvspec::fifo::{CHANNELS, VirtualChannelId, engine};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// A channel that does not leave an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hang {
    /// Number of the engine; below `nvspec::fifo::engine::COUNT`.
    pub engine: u32,
    pub channel: VirtualChannelId,
}

/// The visible hang, and the queued ones.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Hangs {
    shown: Option<Hang>,
    waiting: Backlog<Hang>,
}

impl Hangs {
    /// Queues a hang until [`Self::next`] shows it; repeated reports count once.
    pub fn add(&mut self, hang: Hang) {
        if self.shown != Some(hang) {
            self.waiting.take(|waits| *waits == hang);
            self.waiting.push(hang);
        }
    }

    /// Shows the next hang that `wanted` accepts, and drops the hangs before it. Returns false if a hang is still
    /// visible or no such hang is queued.
    pub fn next(&mut self, wanted: impl Fn(&Hang) -> bool) -> bool {
        if self.shown.is_some() {
            return false;
        }
        while let Some(hang) = self.waiting.take(|_| true) {
            if wanted(&hang) {
                self.shown = Some(hang);
                return true;
            }
        }
        false
    }

    /// Returns the channel that does not leave `engine`.
    pub fn on(&self, engine: u32) -> Option<VirtualChannelId> {
        self.shown.filter(|hang| hang.engine == engine).map(|hang| hang.channel)
    }

    /// Removes the hangs that `over` accepts.
    pub fn end(&mut self, over: impl Fn(&Hang) -> bool) {
        self.shown = self.shown.filter(|hang| !over(hang));
        while self.waiting.take(&over).is_some() {}
    }

    /// Removes all hangs. The number of dropped hangs is kept.
    pub fn reset(&mut self) {
        self.shown = None;
        self.waiting.clear();
    }

    /// Validates saved data.
    pub fn check(&self) -> Result<(), Invalid> {
        let Self { shown, waiting } = self;
        let sound = |hang: &Hang| hang.engine < engine::COUNT && u32::from(hang.channel.0) < CHANNELS;
        waiting.check(sound)?;
        Invalid::unless(shown.as_ref().is_none_or(sound), || "a channel hangs that there is not".into())
    }

    /// Returns the visible hang, and the numbers of queued and dropped hangs.
    pub fn counts(&self) -> (Option<Hang>, usize, u64) {
        (self.shown, self.waiting.len(), self.waiting.dropped)
    }
}
