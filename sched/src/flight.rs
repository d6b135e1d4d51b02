//! Submissions on an engine, and the engine's busy time.

use crate::types::{Channel, Nanos, TenantId, Ticket};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// A submission on the card.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Flight {
    pub(crate) ticket: Ticket,
    pub(crate) vgpu: TenantId,
    pub(crate) channel: Channel,
    pub(crate) started: Nanos,
    /// Start of the run time limit: the time at which the submission became the first in flight, according to the
    /// accounts. The end of a later submission does not change it. Otherwise, a vGPU could submit short work during a
    /// long submission, which would then never reach its limit.
    #[serde(default)]
    pub(crate) began: Option<Nanos>,
    /// True if the scheduler has decided to kill the submission's channel.
    pub(crate) killed: bool,
}

/// State of one engine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct EngineState {
    /// Submissions in the order of their starts, which is also the order of execution.
    flights: VecDeque<Flight>,
    /// Deferred submissions, which wait for something other than the engine.
    aside: Vec<Flight>,
    /// Latest known end of the engine's busy time.
    last_end: Nanos,
    /// Total busy time of the engine, in ns.
    pub(crate) busy: u64,
    /// Part of `busy` charged to vGPUs that have since been removed, in ns.
    pub(crate) departed: u64,
}

impl EngineState {
    pub(crate) fn start(&mut self, flight: Flight) {
        self.flights.push_back(flight);
        self.promote();
    }

    /// Starts the first submission's run time limit, unless the limit is already running.
    fn promote(&mut self) {
        let last_end = self.last_end;
        if let Some(first) = self.flights.front_mut() {
            first.began.get_or_insert(first.started.max(last_end));
        }
    }

    /// Records that the card received a submission at `now`.
    pub(crate) fn given(&mut self, ticket: Ticket, now: Nanos) {
        if let Some(flight) = self.flights.iter_mut().find(|flight| flight.ticket == ticket) {
            (flight.started, flight.began) = (now, None);
        }
        self.promote();
    }

    /// Moves the first submission that satisfies `of` to the front, because the card reports that the engine is now
    /// executing it. Returns `false` if no submission satisfies `of`.
    pub(crate) fn bring_forward(&mut self, of: impl Fn(&Flight) -> bool) -> bool {
        let Some(at) = self.flights.iter().position(of) else { return false };
        if let Some(first) = self.flights.front_mut().filter(|_| at > 0) {
            (first.began, first.killed) = (None, false);
        }
        if let Some(flight) = self.flights.remove(at) {
            self.flights.push_front(flight);
        }
        self.promote();
        true
    }

    /// Restarts the run time limit of the first submission at `since`, because it did not have the engine before that
    /// time.
    pub(crate) fn begin_anew(&mut self, since: Nanos) {
        if let Some(first) = self.flights.front_mut() {
            (first.began, first.killed) = (Some(since), false);
        }
    }

    /// Charges a deferred submission for the time from the later of `since` and the last end of a submission on this
    /// engine to `now`. Returns the submission and the charged time in ns.
    pub(crate) fn charge_aside(&mut self, ticket: Ticket, since: Nanos, now: Nanos) -> Option<(Flight, u64)> {
        let flight = *self.aside.iter().find(|flight| flight.ticket == ticket)?;
        Some((flight, self.charge_until(since, now)))
    }

    /// Counts the time from the later of `since` and the last end of a submission to `now` as busy. Returns this time
    /// in ns.
    pub(crate) fn charge_until(&mut self, since: Nanos, now: Nanos) -> u64 {
        let used = now.since(since.max(self.last_end));
        self.last_end = self.last_end.max(now);
        self.busy = self.busy.saturating_add(used);
        used
    }

    /// Counts the time from the later of `since` and the end of the last submission to `now` as busy, although no
    /// submission could use the engine. Restarts the run time limit of the first submission. Returns the counted time
    /// in ns.
    pub(crate) fn pass(&mut self, since: Nanos, now: Nanos) -> u64 {
        let used = self.charge_until(since, now);
        self.begin_anew(now);
        used
    }

    pub(crate) fn flights(&self) -> impl Iterator<Item = &Flight> {
        self.flights.iter()
    }

    /// Returns the deferred submissions.
    pub(crate) fn asides(&self) -> impl Iterator<Item = &Flight> {
        self.aside.iter()
    }

    /// Returns the running submission and the start of its run time limit.
    pub(crate) fn running(&self) -> Option<(&Flight, Nanos)> {
        let first = self.flights.front()?;
        Some((first, first.began.unwrap_or(first.started.max(self.last_end))))
    }

    pub(crate) fn mark_killed(&mut self) {
        if let Some(first) = self.flights.front_mut() {
            first.killed = true;
        }
    }

    /// Ends a submission. Returns it and its engine time in ns, measured from the later of its start and the end of the
    /// previous submission. An `ended` before this time is clamped to it.
    pub(crate) fn end(&mut self, ticket: Ticket, ended: Nanos) -> Option<(Flight, u64)> {
        let at = self.flights.iter().position(|flight| flight.ticket == ticket)?;
        let flight = self.flights.remove(at)?;
        let used = ended.since(flight.started.max(self.last_end));
        self.last_end = self.last_end.max(ended);
        self.busy = self.busy.saturating_add(used);
        self.promote();
        Some((flight, used))
    }

    /// Defers a submission at `now`, because it waits for something other than the engine. Returns it and its engine
    /// time in ns.
    pub(crate) fn set_aside(&mut self, ticket: Ticket, now: Nanos) -> Option<(Flight, u64)> {
        let first = self.flights.front()?.ticket == ticket;
        let (flight, used) = if first { self.end(ticket, now)? } else { (self.withdraw(ticket)?, 0) };
        self.aside.push(flight);
        Some((flight, used))
    }

    /// Adds a deferred submission from another card.
    pub(crate) fn adopt(&mut self, flight: Flight) {
        self.aside.push(flight);
    }

    /// Removes a deferred submission.
    pub(crate) fn take_aside(&mut self, ticket: Ticket) -> Option<Flight> {
        let at = self.aside.iter().position(|flight| flight.ticket == ticket)?;
        Some(self.aside.remove(at))
    }

    /// Removes the deferred submissions that satisfy `gone`.
    pub(crate) fn drop_aside(&mut self, gone: impl Fn(&Flight) -> bool) -> Vec<Flight> {
        self.aside.extract_if(.., |flight| gone(flight)).collect()
    }

    /// Removes a submission that has not used the engine.
    pub(crate) fn withdraw(&mut self, ticket: Ticket) -> Option<Flight> {
        let at = self.flights.iter().position(|flight| flight.ticket == ticket)?;
        let flight = self.flights.remove(at);
        self.promote();
        flight
    }

    /// Removes the first submission that satisfies `gone`, at `now`. Returns it and its engine time in ns. Only the
    /// running submission has used engine time.
    pub(crate) fn drop_first(&mut self, now: Nanos, gone: impl Fn(&Flight) -> bool) -> Option<(Flight, u64)> {
        let at = self.flights.iter().position(gone)?;
        if at == 0 {
            let ticket = self.flights.front()?.ticket;
            return self.end(ticket, now);
        }
        self.flights.remove(at).map(|flight| (flight, 0))
    }
}
