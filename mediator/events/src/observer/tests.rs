//! Tests of events between states in the form of the API.

use super::*;
use serde_json::{Value, json};

/// Returns a tenant with `keys` that differ from those of an idle tenant.
fn tenant(keys: Value) -> api::Tenant {
    let mut all = json!({
        "name": "train", "card": "h100", "served": true, "socket": "/s", "vram_mib": 64, "memory": {},
        "time": { "weight": 100 }, "programs": [], "on_card_bytes": 0, "in_host_bytes": 0, "used_ns": 0, "busy_ns": 0,
        "copy_ns": 0, "received_permille": 0, "entitled_permille": 1000, "launches": 0, "wait_p99_ns": 0, "killed": 0,
    });
    for (key, value) in keys.as_object().unwrap() {
        all[key] = value.clone();
    }
    serde_json::from_value(all).unwrap()
}

fn with(tenant: api::Tenant) -> States {
    States { tenants: vec![tenant], ..States::default() }
}

/// Returns the kinds and texts of events.
fn shown(events: &[NewEvent]) -> Vec<(EventKind, &str)> {
    events.iter().map(|event| (event.kind, &*event.text)).collect()
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Returns an observer that has seen an idle tenant.
fn observer() -> Observer {
    let mut observer = Observer::default();
    assert_eq!(observer.compare(&with(tenant(json!({}))), seconds(0)), []);
    observer
}

#[test]
fn killed_program_is_named_with_reason() {
    let mut observer = observer();
    let programs = json!([{ "pid": 7, "name": "spin" }, { "pid": 8, "name": "work" }]);
    let events = observer.compare(&with(tenant(json!({ "programs": programs }))), seconds(1));
    let text = "connected: program `spin`, process 7; program `work`, process 8";
    assert_eq!(shown(&events), [(EventKind::Connected, text)]);
    let why = "its work did not end within the limit of a turn";
    let given_up = json!([{ "pid": 3, "program": "old", "why": "?" }, { "pid": 7, "program": "spin", "why": why }]);
    let after = json!({ "programs": [programs[1]], "killed": 1, "strikes": 1, "given_up": given_up });
    let events = observer.compare(&with(tenant(after.clone())), seconds(2));
    let text = format!("a program was killed: program `spin`, process 7: {why}");
    let expected = [
        (EventKind::Killed, &*text),
        (EventKind::Overran, "a turn ran beyond its limit, strike 1"),
        (EventKind::Disconnected, "disconnected: program `spin`, process 7"),
    ];
    assert_eq!(shown(&events), expected);
    assert_eq!(observer.compare(&with(tenant(after)), seconds(3)), []);
    // The next owner counts from zero.
    assert_eq!(observer.compare(&with(tenant(json!({ "programs": [programs[1]] }))), seconds(4)), []);
    let events = observer.compare(&with(tenant(json!({ "killed": 1 }))), seconds(5));
    assert_eq!(events[0].kind, EventKind::Killed);
}

#[test]
fn turn_that_runs_on_is_reported_once_when_long() {
    let mut observer = observer();
    let runs_on = |ms: u64| with(tenant(json!({ "state": "working", "overrun_ns": ms * 1_000_000 })));
    let kinds = |events: Vec<NewEvent>| events.into_iter().map(|event| event.kind).collect::<Vec<_>>();
    assert_eq!(observer.compare(&runs_on(900), seconds(1)), []);
    let events = observer.compare(&runs_on(1900), seconds(2));
    let text = "its turn has run on for 1.9 s after its slice: others share the card with it";
    assert_eq!(shown(&events), [(EventKind::Overran, text)]);
    assert_eq!(observer.compare(&runs_on(2900), seconds(3)), []);
    // Another turn overruns.
    assert_eq!(kinds(observer.compare(&runs_on(1100), seconds(5))), [EventKind::Overran]);
}

#[test]
fn quarantine_is_reported_once_and_ends_by_itself_only_in_time() {
    let mut observer = observer();
    let held = with(tenant(json!({ "quarantined": true, "state": "quarantined", "strikes": 3 })));
    let events = observer.compare(&held, seconds(1));
    let kinds: Vec<EventKind> = events.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::Overran, EventKind::Quarantined]);
    assert!(events[1].text.contains("`mediatorctl sched release train`"), "{}", events[1].text);
    assert_eq!(observer.compare(&held, seconds(30)), []);
    // The daemon itself reports an operator's release.
    let events = observer.compare(&with(tenant(json!({}))), seconds(61));
    assert_eq!(shown(&events), [(EventKind::Waited, "was quarantined for 60.0 s")]);
}

#[test]
fn long_wait_is_reported_when_long_and_at_its_end() {
    let mut observer = observer();
    let waits = |left: u64| {
        let words = format!("memory quantum of `other`, {left}.0 s left");
        with(tenant(json!({ "state": "waiting", "waits_for": words })))
    };
    for at in 1..6 {
        assert_eq!(observer.compare(&waits(60 - at), seconds(at)), [], "{at}");
    }
    let events = observer.compare(&waits(50), seconds(6));
    assert_eq!(shown(&events), [(EventKind::Waits, "has waited for 5.0 s: memory quantum of `other`")]);
    assert_eq!(observer.compare(&waits(40), seconds(20)), []);
    let events = observer.compare(&with(tenant(json!({ "state": "working" }))), seconds(41));
    assert_eq!(shown(&events), [(EventKind::Waited, "waited for 40.0 s: memory quantum of `other`")]);
    // Short waits are normal when a card is shared.
    assert_eq!(observer.compare(&waits(9), seconds(42)), []);
    assert_eq!(observer.compare(&with(tenant(json!({}))), seconds(44)), []);
}

#[test]
fn restarting_owner_is_a_wait_and_no_loss_of_programs() {
    let mut observer = observer();
    let programs = json!([{ "pid": 7, "name": "work" }]);
    observer.compare(&with(tenant(json!({ "programs": programs, "killed": 2 }))), seconds(1));
    let unserved = with(tenant(json!({ "served": false, "state": "unserved", "waits_for": "the owner of its card" })));
    assert_eq!(observer.compare(&unserved, seconds(2)), []);
    let events = observer.compare(&unserved, seconds(8));
    assert_eq!(shown(&events), [(EventKind::Waits, "has been without an owner of its card for 6.0 s")]);
    let events = observer.compare(&with(tenant(json!({ "programs": programs }))), seconds(9));
    assert_eq!(shown(&events), [(EventKind::Waited, "was without an owner of its card for 7.0 s")]);
}

#[test]
fn slices_that_come_in_between_end_a_wait_for_a_slice() {
    let share = |turns: u64| {
        let engine = json!({ "used_ns": 0, "received_permille": 0, "arrived": 0, "started": turns, "completed": 0,
            "dropped": 0, "killed": 0, "longest_ns": 0, "credit_ns": 0, "beyond_ns": 0,
            "wait": serde_json::to_value(api::Durations::default()).unwrap() });
        json!({ "card": "h100", "settings": {}, "window_ms": 100, "queued": 0, "in_flight": 0, "engines": {},
            "vms": [{ "vm": "train", "time": { "weight": 100 }, "entitled_permille": 1000, "queued": 0, "in_flight": 0,
                "strikes": 0, "engines": { "compute": engine } }] })
    };
    let state = |turns: u64| States {
        tenants: vec![tenant(json!({ "state": "waiting", "waits_for": format!("slice of `t{turns}`") }))],
        schedulers: vec![serde_json::from_value(share(turns)).unwrap()],
        ..States::default()
    };
    let mut observer = observer();
    for at in 1..20 {
        assert_eq!(observer.compare(&state(at), seconds(at)), [], "it has turns");
    }
    assert_eq!(observer.compare(&state(19), seconds(23)), []);
    let events = observer.compare(&state(19), seconds(24));
    assert_eq!(shown(&events), [(EventKind::Waits, "has waited for 5.0 s: a slice")]);
}

#[test]
fn failed_cards_are_reported_once_unless_an_owner_restarts_them() {
    let card = |name: &str, kind: &str, error: Option<&str>| -> api::Card {
        serde_json::from_value(json!({
            "name": name, "kind": kind, "error": error, "pci_id": "", "vram_mib": 0, "vram_reserved_mib": 0,
            "vram_assigned_mib": 0, "vram_free_mib": 0, "bar1_mib": 0, "bar3_mib": 0, "channels": 0, "channels_used": 0,
            "vms": [], "passthrough": false,
        }))
        .unwrap()
    };
    let states =
        |error| States { cards: vec![card("c", "simgpu", error), card("h100", "cuda", error)], ..States::default() };
    let mut observer = Observer::default();
    assert_eq!(observer.compare(&states(None), seconds(0)), []);
    let events = observer.compare(&states(Some("it does not answer")), seconds(1));
    assert_eq!(shown(&events), [(EventKind::Failed, "the card is out of service: it does not answer")]);
    assert_eq!(events[0].subject.name, "c");
    assert_eq!(observer.compare(&states(Some("it does not answer")), seconds(2)), []);
}

#[test]
fn objects_of_the_first_state_have_no_events_and_later_ones_do() {
    let mut observer = Observer::default();
    let busy = tenant(json!({ "killed": 3, "programs": [{ "pid": 7, "name": "work" }] }));
    assert_eq!(observer.compare(&with(busy.clone()), seconds(0)), []);
    // This tenant was added since the last state, and its program was killed at once.
    let new = api::Tenant { name: "new".to_owned(), programs: Vec::new(), killed: 1, ..busy.clone() };
    let states = States { tenants: vec![busy, new], ..States::default() };
    let events = observer.compare(&states, seconds(1));
    assert_eq!(
        events.iter().map(|event| (event.kind, &*event.subject.name)).collect::<Vec<_>>(),
        [(EventKind::Killed, "new")]
    );
}
