//! Converts a recording of a card's scheduler to a trace for Perfetto, for `mediatorctl sched record --format
//! perfetto`.
//!
//! The format is the JSON of chrome://tracing, which Perfetto can also read. Each tenant is a process. Each submission
//! of a VM is a row with its phases (queued, runs, waits). A tenant of a CUDA card has one row with its turns, waits
//! and overruns. Memory moves have their own rows, and kills and quarantines are marks. The card is also a process,
//! with a row for the gaps in which no work ran. Times are in microseconds since the start of the recording.
//!
//! Source: "Trace Event Format", Google, sections on complete, async and instant events and on metadata.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use sched::trace::{Entry, MemoryMove, Trace};
use sched::{Channel, Decision, Engine, Event, Nanos, TenantId, Ticket};
use serde_json::{Value, json};

/// Process ID of the card in the trace.
const CARD: u64 = 1;
/// Process ID of the first tenant in the trace.
const FIRST_TENANT: u64 = 2;
/// Row of a tenant's turns and marks, and of the card's gaps.
const TURNS: u64 = 1;

/// A submission that has not ended yet.
struct Open {
    vm: TenantId,
    channel: Channel,
    engine: Engine,
    phase: &'static str,
    since: Nanos,
}

/// A phase of a tenant of a CUDA card.
struct Phase {
    name: &'static str,
    from: Nanos,
    until: Nanos,
}

/// A trace under construction.
struct Timeline<'a> {
    trace: &'a Trace,
    open: BTreeMap<Ticket, Open>,
    events: Vec<Value>,
    seen: BTreeSet<TenantId>,
    /// Phases of a CUDA card's tenants, in the order in which the submissions ended.
    phases: BTreeMap<TenantId, Vec<Phase>>,
    /// Intervals in which work ran on the card.
    busy: Vec<(Nanos, Nanos)>,
}

/// Converts a recording to a trace for Perfetto.
#[must_use]
pub fn convert(trace: &Trace, card: &str) -> Value {
    let mut timeline = Timeline {
        trace,
        open: BTreeMap::new(),
        events: Vec::new(),
        seen: trace.names.keys().copied().collect(),
        phases: BTreeMap::new(),
        busy: Vec::new(),
    };
    for entry in &trace.entries {
        timeline.add(entry);
    }
    // Extend submissions without an end to the end of the recording.
    let left: Vec<Ticket> = timeline.open.keys().copied().collect();
    for ticket in left {
        timeline.close(ticket, trace.end());
    }
    timeline.turns();
    for (number, moved) in trace.moves.iter().enumerate() {
        timeline.moved(number, moved);
    }
    timeline.gaps();
    let mut events = timeline.names(card);
    // Sort stably by time, because some readers do not sort.
    timeline.events.sort_by(|one, other| time(one).total_cmp(&time(other)));
    events.append(&mut timeline.events);
    json!({ "displayTimeUnit": "ms", "otherData": { "card": card }, "traceEvents": events })
}

fn time(event: &Value) -> f64 {
    event["ts"].as_f64().unwrap_or_default()
}

fn process(tenant: TenantId) -> u64 {
    FIRST_TENANT + u64::from(tenant.0)
}

impl Timeline<'_> {
    fn add(&mut self, Entry { at, event, decisions }: &Entry) {
        let at = *at;
        match *event {
            Event::Arrival { vgpu: vm, channel, engine, ticket }
            | Event::Adopted { vgpu: vm, channel, engine, ticket } => {
                self.seen.insert(vm);
                self.open.insert(ticket, Open { vm, channel, engine, phase: self.name("queued"), since: at });
            }
            Event::Waiting { ticket } => self.enter(ticket, self.name("waits"), at),
            Event::Resumed { ticket } => self.enter(ticket, self.name("runs"), at),
            Event::Requeued { ticket } => self.enter(ticket, self.name("queued"), at),
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
                Decision::Start(ticket) => self.enter(ticket, self.name("runs"), at),
                Decision::Quarantined { vgpu, .. } => self.mark(vgpu, "quarantined", at),
                Decision::Released { vgpu } => self.mark(vgpu, "released", at),
                Decision::Kill { .. } => {}
            }
        }
    }

    /// Returns the display name of a phase. Phases of turns on a CUDA card have different names.
    fn name(&self, phase: &'static str) -> &'static str {
        match phase {
            "queued" if self.trace.turns => "waits",
            "runs" if self.trace.turns => "turn",
            "waits" if self.trace.turns => "overruns",
            phase => phase,
        }
    }

    /// Begins a submission's phase. Submissions that started before the recording are unknown and omitted.
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

    /// Adds a submission's current phase, which ends at `at`.
    fn show(&mut self, ticket: Ticket, at: Nanos) {
        let Some(&Open { vm, engine, phase, since, .. }) = self.open.get(&ticket) else { return };
        // The card's end time may precede the mediator's start time, because their clocks differ slightly.
        let until = at.max(since);
        if phase == self.name("runs") || phase == "overruns" {
            self.busy.push((since, until));
        }
        if self.trace.turns {
            return self.phase(vm, Phase { name: phase, from: since, until });
        }
        self.pair(engine.name(), phase, (ticket.0, vm), (since, until), None);
    }

    /// Adds a phase of a CUDA card's tenant. Merges slices of the same turn into one phase.
    fn phase(&mut self, tenant: TenantId, Phase { name, from, until }: Phase) {
        let phases = self.phases.entry(tenant).or_default();
        match phases.last_mut() {
            Some(last) if last.name == name && last.until == from => last.until = until,
            _ if from == until => {}
            _ => phases.push(Phase { name, from, until }),
        }
    }

    /// Adds an interval that may overlap other intervals of the same process.
    fn pair(
        &mut self,
        category: &str,
        name: &str,
        (id, tenant): (u64, TenantId),
        (from, until): (Nanos, Nanos),
        arguments: Option<Value>,
    ) {
        let pid = process(tenant);
        for (kind, at) in [("b", from), ("e", until)] {
            let ts = self.microseconds(at);
            let mut event =
                json!({ "ph": kind, "cat": category, "name": name, "id": id, "pid": pid, "tid": TURNS, "ts": ts });
            if let (Some(arguments), "b") = (&arguments, kind) {
                event["args"] = arguments.clone();
            }
            self.events.push(event);
        }
    }

    /// Adds an interval to the row `TURNS` of a process.
    fn complete(&mut self, pid: u64, name: &str, from: Nanos, until: Nanos) {
        let (ts, end) = (self.microseconds(from), self.microseconds(until));
        self.events.push(json!({ "ph": "X", "name": name, "pid": pid, "tid": TURNS, "ts": ts, "dur": end - ts }));
    }

    /// Adds the phases of a CUDA card's tenants.
    fn turns(&mut self) {
        for (tenant, mut phases) in std::mem::take(&mut self.phases) {
            // Submissions were added in the order in which they ended.
            phases.sort_by_key(|phase| (phase.from, phase.until));
            for Phase { name, from, until } in phases {
                self.complete(process(tenant), name, from, until);
            }
        }
    }

    fn moved(&mut self, number: usize, &MemoryMove { from, until, vgpu, bytes, to_card }: &MemoryMove) {
        self.seen.insert(vgpu);
        let name = if to_card { "to the card" } else { "to host memory" };
        let from = from.max(self.trace.at);
        let mib = bytes as f64 / f64::from(1 << 20);
        let times = (from, until.max(from));
        self.pair("memory", name, (number as u64, vgpu), times, Some(json!({ "MiB": mib })));
    }

    /// Adds the intervals in which no work ran.
    fn gaps(&mut self) {
        let mut busy = std::mem::take(&mut self.busy);
        busy.sort_unstable();
        let mut end = self.trace.at;
        for (from, until) in busy {
            if from > end {
                self.complete(CARD, "gap", end, from);
            }
            end = end.max(until);
        }
        if self.trace.end() > end {
            self.complete(CARD, "gap", end, self.trace.end());
        }
    }

    fn mark(&mut self, vm: TenantId, name: &str, at: Nanos) {
        self.seen.insert(vm);
        let ts = self.microseconds(at);
        self.events.push(json!({ "ph": "i", "s": "p", "name": name, "pid": process(vm), "tid": TURNS, "ts": ts }));
    }

    /// Returns the names of processes and rows.
    fn names(&self, card: &str) -> Vec<Value> {
        let row = if self.trace.turns { "turns" } else { "work" };
        let named = |kind: &str, pid: u64, name: &str| json!({ "ph": "M", "name": kind, "pid": pid, "tid": TURNS, "args": { "name": name } });
        let mut names = vec![named("process_name", CARD, &format!("card {card}")), named("thread_name", CARD, "gaps")];
        for tenant in &self.seen {
            let name = self.trace.names.get(tenant).cloned().unwrap_or_else(|| format!("#{}", tenant.0));
            names.push(named("process_name", process(*tenant), &name));
            names.push(named("thread_name", process(*tenant), row));
        }
        names
    }

    fn microseconds(&self, at: Nanos) -> f64 {
        at.since(self.trace.at) as f64 / 1000.0
    }
}

#[cfg(test)]
mod tests;
