//! Binds and work that wait for memory, and for how long.
//!
//! Nothing waits here with a lock held: what cannot be done is remembered, the mover is asked for memory, and it is all tried
//! again when the VM is told that there may be some ([`VmBackend::retry`]).

use super::backend::VmBackend;
use super::channels::Unbound;
use ::channels::{Doorbell, GuestInstance};
use nvspec::addr::Place;
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::userd;
use owner::{Feeder, HostState, Looks};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vram::VmId;

/// A wait for memory. Its end is told by the mover's looks, not by the clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    /// For the accounts.
    since: Instant,
    looks: Looks,
}

impl Wait {
    pub(super) fn begin(state: &HostState, vm: VmId) -> Self {
        Self { since: Instant::now(), looks: state.vram.looks(vm) }
    }

    /// Returns whether the mover has looked in vain for as long as `limit` lets it wait.
    pub(super) fn is_over(&self, state: &HostState, vm: VmId, limit: Duration) -> bool {
        state.vram.is_vain(vm, self.looks, limit)
    }

    /// Returns how long it has been, in ns.
    fn ns(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A channel that its guest has bound, and for which the card has no memory yet.
#[derive(Clone, Copy, Debug)]
struct PendingBind {
    instance: Place,
    enabled: bool,
    /// The last doorbell.
    gp_put: Option<u32>,
    wait: Wait,
}

/// What waits for memory of one VM.
#[derive(Debug, Default)]
pub(super) struct Pending {
    binds: BTreeMap<VirtualChannelId, PendingBind>,
    /// Doorbells of channels that are bound.
    work: BTreeMap<VirtualChannelId, (Doorbell, Wait)>,
    /// The runlist that the guest has submitted last, if a channel was pending since.
    listed: Vec<VirtualChannelId>,
}

impl Pending {
    /// Returns whether a channel's bind waits.
    pub(super) fn is_bind(&self, channel: VirtualChannelId) -> bool {
        self.binds.contains_key(&channel)
    }

    /// Remembers the doorbell of a channel whose bind waits. `false` for others.
    pub(super) fn ring(&mut self, channel: VirtualChannelId, gp_put: u32) -> bool {
        let bind = self.binds.get_mut(&channel);
        bind.map(|bind| bind.gp_put = Some(gp_put)).is_some()
    }

    /// Remembers whether the guest wants a channel scheduled whose bind waits.
    pub(super) fn enable(&mut self, channel: VirtualChannelId, enabled: bool) {
        if let Some(bind) = self.binds.get_mut(&channel) {
            bind.enabled = enabled;
        }
    }

    /// Returns whether the guest wants a channel scheduled whose bind waits, and whether it has rung for it.
    pub(super) fn state(&self, channel: VirtualChannelId) -> Option<(bool, bool)> {
        self.binds.get(&channel).map(|bind| (bind.enabled, bind.gp_put.is_some()))
    }

    /// GP_PUT of a channel whose bind waits, as its guest has written it.
    pub(super) fn gp_put(&self, channel: VirtualChannelId) -> Option<u32> {
        self.binds.get(&channel)?.gp_put
    }

    /// Remembers the guest's runlist.
    pub(super) fn list(&mut self, channels: &[VirtualChannelId]) {
        channels.clone_into(&mut self.listed);
    }

    fn is_empty(&self) -> bool {
        self.binds.is_empty() && self.work.is_empty()
    }
}

impl VmBackend {
    /// A bind finds no memory: it is done when there is some. `false` when it cannot wait.
    pub(super) fn bind_later(&mut self, channel: VirtualChannelId, instance: Place, guest: &GuestInstance) -> bool {
        let wait = {
            let state = self.host.lock();
            let wait = Wait::begin(&state, self.vm);
            if wait.is_over(&state, self.vm, self.queue_limit) {
                return false;
            }
            wait
        };
        self.counts.memory_waits += 1;
        self.userd.insert(guest.userd.0 / userd::BYTES, channel);
        self.instances.insert(channel, instance);
        self.pending.binds.insert(channel, PendingBind { instance, enabled: false, gp_put: None, wait });
        self.tell_waits(&mut self.host.lock());
        true
    }

    /// Work whose memory has no place waits for it, as long as some may be found or the operator lets it. `false` when it has
    /// waited that long.
    pub(super) fn may_wait(&mut self, state: &mut HostState, doorbell: Doorbell) -> bool {
        let channel = doorbell.virtual_channel;
        let wait = self.pending.work.get(&channel).map_or_else(|| Wait::begin(state, self.vm), |(_, wait)| *wait);
        let over = wait.is_over(state, self.vm, self.queue_limit);
        if over {
            self.counts.memory_denied += 1;
            tracing::error!(
                vm = %self.vm,
                ?channel,
                queue_ms = self.queue_limit.as_millis(),
                "work has waited for memory for as long as `memory.queue_ms` lets it, and faults; raise that or the VM's \
                 `memory.guarantee_mib`, or give the card `memory.host_mib` and the VM `memory.on_full` = `swap`"
            );
        } else {
            self.counts.memory_waits += u64::from(self.pending.work.insert(channel, (doorbell, wait)).is_none());
            self.tell_waits(state);
        }
        !over
    }

    /// A channel's bind or work waits for memory no more, if it did.
    pub(super) fn wait_ends(&mut self, state: &mut HostState, channel: VirtualChannelId) {
        let bind = self.pending.binds.remove(&channel).map(|bind| bind.wait);
        let work = self.pending.work.remove(&channel).map(|(_, wait)| wait);
        for wait in bind.into_iter().chain(work) {
            self.counts.memory_waited_ns = self.counts.memory_waited_ns.saturating_add(wait.ns());
            self.tell_waits(state);
        }
    }

    /// The mover tells the VM when there may be memory as long as anything of it waits, whatever else it does meanwhile.
    fn tell_waits(&self, state: &mut HostState) {
        state.vram.set_waits(self.vm, !self.pending.is_empty());
    }

    /// Tries all again that waits for memory.
    pub(super) fn retry(&mut self) {
        for (channel, bind) in self.pending.binds.clone() {
            self.bind_again(channel, bind);
        }
        let waiting: Vec<Doorbell> = self.pending.work.values().map(|(doorbell, _)| *doorbell).collect();
        if waiting.is_empty() && self.host.lock().vram.was_short(self.vm) {
            // What was denied was no work's, and nothing waits for it. The next work that needs it looks at it again.
            self.spaces.granted();
        }
        for doorbell in waiting {
            self.submit(doorbell);
        }
        if self.pending.is_empty() {
            self.tell_waits(&mut self.host.lock());
        }
    }

    fn bind_again(&mut self, channel: VirtualChannelId, pending: PendingBind) {
        let PendingBind { instance, enabled, gp_put, wait } = pending;
        let error = match self.bind(channel, instance) {
            Ok(()) => None,
            Err(Unbound::Lacking(..)) if !wait.is_over(&self.host.lock(), self.vm, self.queue_limit) => return,
            Err(error) => Some(error),
        };
        let host = Arc::clone(&self.host);
        self.wait_ends(&mut host.lock(), channel);
        match error {
            None => {
                self.counts.binds += 1;
                if enabled {
                    self.with_channels(|channels, card, guest, vm| channels.enable(card, guest, vm, channel, true));
                }
                if self.pending.listed.contains(&channel) {
                    let list = self.pending.listed.clone();
                    self.with_channels(|channels, card, guest, vm| channels.submit_runlist(card, guest, vm, &list));
                }
                self.host.lock().look_at_waits(Some(self.vm));
            }
            Some(error) => {
                self.counts.memory_denied += 1;
                self.refuse_bind(channel, instance, &error);
            }
        }
        self.choose_polled();
        if let Some(gp_put) = gp_put {
            self.ring(channel, gp_put);
        }
    }
}
