//! Channels that wait for a semaphore and keep others from running: an acquire may say that it gives nothing up while it
//! waits, and then its channel has the unit that takes methods until its time slice is over, again and again.
//!
//! The scheduler has set such a submission aside, and the neighbours' time would go by. So its channel rests, off the
//! card, while others have work there. From time to time one of those that rest may look again; what it holds up then is
//! a look of [`super::feeder`] out of [`REST_NS`], however many channels there are. When the card has nothing else to do,
//! none rests.

use super::Feeder;
use super::registry::HostState;
use nvspec::fifo::ChannelId;
use sched::Nanos;
use std::collections::VecDeque;
use vram::VmId;

/// Time from one channel's look at its semaphore to that of the next, in ns. A look takes up to a millisecond: 3 %.
const REST_NS: u64 = 32_000_000;

/// The channels that rest.
#[derive(Debug, Default)]
pub(super) struct Resting {
    /// Who looks next is first.
    channels: VecDeque<(VmId, ChannelId)>,
    /// When.
    next: Nanos,
}

impl Resting {
    pub(super) fn is_empty(&self) -> bool {
        self.channels.is_empty()
    }

    /// Forgets channels that are off the card for good.
    pub(super) fn forget(&mut self, gone: impl Fn(VmId, ChannelId) -> bool) {
        self.channels.retain(|(vm, channel)| !gone(*vm, *channel));
    }
}

/// Lets those rest that hold others up, and one of them look again, or all.
pub(super) fn rest_and_rouse(state: &mut HostState) {
    let now = state.card_time();
    let HostState { vram, channels, schedule, .. } = state;
    let wanted = schedule.scheduler().in_flight() > 0;
    if wanted {
        for (vm, channel) in schedule.waiting_channels() {
            if channels.holds(&mut vram.memory, channel) {
                tracing::debug!(%vm, channel = channel.0, "a channel that waits and holds others up rests");
                channels.rest(&mut vram.memory, channel, true);
                schedule.resting.channels.push_back((vm, channel));
                schedule.resting.next = schedule.resting.next.max(now.after(REST_NS));
            }
        }
    }
    while !wanted || now >= schedule.resting.next {
        let Some((_, channel)) = schedule.resting.channels.pop_front() else { break };
        channels.rest(&mut vram.memory, channel, false);
        schedule.resting.next = now.after(REST_NS);
    }
}
