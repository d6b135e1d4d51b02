//! Tests traces of recordings from real schedulers against the trace event format.

use super::*;
use sched::trace::Recorder;
use sched::turns::{Turns, TurnsConfig, scheduler_defaults};
use sched::{Config, Scheduler, VgpuParams};

const VM: TenantId = TenantId(3);

/// Checks each rule of the trace event format that applies to these events, and returns the events by kind.
fn checked(trace: &Value) -> BTreeMap<String, Vec<Value>> {
    let mut kinds: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    let mut named: BTreeSet<(String, u64)> = BTreeSet::new();
    // Parse the output, because viewers read it as text.
    let trace: Value = serde_json::from_str(&trace.to_string()).unwrap();
    assert_eq!(trace["displayTimeUnit"], "ms");
    let mut last = 0.0;
    let mut open: BTreeMap<(String, u64, u64), (String, f64)> = BTreeMap::new();
    let mut rows: BTreeMap<(u64, u64), f64> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        let text = |key: &str| event[key].as_str().unwrap_or_else(|| panic!("{key}: {event}")).to_owned();
        let (kind, pid, tid) = (text("ph"), event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        assert!(pid > 0 && tid > 0 && !text("name").is_empty(), "{event}");
        kinds.entry(kind.clone()).or_default().push(event.clone());
        if kind == "M" {
            assert!(["process_name", "thread_name"].contains(&&*text("name")), "{event}");
            assert!(event["args"]["name"].is_string() && named.insert((text("name"), pid)), "{event}");
            continue;
        }
        for name in ["process_name", "thread_name"] {
            assert!(named.contains(&(name.to_owned(), pid)), "process without {name}: {event}");
        }
        let ts = event["ts"].as_f64().unwrap();
        assert!(ts.is_finite() && ts >= last, "{event}");
        last = ts;
        match &*kind {
            "X" => {
                let dur = event["dur"].as_f64().unwrap();
                assert!(dur.is_finite() && dur > 0.0, "{event}");
                // Intervals on the same row must not overlap.
                let end = rows.entry((pid, tid)).or_default();
                assert!(ts >= *end - 1e-6, "overlaps: {event}");
                *end = ts + dur;
            }
            "b" => {
                let id = (text("cat"), event["id"].as_u64().unwrap(), pid);
                assert!(open.insert(id, (text("name"), ts)).is_none(), "begins twice: {event}");
            }
            "e" => {
                let id = (text("cat"), event["id"].as_u64().unwrap(), pid);
                let (name, since) = open.remove(&id).unwrap_or_else(|| panic!("no begin: {event}"));
                assert!(name == text("name") && since <= ts, "{event}");
            }
            "i" => assert_eq!(event["s"], "p", "{event}"),
            _ => panic!("{event}"),
        }
    }
    assert!(open.is_empty(), "{open:?}");
    kinds
}

/// Records one virtual machine's events through a real scheduler.
fn record(events: &[(u64, Event)]) -> Trace {
    let mut running = Scheduler::new(Config::default(), Nanos(1_000)).unwrap();
    let mut recorder = Recorder::new(Vec::new(), &running, Nanos(1_000), &[(VM, "web".to_owned())].into()).unwrap();
    let added = (1_000, Event::Added { vgpu: VM, params: VgpuParams::default() });
    for &(at, event) in [added].iter().chain(events) {
        let mut decisions = Vec::new();
        running.event(Nanos(at), event, &mut decisions);
        recorder.record(Nanos(at), event, &decisions).unwrap();
    }
    Trace::read(&*recorder.finish().unwrap()).unwrap()
}

/// Returns the phases as tuples of name, ticket, begin and end.
fn phases(trace: &Value) -> Vec<(String, u64, f64, f64)> {
    let mut kinds = checked(trace);
    let (begins, mut ends) = (kinds.remove("b").unwrap_or_default(), kinds.remove("e").unwrap_or_default());
    let pairs = begins.into_iter().map(|begin| {
        let at = ends.iter().position(|end| end["id"] == begin["id"] && end["cat"] == begin["cat"]).unwrap();
        let end = ends.remove(at);
        let name = begin["name"].as_str().unwrap().to_owned();
        (name, begin["id"].as_u64().unwrap(), begin["ts"].as_f64().unwrap(), end["ts"].as_f64().unwrap())
    });
    pairs.collect()
}

/// Returns a process's intervals as tuples of name, begin and end.
fn intervals(trace: &Value, pid: u64) -> Vec<(String, f64, f64)> {
    let all = checked(trace).remove("X").unwrap_or_default();
    let of_process = all.into_iter().filter(|event| event["pid"] == pid);
    let shown = of_process.map(|event| {
        let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        (event["name"].as_str().unwrap().to_owned(), ts, ts + dur)
    });
    shown.collect()
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
    let names = checked(&shown).remove("M").unwrap();
    let names: Vec<&str> = names.iter().map(|event| event["args"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["card card0", "gaps", "web", "work"]);
    // No work ran while the submission waited, or between the two submissions.
    let gaps = [(0.0, 1.0), (4.0, 5.0), (7.5, 8.5)].map(|(from, to)| ("gap".to_owned(), from, to));
    assert_eq!(intervals(&shown, CARD), gaps);
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

#[test]
fn overlapping_memory_moves_are_rows_of_their_tenant() {
    let mut trace = record(&[(2_000, arrival(1)), (9_000, Event::Tick)]);
    let moved =
        |from, until, to_card| MemoryMove { from: Nanos(from), until: Nanos(until), vgpu: VM, bytes: 3 << 20, to_card };
    trace.moves = vec![moved(0, 4_000, false), moved(3_000, 5_000, true)];
    let shown = convert(&trace, "card0");
    let moves: Vec<_> = phases(&shown).into_iter().filter(|(name, ..)| name.starts_with("to ")).collect();
    // A move that began before the recording is truncated.
    let expected = [("to host memory", 0, 0.0, 3.0), ("to the card", 1, 2.0, 4.0)];
    assert_eq!(moves, expected.map(|(name, number, from, to)| (name.to_owned(), number, from, to)));
    let begins = checked(&shown).remove("b").unwrap();
    assert!(begins.iter().any(|event| event["cat"] == "memory" && event["args"]["MiB"] == 3.0), "{begins:?}");
}

#[test]
fn turns_waits_and_overruns_of_cuda_tenants_are_rows() {
    const MS: u64 = 1_000_000;
    let (one, two) = (TenantId(1), TenantId(2));
    let mut turns = Turns::new(scheduler_defaults(), TurnsConfig::default(), Nanos(0)).unwrap();
    for tenant in [one, two] {
        turns.add(tenant, VgpuParams::default(), Nanos(0));
    }
    let names = [(one, "a".to_owned()), (two, "b".to_owned())].into();
    assert!(turns.start_record(&names, 1 << 20, Nanos(0)));
    assert!(!turns.start_record(&names, 1 << 20, Nanos(0)), "one at a time");
    let at = |ms: u64| Nanos(ms * MS);
    turns.wants(one, at(10));
    turns.wants(two, at(12));
    // The first tenant keeps its turn.
    let mut now = 10;
    while !turns.has_turn(two) {
        now += 1;
        turns.tick(at(now));
        assert!(now < 1000, "no turn for the second tenant");
    }
    turns.ended(two, at(now + 5), false, at(now + 5));
    turns.ended(one, at(now + 9), false, at(now + 9));
    turns.tick(at(now + 20));
    let trace = Trace::read(&*turns.end_record().unwrap()).unwrap();
    assert!(trace.turns && trace.replay().other.is_empty());
    let shown = convert(&trace, "h100");
    let names =
        |tenant: TenantId| intervals(&shown, process(tenant)).into_iter().map(|(name, ..)| name).collect::<Vec<_>>();
    assert_eq!(names(one), ["turn", "overruns"]);
    assert_eq!(names(two), ["waits", "turn"]);
    let first = &intervals(&shown, process(one))[0];
    assert_eq!(first.1, 10_000.0);
    let gaps = intervals(&shown, CARD);
    assert_eq!((gaps[0].1, gaps[0].2), (0.0, 10_000.0), "{gaps:?}");
    assert_eq!(gaps.len(), 2, "{gaps:?}");
}
