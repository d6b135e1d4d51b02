//! Preemption that a guest asks for: begun at once, and over when the card says so.
//!
//! What runs on an engine may not be interruptible, so that a channel leaves only when its work ends. Nobody waits for
//! that here. The card has one register for it, so requests of several VMs take turns: [`Channels::preempting`] looks how
//! far the card is and asks for the next. Meanwhile the host may use the register for a channel that it ends; what was
//! asked for before is asked for again.

use crate::card;
use crate::{Channels, GuestMemory, Host, Stuck, VmId};
use nvspec::fifo::{CHANNELS, ChannelId, VirtualChannelId};
use std::collections::VecDeque;

/// Looks that the card has for one channel while others wait.
// TIMEOUT: a guest that looks again and again does so every 20 us; a channel without work in hand leaves in less than
// the millisecond that this makes, and one that hangs holds up the others for no longer at a time.
const TURN: u32 = 64;

/// Channels that are to leave their engines. None stands there twice.
#[derive(Debug, Default)]
pub(crate) struct Preemptions {
    pub(crate) waiting: VecDeque<ChannelId>,
    /// The card was asked for the first.
    pub(crate) asked: bool,
    /// Looks that the first has had.
    pub(crate) looks: u32,
}

impl Preemptions {
    /// The channel was ended.
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

    /// Sees how far the card is, and asks it for the next that waits.
    fn advance(&mut self, host: &mut impl Host) {
        // Nothing that the card says makes this longer.
        for _ in 0..=2 * CHANNELS {
            let Some(first) = self.waiting.front().copied() else { return };
            if !self.asked {
                card::ask_kick(host, first);
                (self.asked, self.looks) = (true, 0);
            }
            let (channel, pending) = card::kicked(host);
            // The register may have been used for another channel since.
            self.asked = channel == first && pending;
            if channel == first && !pending {
                self.waiting.pop_front();
            } else if self.asked && (self.waiting.len() == 1 || self.looks < TURN) {
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
    /// Begins to take the channel off its engines; it may be scheduled again at once if it is enabled and listed.
    /// [`Self::preempting`] says whether it is still under way. Nothing when it is not bound.
    pub fn preempt(&mut self, card: &mut (impl Host + GuestMemory), vm: VmId, channel: VirtualChannelId) {
        let Some(physical) = self.physical(vm, channel) else { return };
        self.refresh(card, physical);
        self.ask_to_leave(card, physical);
    }

    /// Begins to take a physical channel off its engines.
    pub fn ask_to_leave(&mut self, host: &mut impl Host, physical: ChannelId) {
        self.preemptions.push(physical);
        self.preemptions.advance(host);
    }

    /// Asks the card to take a physical channel off its engines, bound or [stuck](crate::RunState::Stuck), and looks a few times
    /// whether it is. It may be scheduled again at once if it is bound, enabled and listed.
    ///
    /// # Errors
    /// [`Stuck`] when it is not off yet.
    pub fn kick(&mut self, host: &mut impl Host, physical: ChannelId) -> Result<(), Stuck> {
        card::kick(host, physical)
    }

    /// Begins to take all of a VM's channels off the engines. It is paused: none comes back. [`Self::vacating`] says
    /// whether one is left.
    pub fn vacate(&mut self, host: &mut impl Host, vm: VmId) {
        let Some(record) = self.vms.get(&vm) else { return };
        // One that no PBDMA holds may have its context on an engine still, which saves it when another channel needs the
        // engine: to where the channel's memory was. The card does not say so, and asking for one that is nowhere costs little.
        for physical in record.channels.values().copied().collect::<Vec<_>>() {
            self.preemptions.push(physical);
        }
        self.preemptions.advance(host);
    }

    /// The channels of a VM that are still to leave their engines; to be asked again until there are none, as
    /// [`Self::preempting`].
    pub fn vacating(&mut self, host: &mut impl Host, vm: VmId) -> Vec<VirtualChannelId> {
        self.preemptions.advance(host);
        let waiting = self.preemptions.waiting.iter();
        waiting
            .filter_map(|physical| self.bound(*physical))
            .filter(|bound| bound.vm == vm)
            .map(|bound| bound.channel)
            .collect()
    }

    /// Returns whether the channel is still to leave its engines. The caller asks again and again until it is not:
    /// nothing else moves the preemptions that wait for the card.
    pub fn preempting(&mut self, host: &mut impl Host, vm: VmId, channel: VirtualChannelId) -> bool {
        self.preemptions.advance(host);
        self.physical(vm, channel).is_some_and(|physical| self.preemptions.waiting.contains(&physical))
    }
}

#[cfg(test)]
#[path = "tests/preempt.rs"]
mod tests;
