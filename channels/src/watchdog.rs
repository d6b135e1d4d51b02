//! Channels without progress: those that keep an engine busy, or that stand still while no engine is busy.

mod saved;

pub(crate) use saved::SavedEpisode;

use crate::card;
use crate::pool::{Bound, Slot};
use crate::{Channels, Hang, Host, RunState, Stall, TenantId};
use nvspec::addr::GpuVa;
use nvspec::fifo::{ChannelId, engine};
use nvspec::instance::userd;
use nvspec::regs::pfifo::CHANNEL_STATE;

/// Time for which a channel may keep an engine busy without progress, unless its VM has another limit.
// TIMEOUT: nouveau gives its own work up after 15 seconds; the guest should see the fault before that.
pub const HANG_LIMIT_NS: u64 = 10_000_000_000;

/// Signature of a channel, which changes while the channel makes progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) channel: ChannelId,
    /// Serial number of the binding.
    pub(crate) serial: u64,
    /// The card's own value.
    pub(crate) gp_get: u32,
    /// Low word of the card's own value.
    pub(crate) get: u32,
    /// Last submission that has ended.
    pub(crate) completed: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Episode {
    signature: Signature,
    since_ns: u64,
    reported: bool,
}

/// For each engine, the time since which its current work has made no progress.
#[derive(Debug)]
pub struct Watchdog {
    limit_ns: u64,
    episodes: [Option<Episode>; engine::COUNT as usize],
}

impl Watchdog {
    /// Creates a watchdog without observations. `limit_ns` applies to VMs without a limit of their own.
    #[must_use]
    pub const fn new(limit_ns: u64) -> Self {
        Self { limit_ns, episodes: [None; engine::COUNT as usize] }
    }

    /// Returns the limit of VMs without one of their own.
    #[must_use]
    pub const fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// Notes that engine `unit` works for `signature` at `now_ns`, or for none. Returns the time without progress when
    /// that exceeds `limit_ns`, once per standstill.
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
    /// Does the same as [`Watchdog::sample`] for one episode.
    fn sample(
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

impl Channels {
    /// Sets for how long a VM's channels may keep an engine busy without progress, in ns; `None` for no limit.
    pub fn set_hang_limit(&mut self, vm: TenantId, limit_ns: Option<u64>) {
        if let Some(record) = self.vms.get_mut(&vm) {
            record.hang_limit = limit_ns;
        }
    }

    /// Polls each engine, and returns the channels that have kept one busy for longer than allowed without progress;
    /// each once. It does not matter if the channel waits for a semaphore: the host interface runs ahead of the engine,
    /// which may still be working. Call it several times within a limit.
    pub fn look(&mut self, host: &mut impl Host, now_ns: u64) -> Vec<Hang> {
        (0..engine::COUNT).filter_map(|unit| self.look_at(host, unit, now_ns)).collect()
    }

    fn look_at(&mut self, host: &mut impl Host, unit: u32, now_ns: u64) -> Option<Hang> {
        let working = card::working_for(host, unit);
        let bound = working.and_then(|physical| Some((physical, self.bound(physical)?)));
        let signature = bound.map(|(channel, bound)| signature(host, channel, bound));
        let owner = bound.map(|(physical, bound)| (physical, bound.vm, bound.channel));
        let limit = owner.and_then(|(_, vm, _)| self.vms.get(&vm)?.hang_limit);
        let for_ns = self.watchdog.sample(unit, signature, limit, now_ns)?;
        let (physical, vm, channel) = owner?;
        Some(Hang { engine: unit, vm, channel, physical, for_ns })
    }

    /// Returns channels that have work in flight, may run, wait for no semaphore and have stood still for longer than
    /// the hang limit, though no engine worked for another; each once. The card has room for one fault of the unit that
    /// fetches; this finds a channel whose fault came while another's was there. Call it as [`Self::look`].
    pub fn stalled(&mut self, host: &mut impl Host, now_ns: u64) -> Vec<Stall> {
        let working: Vec<ChannelId> = (0..engine::COUNT).filter_map(|unit| card::working_for(host, unit)).collect();
        let Self { slots, vms, gate, .. } = self;
        let mut stalls = Vec::new();
        for (slot, number) in slots.iter_mut().zip(0..) {
            let Slot::Bound(bound) = slot else { continue };
            let physical = ChannelId(number);
            let Some(vm) = vms.get(&bound.vm) else { continue };
            let is_to_run =
                bound.told == RunState::Running && bound.ring.with_card() > 0 && vm.list.contains(&bound.channel.0);
            let may_run = is_to_run && !gate.bars(bound, vm.trusted);
            let waits = |host: &mut _| {
                working.iter().any(|other| *other != physical)
                    || CHANNEL_STATE::ACQUIRE_PENDING.is_set(card::state(host, physical))
            };
            let signature = (may_run && !waits(host)).then(|| signature(host, physical, bound));
            if Episode::sample(&mut bound.still, signature, vm.hang_limit, now_ns).is_some() {
                let at = card::userd_wide(host, physical, userd::GET, userd::GET_HI);
                stalls.push(Stall { vm: bound.vm, channel: bound.channel, at: GpuVa(at) });
            }
        }
        stalls
    }
}

fn signature(host: &mut impl Host, channel: ChannelId, bound: &Bound) -> Signature {
    Signature {
        channel,
        serial: bound.serial,
        gp_get: host.userd_read(channel, userd::GP_GET),
        get: host.userd_read(channel, userd::GET),
        completed: bound.ring.completed,
    }
}

#[cfg(test)]
mod tests;
