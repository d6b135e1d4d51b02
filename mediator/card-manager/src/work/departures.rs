//! Channels that must leave the card and have not left their engines yet.
//!
//! No thread holds the card's lock while it waits for these channels. The scheduler's tick polls each channel, resets
//! an engine that keeps a channel for too long, and gives up if the channel still does not leave. Until a channel has
//! left, its number, shadow directory and work area do not change, and its VM is charged for its work.

use nvspec::fifo::ChannelId;
use std::collections::BTreeMap;
use vram::TenantId;

/// Minimum time between counted polls, in ns.
pub(crate) const LOOK_NS: u64 = 500_000;
/// Number of polls after which the engine that executes a channel is reset. These polls take at least 20 ms.
// TIMEOUT: an idle engine releases a channel much sooner. A busy host delays the polls.
const ASKED_LOOKS: u32 = 40;
/// Number of polls after the reset until the wait for the channel ends.
const RESET_LOOKS: u32 = 200;
/// Interval between polls of a channel that has not left after the reset, in ns. It may still leave, because a slow
/// host may only have delayed the card.
const KEPT_LOOK_NS: u64 = 100_000_000;

/// Stage of a channel's departure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The removal of the channel from its engines was requested.
    Asked,
    /// The engines that executed the channel were reset.
    Reset,
    /// The channel has left. The VM must unmap the channel's work area.
    Left,
    /// The channel does not leave the card, and no thread waits for it. It may still leave late, or after a card reset.
    Kept,
}

/// A departing channel.
#[derive(Clone, Copy, Debug)]
struct Departure {
    vm: TenantId,
    stage: Stage,
    /// Number of counted polls at this stage.
    looks: u32,
    /// Time of the last counted poll, in ns since the card was taken over.
    looked_ns: u64,
    /// Set if the scheduler charges the channel's work until the channel has left.
    charged: bool,
}

/// Next remedy for a channel that does not leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// Reset the engines that execute the channel.
    Reset,
    /// Stop waiting for the channel.
    GiveUp,
}

/// Departing channels, by physical channel number.
#[derive(Debug, Default)]
pub(crate) struct Departures(BTreeMap<ChannelId, Departure>);

impl Departures {
    /// Starts the departure of one of `vm`'s channels, unless it is already departing. If `charged` is true, the
    /// channel's work is charged until it has left.
    pub(crate) fn begin(&mut self, vm: TenantId, channel: ChannelId, charged: bool, now_ns: u64) {
        let new = Departure { vm, stage: Stage::Asked, looks: 0, looked_ns: now_ns, charged };
        self.0.entry(channel).or_insert(new).charged |= charged;
    }

    /// Returns true if a channel is tracked: it is departing, has left, or is not expected to leave.
    pub(crate) fn contains(&self, channel: ChannelId) -> bool {
        self.0.contains_key(&channel)
    }

    /// Returns the channels to poll, with their VMs: departing channels and, occasionally, channels that are not
    /// expected to leave.
    pub(crate) fn due(&self, now_ns: u64) -> Vec<(ChannelId, TenantId)> {
        let due = self.0.iter().filter(|(_, departure)| departure.is_due(now_ns));
        due.map(|(channel, departure)| (*channel, departure.vm)).collect()
    }

    /// Returns true if any channel (of `vm`, if given) is still expected to leave the card.
    pub(crate) fn any_leaving(&self, vm: Option<TenantId>) -> bool {
        self.0.values().any(|departure| departure.is_leaving() && vm.is_none_or(|vm| vm == departure.vm))
    }

    /// Returns true if any channel of `vm` is not expected to leave the card.
    pub(crate) fn any_kept(&self, vm: TenantId) -> bool {
        self.0.values().any(|departure| departure.stage == Stage::Kept && departure.vm == vm)
    }

    /// Returns true if no channel is tracked.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if any channel is not expected to leave the card.
    pub(crate) fn any_kept_at_all(&self) -> bool {
        self.0.values().any(|departure| departure.stage == Stage::Kept)
    }

    /// Counts a poll at `now_ns` that found a channel still on the card, unless the previous poll was too recent.
    /// Returns the next remedy, if one is due.
    pub(crate) fn stays(&mut self, channel: ChannelId, now_ns: u64) -> Option<Remedy> {
        let departure = self.0.get_mut(&channel)?;
        if departure.stage == Stage::Kept {
            departure.looked_ns = now_ns;
        }
        if !departure.is_leaving() || now_ns < departure.looked_ns.saturating_add(LOOK_NS) {
            return None;
        }
        departure.looked_ns = now_ns;
        departure.looks += 1;
        let (most, next, remedy) = match departure.stage {
            Stage::Asked => (ASKED_LOOKS, Stage::Reset, Remedy::Reset),
            _ => (RESET_LOOKS, Stage::Kept, Remedy::GiveUp),
        };
        if departure.looks < most {
            return None;
        }
        (departure.stage, departure.looks) = (next, 0);
        Some(remedy)
    }

    /// Records that a channel has left. If `lingers` is true, the VM must still unmap the channel's work area. Returns
    /// true if the scheduler must be notified that the channel's work has ended.
    pub(crate) fn leave(&mut self, channel: ChannelId, lingers: bool) -> bool {
        let charged = self.discharge(channel);
        match self.0.get_mut(&channel) {
            Some(departure) if lingers => departure.stage = Stage::Left,
            _ => _ = self.0.remove(&channel),
        }
        charged
    }

    /// Stops charging the channel's work. Returns true if the work was charged.
    pub(crate) fn discharge(&mut self, channel: ChannelId) -> bool {
        self.0.get_mut(&channel).is_some_and(|departure| std::mem::take(&mut departure.charged))
    }

    /// Returns the departed channels of `vm`, whose work areas the VM can now unmap.
    pub(crate) fn take_left(&mut self, vm: TenantId) -> Vec<ChannelId> {
        let left = |departure: &Departure| departure.vm == vm && departure.stage == Stage::Left;
        self.0.extract_if(.., |_, departure| left(departure)).map(|(channel, _)| channel).collect()
    }
}

impl Departure {
    fn is_leaving(&self) -> bool {
        matches!(self.stage, Stage::Asked | Stage::Reset)
    }

    fn is_due(&self, now_ns: u64) -> bool {
        self.is_leaving() || self.stage == Stage::Kept && now_ns >= self.looked_ns.saturating_add(KEPT_LOOK_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: TenantId = TenantId(1);
    const CHANNEL: ChannelId = ChannelId(7);

    /// Polls `times` times, at intervals that are long enough to be counted. Returns the last remedy.
    fn look(departures: &mut Departures, times: u32, now_ns: &mut u64) -> Option<Remedy> {
        let mut remedy = None;
        for _ in 0..times {
            assert_eq!(remedy, None);
            *now_ns += LOOK_NS;
            remedy = departures.stays(CHANNEL, *now_ns);
        }
        remedy
    }

    #[test]
    fn engine_is_reset_after_fixed_poll_count_despite_extra_polls() {
        let (mut departures, mut now) = (Departures::default(), 0);
        departures.begin(VM, CHANNEL, true, now);
        // Waiting threads poll more often than the tick does.
        assert!((0..1000).all(|_| departures.stays(CHANNEL, now).is_none()));
        assert_eq!(look(&mut departures, ASKED_LOOKS, &mut now), Some(Remedy::Reset));
        assert!(departures.any_leaving(Some(VM)) && !departures.any_leaving(Some(TenantId(2))));
        assert_eq!(look(&mut departures, RESET_LOOKS, &mut now), Some(Remedy::GiveUp));
        assert!(departures.any_kept(VM) && !departures.any_leaving(None));
        assert_eq!(look(&mut departures, 1000, &mut now), None);
        // The channel is still tracked, so a second request starts no new wait.
        departures.begin(VM, CHANNEL, true, now);
        assert!(!departures.any_leaving(None) && departures.contains(CHANNEL));
    }

    #[test]
    fn a_channel_that_the_card_keeps_is_looked_at_now_and_then() {
        let (mut departures, mut now) = (Departures::default(), 0);
        departures.begin(VM, CHANNEL, false, now);
        look(&mut departures, ASKED_LOOKS, &mut now);
        assert_eq!(departures.due(now), [(CHANNEL, VM)]);
        look(&mut departures, RESET_LOOKS, &mut now);
        assert_eq!(departures.due(now), []);
        for _ in 0..3 {
            now += KEPT_LOOK_NS;
            assert_eq!(departures.due(now), [(CHANNEL, VM)]);
            assert_eq!(departures.stays(CHANNEL, now), None);
            assert_eq!(departures.due(now), []);
        }
        departures.leave(CHANNEL, false);
        assert!(!departures.any_kept(VM) && !departures.contains(CHANNEL));
    }

    #[test]
    fn work_is_charged_until_the_channel_has_left_and_once() {
        let mut departures = Departures::default();
        departures.begin(VM, CHANNEL, true, 0);
        assert!(departures.leave(CHANNEL, true));
        assert!(!departures.leave(CHANNEL, true));
        assert_eq!(departures.take_left(TenantId(2)), []);
        assert_eq!(departures.take_left(VM), [CHANNEL]);
        assert!(!departures.contains(CHANNEL));
        // The channel was killed, so its engine was reset immediately.
        departures.begin(VM, CHANNEL, true, 0);
        assert!(departures.discharge(CHANNEL) && !departures.leave(CHANNEL, false));
        assert!(!departures.contains(CHANNEL));
    }
}
