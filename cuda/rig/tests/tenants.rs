//! Tests tenants that are added, removed and changed while the daemon runs, on the fake driver. All programs are real
//! processes.

mod support;

use std::io::Read as _;

use support::daemon::*;
use support::{NO_DRIVER, PROGRAM, Program, Rig, host_has_driver};

/// Creates a rig with two cards without tenants. The second card has half as much memory as the first.
fn two_cards() -> Rig {
    rig(|rig| card(rig, "fake", "") + &card(rig, "small", "").replace("vram_mib = 64", "vram_mib = 32"))
}

fn add(rig: &Rig, name: &str, more: &[&str]) -> serde_json::Value {
    json(rig, &[&["tenant", "add", name], more].concat())
}

fn names(rig: &Rig) -> Vec<String> {
    let list = json(rig, &["tenant", "list"]);
    let names = list["tenants"].as_array().expect("a list").iter();
    names.map(|tenant| tenant["name"].as_str().expect("a name").to_owned()).collect()
}

/// Waits for a program's exit, and checks that the program has not succeeded.
fn ended_by_a_signal(mut program: Program) {
    let mut rest = String::new();
    program.output().read_to_string(&mut rest).expect("readable");
    let status = program.child.wait().expect("ends");
    assert!(!status.success(), "{status}: {rest}");
}

#[test]
fn tenants_come_and_go_while_others_work_and_outlive_the_daemon() {
    let rig = two_cards();
    let daemon = Daemon::start(&rig);
    // Each tenant is placed on the card with the most unallocated memory.
    assert_eq!(add(&rig, "a", &["--vram-mib", "32"])["card"], "fake");
    assert_eq!(add(&rig, "b", &["--vram-mib", "32", "--weight", "300"])["card"], "fake");
    let c = add(&rig, "c", &["--vram-mib", "32", "--on-remove", "disconnect", "--guarantee-mib", "16"]);
    assert_eq!((&c["card"], &c["served"]), (&"small".into(), &true.into()));

    // Impossible requests are rejected without any effect.
    assert!(bad(&rig, 4, &["tenant", "add", "a", "--vram-mib", "16"]).contains("tenant `a` already exists"));
    let promised = ["tenant", "add", "e", "--card", "small", "--vram-mib", "32", "--guarantee-mib", "18"];
    assert!(bad(&rig, 4, &promised).contains("expected at most the 16 MiB of card `small`"));
    assert!(
        bad(&rig, 3, &["tenant", "add", "e", "--card", "none", "--vram-mib", "16"])
            .contains("expected `fake` or `small`")
    );
    assert!(bad(&rig, 2, &["tenant", "add", "e", "--vram-mib", "15"]).contains("a multiple of the chunk"));
    assert!(
        bad(&rig, 2, &["tenant", "add", "e", "--vram-mib", "16", "--owner", "nobody-at-all"]).contains("nobody-at-all")
    );
    let lost = ["tenant", "add", "e", "--vram-mib", "16", "--socket-path", "/none/at/all.cuda"];
    assert!(bad(&rig, 2, &lost).contains("/none/at/all.cuda"));
    let revision = json(&rig, &["export"])["revision"].as_str().expect("text").to_owned();
    good(&rig, &["tenant", "set", "a", "--on-stuck", "suspend"]);
    for command in [
        &["tenant", "add", "e", "--vram-mib", "16"][..],
        &["tenant", "remove", "a"],
        &["tenant", "set", "a", "--weight", "5"],
    ] {
        bad(&rig, 4, &[&["--if-revision", &revision], command].concat());
    }
    assert_eq!(names(&rig), ["a", "b", "c"]);

    // Removing a tenant kills its programs without affecting a neighbour.
    let mut one = run(&rig, "a", &[], &["live", "--mib", "16"]);
    let mut two = run(&rig, "b", &[], &["live", "--mib", "16"]);
    one.steps(2);
    two.steps(2);
    let socket = rig.folder.path().join("tenants/a/cuda.sock");
    assert!(socket.exists());
    good(&rig, &["tenant", "remove", "a"]);
    ended_by_a_signal(one);
    assert!(!socket.parent().expect("a folder").exists(), "its folder is removed too");
    let memory = json(&rig, &["memory", "show", "fake"]);
    assert_eq!(memory["vms"].as_array().expect("a list").len(), 1, "{memory}");
    assert_eq!(memory["spare_bytes"].as_u64().expect("bytes") >> 20, 64 - 16, "{memory}");
    bad(&rig, 3, &["tenant", "remove", "a"]);
    two.steps(5);

    // Removing this tenant disconnects its program, but does not kill it.
    let mut three = run(&rig, "c", &[], &["hold", "--mib", "2"]);
    assert_eq!(three.line(), "holds");
    good(&rig, &["tenant", "remove", "c"]);
    assert!(three.child.try_wait().expect("a child").is_none(), "the program continues for a while");
    three.kill();

    // The next daemon restores the tenants, and their programs reconnect.
    good(&rig, &["tenant", "set", "b", "--quota-mib", "8", "--class", "interactive"]);
    add(&rig, "d", &["--vram-mib", "16", "--card", "small"]);
    let before = json(&rig, &["export"]);
    daemon.kill();
    let daemon = Daemon::start(&rig);
    let after = json(&rig, &["export"]);
    assert_eq!((&before["tenant"], &before["card"]), (&after["tenant"], &after["card"]));
    assert_eq!(names(&rig), ["b", "d"]);
    two.grow();
    until(&rig, "b", "its quota is enforced", |b| {
        programs(b) == 1 && mib(b, "on_card_bytes") == 8 && mib(b, "in_host_bytes") > 0
    });
    assert_eq!(two.end(), "held 10");
    drop(daemon);
    rig.until_free();
}

#[test]
fn documents_make_change_and_remove_tenants() {
    let rig = two_cards();
    let _daemon = Daemon::start(&rig);
    let file = rig.folder.path().join("desired.toml");
    let path = file.display().to_string();
    let apply = |text: &str, more: &[&str]| {
        std::fs::write(&file, text).expect("written");
        good(&rig, &[&["apply", "-f", &path], more].concat())
    };
    let both = "[[tenant]]\nname = \"a\"\nvram_mib = 32\n[[tenant]]\nname = \"b\"\ncard = \"small\"\nvram_mib = 16\ntime.weight = 7\n";
    let card = "[[card]]\nname = \"fake\"\nscheduler.policy = \"credit\"\nmemory.victims = \"random\"\n";
    assert!(apply(both, &["--dry-run"]).contains("tenant a would be added"));
    assert_eq!(names(&rig), [""; 0]);
    let told = apply(&format!("{card}{both}"), &[]);
    assert!(told.contains("tenant a added") && told.contains("card fake changed"), "{told}");
    // Applying the same document again, or an exported document, has no effect.
    assert!(!apply(both, &[]).contains("changed"));
    std::fs::write(&file, good(&rig, &["export"])).expect("written");
    good(&rig, &["assert", "--exact", "-f", &path]);
    assert!(!good(&rig, &["apply", "--prune", "-f", &path]).contains("changed"));
    // A document can contain a subset of the values. Impossible changes are reported before any change is applied.
    apply("[[tenant]]\nname = \"a\"\nmemory.quota_mib = 16\non_stuck = \"suspend\"\n", &[]);
    let a = json(&rig, &["tenant", "show", "a"]);
    assert_eq!((&a["memory"]["quota_mib"], &a["on_stuck"]), (&16.into(), &"suspend".into()));
    std::fs::write(&file, "[[tenant]]\nname = \"a\"\nmode = \"0600\"\ntime.weight = 5\n").expect("written");
    let refused = bad(&rig, 4, &["apply", "-f", &path]);
    assert!(refused.contains("tenant `a`: mode is "), "{refused}");
    assert_eq!(json(&rig, &["tenant", "show", "a"])["time"]["weight"], 100);
    apply("[[tenant]]\nname = \"a\"\nvram_mib = 48\n", &[]);
    assert_eq!(json(&rig, &["tenant", "show", "a"])["vram_mib"], 48);
    // Tenants missing from a document are removed only with `--prune`.
    let told = apply("[[tenant]]\nname = \"b\"\n", &["--prune"]);
    assert!(told.contains("tenant a removed"), "{told}");
    assert_eq!(names(&rig), ["b"]);
}

#[test]
fn card_settings_change_live_and_persist_for_next_owner() {
    let rig = pair();
    let daemon = Daemon::start(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "32"]);
    program.steps(2);
    good(&rig, &["sched", "set", "fake", "--policy", "credit"]);
    good(&rig, &["memory", "set", "fake", "--victims", "random", "--return-ms", "20"]);
    let shown = |key: &str, command: &[&str]| json(&rig, command)["settings"][key].clone();
    let check = || {
        assert_eq!(shown("policy", &["sched", "show", "fake"]), "credit");
        assert_eq!(shown("victims", &["memory", "show", "fake"]), "random");
        assert_eq!(shown("return_ms", &["memory", "show", "fake"]), 20);
    };
    check();
    for (command, told) in [
        (&["sched", "set", "fake", "--policy", "direct"][..], "`direct`, expected `band`, `credit` or `fifo`"),
        (&["sched", "set", "fake", "--queues", "single"], "scheduler.queues: expected no such key on a CUDA card"),
        (&["memory", "set", "fake", "--victims", "profiled"], "expected another policy on a CUDA card"),
        (&["memory", "set", "fake", "--host-mib", "512"], "expected at most the 128"),
    ] {
        let said = bad(&rig, 2, command);
        assert!(said.contains(told), "{said}");
    }
    check();
    // The next owner also uses the values set before.
    signal("-KILL", &daemon.owners()[0]);
    program.grow();
    until(&rig, "a", "the next owner serves it", |a| a["served"] == true && programs(a) == 1);
    check();
    // Commands, reports and views for virtual machines also show tenants.
    let picture = rig.folder.path().join("report.svg").display().to_string();
    let report = json(&rig, &["sched", "report", "fake", "--since", "10s", "--out", &picture]);
    assert_eq!(report["vms"].as_array().expect("a list").len(), 2, "{report}");
    assert!(std::fs::read_to_string(&picture).expect("a picture").contains("<svg"));
    daemon.kill();
    let _daemon = Daemon::start(&rig);
    check();
    assert_eq!(program.end(), "held 18");
}

#[test]
fn run_without_a_driver_says_what_to_install() {
    let rig = pair();
    let _daemon = Daemon::start(&rig);
    if host_has_driver(&rig) {
        return println!("skipped: this host has a driver, which programs find");
    }
    let library = rig.folder.path().join("shim").display().to_string();
    let mut command = ctl_command(&rig, &["run", "--tenant", "a", "--library", &library, "--", PROGRAM, "look"]);
    command.env("LD_LIBRARY_PATH", "").env_remove(cuda_protocol::LOG_VARIABLE);
    let output = command.env_remove(cuda_protocol::DRIVER_VARIABLE).output().expect("starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{error}");
    assert!(error.starts_with(NO_DRIVER) && error.contains("cuInit failed with 100"), "{error}");
}
