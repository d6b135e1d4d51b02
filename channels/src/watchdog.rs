//! Channels that keep an engine busy and get nowhere.

use crate::card;
use crate::{Channels, Hang, Host, VmId};
use nvspec::fifo::{ChannelId, engine};
use nvspec::instance::userd;
use nvspec::regs::pfifo::CHANNEL_STATE;

/// How long a channel may keep an engine busy and get nowhere, unless its VM has another limit.
// TIMEOUT: nouveau gives its own work up after 15 seconds; the guest is to see the fault before that.
pub const HANG_LIMIT_NS: u64 = 10_000_000_000;

/// What of a channel moves while it gets on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) channel: ChannelId,
    /// Which binding of it.
    pub(crate) serial: u64,
    /// The card's own.
    pub(crate) gp_get: u32,
    /// Low word of the card's own.
    pub(crate) get: u32,
    /// Last submission that has ended.
    pub(crate) completed: u32,
}

#[derive(Clone, Copy, Debug)]
struct Episode {
    signature: Signature,
    since_ns: u64,
    reported: bool,
}

/// For each engine, since when what it works for has not moved.
#[derive(Debug)]
pub struct Watchdog {
    limit_ns: u64,
    episodes: [Option<Episode>; engine::COUNT as usize],
}

impl Watchdog {
    /// A watchdog that has seen nothing yet. `limit_ns` is what VMs without a limit of their own have.
    #[must_use]
    pub const fn new(limit_ns: u64) -> Self {
        Self { limit_ns, episodes: [None; engine::COUNT as usize] }
    }

    /// The limit of VMs without one of their own.
    #[must_use]
    pub const fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// Engine `unit` works for `signature` at `now_ns`, or for nothing that counts. Returns since how long it has, once
    /// that is longer than `limit_ns`; once for each time that it stands still.
    pub(crate) fn sample(
        &mut self,
        unit: u32,
        signature: Option<Signature>,
        limit_ns: Option<u64>,
        now_ns: u64,
    ) -> Option<u64> {
        let episode = self.episodes.get_mut(usize::try_from(unit).ok()?)?;
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
                *episode = Some(Episode { signature, since_ns: now_ns, reported: false });
                None
            }
        }
    }
}

impl Channels {
    /// How long a VM's channels may keep an engine busy and get nowhere, in ns; `None` for as long as they like.
    pub fn set_hang_limit(&mut self, vm: VmId, limit_ns: Option<u64>) {
        if let Some(record) = self.vms.get_mut(&vm) {
            record.hang_limit = limit_ns;
        }
    }

    /// Looks at each engine, and returns the channels that have kept one busy for longer than they may without getting
    /// on; each once. A channel that waits for a semaphore is not one. To be called several times within a limit.
    pub fn look(&mut self, host: &mut impl Host, now_ns: u64) -> Vec<Hang> {
        (0..engine::COUNT).filter_map(|unit| self.look_at(host, unit, now_ns)).collect()
    }

    fn look_at(&mut self, host: &mut impl Host, unit: u32, now_ns: u64) -> Option<Hang> {
        let working = card::working_for(host, unit).filter(|physical| {
            self.bound(*physical).is_some() && !CHANNEL_STATE::ACQUIRE_PENDING.is_set(card::state(host, *physical))
        });
        let bound = working.and_then(|physical| Some((physical, self.bound(physical)?)));
        let signature = bound.map(|(channel, bound)| Signature {
            channel,
            serial: bound.serial,
            gp_get: host.userd_read(channel, userd::GP_GET),
            get: host.userd_read(channel, userd::GET),
            completed: bound.ring.completed,
        });
        let owner = bound.map(|(physical, bound)| (physical, bound.vm, bound.channel));
        let limit = owner.and_then(|(_, vm, _)| self.vms.get(&vm)?.hang_limit);
        let for_ns = self.watchdog.sample(unit, signature, limit, now_ns)?;
        let (physical, vm, channel) = owner?;
        Some(Hang { engine: unit, vm, channel, physical, for_ns })
    }
}

#[cfg(test)]
#[path = "tests/watchdog.rs"]
mod tests;
