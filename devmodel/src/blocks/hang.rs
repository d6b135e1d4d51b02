//! Context switches that do not end: what the scheduler tells the driver of a channel that keeps an engine.
//!
//! The error has one reason register and one interrupt bit for all engines, and a driver acknowledges it after it has
//! looked at the engines; one that comes in between is lost. So here only one is shown at a time, and the next waits until
//! the driver has acknowledged this one and has taken the channel off, by resetting the engine or unbinding the channel.

use super::Backlog;
use nvspec::fifo::{CHANNELS, VirtualChannelId, engine};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// A channel that does not leave an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hang {
    /// Below `nvspec::fifo::engine::COUNT`.
    pub engine: u32,
    pub channel: VirtualChannelId,
}

/// The hang that is shown, and those that wait.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Hangs {
    shown: Option<Hang>,
    waiting: Backlog<Hang>,
}

impl Hangs {
    /// Keeps a hang until [`Self::next`] shows it, once however often it is reported.
    pub fn add(&mut self, hang: Hang) {
        if self.shown != Some(hang) {
            self.waiting.take(|waits| *waits == hang);
            self.waiting.push(hang);
        }
    }

    /// Shows the next one that `wanted` is true for, dropping others; false when one is shown still or none waits.
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

    /// The channel that does not leave `engine`.
    pub fn on(&self, engine: u32) -> Option<VirtualChannelId> {
        self.shown.filter(|hang| hang.engine == engine).map(|hang| hang.channel)
    }

    /// Forgets the hangs for which `over` is true.
    pub fn end(&mut self, over: impl Fn(&Hang) -> bool) {
        self.shown = self.shown.filter(|hang| !over(hang));
        while self.waiting.take(&over).is_some() {}
    }

    /// Forgets all; what was dropped stays counted.
    pub fn reset(&mut self) {
        self.shown = None;
        self.waiting.clear();
    }

    /// Checks what was read.
    pub fn check(&self) -> Result<(), Invalid> {
        let Self { shown, waiting } = self;
        let sound = |hang: &Hang| hang.engine < engine::COUNT && u32::from(hang.channel.0) < CHANNELS;
        waiting.check(sound)?;
        Invalid::unless(shown.as_ref().is_none_or(sound), || "a channel hangs that there is not".into())
    }

    /// The one that is shown, how many wait, how many were dropped.
    pub fn counts(&self) -> (Option<Hang>, usize, u64) {
        (self.shown, self.waiting.len(), self.waiting.dropped)
    }
}
