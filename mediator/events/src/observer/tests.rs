//! Tests the events between two states, which consist of API objects.

use super::*;
use serde_json::{Value, json};

/// Returns an idle tenant, with `keys` changed.
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

/// Returns an observer that has observed an idle tenant.
fn observer() -> Observer {
    let mut observer = Observer::default();
    assert_eq!(observer.compare(&with(tenant(json!({}))), seconds(0)), []);
    observer
}

/// Returns a state with a virtual machine whose share of the card has these keys.
fn vm(keys: Value) -> States {
    let vm = json!({ "name": "web", "card": "c", "mode": "mediated", "state": "connected", "vram_mib": 64,
        "channels_limit": 0, "channels_used": 0, "memory_not_shared": false, "memory_withdrawn": false, "driver": {
            "pci_id": "", "bus_master": false, "interrupts": "off" },
        "denied_total": 0, "denied": [], "counters": {}, "transport": {} });
    let engine = json!({ "used_ns": 0, "received_permille": 0, "arrived": 0, "started": 0, "completed": 0, "dropped": 0,
        "killed": keys["killed"], "longest_ns": 0, "credit_ns": 0, "beyond_ns": 0,
        "wait": serde_json::to_value(api::Durations::default()).unwrap() });
    let mut share = json!({ "vm": "web", "time": { "weight": 100 }, "entitled_permille": 1000, "queued": 0,
        "in_flight": 0, "strikes": 0, "engines": { "compute": engine } });
    for (key, value) in keys.as_object().unwrap().iter().filter(|(key, _)| *key != "killed") {
        share[key] = value.clone();
    }
    let card = json!({ "card": "c", "settings": {}, "window_ms": 100, "queued": 0, "in_flight": 0, "engines": {},
        "vms": [share] });
    States {
        vms: vec![serde_json::from_value(vm).unwrap()],
        schedulers: vec![serde_json::from_value(card).unwrap()],
        ..States::default()
    }
}

#[test]
fn kills_and_strikes_of_vm_are_counted() {
    let mut observer = Observer::default();
    assert_eq!(observer.compare(&vm(json!({ "killed": 1 })), seconds(0)), []);
    let events = observer.compare(&vm(json!({ "killed": 3, "strikes": 2 })), seconds(1));
    let expected = [
        (EventKind::Killed, "2 submissions were killed for exceeding the time limit"),
        (EventKind::Overran, "a submission exceeded its time limit, strike 2"),
    ];
    assert_eq!(shown(&events), expected);
    assert_eq!(observer.compare(&vm(json!({ "killed": 3, "strikes": 2 })), seconds(2)), []);
    // After a move, counters start from zero on the new card.
    let events = observer.compare(&vm(json!({ "killed": 1, "strikes": 2 })), seconds(3));
    assert_eq!(shown(&events), [(EventKind::Killed, "a submission was killed for exceeding the time limit")]);
}

#[test]
fn programs_of_tenant_connect_and_disconnect() {
    let mut observer = observer();
    let programs = json!([{ "pid": 7, "name": "spin" }, { "pid": 8, "name": "work" }]);
    let events = observer.compare(&with(tenant(json!({ "programs": programs }))), seconds(1));
    let text = "connected: program `spin`, process 7; program `work`, process 8";
    assert_eq!(shown(&events), [(EventKind::Connected, text)]);
    // The owner of the card reports the kill.
    let after = json!({ "programs": [programs[1]], "killed": 1, "strikes": 1, "quarantined": true });
    let events = observer.compare(&with(tenant(after)), seconds(2));
    assert_eq!(shown(&events), [(EventKind::Disconnected, "disconnected: program `spin`, process 7")]);
}

#[test]
fn turn_that_runs_on_is_reported_once_when_long() {
    let mut observer = observer();
    let runs_on = |ms: u64| with(tenant(json!({ "state": "working", "overrun_ns": ms * 1_000_000 })));
    let kinds = |events: Vec<NewEvent>| events.into_iter().map(|event| event.kind).collect::<Vec<_>>();
    assert_eq!(observer.compare(&runs_on(900), seconds(1)), []);
    let events = observer.compare(&runs_on(1900), seconds(2));
    let text = "its turn continued for 1.9 s beyond its slice while other tenants share the card";
    assert_eq!(shown(&events), [(EventKind::Overran, text)]);
    assert_eq!(observer.compare(&runs_on(2900), seconds(3)), []);
    // This overrun is in another turn.
    assert_eq!(kinds(observer.compare(&runs_on(1100), seconds(5))), [EventKind::Overran]);
}

#[test]
fn quarantine_of_vm_is_reported_once_and_ends_by_itself() {
    let free = || vm(json!({ "killed": 0 }));
    let held = |ends_in_ms: Value| {
        vm(json!({ "killed": 0, "state": "quarantined", "quarantine": { "ends_in_ms": ends_in_ms } }))
    };
    let mut observer = Observer::default();
    observer.compare(&free(), seconds(0));
    let events = observer.compare(&held(Value::Null), seconds(1));
    assert_eq!(events.iter().map(|event| event.kind).collect::<Vec<_>>(), [EventKind::Quarantined]);
    assert!(events[0].text.contains("`mediatorctl sched release web`"), "{}", events[0].text);
    assert_eq!(observer.compare(&held(Value::Null), seconds(30)), []);
    // The daemon itself reports an operator's release.
    let events = observer.compare(&free(), seconds(61));
    assert_eq!(shown(&events), [(EventKind::Waited, "was quarantined for 60.0 s")]);
    observer.compare(&held(900.into()), seconds(62));
    let events = observer.compare(&free(), seconds(63));
    assert_eq!(shown(&events), [(EventKind::Released, "its quarantine has ended")]);
}

#[test]
fn long_wait_is_reported_when_long_and_at_its_end() {
    let mut observer = observer();
    let waits = |left: u64| {
        let words = format!("memory quantum of `other`, {left}.0 s left");
        let reason = json!({ "kind": "memory_quantum", "holder": "other" });
        with(tenant(json!({ "state": "waiting", "waits_for": words, "wait_reason": reason })))
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
    let unserved = with(tenant(json!({ "served": false, "state": "unserved", "wait_reason": { "kind": "owner" } })));
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
        tenants: vec![tenant(
            json!({ "state": "waiting", "wait_reason": { "kind": "slice", "holder": format!("t{turns}") } }),
        )],
        schedulers: vec![serde_json::from_value(share(turns)).unwrap()],
        ..States::default()
    };
    let mut observer = observer();
    for at in 1..20 {
        assert_eq!(observer.compare(&state(at), seconds(at)), [], "the tenant has turns");
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
    let busy = tenant(json!({ "programs": [{ "pid": 7, "name": "work" }] }));
    assert_eq!(observer.compare(&with(busy.clone()), seconds(0)), []);
    let new = api::Tenant { name: "new".to_owned(), ..busy.clone() };
    let states = States { tenants: vec![busy, new], ..States::default() };
    let events = observer.compare(&states, seconds(1));
    assert_eq!(
        events.iter().map(|event| (event.kind, &*event.subject.name)).collect::<Vec<_>>(),
        [(EventKind::Connected, "new")]
    );
}
