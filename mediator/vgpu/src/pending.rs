//! Work of a VM that waits for memory, with its time limit.
//!
//! No thread waits here with a lock held: blocked work is recorded, the mover gets a request for memory, and all work
//! is retried when the mover notifies the VM of available memory.

mod saved;

pub(crate) use saved::SavedPending;

use ::channels::Doorbell;
use card_manager::{CardState, Looks};
use nvspec::addr::Place;
use nvspec::fifo::VirtualChannelId;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use vram::TenantId;

/// A wait for memory. Its end depends on the mover's scans, not on the clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    /// Used for the accounts.
    since: Instant,
    looks: Looks,
}

impl Wait {
    pub(crate) fn begin(state: &CardState, vm: TenantId) -> Self {
        Self { since: Instant::now(), looks: state.vram().looks(vm) }
    }

    /// Returns whether the mover has scanned without success while `limit` allows.
    pub(crate) fn is_over(&self, state: &CardState, vm: TenantId, limit: Duration) -> bool {
        state.vram().is_vain(vm, self.looks, limit)
    }

    /// Returns its duration so far, in ns.
    fn ns(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A bound channel for which the card has no memory yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingBind {
    pub(crate) instance: Place,
    pub(crate) enabled: bool,
    /// The last doorbell.
    pub(crate) gp_put: Option<u32>,
    pub(crate) wait: Wait,
}

/// Binds and work of one VM that wait for memory.
#[derive(Debug)]
pub(crate) struct Pending {
    vm: TenantId,
    /// Time for which they may wait if no memory is found.
    limit: Duration,
    binds: BTreeMap<VirtualChannelId, PendingBind>,
    /// Doorbells of channels that are bound.
    work: BTreeMap<VirtualChannelId, (Doorbell, Wait)>,
    /// The last runlist that the guest has submitted, if a channel was pending since.
    listed: Vec<VirtualChannelId>,
}

impl Pending {
    /// Creates an empty queue whose entries may wait for `limit`.
    pub(crate) fn new(vm: TenantId, limit: Duration) -> Self {
        Self { vm, limit, binds: BTreeMap::new(), work: BTreeMap::new(), listed: Vec::new() }
    }

    /// Returns the time limit of a wait without available memory.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Returns whether a channel's bind waits.
    pub(crate) fn is_bind(&self, channel: VirtualChannelId) -> bool {
        self.binds.contains_key(&channel)
    }

    /// Remembers the doorbell of a channel whose bind waits. `false` for other channels.
    pub(crate) fn ring(&mut self, channel: VirtualChannelId, gp_put: u32) -> bool {
        let bind = self.binds.get_mut(&channel);
        bind.map(|bind| bind.gp_put = Some(gp_put)).is_some()
    }

    /// Records whether the guest has enabled a channel whose bind waits.
    pub(crate) fn enable(&mut self, channel: VirtualChannelId, enabled: bool) {
        if let Some(bind) = self.binds.get_mut(&channel) {
            bind.enabled = enabled;
        }
    }

    /// Returns whether the guest has enabled a channel whose bind waits, and whether it has rung its doorbell.
    pub(crate) fn state(&self, channel: VirtualChannelId) -> Option<(bool, bool)> {
        self.binds.get(&channel).map(|bind| (bind.enabled, bind.gp_put.is_some()))
    }

    /// Returns the guest-written GP_PUT of a channel whose bind waits.
    pub(crate) fn gp_put(&self, channel: VirtualChannelId) -> Option<u32> {
        self.binds.get(&channel)?.gp_put
    }

    /// Remembers the guest's runlist.
    pub(crate) fn list(&mut self, channels: &[VirtualChannelId]) {
        channels.clone_into(&mut self.listed);
    }

    /// Returns the guest's runlist, if a channel is on it.
    pub(crate) fn list_with(&self, channel: VirtualChannelId) -> Option<Vec<VirtualChannelId>> {
        self.listed.contains(&channel).then(|| self.listed.clone())
    }

    /// Queues a bind. Does nothing and returns `false` if it may not wait.
    pub(crate) fn add_bind(&mut self, state: &mut CardState, channel: VirtualChannelId, instance: Place) -> bool {
        let wait = Wait::begin(state, self.vm);
        if wait.is_over(state, self.vm, self.limit) {
            return false;
        }
        self.binds.insert(channel, PendingBind { instance, enabled: false, gp_put: None, wait });
        self.tell(state);
        true
    }

    /// Queues work, or keeps it queued: returns `Some(true)` for the former. Returns `None` when its time limit has
    /// passed.
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

    /// Ends the wait of a channel's bind or work. Returns its duration, in ns.
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

    /// Makes the mover notify the VM of available memory while any of its work waits.
    pub(crate) fn tell(&self, state: &mut CardState) {
        state.vram_mut().set_waits(self.vm, !self.is_empty());
    }

    /// Returns the binds that wait.
    pub(crate) fn binds(&self) -> Vec<(VirtualChannelId, PendingBind)> {
        self.binds.iter().map(|(channel, bind)| (*channel, *bind)).collect()
    }

    /// Returns the doorbells that wait.
    pub(crate) fn work(&self) -> Vec<Doorbell> {
        self.work.values().map(|(doorbell, _)| *doorbell).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.binds.is_empty() && self.work.is_empty()
    }
}
