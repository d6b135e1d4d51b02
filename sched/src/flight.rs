//! Submissions that an engine has been given, and those that it has been busy with.

use crate::types::{Channel, Nanos, Ticket, VgpuId};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// A submission on the card.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Flight {
    pub(crate) ticket: Ticket,
    pub(crate) vgpu: VgpuId,
    pub(crate) channel: Channel,
    pub(crate) started: Nanos,
    /// Since when the engine works on it, by the books, for its limit; set when it comes to the front. Ends of what is
    /// behind it do not move that: who keeps sending short work beside a long one would never meet its limit.
    #[serde(default)]
    pub(crate) began: Option<Nanos>,
    /// Its channel is to be killed; that was said.
    pub(crate) killed: bool,
}

/// One engine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct EngineState {
    /// In the order of their starts, which is the engine's own.
    flights: VecDeque<Flight>,
    /// Those that wait for something else than the engine.
    aside: Vec<Flight>,
    /// Up to when it was busy, as far as is known.
    last_end: Nanos,
    /// Time that it was busy, in ns.
    pub(crate) busy: u64,
    /// Of that, what vGPUs have used that are gone.
    pub(crate) departed: u64,
}

impl EngineState {
    pub(crate) fn start(&mut self, flight: Flight) {
        self.flights.push_back(flight);
        self.promote();
    }

    /// Notes since when the engine works on the first, if that is new.
    fn promote(&mut self) {
        let last_end = self.last_end;
        if let Some(first) = self.flights.front_mut() {
            first.began.get_or_insert(first.started.max(last_end));
        }
    }

    /// The card has got a submission at `now`.
    pub(crate) fn given(&mut self, ticket: Ticket, now: Nanos) {
        if let Some(flight) = self.flights.iter_mut().find(|flight| flight.ticket == ticket) {
            (flight.started, flight.began) = (now, None);
        }
        self.promote();
    }

    /// The engine works on a channel's submission now, whatever the books say: it comes to the front. `false` when the
    /// channel has none here.
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

    /// The first has not had the engine before `since`: its limit counts from then on.
    pub(crate) fn begin_anew(&mut self, since: Nanos) {
        if let Some(first) = self.flights.front_mut() {
            (first.began, first.killed) = (Some(since), false);
        }
    }

    /// Charges a submission that was set aside for what it did at some time since `since`, and not before the end of
    /// anything else. Returns whose it is, and the time in ns.
    pub(crate) fn charge_aside(&mut self, ticket: Ticket, since: Nanos, now: Nanos) -> Option<(Flight, u64)> {
        let flight = *self.aside.iter().find(|flight| flight.ticket == ticket)?;
        Some((flight, self.charge_until(since, now)))
    }

    /// Books the time up to `now`, from `since` or the end of the submission before. Returns it in ns.
    fn charge_until(&mut self, since: Nanos, now: Nanos) -> u64 {
        let used = now.since(since.max(self.last_end));
        self.last_end = self.last_end.max(now);
        self.busy = self.busy.saturating_add(used);
        used
    }

    /// Up to `now` the engine was kept from all of its submissions, since `since` or the end of the one before. Returns the time in ns.
    pub(crate) fn pass(&mut self, since: Nanos, now: Nanos) -> u64 {
        let used = self.charge_until(since, now);
        self.begin_anew(now);
        used
    }

    pub(crate) fn flights(&self) -> impl Iterator<Item = &Flight> {
        self.flights.iter()
    }

    /// Those that wait for something else than the engine.
    pub(crate) fn asides(&self) -> impl Iterator<Item = &Flight> {
        self.aside.iter()
    }

    /// Returns what the engine works on, and since when.
    pub(crate) fn running(&self) -> Option<(&Flight, Nanos)> {
        let first = self.flights.front()?;
        Some((first, first.began.unwrap_or(first.started.max(self.last_end))))
    }

    pub(crate) fn mark_killed(&mut self) {
        if let Some(first) = self.flights.front_mut() {
            first.killed = true;
        }
    }

    /// A submission has ended. Returns it and the time in ns that it used: since its start, or since the end of the one
    /// before. `ended` is taken as not before that.
    pub(crate) fn end(&mut self, ticket: Ticket, ended: Nanos) -> Option<(Flight, u64)> {
        let at = self.flights.iter().position(|flight| flight.ticket == ticket)?;
        let flight = self.flights.remove(at)?;
        let used = ended.since(flight.started.max(self.last_end));
        self.last_end = self.last_end.max(ended);
        self.busy = self.busy.saturating_add(used);
        self.promote();
        Some((flight, used))
    }

    /// A submission waits for something else from `now` on. Returns it and the time in ns that it used before.
    pub(crate) fn set_aside(&mut self, ticket: Ticket, now: Nanos) -> Option<(Flight, u64)> {
        let first = self.flights.front()?.ticket == ticket;
        let (flight, used) = if first { self.end(ticket, now)? } else { (self.withdraw(ticket)?, 0) };
        self.aside.push(flight);
        Some((flight, used))
    }

    /// A submission that has begun elsewhere waits.
    pub(crate) fn adopt(&mut self, flight: Flight) {
        self.aside.push(flight);
    }

    /// Takes out a submission that was set aside.
    pub(crate) fn take_aside(&mut self, ticket: Ticket) -> Option<Flight> {
        let at = self.aside.iter().position(|flight| flight.ticket == ticket)?;
        Some(self.aside.remove(at))
    }

    /// Takes out those set aside that `gone` says of.
    pub(crate) fn drop_aside(&mut self, gone: impl Fn(&Flight) -> bool) -> Vec<Flight> {
        self.aside.extract_if(.., |flight| gone(flight)).collect()
    }

    /// Takes out a submission that was nothing to the engine.
    pub(crate) fn withdraw(&mut self, ticket: Ticket) -> Option<Flight> {
        let at = self.flights.iter().position(|flight| flight.ticket == ticket)?;
        let flight = self.flights.remove(at);
        self.promote();
        flight
    }

    /// Takes out the first submission that `gone` says of, at `now`, with the time in ns that it used. Only the one that the
    /// engine works on has used any.
    pub(crate) fn drop_first(&mut self, now: Nanos, gone: impl Fn(&Flight) -> bool) -> Option<(Flight, u64)> {
        let at = self.flights.iter().position(gone)?;
        if at == 0 {
            let ticket = self.flights.front()?.ticket;
            return self.end(ticket, now);
        }
        self.flights.remove(at).map(|flight| (flight, 0))
    }
}
