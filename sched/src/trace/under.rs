//! Computes the effect of other settings on recorded submissions.
//!
//! The submissions keep their arrival times and durations, and only their start times change. The result does not
//! include the reactions of guests, which would submit earlier or later. Such reactions are simulated in
//! [`crate::sim`].

use super::Trace;
use crate::types::{Engine, Ticket};
use crate::{Config, ConfigError, Decision, Event, Nanos, Scheduler};
use std::collections::{BTreeMap, VecDeque};

/// A recorded submission.
#[derive(Clone, Copy, Debug)]
struct Work {
    engine: Engine,
    started: Option<Nanos>,
    /// Engine time of the submission in ns, or `None` if it did not end. Such a submission is not replayed.
    length: Option<u64>,
}

/// Submissions on an engine.
#[derive(Debug, Default)]
struct Busy {
    queue: VecDeque<Ticket>,
    /// End time of the first submission, which is running.
    until: Option<Nanos>,
}

impl Trace {
    /// Replays the recorded submissions with other settings. Returns the scheduler, with its accounts, after all
    /// submissions have ended.
    ///
    /// # Errors
    /// Returns an error if the settings are out of bounds.
    pub fn under(&self, config: Config) -> Result<Scheduler, ConfigError> {
        let works = self.works();
        let mut events = self.told(&works);
        let mut scheduler = Scheduler::new(config, self.at)?;
        let mut decisions = Vec::new();
        for vgpu in self.scheduler.vgpus() {
            let params = self.scheduler.params(vgpu).copied().unwrap_or_default();
            scheduler.event(self.at, Event::Added { vgpu, params }, &mut decisions);
        }
        let mut engines: [Busy; Engine::COUNT] = Default::default();
        let mut now = self.at;
        // The loop terminates because all work ends, and each iteration handles an event, an end, or a scheduler
        // wakeup.
        loop {
            let next_end =
                Engine::ALL.into_iter().filter_map(|engine| Some((engines[engine.index()].until?, engine))).min();
            let next_event = events.front().map(|(at, _)| *at);
            let wakeup = scheduler.next_wakeup();
            let Some(at) = next_end.map(|(at, _)| at).into_iter().chain(next_event).chain(wakeup).min() else { break };
            if next_end.is_none() && next_event.is_none() && scheduler.queued() == 0 {
                break;
            }
            now = now.max(at);
            let event = match (next_end, next_event) {
                (Some((end, engine)), _) if end <= at => {
                    let busy = &mut engines[engine.index()];
                    busy.until = None;
                    busy.queue.pop_front().map(|ticket| Event::Completed { ticket, ended: Some(end) })
                }
                (_, Some(when)) if when <= at => events.pop_front().map(|(_, event)| event),
                _ => Some(Event::Tick),
            };
            if let Some(event) = event {
                scheduler.event(now, event, &mut decisions);
            }
            for decision in decisions.drain(..) {
                if let Decision::Start(ticket) = decision
                    && let Some(work) = works.get(&ticket)
                {
                    engines[work.engine.index()].queue.push_back(ticket);
                }
            }
            for busy in engines.iter_mut().filter(|busy| busy.until.is_none()) {
                let length = busy.queue.front().and_then(|ticket| works.get(ticket)?.length);
                busy.until = length.map(|length| now.after(length));
            }
        }
        Ok(scheduler)
    }

    /// Returns the recorded submissions and their durations.
    fn works(&self) -> BTreeMap<Ticket, Work> {
        let mut works = BTreeMap::new();
        for (_, _, engine, ticket) in self.scheduler.pending() {
            works.insert(ticket, Work { engine, started: Some(self.at), length: None });
        }
        let mut last_end = [self.at; Engine::COUNT];
        for entry in &self.entries {
            match entry.event {
                Event::Arrival { engine, ticket, .. } => {
                    works.insert(ticket, Work { engine, started: None, length: None });
                }
                Event::Completed { ticket, ended } => {
                    if let Some(work) = works.get_mut(&ticket) {
                        let (ended, last) = (ended.unwrap_or(entry.at), &mut last_end[work.engine.index()]);
                        work.length = work.started.map(|started| ended.since(started.max(*last)));
                        *last = ended.max(*last);
                    }
                }
                _ => {}
            }
            for decision in &entry.decisions {
                if let Decision::Start(ticket) = decision
                    && let Some(work) = works.get_mut(ticket)
                {
                    work.started = Some(entry.at);
                }
            }
        }
        works
    }

    /// Returns the events that do not depend on the scheduler's settings (additions, changes and removals of vGPUs, and
    /// arrivals), in order. Omits submissions that did not end.
    fn told(&self, works: &BTreeMap<Ticket, Work>) -> VecDeque<(Nanos, Event)> {
        let whole = |ticket: &Ticket| works.get(ticket).is_some_and(|work| work.length.is_some());
        let before = self.scheduler.pending().filter(|(.., ticket)| whole(ticket));
        let before =
            before.map(|(vgpu, channel, engine, ticket)| (self.at, Event::Arrival { vgpu, channel, engine, ticket }));
        let told = self.entries.iter().filter(|entry| match &entry.event {
            Event::Arrival { ticket, .. } => whole(ticket),
            Event::Added { .. } | Event::Removed { .. } | Event::Changed { .. } | Event::Competes { .. } => true,
            _ => false,
        });
        before.chain(told.map(|entry| (entry.at, entry.event))).collect()
    }
}
