//! A VM's work that waits for memory, with a time limit.
//!
//! No thread waits for memory while it holds a lock. Work that lacks memory is recorded, and the mover is notified.
//! When the mover notifies the VM that memory is available, the VM retries all of this work.

mod saved;

pub(crate) use saved::SavedPending;

use ::channels::Doorbell;
use card_manager::{CardState, Looks};
use nvspec::addr::Place;
use nvspec::fifo::VirtualChannelId;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use vram::TenantId;

/// A wait for memory, which is limited by the number of the mover's failed scans rather than by time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    /// Start time of the wait, for statistics.
    since: Instant,
    looks: Looks,
}

impl Wait {
    pub(crate) fn begin(state: &CardState, vm: TenantId) -> Self {
        Self { since: Instant::now(), looks: state.vram().looks(vm) }
    }

    /// Returns true if the mover's scans have failed as often as `limit` permits.
    pub(crate) fn is_over(&self, state: &CardState, vm: TenantId, limit: Duration) -> bool {
        state.vram().is_vain(vm, self.looks, limit)
    }

    /// Returns the length of the wait so far, in ns.
    fn ns(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A guest channel whose bind waits for card memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingBind {
    pub(crate) instance: Place,
    pub(crate) enabled: bool,
    /// GP_PUT of the channel's last doorbell, if any.
    pub(crate) gp_put: Option<u32>,
    pub(crate) wait: Wait,
}

/// A VM's binds and work that wait for memory.
#[derive(Debug)]
pub(crate) struct Pending {
    vm: TenantId,
    /// Maximum time that an entry may wait while the mover's scans fail.
    limit: Duration,
    binds: BTreeMap<VirtualChannelId, PendingBind>,
    /// Doorbells of bound channels whose work waits for memory, and the start of each wait.
    work: BTreeMap<VirtualChannelId, (Doorbell, Wait)>,
    /// Last runlist that the guest submitted.
    listed: Vec<VirtualChannelId>,
}

impl Pending {
    /// Creates an empty queue whose entries may wait for `limit`.
    pub(crate) fn new(vm: TenantId, limit: Duration) -> Self {
        Self { vm, limit, binds: BTreeMap::new(), work: BTreeMap::new(), listed: Vec::new() }
    }

    /// Returns the maximum time that an entry may wait while the mover's scans fail.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Returns true if the bind of a channel is pending.
    pub(crate) fn is_bind(&self, channel: VirtualChannelId) -> bool {
        self.binds.contains_key(&channel)
    }

    /// Records the doorbell of a channel whose bind is pending. Returns `false` if no bind is pending.
    pub(crate) fn ring(&mut self, channel: VirtualChannelId, gp_put: u32) -> bool {
        let bind = self.binds.get_mut(&channel);
        bind.map(|bind| bind.gp_put = Some(gp_put)).is_some()
    }

    /// Records whether the guest has enabled a channel whose bind is pending.
    pub(crate) fn enable(&mut self, channel: VirtualChannelId, enabled: bool) {
        if let Some(bind) = self.binds.get_mut(&channel) {
            bind.enabled = enabled;
        }
    }

    /// Returns two flags for a channel with a pending bind: true if the guest has enabled it, and true if its doorbell
    /// was rung.
    pub(crate) fn state(&self, channel: VirtualChannelId) -> Option<(bool, bool)> {
        self.binds.get(&channel).map(|bind| (bind.enabled, bind.gp_put.is_some()))
    }

    /// Returns the GP_PUT that the guest wrote for a channel whose bind is pending.
    pub(crate) fn gp_put(&self, channel: VirtualChannelId) -> Option<u32> {
        self.binds.get(&channel)?.gp_put
    }

    /// Records the guest's runlist.
    pub(crate) fn list(&mut self, channels: &[VirtualChannelId]) {
        channels.clone_into(&mut self.listed);
    }

    /// Returns the guest's runlist if it contains the channel.
    pub(crate) fn list_with(&self, channel: VirtualChannelId) -> Option<Vec<VirtualChannelId>> {
        self.listed.contains(&channel).then(|| self.listed.clone())
    }

    /// Queues a bind. Returns `false` without queueing it if waiting is not permitted.
    pub(crate) fn add_bind(&mut self, state: &mut CardState, channel: VirtualChannelId, instance: Place) -> bool {
        let wait = Wait::begin(state, self.vm);
        if wait.is_over(state, self.vm, self.limit) {
            return false;
        }
        self.binds.insert(channel, PendingBind { instance, enabled: false, gp_put: None, wait });
        self.tell(state);
        true
    }

    /// Queues a channel's work, or replaces the doorbell of work that is already queued. Returns `Some(true)` if no
    /// work of the channel was queued, or `None` if the work has waited too long.
    pub(crate) fn add_work(&mut self, state: &mut CardState, doorbell: Doorbell) -> Option<bool> {
        let channel = doorbell.virtual_channel;
        let wait = self.work.get(&channel).map_or_else(|| Wait::begin(state, self.vm), |(_, wait)| *wait);
        if wait.is_over(state, self.vm, self.limit) {
            return None;
        }
        let first = self.work.insert(channel, (doorbell, wait)).is_none();
        self.tell(state);
        Some(first)
    }

    /// Ends the wait of a channel's bind or work. Returns the duration of the wait in ns.
    pub(crate) fn end(&mut self, state: &mut CardState, channel: VirtualChannelId) -> u64 {
        let bind = self.binds.remove(&channel).map(|bind| bind.wait);
        let work = self.work.remove(&channel).map(|(_, wait)| wait);
        let waits = bind.into_iter().chain(work);
        let waited = waits.map(|wait| wait.ns()).reduce(u64::saturating_add);
        if waited.is_some() {
            self.tell(state);
        }
        waited.unwrap_or(0)
    }

    /// Requests a notification from the mover when memory becomes available, or cancels the request if none of the VM's
    /// work waits for memory.
    pub(crate) fn tell(&self, state: &mut CardState) {
        state.vram_mut().set_waits(self.vm, !self.is_empty());
    }

    /// Returns the pending binds.
    pub(crate) fn binds(&self) -> Vec<(VirtualChannelId, PendingBind)> {
        self.binds.iter().map(|(channel, bind)| (*channel, *bind)).collect()
    }

    /// Returns the doorbells whose work waits for memory.
    pub(crate) fn work(&self) -> Vec<Doorbell> {
        self.work.values().map(|(doorbell, _)| *doorbell).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.binds.is_empty() && self.work.is_empty()
    }
}
