//! Channels whose started work is currently kept off the card. The work resumes in its VM's next slice.
//!
//! There are two kinds. A channel of the first kind was stopped, by its guest or because memory moves, and has left the
//! card. It resumes when it may run again. A channel of the second kind waits for a semaphore, and *rests* while other
//! channels have work. It rests because its acquire may repeatedly block the method fetch unit for a whole time slice,
//! or because its VM has used up its [hops](WakeAllowance) for work between waits. Periodically, one resting channel is
//! queued for a slice, in which it polls its semaphore again. If the card has no other work, no channel rests.

use nvspec::fifo::ChannelId;
use sched::Nanos;
use std::collections::{BTreeMap, VecDeque};
use vram::TenantId;

/// Interval between semaphore polls by resting channels, in ns. A poll takes up to a millisecond, which is 3 % of this
/// time.
const REST_NS: u64 = 32_000_000;
/// Maximum number of hops that a VM may make in a burst ([`WakeAllowance`]).
const BURST_HOPS: u64 = 4;

/// Reason why a channel is descheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The channel may not run.
    Stopped,
    /// The channel waits for a semaphore, and other VMs have work.
    Rests,
    /// The channel waits for a slice.
    Queued,
}

/// The descheduled channels.
#[derive(Debug, Default)]
pub(crate) struct DescheduledChannels {
    pub(super) channels: BTreeMap<ChannelId, (TenantId, Why)>,
    /// Resting channels, in the order of their next polls.
    pub(super) resting: VecDeque<ChannelId>,
    /// Time of the next poll.
    pub(super) next: Nanos,
    pub(crate) hops: WakeAllowance,
}

impl DescheduledChannels {
    pub(crate) fn reason(&self, channel: ChannelId) -> Option<Why> {
        self.channels.get(&channel).map(|(_, why)| *why)
    }

    pub(crate) fn contains(&self, channel: ChannelId) -> bool {
        self.channels.contains_key(&channel)
    }

    /// Returns true if any resting channel waits for its next poll.
    pub(crate) fn any_rests(&self) -> bool {
        !self.resting.is_empty()
    }

    /// Returns all descheduled channels with their VMs.
    pub(crate) fn channels(&self) -> impl Iterator<Item = (ChannelId, TenantId)> {
        self.channels.iter().map(|(channel, (vm, _))| (*channel, *vm))
    }

    pub(crate) fn insert(&mut self, vm: TenantId, channel: ChannelId, why: Why, now: Nanos) {
        self.resting.retain(|resting| *resting != channel);
        self.channels.insert(channel, (vm, why));
        if why == Why::Rests {
            self.resting.push_back(channel);
            self.next = self.next.max(now.after(REST_NS));
        }
    }

    pub(crate) fn remove(&mut self, channel: ChannelId) -> bool {
        self.resting.retain(|resting| *resting != channel);
        self.channels.remove(&channel).is_some()
    }

    /// Removes channels that have left the card permanently.
    pub(crate) fn forget(&mut self, gone: impl Fn(TenantId, ChannelId) -> bool) {
        self.channels.retain(|channel, (vm, _)| !gone(*vm, *channel));
        let channels = &self.channels;
        self.resting.retain(|channel| channels.contains_key(channel));
    }

    /// Removes and returns the resting channel to poll next, if a poll is due. `wanted` is true if other work is on the
    /// card; otherwise, a poll is always due.
    pub(crate) fn wake_next(&mut self, now: Nanos, wanted: bool) -> Option<ChannelId> {
        if wanted && now < self.next {
            return None;
        }
        let channel = self.resting.pop_front()?;
        self.next = now.after(REST_NS);
        if let Some((_, why)) = self.channels.get_mut(&channel) {
            *why = Why::Stopped;
        }
        Some(channel)
    }
}

/// Limits how often a VM's channels do work between two polls that both find them waiting. Such work is neither
/// measured nor part of a slice. Therefore, each VM may do it a few times in a row, and then only as often as a resting
/// channel may poll.
#[derive(Debug, Default)]
pub(crate) struct WakeAllowance(pub(super) BTreeMap<TenantId, Nanos>);

impl WakeAllowance {
    /// Counts one hop. Returns false if the VM has used up its allowance.
    pub(crate) fn allow(&mut self, vm: TenantId, now: Nanos) -> bool {
        let paid = self.0.entry(vm).or_default();
        let next = (*paid).max(now).after(REST_NS);
        let allowed = next.since(now) <= BURST_HOPS * REST_NS;
        if allowed {
            *paid = next;
        }
        allowed
    }

    pub(crate) fn forget(&mut self, vm: TenantId) {
        self.0.remove(&vm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_has_some_hops_in_advance_and_then_one_for_each_rest() {
        let (mut hops, vm) = (WakeAllowance::default(), TenantId(1));
        let at = |ms: u64| Nanos(1_000_000_000 + ms * 1_000_000);
        assert_eq!((0..100).filter(|_| hops.allow(vm, at(0))).count() as u64, BURST_HOPS);
        assert!(hops.allow(TenantId(2), at(0)), "each VM has its own allowance");
        // A rejected hop does not count.
        assert!(!hops.allow(vm, at(31)) && hops.allow(vm, at(32)) && !hops.allow(vm, at(63)));
        // Unused hops do not accumulate.
        assert_eq!((0..100).filter(|_| hops.allow(vm, at(100_000))).count() as u64, BURST_HOPS);
        hops.forget(vm);
        assert!(hops.allow(vm, at(100_000)));
    }
}
