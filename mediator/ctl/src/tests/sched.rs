//! Tests `mediatorctl sched` and `mediatorctl top` against a daemon with software cards.

use super::*;
use ::sched::{Engine, LatencyClass, PolicyKind, Queues};
use mediatord::fixture::{copy, guest, one_card};

fn good(served: &Served, arguments: &[&str]) -> String {
    let ran = ctl(served, arguments);
    assert_eq!((ran.code, &*ran.err), (Code::Good, ""), "{arguments:?}");
    ran.out
}

fn json<T: serde::de::DeserializeOwned>(served: &Served, arguments: &[&str]) -> T {
    serde_json::from_str(&good(served, &[&["--json"], arguments].concat())).unwrap()
}

fn add(served: &Served, name: &str, more: &[&str]) {
    good(served, &[&["vm", "add", name, "--card", "card0", "--vram-mib", "16"], more].concat());
}

/// Returns the cells of the first line whose first word is `first`.
fn cells(table: &str, first: &str) -> Vec<String> {
    let mut lines = table.lines().filter(|line| line.split_whitespace().next() == Some(first));
    let line = lines.next().unwrap_or_else(|| panic!("no {first} in {table}"));
    line.split("  ").map(|cell| cell.trim().to_owned()).filter(|cell| !cell.is_empty()).collect()
}

#[test]
fn every_flag_sets_its_own_key() {
    let served = one_card("");
    let all: api::CardScheduler = json(
        &served,
        &[
            "sched",
            "set",
            "card0",
            "--policy",
            "disengaged",
            "--queues",
            "single",
            "--period-ms",
            "20",
            "--wait-us",
            "300",
            "--correct",
            "false",
            "--own-time",
            "false",
            "--free-wait",
            "7.5",
            "--engaged-ms",
            "6",
            "--free-ms",
            "30",
            "--pipeline-contended",
            "3",
            "--pipeline-alone",
            "33",
            "--ahead-us",
            "2000",
            "--stamp-slack-us",
            "400",
            "--strikes",
            "4",
            "--quarantine-s",
            "9",
        ],
    );
    let ::sched::Config { policy, queues, band, disengaged, pipeline, stamp_slack_ns, strikes, quarantine_ns } =
        all.settings;
    assert_eq!((policy, queues), (PolicyKind::Disengaged, Queues::Single));
    assert_eq!((band.period_ns, band.wait_ns, band.free_wait_permille), (20_000_000, 300_000, 75));
    assert!(!band.correct && !band.own_time);
    assert_eq!((disengaged.engaged_ns, disengaged.free_ns), (6_000_000, 30_000_000));
    assert_eq!((pipeline.contended, pipeline.alone, pipeline.ahead_ns), (3, 33, 2_000_000));
    assert_eq!((stamp_slack_ns, strikes, quarantine_ns), (400_000, 4, 9_000_000_000));
    // A single option leaves the other settings unchanged.
    let one: api::CardScheduler = json(&served, &["sched", "set", "card0", "--policy", "band"]);
    assert_eq!(one.settings, ::sched::Config { policy: PolicyKind::Band, ..all.settings });

    let shown = good(&served, &["sched", "show", "card0"]);
    for (key, value) in
        [("policy", "band"), ("band.period", "20 ms"), ("band.free_wait", "7.5 %"), ("quarantine", "9 s")]
    {
        assert_eq!(cells(&shown, key)[1], value, "{shown}");
    }
    assert!(shown.contains("no VMs"), "{shown}");
}

#[test]
fn shares_are_given_when_a_vm_is_added_and_later() {
    let served = one_card("");
    let flags =
        ["--weight", "300", "--guarantee", "25", "--cap", "62.5%", "--class", "interactive", "--max-run-ms", "800"];
    add(&served, "a", &flags);
    add(&served, "b", &["--weight", "100"]);
    let list: api::SchedulerList = json(&served, &["sched", "show"]);
    let time = list.schedulers[0].vms[0].time;
    assert_eq!((time.weight, time.guarantee_permille, time.cap_permille), (300, 250, 625));
    assert_eq!((time.class, time.max_run_ms), (LatencyClass::Interactive, Some(800)));

    let changed: api::VmTime = json(&served, &["sched", "set-vm", "a", "--cap", "100", "--weight", "100"]);
    assert_eq!(changed, api::VmTime { cap_permille: 1000, weight: 100, ..time });
    let table = good(&served, &["sched", "set-vm", "b", "--max-run-ms", "0"]);
    assert_eq!(cells(&table, "max")[1], "no limit", "{table}");
    let shown = good(&served, &["sched", "show"]);
    let expected = ["a", "100", "25.0 %", "100.0 %", "interactive", "800 ms", "50.0 %", "0", "0", "0", "-"];
    assert_eq!(cells(&shown, "a"), expected, "{shown}");
    assert!(!shown.contains("WEIGHT FOR COPIES"), "{shown}");

    let copies: api::VmTime = json(&served, &["sched", "set-vm", "a", "--copy-weight", "300", "--copy-cap", "87.5"]);
    assert_eq!((copies.weight, copies.copies.weight, copies.copies.cap_permille), (100, Some(300), Some(875)));
    let shown = good(&served, &["sched", "show"]);
    let (_, rows) = shown.split_once("WEIGHT FOR COPIES").expect("a table of copies");
    assert_eq!(cells(rows, "a"), ["a", "300", "25.0 %", "87.5 %", "75.0 %"], "{shown}");
    let table = good(&served, &["sched", "set-vm", "a", "--copy-weight", "compute"]);
    assert!(table.contains("weight for copies  100") && table.contains("87.5 %"), "{table}");
    let table = good(&served, &["sched", "set-vm", "a", "--copy-cap", "compute"]);
    assert!(!table.contains("copies"), "{table}");
    assert_eq!(good(&served, &["sched", "release", "a"]), "VM a released, strikes cleared\n");
}

#[test]
fn invalid_sched_command_exits_with_code_and_cause() {
    let served = one_card("[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 64\n");
    add(&served, "a", &[]);
    good(&served, &["vm", "add", "p", "--card", "card1", "--passthrough"]);
    for (arguments, code, what) in [
        (&["sched", "set", "card0"][..], Code::Usage, "--policy"),
        (&["sched", "set-vm", "a"], Code::Usage, "--weight"),
        (&["sched", "set", "card0", "--policy", "best"], Code::Usage, "expected one of `direct`, `fifo`"),
        (&["sched", "set", "card0", "--period-ms", "0"], Code::Usage, "band.period_ns = 0 is not between 100000"),
        (&["sched", "set", "card9", "--policy", "fifo"], Code::NotFound, "there is no card `card9`"),
        (&["sched", "set", "card1", "--policy", "fifo"], Code::Conflict, "VM `p` uses its card in passthrough"),
        (&["sched", "show", "card1"], Code::Conflict, "its share of the card is fixed"),
        (&["sched", "set-vm", "p", "--weight", "3"], Code::Conflict, "its share of the card is fixed"),
        (&["sched", "set-vm", "a", "--weight", "0"], Code::Usage, "weight = 0 is not between 1 and 10000"),
        (&["sched", "set-vm", "a", "--cap", "101"], Code::Usage, "expected a number from 0 to 100"),
        (&["sched", "set-vm", "a", "--copy-cap", "101"], Code::Usage, "such as 12.5; or `compute`"),
        (&["sched", "set-vm", "a", "--class", "best"], Code::Usage, "expected one of `interactive`"),
        (&["sched", "set-vm", "b", "--weight", "3"], Code::NotFound, "there is no VM `b`"),
        (&["sched", "release", "b"], Code::NotFound, "there is no VM `b`"),
        (&["sched", "report", "card0"], Code::Usage, "--out"),
        (&["sched", "report", "card0", "--since", "2m", "--out", "x"], Code::Usage, "since_ms = 120000 is not between"),
        (
            &["sched", "report", "card0", "--window", "150ms", "--out", "x"],
            Code::Usage,
            "expected a multiple of 100 ms",
        ),
        (
            &["sched", "report", "card0", "--out", "/nonexistent/x.svg"],
            Code::Failed,
            "/nonexistent/x.svg cannot be written",
        ),
        (&["top", "card1", "--once"], Code::Conflict, "its share of the card is fixed"),
        (&["top", "--once", "--interval", "1"], Code::Usage, "expected a number with ms, s or m"),
        (&["--json", "--output", "table", "sched", "show"], Code::Usage, "cannot be used with"),
    ] {
        let ran = ctl(&served, arguments);
        assert_eq!((ran.code, &*ran.out), (code, ""), "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains(what), "{arguments:?}: {}", ran.err);
    }
    // The list of all cards omits passed-through cards.
    assert!(!good(&served, &["top", "--once"]).contains("card1"));
}

#[test]
fn work_is_shown_by_top_and_drawn_by_report() {
    let served = one_card("time = { copy_mib_per_s = 1 }\n");
    let mut guests: Vec<_> = [("web", "300"), ("build", "100")]
        .map(|(name, weight)| {
            add(&served, name, &["--weight", weight]);
            guest(&served, name)
        })
        .into();
    for _ in 0..15 {
        guests.iter_mut().for_each(|(driver, channel)| copy(driver, channel));
        guests.iter_mut().for_each(|(driver, channel)| driver.wait(channel));
    }
    let top = good(&served, &["top", "--once", "--interval", "5s"]);
    assert!(top.starts_with("card0: band; busy: compute "), "{top}");
    let heads = [
        "CARD",
        "VM",
        "ENGINE",
        "ENTITLED",
        "RECEIVED",
        "WAIT",
        "WAIT 99 %",
        "ON CARD",
        "IN HOST",
        "QUEUED",
        "STRIKES",
        "STATE",
    ];
    assert_eq!(cells(&top, "CARD"), heads, "{top}");
    let web = top.lines().find(|line| line.contains("web")).unwrap();
    assert!(web.contains("compute") && web.contains("75.0 %") && !web.contains("QUARANTINED"), "{top}");
    let list: api::SchedulerList = json(&served, &["top"]);
    assert_eq!(list.schedulers[0].vms.len(), 2);

    let file = served.fixture.path("use.svg");
    let report = ["sched", "report", "card0", "--since", "30s", "--window", "100ms", "--out"];
    let path = file.display().to_string();
    // The report omits the work until the interval that contains it is complete.
    mediatord::fixture::eventually("the work is in the report", || {
        let out = good(&served, &[&report[..], &[&*path]].concat());
        let svg = std::fs::read_to_string(&file).unwrap();
        assert!(svg.starts_with("<svg ") && svg.contains("card0, compute"), "{svg}");
        assert!(svg.contains("web: ") && svg.contains("(entitled 75.0 %)") && out.contains("Jain's index"), "{out}");
        !svg.contains("Jain's index -") && !svg.contains(": 0.0 % (")
    });
    let copies = served.client().get::<api::CardScheduler>("/v1/cards/card0/scheduler").unwrap();
    assert!(copies.vms.iter().all(|vm| vm.engines[&Engine::Compute].completed == 15), "{copies:?}");
    let idle = good(&served, &["sched", "report", "card0", "--engine", "copy1", "--stacked", "--out", &path]);
    assert!(idle.contains("use of copy1, Jain's index -"), "{idle}");
    assert!(std::fs::read_to_string(&file).unwrap().contains("card0, copy1"));
}
