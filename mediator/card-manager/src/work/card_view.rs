//! Interface of a [`Feeder`](super::feeder::Feeder) to the card.

use super::needs::Needs;
use super::schedule::Schedule;
use crate::alarm::Alarm;
use channels::{Presence, Submission};
use nvspec::fifo::{ChannelId, VirtualChannelId};
use sched::{Engine, Nanos};
use vram::TenantId;

/// Queries and requests that a feeder sends to its card. Implemented by a card's locked state, and by a model in tests.
///
/// The schedule is part of this state rather than of the feeder. A request may end channels, and a feeder for the same
/// card must then be notified before the request returns ([`Self::kill`]).
pub trait CardView {
    /// Alarm that wakes the interrupt thread.
    type Alarm: Alarm;

    /// Returns the scheduler and its known submissions, which are part of the card's state.
    fn schedule(&mut self) -> &mut Schedule<Self::Alarm>;

    /// Returns the card time, which never decreases.
    fn card_time(&self) -> Nanos;

    /// Returns the VM that owns a channel on the card, and the guest's channel number.
    fn owner(&self, channel: ChannelId) -> Option<(TenantId, VirtualChannelId)>;

    /// Returns the engines on which a channel's work can run, according to its contexts.
    fn engines_of(&self, channel: ChannelId) -> [bool; Engine::COUNT];

    /// Returns true if a channel may run, now or in its slice: neither the guest nor the mediator has stopped it.
    fn wants(&self, channel: ChannelId) -> bool;

    /// Returns a channel's presence as reported by the card.
    fn presence(&mut self, channel: ChannelId) -> Presence;

    /// Returns true if a channel's semaphore wait blocks the method unit for other channels.
    fn holds(&mut self, channel: ChannelId) -> bool;

    /// Returns the channel that the card reports as running on an engine.
    fn occupant(&mut self, engine: Engine) -> Option<ChannelId>;

    /// Returns a value that changes while the channel makes progress.
    fn progress(&mut self, channel: ChannelId) -> u64;

    /// Returns true if a channel cannot poll its semaphore because it is kept off an engine that another VM holds. In
    /// this case, the card's report about the channel is from its last run.
    fn is_shut_out(&self, channel: ChannelId) -> bool;

    /// Returns true if a channel is [shut out](Self::is_shut_out) and its VM will not soon be granted the engine for
    /// other work.
    fn is_left_out(&self, channel: ChannelId) -> bool;

    /// Returns true if a channel's VM has exclusive use of PGRAPH while the channel has any work on the card.
    fn closes_graphics(&self, channel: ChannelId) -> bool;

    /// Returns true if the state of a channel's PGRAPH context matches the needs of the work.
    fn is_ready_for(&self, channel: ChannelId, needs: Needs) -> bool;

    /// Returns true if a channel has so much work in flight that its completions must be noticed immediately.
    fn needs_ends(&self, channel: ChannelId) -> bool;

    /// Returns the time until the timer must expire unless an event occurs earlier, in ns. At that time,
    /// [`Self::take_ended`] must be called again, or a departing channel must be polled.
    fn deferred_ns(&self) -> Option<u64>;

    /// Returns the submissions that have completed since the last call, each with the card time of its completion if
    /// known.
    fn take_ended(&mut self) -> Vec<(Submission, Option<Nanos>)>;

    /// Lets the card fetch a submission and the channel's earlier ones. Returns `false` if the channel no longer
    /// exists.
    fn start(&mut self, channel: ChannelId, submission: Submission) -> bool;

    /// Suppresses the interrupt at the end of a submission. Returns `false` if it cannot be suppressed.
    fn suppress_completion_irq(&mut self, channel: ChannelId, submission: Submission) -> bool;

    /// Makes a channel without work on the card [ready](Self::is_ready_for) for work. Returns `false` if the channel
    /// has not left an engine yet.
    fn make_ready(&mut self, channel: ChannelId, needs: Needs) -> bool;

    /// Requests that the card remove a channel from its engines.
    fn ask_to_leave(&mut self, channel: ChannelId);

    /// Keeps a channel off the card, or lets it return together with its work.
    fn withhold(&mut self, channel: ChannelId, descheduled: bool);

    /// Advances a due tenant change of an engine that only one VM may use at a time. If a VM has blocked PGRAPH with
    /// work on other engines since the last call, returns the VM and the time at which this began.
    fn hand_over(&mut self) -> Option<(TenantId, Nanos)>;

    /// Removes from the card a channel that has occupied an engine for too long. Must report the channel's end through
    /// `Feeder::channel_ended` before returning.
    fn kill(&mut self, vm: TenantId, channel: VirtualChannelId, engine: Engine);
}
