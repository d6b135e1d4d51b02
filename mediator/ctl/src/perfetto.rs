//! `mediatorctl sched record --format perfetto`: a record of a card's scheduler as a trace for Perfetto.
//!
//! The format is the JSON of chrome://tracing, which Perfetto reads, too: each virtual machine is a process, each of
//! its submissions a row with its phases (queued, runs, waits), and kills and quarantines are marks. Times are in
//! microseconds since the record began.
//!
//! Source: "Trace Event Format", Google, sections on async events, instant events and metadata.

use std::collections::BTreeMap;

use sched::trace::{Entry, Trace};
use sched::{Channel, Decision, Engine, Event, Nanos, TenantId, Ticket};
use serde_json::{Value, json};

/// A submission whose end the record has not reached.
struct Open {
    vm: TenantId,
    channel: Channel,
    engine: Engine,
    phase: &'static str,
    since: Nanos,
}

/// A trace under construction.
struct Timeline<'a> {
    trace: &'a Trace,
    open: BTreeMap<Ticket, Open>,
    events: Vec<Value>,
}

/// Converts a record.
pub(super) fn convert(trace: &Trace, card: &str) -> Value {
    let mut timeline = Timeline { trace, open: BTreeMap::new(), events: Vec::new() };
    for (vm, name) in &trace.names {
        let named = json!({ "ph": "M", "name": "process_name", "pid": vm.0, "args": { "name": name } });
        timeline.events.push(named);
    }
    for entry in &trace.entries {
        timeline.add(entry);
    }
    // Submissions without an end last until the end of the record.
    let end = trace.entries.last().map_or(trace.at, |entry| entry.at);
    let left: Vec<Ticket> = timeline.open.keys().copied().collect();
    for ticket in left {
        timeline.close(ticket, end);
    }
    json!({ "displayTimeUnit": "ms", "otherData": { "card": card }, "traceEvents": timeline.events })
}

impl Timeline<'_> {
    fn add(&mut self, Entry { at, event, decisions }: &Entry) {
        let at = *at;
        match *event {
            Event::Arrival { vgpu: vm, channel, engine, ticket }
            | Event::Adopted { vgpu: vm, channel, engine, ticket } => {
                self.open.insert(ticket, Open { vm, channel, engine, phase: "queued", since: at });
            }
            Event::Waiting { ticket } => self.enter(ticket, "waits", at),
            Event::Resumed { ticket } => self.enter(ticket, "runs", at),
            Event::Requeued { ticket } => self.enter(ticket, "queued", at),
            Event::Completed { ticket, ended } => self.close(ticket, ended.unwrap_or(at)),
            Event::Withdrawn { ticket } => self.close(ticket, at),
            Event::ChannelEnded { vgpu, channel } => {
                let of_channel = |open: &Open| open.vm == vgpu && open.channel == channel;
                let gone: Vec<_> = self.open.iter().filter(|(_, open)| of_channel(open)).map(|(&t, _)| t).collect();
                for ticket in gone {
                    self.close(ticket, at);
                }
            }
            Event::Struck { vgpu, engine } => self.mark(vgpu, &format!("killed on {}", engine.name()), at),
            _ => {}
        }
        for decision in decisions {
            match *decision {
                Decision::Start(ticket) => self.enter(ticket, "runs", at),
                Decision::Quarantined { vgpu, .. } => self.mark(vgpu, "quarantined", at),
                Decision::Released { vgpu } => self.mark(vgpu, "released", at),
                Decision::Kill { .. } => {}
            }
        }
    }

    /// Begins a phase of a submission. Submissions from before the record are unknown and omitted.
    fn enter(&mut self, ticket: Ticket, phase: &'static str, at: Nanos) {
        self.show(ticket, at);
        if let Some(open) = self.open.get_mut(&ticket) {
            open.phase = phase;
            open.since = at;
        }
    }

    fn close(&mut self, ticket: Ticket, at: Nanos) {
        self.show(ticket, at);
        self.open.remove(&ticket);
    }

    /// Adds the current phase of a submission, which ends at `at`.
    fn show(&mut self, ticket: Ticket, at: Nanos) {
        let Some(&Open { vm, engine, phase, since, .. }) = self.open.get(&ticket) else { return };
        // The card's time of an end may precede the mediator's time of the start by its exactness.
        for (kind, time) in [("b", since), ("e", at.max(since))] {
            let at_us = self.microseconds(time);
            let event = json!({ "ph": kind, "cat": engine.name(), "name": phase, "id": ticket.0, "pid": vm.0, "tid": 0, "ts": at_us });
            self.events.push(event);
        }
    }

    fn mark(&mut self, vm: TenantId, name: &str, at: Nanos) {
        let at_us = self.microseconds(at);
        self.events.push(json!({ "ph": "i", "s": "p", "name": name, "pid": vm.0, "tid": 0, "ts": at_us }));
    }

    fn microseconds(&self, at: Nanos) -> f64 {
        at.since(self.trace.at) as f64 / 1000.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sched::{Config, Scheduler, VgpuParams};

    const VM: TenantId = TenantId(3);

    /// Records events of one virtual machine through a real scheduler.
    fn record(events: &[(u64, Event)]) -> Trace {
        let scheduler = Scheduler::new(Config::default(), Nanos(1_000)).unwrap();
        let mut running = scheduler.clone();
        let added = (1_000, Event::Added { vgpu: VM, params: VgpuParams::default() });
        let mut entries = Vec::new();
        for &(at, event) in [added].iter().chain(events) {
            let mut decisions = Vec::new();
            running.event(Nanos(at), event, &mut decisions);
            entries.push(Entry { at: Nanos(at), event, decisions });
        }
        Trace { scheduler, at: Nanos(1_000), names: [(VM, "web".to_owned())].into(), entries }
    }

    /// Returns the phases as name, ticket, begin and end, after checking that they come in pairs.
    fn phases(trace: &Value) -> Vec<(String, u64, f64, f64)> {
        let events = trace["traceEvents"].as_array().unwrap();
        let of_kind = |kind: &str| events.iter().filter(|event| event["ph"] == kind).cloned().collect::<Vec<_>>();
        let (begins, ends) = (of_kind("b"), of_kind("e"));
        assert_eq!(begins.len(), ends.len());
        let pairs = begins.iter().zip(&ends);
        pairs
            .map(|(begin, end)| {
                assert_eq!([&begin["id"], &begin["name"], &begin["pid"]], [&end["id"], &end["name"], &end["pid"]]);
                let name = begin["name"].as_str().unwrap().to_owned();
                (name, begin["id"].as_u64().unwrap(), begin["ts"].as_f64().unwrap(), end["ts"].as_f64().unwrap())
            })
            .collect()
    }

    fn arrival(ticket: u64) -> Event {
        Event::Arrival { vgpu: VM, channel: Channel(1), engine: Engine::Compute, ticket: Ticket(ticket) }
    }

    #[test]
    fn phases_of_submissions_follow_each_other_without_gaps() {
        let trace = record(&[
            (2_000, arrival(1)),
            (5_000, Event::Waiting { ticket: Ticket(1) }),
            (6_000, Event::Resumed { ticket: Ticket(1) }),
            (9_000, Event::Completed { ticket: Ticket(1), ended: Some(Nanos(8_500)) }),
            (9_500, arrival(2)),
            (10_000, Event::ChannelEnded { vgpu: VM, channel: Channel(1) }),
        ]);
        let shown = convert(&trace, "card0");
        let expected = [
            ("queued", 1, 1.0, 1.0),
            ("runs", 1, 1.0, 4.0),
            ("waits", 1, 4.0, 5.0),
            ("runs", 1, 5.0, 7.5),
            ("queued", 2, 8.5, 8.5),
            ("runs", 2, 8.5, 9.0),
        ];
        assert_eq!(phases(&shown), expected.map(|(name, ticket, from, to)| (name.to_owned(), ticket, from, to)));
        assert_eq!(shown["traceEvents"][0]["args"]["name"], "web");
    }

    #[test]
    fn submission_without_an_end_lasts_until_the_end_of_the_record() {
        let trace = record(&[(2_000, arrival(1)), (4_000, arrival(2))]);
        let ends: Vec<f64> = phases(&convert(&trace, "card0")).iter().map(|(.., end)| *end).collect();
        assert_eq!(ends.iter().copied().fold(0.0, f64::max), 3.0, "{ends:?}");
    }

    #[test]
    fn unknown_submissions_and_empty_records_are_harmless() {
        let trace = record(&[(2_000, Event::Completed { ticket: Ticket(9), ended: None })]);
        assert_eq!(phases(&convert(&trace, "card0")), []);
    }
}
