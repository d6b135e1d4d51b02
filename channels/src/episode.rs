//! Measures how long the current work of an engine or channel has made no progress.

mod saved;

pub(crate) use saved::SavedEpisode;

use nvspec::fifo::{ChannelId, engine};

/// Time limit for a channel to keep an engine busy without progress, in ns. Applies to VMs without their own limit.
// TIMEOUT: nouveau abandons its own work after 15 seconds, and the guest should see the fault before that.
pub const HANG_LIMIT_NS: u64 = 10_000_000_000;

/// State of a channel that changes while the channel makes progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) channel: ChannelId,
    /// Serial number of the channel's binding.
    pub(crate) serial: u64,
    /// GP_GET as maintained by the card.
    pub(crate) gp_get: u32,
    /// Low dword of GET as stored by the card.
    pub(crate) get: u32,
    /// Sequence number of the last submission that has ended.
    pub(crate) completed: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Episode {
    signature: Signature,
    since_ns: u64,
    reported: bool,
}

/// Tracks the start of each engine's current period without progress.
#[derive(Debug)]
pub struct Watchdog {
    limit_ns: u64,
    episodes: [Option<Episode>; engine::COUNT as usize],
}

impl Watchdog {
    /// Creates a watchdog without observations. `limit_ns` applies to VMs without their own limit.
    #[must_use]
    pub const fn new(limit_ns: u64) -> Self {
        Self { limit_ns, episodes: [None; engine::COUNT as usize] }
    }

    /// Returns the limit for VMs without their own limit, in ns.
    #[must_use]
    pub const fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// Records that engine `unit` is running `signature`, or no channel, at `now_ns`. Once per stall, when the time
    /// without progress exceeds `limit_ns`, returns that time.
    pub(crate) fn sample(
        &mut self,
        unit: u32,
        signature: Option<Signature>,
        limit_ns: Option<u64>,
        now_ns: u64,
    ) -> Option<u64> {
        let episode = self.episodes.get_mut(usize::try_from(unit).ok()?)?;
        Episode::sample(episode, signature, limit_ns, now_ns)
    }
}

impl Episode {
    /// Like [`Watchdog::sample`] for a single episode.
    pub(crate) fn sample(
        episode: &mut Option<Self>,
        signature: Option<Signature>,
        limit_ns: Option<u64>,
        now_ns: u64,
    ) -> Option<u64> {
        let Some(signature) = signature else {
            *episode = None;
            return None;
        };
        match episode {
            Some(known) if known.signature == signature => {
                let for_ns = now_ns.saturating_sub(known.since_ns);
                let hangs = !known.reported && limit_ns.is_some_and(|limit| for_ns > limit);
                known.reported |= hangs;
                hangs.then_some(for_ns)
            }
            _ => {
                *episode = Some(Self { signature, since_ns: now_ns, reported: false });
                None
            }
        }
    }
}
