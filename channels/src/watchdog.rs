//! Detects channels without progress: those that keep an engine busy, and those that stall although no engine is busy.

use crate::card;
use crate::episode::{Episode, Signature};
use crate::pool::{Bound, Slot};
use crate::{Channels, Hang, Host, RunState, Stall, TenantId};
use nvspec::addr::GpuVa;
use nvspec::fifo::{ChannelId, engine};
use nvspec::instance::userd;
use nvspec::regs::pfifo::CHANNEL_STATE;

impl Channels {
    /// Sets the time limit for a VM's channels to keep an engine busy without progress, in ns, or removes it with
    /// `None`.
    pub fn set_hang_limit(&mut self, vm: TenantId, limit_ns: Option<u64>) {
        if let Some(record) = self.vms.get_mut(&vm) {
            record.hang_limit = limit_ns;
        }
    }

    /// Polls each engine, and returns the channels that have kept an engine busy for too long without progress. A
    /// channel is not returned again before it has made progress. Channels that wait for a semaphore are included,
    /// because the host unit runs ahead of the engine, which may still be busy. Call this function several times within
    /// the time limit.
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

    /// Returns channels that have work in flight, may run, do not wait for a semaphore, and have made no progress for
    /// longer than the hang limit, although no engine was running another channel. A channel is not returned again
    /// before it has made progress. The card can report only one fetch fault at a time, so a fault can be lost while
    /// another one is pending. This check finds the affected channels. Call this function as often as [`Self::look`].
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
