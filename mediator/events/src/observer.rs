//! Derives events by comparing successive states of the daemon in API form: long overruns, long waits, failures,
//! connections. For virtual machines, it also derives kills and strikes (from counters), and quarantines (which last
//! for at least a second).
//!
//! Comparing states misses changes that begin and end between two states, so the code that makes such changes adds its
//! own events: the daemon for changes and moves, and the owner of a CUDA card for kills, strikes and quarantines of
//! tenants. The daemon compares states before it removes a virtual machine, because the removal discards its counters.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{EventKind, Subject, SubjectKind, WaitKind, WaitReason, WorkState};

use crate::event::NewEvent;

/// Minimum duration of a reported overrun.
const LONG_OVERRUN: Duration = Duration::from_secs(1);
/// Minimum duration of a reported wait.
const LONG_WAIT: Duration = Duration::from_secs(5);
/// Tolerance in ms: a quarantine with at most this much time left in the last state counts as expired.
const QUARANTINE_SLACK_MS: u64 = 3000;
/// Maximum number of clients named in the text of one event.
const MAX_NAMED: usize = 4;

/// Snapshot of the daemon's state.
#[derive(Clone, Debug, Default)]
pub struct States {
    /// All cards.
    pub cards: Vec<api::Card>,
    /// All virtual machines.
    pub vms: Vec<api::Vm>,
    /// All tenants.
    pub tenants: Vec<api::Tenant>,
    /// Schedulers of the cards that have a scheduler.
    pub schedulers: Vec<api::CardScheduler>,
}

/// Observed state of a virtual machine or tenant.
#[derive(Clone, Debug, Default)]
struct Sight {
    card: String,
    failed: Option<String>,
    /// Clients by process ID. A tenant's clients are its programs.
    clients: BTreeMap<i64, String>,
    /// Number of a virtual machine's killed submissions. The owner of a CUDA card reports kills itself.
    killed: u64,
    /// Time by which a turn has exceeded its slice.
    overran: Duration,
    strikes: u64,
    quarantined: bool,
    /// Remaining time of the quarantine.
    ends_in_ms: Option<u64>,
    state: WorkState,
    wait_reason: Option<WaitReason>,
    /// Value that changes when work starts.
    progress: u64,
}

/// A wait in progress.
#[derive(Clone, Debug)]
struct Wait {
    since: Duration,
    /// State and reason, without details that change during the wait.
    reason: (WorkState, Option<WaitReason>),
    /// Value of [`Sight::progress`] at the start of the wait.
    progress: u64,
    /// True if the wait was long enough for an event.
    reported: bool,
}

/// Last known state of an object.
#[derive(Clone, Debug, Default)]
struct Known {
    sight: Sight,
    wait: Option<Wait>,
}

/// Compares states of the daemon.
#[derive(Debug, Default)]
pub struct Observer {
    /// False until the first state, whose objects have no earlier state for comparison.
    started: bool,
    known: BTreeMap<Subject, Known>,
    /// Names of failed cards.
    failed: Vec<String>,
}

impl Observer {
    /// Returns the events since the last state. `now` is the time since an arbitrary fixed start.
    pub fn compare(&mut self, states: &States, now: Duration) -> Vec<NewEvent> {
        let mut events = Vec::new();
        // The daemon restarts the owners of CUDA cards, and each restart has its own event.
        let failed = states.cards.iter().filter(|card| card.kind != "cuda");
        let failed: Vec<_> = failed.filter_map(|card| Some((card.name.clone(), card.error.clone()?))).collect();
        for (card, why) in failed.iter().filter(|(card, _)| !self.failed.contains(card)) {
            events.push(NewEvent::card(EventKind::Failed, card, format!("the card is out of service: {why}")));
        }
        self.failed = failed.into_iter().map(|(card, _)| card).collect();
        let mut known = BTreeMap::new();
        for (subject, sight) in sights(states) {
            let before = self.known.remove(&subject);
            if before.is_none() && !self.started {
                known.insert(subject, Known { wait: sight.wait(now), sight });
                continue;
            }
            let mut of = before.unwrap_or_default();
            let mut found = changes(&subject, &of.sight, &sight);
            found.extend(of.waits(&subject, &sight, now));
            events.extend(found.into_iter().map(|event| event.on(&sight.card)));
            of.sight = sight;
            known.insert(subject, of);
        }
        (self.known, self.started) = (known, true);
        events
    }
}

/// Returns the observed states of all virtual machines and tenants.
fn sights(states: &States) -> Vec<(Subject, Sight)> {
    let shares: BTreeMap<&str, &api::VmShare> =
        states.schedulers.iter().flat_map(|card| &card.vms).map(|share| (share.vm.as_str(), share)).collect();
    let progress = |share: Option<&&api::VmShare>| {
        share.map_or(0, |share| share.engines.values().map(|engine| engine.started).fold(0, u64::wrapping_add))
    };
    let vms = states.vms.iter().map(|vm| {
        let share = shares.get(vm.name.as_str());
        let client = vm.client.map(|client| {
            let what = match client.domain {
                Some(domain) => format!("Xen domain {domain}"),
                None => format!("VMM, user {}, process {}", client.uid, client.pid),
            };
            (i64::from(client.pid), what)
        });
        let sight = Sight {
            card: vm.card.clone(),
            failed: (vm.state == api::VmState::Failed).then(|| vm.error.clone().unwrap_or_default()),
            clients: client.into_iter().collect(),
            killed: share.map_or(0, |share| share.engines.values().map(|engine| engine.killed).sum()),
            strikes: share.map_or(0, |share| share.strikes.into()),
            quarantined: share.is_some_and(|share| share.quarantine.is_some()),
            ends_in_ms: share.and_then(|share| share.quarantine?.ends_in_ms),
            state: share.map_or(WorkState::Idle, |share| share.state),
            wait_reason: share.and_then(|share| share.wait_reason.clone()),
            progress: progress(share),
            ..Sight::default()
        };
        (Subject { kind: SubjectKind::Vm, name: vm.name.clone() }, sight)
    });
    let tenants = states.tenants.iter().map(|tenant| {
        let program = |program: &api::Program| {
            let (name, pid) = (&program.name, program.pid);
            (i64::from(pid), format!("program `{name}`, process {pid}"))
        };
        let sight = Sight {
            card: tenant.card.clone(),
            clients: tenant.programs.iter().map(program).collect(),
            overran: Duration::from_nanos(tenant.overrun_ns),
            state: tenant.state,
            wait_reason: tenant.wait_reason.clone(),
            progress: progress(shares.get(tenant.name.as_str())),
            ..Sight::default()
        };
        (Subject { kind: SubjectKind::Tenant, name: tenant.name.clone() }, sight)
    });
    vms.chain(tenants).collect()
}

/// Returns the increase of a counter. A counter below its last value has restarted from zero, under a new owner.
fn increase(before: u64, now: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

/// Returns the events between two states of an object.
fn changes(subject: &Subject, before: &Sight, now: &Sight) -> Vec<NewEvent> {
    let event = |kind, text: String| NewEvent::about(kind, subject.clone(), text);
    let mut events = Vec::new();
    // Programs and counters of an unresponsive owner are unknown.
    if now.state == WorkState::Unserved || before.state == WorkState::Unserved {
        return events;
    }
    let gone: Vec<&String> = left(&before.clients, &now.clients);
    let killed = increase(before.killed, now.killed);
    if killed > 0 {
        let what = count(killed, "submission was", "submissions were");
        events.push(event(EventKind::Killed, format!("{what} killed for exceeding the time limit")));
    }
    if now.overran >= LONG_OVERRUN && (before.overran < LONG_OVERRUN || now.overran < before.overran) {
        let seconds = now.overran.as_secs_f64();
        let text = format!("its turn continued for {seconds:.1} s beyond its slice while other tenants share the card");
        events.push(event(EventKind::Overran, text));
    }
    let strikes = increase(before.strikes, now.strikes);
    // A release clears the strikes.
    if strikes > 0 && now.strikes > before.strikes {
        let text = format!("a submission exceeded its time limit, strike {}", now.strikes);
        events.push(event(EventKind::Overran, text));
    }
    if now.quarantined && !before.quarantined {
        let length = now.ends_in_ms.map(|ms| format!(" for {} s", ms.div_ceil(1000))).unwrap_or_default();
        let release = format!("run `mediatorctl sched release {}` to release it", subject.name);
        events.push(event(
            EventKind::Quarantined,
            format!("quarantined{length}: none of its work is started; {release}"),
        ));
    }
    if before.quarantined && !now.quarantined && before.ends_in_ms.is_some_and(|ms| ms <= QUARANTINE_SLACK_MS) {
        events.push(event(EventKind::Released, "its quarantine has ended".to_owned()));
    }
    if let Some(why) = now.failed.as_ref().filter(|_| before.failed.is_none()) {
        events.push(event(EventKind::Failed, format!("out of service, remove it and add it again: {why}")));
    }
    let come = left(&now.clients, &before.clients);
    if !come.is_empty() {
        events.push(event(EventKind::Connected, format!("connected: {}", named(&come))));
    }
    if !gone.is_empty() {
        events.push(event(EventKind::Disconnected, format!("disconnected: {}", named(&gone))));
    }
    events
}

/// Returns the clients in `these` that are missing from `others`.
fn left<'a>(these: &'a BTreeMap<i64, String>, others: &BTreeMap<i64, String>) -> Vec<&'a String> {
    these.iter().filter(|(pid, name)| others.get(pid) != Some(name)).map(|(_, name)| name).collect()
}

fn named(clients: &[&String]) -> String {
    let shown: Vec<&str> = clients.iter().take(MAX_NAMED).map(|name| name.as_str()).collect();
    let more = clients.len().saturating_sub(MAX_NAMED);
    if more == 0 { shown.join("; ") } else { format!("{}; and {more} more", shown.join("; ")) }
}

fn count(number: u64, one: &str, several: &str) -> String {
    if number == 1 { format!("a {one}") } else { format!("{number} {several}") }
}

impl Sight {
    /// Returns the object's current wait.
    fn wait(&self, now: Duration) -> Option<Wait> {
        let reason = match self.state {
            WorkState::Idle | WorkState::Working => return None,
            // Ignore the holder of the slice, which changes while this tenant waits.
            WorkState::Waiting => self.wait_reason.clone().map(|reason| match reason.kind {
                WaitKind::Slice => WaitKind::Slice.into(),
                _ => reason,
            }),
            WorkState::Stopped | WorkState::Quarantined | WorkState::Unserved => None,
        };
        Some(Wait { since: now, reason: (self.state, reason), progress: self.progress, reported: false })
    }

    /// Describes a wait of `seconds`, in the present or past tense.
    fn wait_in_words(wait: &Wait, seconds: Duration, ended: bool) -> String {
        let (state, reason) = &wait.reason;
        let seconds = format!("{:.1} s", seconds.as_secs_f64());
        let has = if ended { "" } else { "has " };
        let been = if ended { "was" } else { "has been" };
        match state {
            WorkState::Stopped => {
                format!("{been} stopped for {seconds}, by a signal, a debugger or a freezer")
            }
            WorkState::Quarantined => format!("{been} quarantined for {seconds}"),
            WorkState::Unserved => format!("{been} without an owner of its card for {seconds}"),
            _ => {
                let reason = reason.as_ref().map(|reason| format!(": {}", reason.in_words())).unwrap_or_default();
                format!("{has}waited for {seconds}{reason}")
            }
        }
    }
}

impl Known {
    /// Continues, begins or ends the object's wait. Returns an event when a wait has become long, and when a long wait
    /// ends.
    fn waits(&mut self, subject: &Subject, sight: &Sight, now: Duration) -> Option<NewEvent> {
        let event = |kind, wait: &Wait, ended| {
            let waited = now.saturating_sub(wait.since);
            NewEvent::about(kind, subject.clone(), Sight::wait_in_words(wait, waited, ended)).waited(waited)
        };
        let next = sight.wait(now);
        let continues = |wait: &Wait| {
            next.as_ref().is_some_and(|next| next.reason == wait.reason && next.progress == wait.progress)
        };
        match &mut self.wait {
            Some(wait) if continues(wait) => {
                let long = !wait.reported && now.saturating_sub(wait.since) >= LONG_WAIT;
                wait.reported |= long;
                // The start of a quarantine has already been reported.
                (long && wait.reason.0 != WorkState::Quarantined).then(|| event(EventKind::Waits, wait, false))
            }
            before => {
                let ended = std::mem::replace(before, next);
                ended.filter(|wait| wait.reported).map(|wait| event(EventKind::Waited, &wait, true))
            }
        }
    }
}

#[cfg(test)]
mod tests;
