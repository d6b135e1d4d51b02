//! Tests recordings of a CUDA card's turns, with real programs on the fake driver: recording, replay, report, and
//! Perfetto trace.

mod support;

use std::collections::BTreeMap;

use serde_json::Value;
use support::daemon::*;

/// Checks that a trace's rows and begin/end pairs are well-formed. Returns the names of its processes.
fn checked(trace: &Value) -> BTreeMap<u64, String> {
    let (mut names, mut rows, mut open) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for event in trace["traceEvents"].as_array().expect("a list") {
        let pid = event["pid"].as_u64().expect("a process");
        let name = event["name"].as_str().expect("a name").to_owned();
        let ts = event["ts"].as_f64();
        match event["ph"].as_str().expect("a kind") {
            "M" if name == "process_name" => {
                names.insert(pid, event["args"]["name"].as_str().expect("a name").to_owned());
            }
            "M" => {}
            "X" => {
                let (from, dur) = (ts.expect("a time"), event["dur"].as_f64().expect("a length"));
                let end: &mut f64 = rows.entry((pid, event["tid"].as_u64())).or_default();
                assert!(dur > 0.0 && from >= *end - 1e-6, "overlaps: {event}");
                *end = from + dur;
            }
            "b" => assert!(open.insert((pid, event["id"].as_u64()), (name, ts)).is_none(), "begins twice: {event}"),
            "e" => {
                let (begun, since) = open.remove(&(pid, event["id"].as_u64())).expect("a begin");
                assert!(begun == name && since <= ts, "{event}");
            }
            "i" => assert_eq!(event["s"], "p", "{event}"),
            kind => panic!("{kind}: {event}"),
        }
        assert!(event["ph"] == "M" || names.contains_key(&pid), "no name: {event}");
    }
    assert!(open.is_empty(), "{open:?}");
    names
}

/// Returns the names of a process's slices.
fn phases(trace: &Value, pid: u64) -> Vec<&str> {
    let of_process = |event: &&Value| event["pid"] == pid && (event["ph"] == "X" || event["ph"] == "b");
    let events = trace["traceEvents"].as_array().expect("a list").iter().filter(of_process);
    events.filter_map(|event| event["name"].as_str()).collect()
}

#[test]
fn turns_and_memory_moves_of_tenants_are_recorded_and_replayed() {
    let rig = pair();
    let _daemon = Daemon::start(&rig);
    let file = |name: &str| rig.folder.path().join(name).display().to_string();
    let mut one = run(&rig, "a", &[], &["live", "--mib", "32"]);
    let mut two = run(&rig, "b", &[], &["live", "--mib", "24"]);
    one.steps(2);
    two.steps(2);
    let trace = file("trace.json");
    let arguments = ["sched", "record", "fake", "--for", "3s", "--format", "perfetto", "--out", &trace];
    let mut recording = ctl_command(&rig, &arguments).spawn().expect("starts");
    std::thread::sleep(std::time::Duration::from_millis(700));
    // A second recording is rejected while the first one is in progress.
    let error = bad(&rig, 4, &["sched", "record", "fake", "--for", "10ms", "--out", &file("second.jsonl")]);
    assert!(error.contains("it is already being recorded"), "{error}");
    good(&rig, &["memory", "set-quota", "a", "16"]);
    for _ in 0..3 {
        one.steps(2);
        two.steps(2);
    }
    assert!(recording.wait().expect("ends").success());
    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).expect("readable")).expect("JSON");
    let names = checked(&trace);
    let process = |name: &str| *names.iter().find(|(_, found)| *found == name).expect("a process").0;
    for tenant in ["a", "b"] {
        let phases = phases(&trace, process(tenant));
        assert!(phases.contains(&"turn"), "{tenant}: {phases:?}");
    }
    let of_a = phases(&trace, process("a"));
    assert!(of_a.contains(&"to host memory"), "{of_a:?}");
    assert!(phases(&trace, process("card fake")).iter().all(|name| *name == "gap"));

    // A replay of the recording makes the same decisions, and can also use another policy.
    let record = file("record.jsonl");
    let recorded = ctl_command(&rig, &["sched", "record", "fake", "--for", "1s", "--out", &record]).spawn();
    let mut recorded = recorded.expect("starts");
    one.steps(3);
    two.steps(3);
    assert!(recorded.wait().expect("ends").success());
    let replayed = json(&rig, &["sched", "replay", &record]);
    assert!(replayed["events"].as_u64().expect("a number") > 3, "{replayed}");
    good(&rig, &["sched", "replay", &record, "--policy", "fifo"]);
    let picture = file("uses.svg");
    good(&rig, &["sched", "report", "fake", "--out", &picture]);
    assert!(std::fs::read_to_string(&picture).expect("readable").starts_with("<svg"));
    one.kill();
    two.kill();
}
