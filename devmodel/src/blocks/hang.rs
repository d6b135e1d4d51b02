//! Hung context switches: reports channels that do not leave an engine.
//!
//! All engines share one reason register and one interrupt bit. A driver first checks the engines and then acknowledges
//! the error, so it would miss an error that occurs between the two steps. The vGPU therefore shows only one hang at a
//! time. It shows the next hang after the driver has acknowledged the current one, and has removed the hung channel by
//! resetting the engine or unbinding the channel.

use super::Backlog;
use nvspec::fifo::{CHANNELS, VirtualChannelId, engine};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// A channel that does not leave an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hang {
    /// Engine number, less than `nvspec::fifo::engine::COUNT`.
    pub engine: u32,
    pub channel: VirtualChannelId,
}

/// The visible hang and the queued hangs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Hangs {
    shown: Option<Hang>,
    waiting: Backlog<Hang>,
}

impl Hangs {
    /// Queues a hang until [`Self::next`] shows it. Ignores a hang that is already visible. A hang that is already
    /// queued moves to the end of the queue.
    pub fn add(&mut self, hang: Hang) {
        if self.shown != Some(hang) {
            self.waiting.take(|waits| *waits == hang);
            self.waiting.push(hang);
        }
    }

    /// Shows the next queued hang for which `wanted` returns true, and drops all hangs before it. Returns false if a
    /// hang is still visible, or if no queued hang is wanted.
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

    /// Returns the channel of the visible hang if the hang is on `engine`.
    pub fn on(&self, engine: u32) -> Option<VirtualChannelId> {
        self.shown.filter(|hang| hang.engine == engine).map(|hang| hang.channel)
    }

    /// Removes the hangs for which `over` returns true.
    pub fn end(&mut self, over: impl Fn(&Hang) -> bool) {
        self.shown = self.shown.filter(|hang| !over(hang));
        while self.waiting.take(&over).is_some() {}
    }

    /// Removes all hangs. Does not reset the number of dropped hangs.
    pub fn reset(&mut self) {
        self.shown = None;
        self.waiting.clear();
    }

    /// Validates restored state.
    pub fn check(&self) -> Result<(), Invalid> {
        let Self { shown, waiting } = self;
        let sound = |hang: &Hang| hang.engine < engine::COUNT && u32::from(hang.channel.0) < CHANNELS;
        waiting.check(sound)?;
        Invalid::unless(shown.as_ref().is_none_or(sound), || "a hang has an invalid channel or engine".into())
    }

    /// Returns the visible hang, and the numbers of queued and dropped hangs.
    pub fn counts(&self) -> (Option<Hang>, usize, u64) {
        (self.shown, self.waiting.len(), self.waiting.dropped)
    }
}
