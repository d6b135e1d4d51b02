//! The mediator's records of a guest's channels. This module uses no locks and does not access the card.

mod saved;

pub(crate) use saved::SavedWork;

use super::memory::{Objects, Slot};
use card_manager::Bindings;
use channels::Span;
use nvspec::addr::Place;
use nvspec::fifo::{ChannelId, VirtualChannelId};
use nvspec::instance::userd;
use shadow_pt::SpaceId;
use std::collections::{BTreeMap, HashMap};

/// A guest's channel that is on the card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    /// Address space of the channel.
    pub(crate) space: SpaceId,
    /// Channel number on the card.
    pub(crate) physical: ChannelId,
    /// Addresses at which the address space maps the mediator's pages.
    pub(crate) span: Span,
}

/// A channel that the guest has bound. It is not necessarily on the card.
#[derive(Debug)]
struct Channel {
    instance: Place,
    bound: Option<Bound>,
    /// Bytes of GP_PUT received so far.
    gp_put: [u8; 4],
    /// Slot of the channel's USERD, if the USERD is under a mapped aperture.
    polled: Option<Slot>,
    /// GP_PUT value in this USERD at the last poll.
    seen: Option<u32>,
    /// Known classes of the objects bound to the channel's subchannels.
    objects: Objects,
    /// Known engines of the objects bound to the channel's subchannels.
    bindings: Bindings,
}

/// State of the guest's runlist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Runlist {
    /// The runlist is in effect, and the vGPU has been notified.
    #[default]
    InForce,
    /// The runlist is in effect. The vGPU is notified after the access that submitted the runlist.
    Taken,
    /// The runlist is not in effect yet, because a channel is still on the card.
    Awaited,
}

/// All channels of a guest.
#[derive(Debug, Default)]
pub(crate) struct Work {
    channels: BTreeMap<VirtualChannelId, Channel>,
    /// Channels by the number of the guest VRAM page that contains their USERD.
    userd: HashMap<u64, VirtualChannelId>,
    /// Channels that the guest has unbound but that are still on the card, by physical channel number.
    departing: BTreeMap<ChannelId, Bound>,
    /// Mask of the engines that the guest has blocked.
    blocked: u32,
    runlist: Runlist,
}

impl Work {
    /// Adds a channel that the guest has bound, or updates the instance block of a known channel and forgets its
    /// bindings. `userd` is the address of its USERD, if known.
    pub(crate) fn enlist(&mut self, channel: VirtualChannelId, instance: Place, userd: Option<u64>) {
        let (objects, bindings) = Default::default();
        let fresh = || Channel { instance, bound: None, gp_put: [0; 4], polled: None, seen: None, objects, bindings };
        let known = self.channels.entry(channel).or_insert_with(fresh);
        (known.instance, known.bindings) = (instance, bindings);
        if let Some(userd) = userd {
            self.userd.retain(|_, owner| *owner != channel);
            self.userd.insert(userd / userd::BYTES, channel);
        }
    }

    /// Removes a channel that the guest has unbound. Returns the location of its instance block, if the channel was
    /// bound.
    pub(crate) fn delist(&mut self, channel: VirtualChannelId) -> Option<Place> {
        self.userd.retain(|_, owner| *owner != channel);
        self.channels.remove(&channel).map(|channel| channel.instance)
    }

    /// Returns the channels that the guest has bound.
    pub(crate) fn channels(&self) -> Vec<VirtualChannelId> {
        self.channels.keys().copied().collect()
    }

    pub(crate) fn instance(&self, channel: VirtualChannelId) -> Option<Place> {
        self.channels.get(&channel).map(|channel| channel.instance)
    }

    /// Returns the channel whose USERD is in this page of guest VRAM, if any.
    pub(crate) fn userd_of(&self, page: u64) -> Option<VirtualChannelId> {
        self.userd.get(&page).copied()
    }

    /// Returns the channel's state if the channel is on the card.
    pub(crate) fn bound(&self, channel: VirtualChannelId) -> Option<Bound> {
        self.channels.get(&channel)?.bound
    }

    /// Records that a channel is on the card.
    pub(crate) fn set_bound(&mut self, channel: VirtualChannelId, bound: Bound) {
        if let Some(channel) = self.channels.get_mut(&channel) {
            channel.bound = Some(bound);
        }
    }

    /// Records that a channel is no longer on the card. Returns its last state.
    pub(crate) fn take_bound(&mut self, channel: VirtualChannelId) -> Option<Bound> {
        self.channels.get_mut(&channel)?.bound.take()
    }

    /// Returns the channels that are on the card.
    pub(crate) fn all_bound(&self) -> impl Iterator<Item = (VirtualChannelId, Bound)> {
        self.channels.iter().filter_map(|(channel, known)| Some((*channel, known.bound?)))
    }

    /// Records an unbound channel that has not left the card yet.
    pub(crate) fn depart(&mut self, bound: Bound) {
        self.departing.insert(bound.physical, bound);
    }

    /// Records that a channel has left the card. Returns its last state.
    pub(crate) fn departed(&mut self, physical: ChannelId) -> Option<Bound> {
        self.departing.remove(&physical)
    }

    /// Returns the state of a channel's subchannels, or `None` if the guest has not bound the channel.
    pub(crate) fn objects(&mut self, channel: VirtualChannelId) -> Option<(&mut Objects, &mut Bindings)> {
        self.channels.get_mut(&channel).map(|channel| (&mut channel.objects, &mut channel.bindings))
    }

    /// Stores a write by the guest's CPU to byte `offset` of a USERD page. Returns GP_PUT when its last byte is
    /// written, which rings the doorbell. Therefore, several narrow stores ring the doorbell only once.
    pub(crate) fn store(&mut self, channel: VirtualChannelId, offset: u64, data: &[u8]) -> Option<u32> {
        let word = &mut self.channels.get_mut(&channel)?.gp_put;
        let mut rung = false;
        for (at, &byte) in (offset..).zip(data) {
            if let Some(lane) = at.checked_sub(userd::GP_PUT).filter(|&lane| lane < 4) {
                word[lane as usize] = byte;
                rung |= lane == 3;
            }
        }
        rung.then_some(u32::from_le_bytes(*word))
    }

    /// Finds the channels whose USERD is under a mapped aperture. Their doorbells cause no messages. `home` returns the
    /// slot of a page. Returns the channels whose doorbells have moved to such a slot.
    pub(crate) fn choose_polled(&mut self, home: impl Fn(u64) -> Option<Slot>) -> Vec<(VirtualChannelId, Slot)> {
        let slots: BTreeMap<VirtualChannelId, Slot> =
            self.userd.iter().filter_map(|(page, channel)| Some((*channel, home(*page)?))).collect();
        let mut moved = Vec::new();
        for (number, channel) in &mut self.channels {
            let slot = slots.get(number).copied();
            let before = std::mem::replace(&mut channel.polled, slot);
            moved.extend(slot.filter(|_| before != slot).map(|slot| (*number, slot)));
        }
        moved
    }

    /// Returns the channels whose doorbells cause no messages, and the slots of their USERDs.
    pub(crate) fn polled(&self) -> impl Iterator<Item = (VirtualChannelId, Slot)> {
        self.channels.iter().filter_map(|(channel, known)| Some((*channel, known.polled?)))
    }

    /// Returns the slot of a channel's USERD, if the USERD is under a mapped aperture.
    pub(crate) fn polled_at(&self, channel: VirtualChannelId) -> Option<Slot> {
        self.channels.get(&channel)?.polled
    }

    /// Records a GP_PUT value found by a poll. Returns true if it is new.
    pub(crate) fn see_put(&mut self, channel: VirtualChannelId, put: u32) -> bool {
        self.channels.get_mut(&channel).is_some_and(|channel| channel.seen.replace(put) != Some(put))
    }

    /// Records that the guest blocks or unblocks engines. Returns true if any engine is blocked.
    pub(crate) fn block(&mut self, engines: u32, blocked: bool) -> bool {
        if blocked {
            self.blocked |= engines;
        } else {
            self.blocked &= !engines;
        }
        self.blocks()
    }

    /// Returns true if the guest blocks any engine.
    pub(crate) fn blocks(&self) -> bool {
        self.blocked != 0
    }

    /// Sets the state of the guest's runlist.
    pub(crate) fn set_runlist(&mut self, runlist: Runlist) {
        self.runlist = runlist;
    }

    /// Records that the runlist is in effect, if its state is `seen`. Returns true in this case.
    pub(crate) fn runlist_ends(&mut self, seen: Runlist) -> bool {
        let awaited = self.runlist == seen;
        if awaited {
            self.runlist = Runlist::InForce;
        }
        awaited
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvspec::addr::GuestVramAddr;

    const CHANNEL: VirtualChannelId = VirtualChannelId(3);

    fn work() -> Work {
        let mut work = Work::default();
        work.enlist(CHANNEL, Place::Vram(GuestVramAddr(0x1000)), Some(0x5000));
        work
    }

    #[test]
    fn stores_of_single_bytes_ring_once_with_the_last() {
        let mut work = work();
        let bytes = [0x78, 0x56, 0x34, 0x12];
        let rung: Vec<_> =
            (0..4).map(|at| work.store(CHANNEL, userd::GP_PUT + at, &bytes[at as usize..][..1])).collect();
        assert_eq!(rung, [None, None, None, Some(0x1234_5678)]);
        assert_eq!(work.store(CHANNEL, userd::GP_GET, &bytes), None);
    }

    #[test]
    fn rebound_channel_starts_with_empty_state() {
        let mut work = work();
        assert_eq!(work.userd_of(5), Some(CHANNEL));
        work.store(CHANNEL, userd::GP_PUT, &[1, 2]);
        assert!(work.see_put(CHANNEL, 7) && !work.see_put(CHANNEL, 7));
        assert_eq!(work.delist(CHANNEL), Some(Place::Vram(GuestVramAddr(0x1000))));
        assert_eq!((work.userd_of(5), work.delist(CHANNEL)), (None, None));
        work.enlist(CHANNEL, Place::Vram(GuestVramAddr(0x2000)), Some(0x6000));
        assert_eq!(work.store(CHANNEL, userd::GP_PUT + 2, &[3, 4]), Some(0x0403_0000));
        assert!(work.see_put(CHANNEL, 7));
    }

    #[test]
    fn runlist_is_reported_once() {
        let mut work = work();
        work.set_runlist(Runlist::Awaited);
        assert!(!work.runlist_ends(Runlist::Taken));
        assert!(work.runlist_ends(Runlist::Awaited) && !work.runlist_ends(Runlist::Awaited));
    }
}
