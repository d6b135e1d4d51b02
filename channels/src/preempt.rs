//! Preemption at a guest's request. It starts immediately, and is complete when the card reports it.
//!
//! If running work cannot be interrupted, its channel leaves only when the work ends. This module does not wait for the
//! card's report. The card has a single preemption register, so requests by several VMs are serialized:
//! [`Channels::preempting`] polls the card and starts the next request. If the host uses the register in the meantime
//! to end a channel, the earlier request is repeated.

use crate::card;
use crate::{Channels, GuestMemory, Host, Stuck, TenantId};
use nvspec::fifo::{CHANNELS, ChannelId, VirtualChannelId};
use std::collections::VecDeque;

/// Maximum number of consecutive polls for one channel while other channels wait.
// TIMEOUT: a waiting guest polls every 20 us, so this number of polls takes about a millisecond. A channel without work
// in progress leaves within this time, and a hung channel delays the others by at most this time per turn.
const MAX_POLLS_PER_CHANNEL: u32 = 64;

/// Channels that must leave their engines, without duplicates.
#[derive(Debug, Default)]
pub(crate) struct Preemptions {
    pub(crate) waiting: VecDeque<ChannelId>,
    /// True if the request for the first channel was sent to the card.
    pub(crate) asked: bool,
    /// Number of consecutive polls for the first channel.
    pub(crate) looks: u32,
}

impl Preemptions {
    /// Removes an ended channel from the list.
    pub(crate) fn forget(&mut self, channel: ChannelId) {
        self.asked &= self.waiting.front() != Some(&channel);
        self.waiting.retain(|waiting| *waiting != channel);
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    fn push(&mut self, channel: ChannelId) {
        if !self.waiting.contains(&channel) {
            self.waiting.push_back(channel);
        }
    }

    /// Polls the card, and starts the request for the next waiting channel.
    fn advance(&mut self, host: &mut impl Host) {
        // The loop is bounded, regardless of the card's responses.
        for _ in 0..=2 * CHANNELS {
            let Some(first) = self.waiting.front().copied() else { return };
            if !self.asked {
                card::ask_kick(host, first);
                (self.asked, self.looks) = (true, 0);
            }
            let (channel, pending) = card::kicked(host);
            // The register may have been used for another channel in the meantime.
            self.asked = channel == first && pending;
            if channel == first && !pending {
                self.waiting.pop_front();
            } else if self.asked && (self.waiting.len() == 1 || self.looks < MAX_POLLS_PER_CHANNEL) {
                self.looks = self.looks.saturating_add(1);
                return;
            } else if self.asked {
                self.waiting.rotate_left(1);
                self.asked = false;
            }
        }
    }
}

impl Channels {
    /// Starts removing a channel from its engines. If the channel is enabled and listed, the card may schedule it again
    /// immediately. [`Self::preempting`] returns true while the preemption is pending. Does nothing if the channel is
    /// not bound.
    pub fn preempt(&mut self, card: &mut (impl Host + GuestMemory), vm: TenantId, channel: VirtualChannelId) {
        let Some(physical) = self.physical(vm, channel) else { return };
        self.refresh(card, physical);
        self.ask_to_leave(card, physical);
    }

    /// Starts removing a physical channel from its engines.
    pub fn ask_to_leave(&mut self, host: &mut impl Host, physical: ChannelId) {
        self.preemptions.push(physical);
        self.preemptions.advance(host);
    }

    /// Starts removing a physical channel, bound or [stuck](crate::RunState::Stuck), from its engines, and polls
    /// briefly until it has left. If the channel is bound, enabled and listed, the card may schedule it again
    /// immediately.
    ///
    /// # Errors
    /// Returns [`Stuck`] if the channel has not left its engines yet.
    pub fn kick(&mut self, host: &mut impl Host, physical: ChannelId) -> Result<(), Stuck> {
        card::kick(host, physical)
    }

    /// Starts removing all of a VM's channels from the engines. The VM must be paused, so that no channel is scheduled
    /// again. [`Self::vacating`] returns the remaining channels.
    pub fn vacate(&mut self, host: &mut impl Host, vm: TenantId) {
        let Some(record) = self.vms.get(&vm) else { return };
        // A channel that is not loaded in a PBDMA may still have its context on an engine. The engine saves this
        // context, to the old address of the channel's memory, only when another channel needs the engine. The card
        // does not report such contexts, so send a request for each channel. Unnecessary requests are cheap.
        for physical in record.channels.values().copied().collect::<Vec<_>>() {
            self.preemptions.push(physical);
        }
        self.preemptions.advance(host);
    }

    /// Returns a VM's channels that are still on their engines. The caller must repeat the call until the list is
    /// empty, as with [`Self::preempting`].
    pub fn vacating(&mut self, host: &mut impl Host, vm: TenantId) -> Vec<VirtualChannelId> {
        self.preemptions.advance(host);
        let waiting = self.preemptions.waiting.iter();
        waiting
            .filter_map(|physical| self.bound(*physical))
            .filter(|bound| bound.vm == vm)
            .map(|bound| bound.channel)
            .collect()
    }

    /// Returns true if the channel is still on its engines. The caller must repeat the call until it returns false,
    /// because nothing else advances pending preemptions.
    pub fn preempting(&mut self, host: &mut impl Host, vm: TenantId, channel: VirtualChannelId) -> bool {
        self.preemptions.advance(host);
        self.physical(vm, channel).is_some_and(|physical| self.preemptions.waiting.contains(&physical))
    }
}

#[cfg(test)]
mod tests;
