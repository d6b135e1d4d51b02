//! Tests events about CUDA tenants on the fake driver: kills with their reasons, overrunning turns, and the end of the
//! owner.

mod support;

use serde_json::Value;
use support::Rig;
use support::daemon::*;

/// Waits until `count` events of a kind about an object have been recorded, and returns them.
fn awaited(rig: &Rig, kind: &str, name: &str, count: usize) -> Vec<Value> {
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..600 {
        let page = json(rig, &["events", "--kind", kind]);
        let events = page["events"].as_array().expect("a list").clone();
        let found: Vec<_> = events.into_iter().filter(|event| event["subject"]["name"] == name).collect();
        if found.len() >= count {
            return found;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!("no {count} events {kind} of {name}: {}", json(rig, &["events"]));
}

fn text(event: &Value) -> &str {
    event["text"].as_str().expect("a text")
}

#[test]
fn killed_endless_kernels_and_lost_owner_are_events() {
    let limited = "time.max_run_ms = 4000\n";
    let rig = rig(|rig| card(rig, "fake", "") + &tenant("a", "fake", limited) + &tenant("b", "fake", ""));
    let daemon = Daemon::start(&rig);
    assert_eq!(awaited(&rig, "added", "a", 1)[0]["author"]["kind"], "configuration");
    let works = run(&rig, "b", &[], &["count", "--kernel-us", "1000"]);
    for count in 1..3 {
        let endless = run(&rig, "a", &[], &["count", "--kernel-us", "3600000000"]);
        let pid = endless.child.id();
        let killed = awaited(&rig, "killed", "a", count).pop().expect("there");
        let why = format!("process {pid}: its work did not end within the limit of a turn");
        assert!(
            text(&killed).starts_with("a program was killed: program `") && text(&killed).ends_with(&why),
            "{killed}"
        );
        assert_eq!((&killed["author"]["kind"], &killed["card"]), (&"daemon".into(), &"fake".into()));
        endless.kill();
    }
    // While other tenants share the card, each endless kernel is reported first as an overrun and then as a strike.
    let overran = awaited(&rig, "overran", "a", 4);
    let is_strike = |event: &&Value| text(event).starts_with("a turn exceeded its time limit, strike ");
    let (strikes, others): (Vec<_>, Vec<_>) = overran.iter().partition(is_strike);
    assert_eq!(strikes.len(), 2, "{overran:?}");
    assert!(others.iter().all(|event| text(event).starts_with("its turn continued for ")), "{overran:?}");
    good(&rig, &["tenant", "set", "a", "--weight", "50"]);
    let changed = awaited(&rig, "changed", "a", 1);
    assert_eq!((text(&changed[0]), &changed[0]["author"]["program"]), ("set: time.weight = 50", &"mediatorctl".into()));
    // The neighbour's only events are its addition and its first connection.
    let all = json(&rig, &["events", "--tenant", "b"]);
    let kinds: Vec<_> = all["events"].as_array().expect("a list").iter().map(|event| event["kind"].clone()).collect();
    assert_eq!(kinds, ["added", "connected"], "{all}");
    // The daemon restarts a killed owner.
    signal("-KILL", &daemon.owners()[0]);
    let lost = awaited(&rig, "owner_lost", "fake", 1);
    assert!(text(&lost[0]).contains("signal: 9"), "{lost:?}");
    awaited(&rig, "owner_started", "fake", 1);
    works.kill();
}

#[test]
fn kills_in_one_moment_are_all_events_even_of_removed_tenant() {
    let rig = pair();
    let _daemon = Daemon::start(&rig);
    let programs: Vec<_> = (0..5).map(|_| run(&rig, "a", &[], &["live", "--mib", "2"])).collect();
    until(&rig, "a", "all events are listed", |a| support::daemon::programs(a) == 5);
    good(&rig, &["tenant", "remove", "a"]);
    let killed = awaited(&rig, "killed", "a", 5);
    for program in &programs {
        let end = format!("process {}: its tenant was removed", program.child.id());
        assert_eq!(killed.iter().filter(|event| text(event).ends_with(&end)).count(), 1, "{end}: {killed:?}");
    }
    assert_eq!(killed.len(), 5, "{killed:?}");
    assert!(killed.iter().all(|event| event["author"]["kind"] == "daemon"), "{killed:?}");
    programs.into_iter().for_each(support::Program::kill);
}

#[test]
fn strikes_and_quarantine_of_tenant_are_events() {
    let limited = "time.max_run_ms = 4000\n";
    let rig = rig(|rig| {
        card(rig, "fake", "scheduler.strikes = 1\n") + &tenant("a", "fake", limited) + &tenant("b", "fake", "")
    });
    let _daemon = Daemon::start(&rig);
    let works = run(&rig, "b", &[], &["count", "--kernel-us", "1000"]);
    let endless = run(&rig, "a", &[], &["count", "--kernel-us", "3600000000"]);
    let held = awaited(&rig, "quarantined", "a", 1);
    assert_eq!(
        text(&held[0]),
        "quarantined: none of its work is started; run `mediatorctl sched release a` to release it"
    );
    let struck = awaited(&rig, "overran", "a", 1);
    assert!(struck.iter().any(|event| text(event) == "a turn exceeded its time limit, strike 1"), "{struck:?}");
    good(&rig, &["sched", "release", "a"]);
    let released = awaited(&rig, "released", "a", 1);
    assert_eq!(released[0]["author"]["program"], "mediatorctl");
    endless.kill();
    works.kill();
}
