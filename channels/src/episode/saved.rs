//! Saved form of the watchdog. Times are those of the caller's clock.

use super::{Episode, Signature, Watchdog};
use nvspec::fifo::{CHANNELS, ChannelId, engine};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// Saved form of an [`Episode`]: a channel's state, and the time at which it last changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedEpisode {
    pub(crate) channel: u8,
    serial: u64,
    gp_get: u32,
    get: u32,
    completed: u32,
    since_ns: u64,
    reported: bool,
}

impl Episode {
    pub(crate) fn save(&self) -> SavedEpisode {
        let Self { signature, since_ns, reported } = *self;
        let Signature { channel, serial, gp_get, get, completed } = signature;
        SavedEpisode { channel: channel.0, serial, gp_get, get, completed, since_ns, reported }
    }

    pub(crate) fn restored(saved: &SavedEpisode) -> Result<Self, Invalid> {
        let SavedEpisode { channel, serial, gp_get, get, completed, since_ns, reported } = *saved;
        Invalid::unless(u32::from(channel) < CHANNELS, || {
            format!("an engine runs channel {channel}, which does not exist")
        })?;
        let signature = Signature { channel: ChannelId(channel), serial, gp_get, get, completed };
        Ok(Self { signature, since_ns, reported })
    }
}

impl Watchdog {
    pub(crate) fn save(&self) -> Vec<Option<SavedEpisode>> {
        let Self { limit_ns: _, episodes } = self;
        episodes.iter().map(|episode| episode.as_ref().map(Episode::save)).collect()
    }

    pub(crate) fn restored(limit_ns: u64, saved: &[Option<SavedEpisode>]) -> Result<Self, Invalid> {
        Invalid::unless(saved.len() == engine::COUNT as usize, || {
            "the watchdog is for a different number of engines".into()
        })?;
        let mut watchdog = Self::new(limit_ns);
        for (episode, saved) in watchdog.episodes.iter_mut().zip(saved) {
            *episode = saved.as_ref().map(Episode::restored).transpose()?;
        }
        Ok(watchdog)
    }
}
