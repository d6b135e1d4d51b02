//! Binds and work that wait for memory: starts their waits, and retries them when memory may be available.

use super::VmBackend;
use super::channels::BindFailure;
use crate::pending::PendingBind;
use ::channels::{Doorbell, GuestInstance};
use card_manager::CardState;
use nvspec::addr::Place;
use nvspec::fifo::VirtualChannelId;
use std::sync::Arc;

impl VmBackend {
    /// Queues a bind for which no memory is free. Returns `false` if waiting is not permitted.
    pub(super) fn bind_later(&mut self, channel: VirtualChannelId, instance: Place, guest: &GuestInstance) -> bool {
        if !self.pending.add_bind(&mut self.host.lock(), channel, instance) {
            return false;
        }
        self.counts.memory_waits += 1;
        self.work.enlist(channel, instance, Some(guest.userd.0));
        true
    }

    /// Queues work whose memory is not placed, while the mover may still find memory or the operator's limit permits
    /// waiting. Returns `false` if the work has waited for too long.
    pub(super) fn may_wait(&mut self, state: &mut CardState, doorbell: Doorbell) -> bool {
        let channel = doorbell.virtual_channel;
        let Some(first) = self.pending.add_work(state, doorbell) else {
            self.counts.memory_denied += 1;
            tracing::error!(
                vm = %self.vm,
                ?channel,
                queue_ms = self.pending.limit().as_millis(),
                "work faults because it has waited for memory for as long as `memory.queue_ms` permits; raise this limit or \
                 the VM's `memory.guarantee_mib`, or give the card `memory.host_mib` and the VM `memory.on_full` = \
                 `swap`"
            );
            return false;
        };
        self.counts.memory_waits += u64::from(first);
        true
    }

    /// Ends the wait of a channel's bind or work, if any.
    pub(super) fn wait_ends(&mut self, state: &mut CardState, channel: VirtualChannelId) {
        let waited_ns = self.pending.end(state, channel);
        self.counts.memory_waited_ns = self.counts.memory_waited_ns.saturating_add(waited_ns);
    }

    /// Retries all binds and work that wait for memory.
    pub(crate) fn retry(&mut self) {
        for (channel, bind) in self.pending.binds() {
            self.bind_again(channel, bind);
        }
        let waiting = self.pending.work();
        if waiting.is_empty() && self.host.lock().vram_mut().was_short(self.vm) {
            // Memory was denied only to other accesses. The next work that needs memory requests it again.
            self.memory.granted();
        }
        for doorbell in waiting {
            self.submit(doorbell);
        }
        if self.pending.is_empty() {
            self.pending.tell(&mut self.host.lock());
        }
    }

    fn bind_again(&mut self, channel: VirtualChannelId, pending: PendingBind) {
        let PendingBind { instance, enabled, gp_put, wait } = pending;
        let error = match self.bind(channel, instance) {
            Ok(()) => None,
            Err(BindFailure::Lacking(..)) if !wait.is_over(&self.host.lock(), self.vm, self.pending.limit()) => return,
            Err(error) => Some(error),
        };
        let host = Arc::clone(&self.host);
        self.wait_ends(&mut host.lock(), channel);
        match error {
            None => {
                self.counts.binds += 1;
                let mut state = host.lock();
                if enabled {
                    self.with_state(&mut state, |channels, card, vm| channels.enable(card, vm, channel, true));
                }
                if let Some(list) = self.pending.list_with(channel) {
                    self.with_state(&mut state, |channels, card, vm| channels.submit_runlist(card, vm, &list));
                }
                state.feeder().look_at_waits(Some(self.vm));
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
