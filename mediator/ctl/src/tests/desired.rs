//! Tests `apply`, `export` and `assert`, with one operator and with several concurrent operators.

use super::*;
use api::{Action, Applied, Comparison, Exported};
use config::TimeShare;
use mediatord::fixture::one_card;
use proptest::collection::btree_map;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;
use std::fs;

/// Writes `text` to a file in the daemon's folder, and runs a command on the file.
fn with_file(served: &Served, text: &str, arguments: &[&str]) -> Ran {
    let path = served.fixture.path("desired");
    fs::write(&path, text).unwrap();
    ctl(served, &[arguments, &["-f", &path.display().to_string()]].concat())
}

fn exported(served: &Served) -> Exported {
    serde_json::from_str(&ctl(served, &["--json", "export"]).out).unwrap()
}

const TWO: &str = r#"
[[card]]
name = "card0"
scheduler = { policy = "fifo", band = { wait_ns = 1000 } }

[[vm]]
name = "web"
card = "card0"
vram_mib = 32
time = { weight = 300 }

[[vm]]
name = "build"
card = "card0"
vram_mib = 16
"#;

#[test]
fn apply_changes_named_keys_and_keeps_unnamed_ones() {
    let served = one_card("");
    let ran = with_file(&served, TWO, &["apply", "--dry-run"]);
    assert!(
        ran.out.contains("VM web would be added\n") && ran.out.contains("card card0 would be changed\n"),
        "{}",
        ran.out
    );
    assert_eq!(ctl(&served, &["vm", "list"]).out, "no VMs\n");
    assert_eq!(with_file(&served, TWO, &["assert"]).code, Code::Failed);

    let ran = with_file(&served, TWO, &["apply"]);
    assert_eq!((ran.code, &*ran.err), (Code::Good, ""));
    assert_eq!(
        ran.out,
        "card card0 changed\n  scheduler.band.wait_ns: 500000 -> 1000\n  scheduler.policy: \"band\" -> \"fifo\"\n\
         VM web added\nVM build added\n"
    );
    assert_eq!(with_file(&served, TWO, &["assert", "--exact"]).out, "everything matches the file\n");
    let ran = with_file(&served, TWO, &["apply"]);
    assert_eq!(ran.out, "card card0 matches the file\nVM web matches the file\nVM build matches the file\n");

    // Only the given keys change: the weight of `web` and the VM `build` stay unchanged.
    let text = "[[vm]]\nname = \"web\"\ntime = { class = \"interactive\" }\n";
    let ran = with_file(&served, text, &["apply"]);
    assert_eq!(ran.out, "VM web changed\n  time.class: \"normal\" -> \"interactive\"\n");
    let state = exported(&served);
    assert_eq!(
        state.vm.iter().map(|vm| (&*vm.name, vm.time.weight)).collect::<Vec<_>>(),
        [("build", 100), ("web", 300)]
    );
    let shown: api::CardScheduler = served.client().get("/v1/cards/card0/scheduler").unwrap();
    assert_eq!((shown.settings.policy, shown.settings.band.wait_ns), (::sched::PolicyKind::Fifo, 1000));
    assert_eq!(shown.vms[1].time.class, ::sched::LatencyClass::Interactive, "the scheduler has the new class");

    let found = with_file(&served, text, &["--json", "assert", "--exact"]);
    let found: Comparison = serde_json::from_str(&found.out).unwrap();
    assert_eq!(
        found.differences.iter().map(|one| (&*one.name, one.action)).collect::<Vec<_>>(),
        [("build", Action::Remove)]
    );
    let ran = with_file(&served, text, &["apply", "--prune"]);
    assert_eq!(ran.out, "VM build removed\nVM web matches the file\n");
    assert!(!served.fixture.path("build.sock").exists());
}

#[test]
fn room_that_is_made_by_the_same_file_counts() {
    let served = one_card("");
    let vm = |name: &str| format!("[[vm]]\nname = \"{name}\"\ncard = \"card0\"\nvram_mib = 112\n");
    assert_eq!(with_file(&served, &vm("old"), &["apply"]).code, Code::Good);
    let ran = with_file(&served, &vm("new"), &["apply"]);
    assert_eq!(ran.code, Code::Conflict);
    assert!(
        ran.err.contains("VM `new`: vram_mib: 112 MiB, expected at most 0: card `card0` has 128 MiB"),
        "{}",
        ran.err
    );
    assert_eq!(with_file(&served, &vm("new"), &["apply", "--prune"]).out, "VM old removed\nVM new added\n");
}

#[test]
fn apply_of_impossible_file_reports_remedy_and_changes_nothing() {
    let served = one_card("");
    assert_eq!(with_file(&served, TWO, &["apply"]).code, Code::Good);
    let before = exported(&served);
    let good =
        "[[vm]]\nname = \"new\"\ncard = \"card0\"\nvram_mib = 16\n[[vm]]\nname = \"web\"\ntime = { weight = 7 }\n";
    let of_web = |keys: &str| good.replace("time = { weight = 7 }", keys);
    for (text, code, parts) in [
        (
            of_web("vram_mib = 64\nchannels = 8"),
            Code::Conflict,
            &[
                "VM `web`: channels is 32 and cannot become 8 while the VM exists",
                "VM `web`: vram_mib is 32 and cannot",
                "`mediatorctl vm remove web`",
                "nothing was changed",
            ][..],
        ),
        (
            format!("{good}[[card]]\nname = \"card0\"\nvram_mib = 256\n"),
            Code::Conflict,
            &["card `card0`: vram_mib is 128 and cannot become 256 while the daemon runs", "configuration file"],
        ),
        (format!("{good}[daemon]\nlog = \"debug\"\n"), Code::Conflict, &["the daemon: log is \"info\""]),
        (
            format!("{good}[[card]]\nname = \"card7\"\n"),
            Code::NotFound,
            &["card `card7`: there is no such card, expected `card0`"],
        ),
        (good.replace("= 16", "= 4096"), Code::Conflict, &["VM `new`: vram_mib: 4096 MiB, expected at most"]),
        (good.replace("= 16", "= 17"), Code::Usage, &["VM `new`: vram_mib: 17 MiB, expected a multiple of the chunk"]),
        (good.replace("vram_mib", "vram"), Code::Usage, &["VM `new`: unknown field `vram`"]),
        (of_web("time = { weight = 0 }"), Code::Usage, &["VM `web`: time: weight = 0 is not between 1 and 10000"]),
        (of_web("time = { wieght = 5 }"), Code::Usage, &["VM `web`: time.wieght: unknown field"]),
        (
            format!("{good}[[card]]\nname = \"card0\"\nscheduler = {{ band = {{ period_ns = 1 }} }}\n"),
            Code::Usage,
            &["card `card0`: scheduler.band.period_ns = 1 is not between"],
        ),
        (good.replace("\"web\"", "\"new\""), Code::Usage, &["VM `new`: duplicate table"]),
        (format!("{good}[[vm]]\ncard = \"card0\"\n"), Code::Usage, &["vm[2]: name: expected the name"]),
        (format!("{good}[[vmm]]\n"), Code::Usage, &["desired", "8:3: vmm: unknown key `vmm`"]),
        ("{ \"vm\": [".to_owned(), Code::Usage, &["EOF while parsing"]),
    ] {
        let ran = with_file(&served, &text, &["apply"]);
        assert_eq!(ran.code, code, "{text}\n{}{}", ran.out, ran.err);
        for part in parts {
            assert!(ran.err.contains(part), "{part}\n{}", ran.err);
        }
        assert_eq!(exported(&served), before, "{text}");
        // For `assert`, a state that conflicts is a mismatch; an invalid state or an unknown card is an error.
        let asserted = with_file(&served, &text, &["assert"]).code;
        assert_eq!(asserted, if matches!(code, Code::Conflict) { Code::Failed } else { code }, "{text}");
    }
    let ran = ctl(&served, &["apply", "-f", "/nonexistent/file"]);
    assert!(
        ran.code == Code::Usage && ran.err.contains("/nonexistent/file does not describe a valid state"),
        "{}",
        ran.err
    );
}

#[test]
fn configuration_file_itself_can_be_applied_and_asserted() {
    let served = one_card("");
    let text =
        "[daemon]\nlog = \"info\"\n[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 128\nreserve_mib = 16\n";
    let ran = with_file(&served, &format!("{text}{}", &TWO[TWO.find("[[vm]]").unwrap()..]), &["apply"]);
    assert_eq!((ran.code, &*ran.err), (Code::Good, ""));
    assert!(ran.out.starts_with("the daemon matches the file\ncard card0 matches the file\n"), "{}", ran.out);
    // A key that the daemon's state omits matches its default value.
    let ran = with_file(
        &served,
        "[[vm]]\nname = \"web\"\nchannels = 32\nhang_limit_ms = 10000\nmode = \"660\"\n",
        &["assert"],
    );
    assert_eq!(ran.code, Code::Good, "{}", ran.out);
}

#[test]
fn two_operators_do_not_lose_each_other_s_changes() {
    let served = one_card("");
    assert_eq!(with_file(&served, TWO, &["apply"]).code, Code::Good);
    let mine = ctl(&served, &["export"]).out;
    let theirs = ctl(&served, &["sched", "set-vm", "web", "--weight", "500"]);
    assert_eq!(theirs.code, Code::Good);
    let ran = with_file(&served, &mine.replace("class = \"normal\"", "class = \"background\""), &["apply"]);
    assert_eq!(ran.code, Code::Conflict);
    assert!(ran.err.contains("revision conflict: expected") && ran.err.contains("mediatorctl export"), "{}", ran.err);
    assert_eq!(exported(&served).vm[1].time, TimeShare { weight: 500, ..TimeShare::default() });
    // A file without a revision can be applied after any change, and reverts that change.
    let kept = ctl(&served, &["export", "--no-revision"]).out;
    assert!(!kept.contains("revision"), "{kept}");
    ctl(&served, &["sched", "set-vm", "web", "--weight", "7"]);
    assert_eq!(with_file(&served, &kept, &["apply"]).code, Code::Good);
    assert_eq!(exported(&served).vm[1].time.weight, 500);

    // Single commands can require a revision as well, and each change creates a new revision.
    let commands: [&[&str]; 5] = [
        &["vm", "add", "c", "--card", "card0", "--vram-mib", "16"],
        &["sched", "set", "card0", "--strikes", "9"],
        &["sched", "set-vm", "web", "--weight", "9"],
        &["vm", "remove", "web"],
        &["apply", "--prune", "-f", "/dev/null"],
    ];
    for command in commands {
        let seen = exported(&served).revision;
        let ran = ctl(&served, &[command, &["--if-revision", "1-1"]].concat());
        assert_eq!(ran.code, Code::Conflict, "{command:?}: {}", ran.err);
        assert_eq!(exported(&served).revision, seen);
        let ran = ctl(&served, &[command, &["--if-revision", &seen]].concat());
        assert_eq!(ran.code, Code::Good, "{command:?}: {}", ran.err);
        assert_ne!(exported(&served).revision, seen, "{command:?}");
    }
    assert_eq!(exported(&served).vm, []);
    let client = served.client().expecting(Some("no quotes \" in it".to_owned()));
    let refused = client.post::<api::Vm>("/v1/vms", &api::AddVm::new("c", "card0", 16));
    assert!(refused.unwrap_err().to_string().contains("is not a revision"));
}

#[test]
fn many_operators_at_once_count_up_without_a_loss() {
    const OPERATORS: usize = 4;
    const CHANGES: u32 = 25;
    let served = one_card("");
    added_small(&served, "web");
    let one = || {
        let client = || served.client();
        let mut done = 0;
        while done < CHANGES {
            let seen: Exported = client().get("/v1/desired").unwrap();
            let weight = seen.vm[0].time.weight + 1;
            let client = client().expecting(Some(seen.revision.clone()));
            // Alternate between a single change and a whole document.
            let result = if done % 2 == 0 {
                client.patch::<api::VmTime>("/v1/vms/web/time", &json!({ "weight": weight })).map(drop)
            } else {
                let body = json!({ "vm": [{ "name": "web", "time": { "weight": weight } }] });
                client.patch::<Applied>("/v1/desired", &body).map(drop)
            };
            match result {
                Ok(()) => done += 1,
                Err(ClientError::Ask(AskError::Refused(error))) => {
                    assert_eq!(error.code, ErrorCode::Conflict, "{error:?}")
                }
                Err(error) => panic!("{error}"),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..OPERATORS {
            scope.spawn(one);
        }
    });
    let weight = exported(&served).vm[0].time.weight;
    assert_eq!(weight, 100 + CHANGES * u32::try_from(OPERATORS).unwrap());
}

fn added_small(served: &Served, name: &str) {
    let ran = ctl(served, &["vm", "add", name, "--card", "card0", "--vram-mib", "16"]);
    assert_eq!(ran.code, Code::Good, "{}", ran.err);
}

#[test]
fn any_state_is_reached_from_any_other_and_back_by_its_export() {
    // Each VM has a name, a weight, and an optional limit. All VMs have the same memory size, so they fit.
    let states = || btree_map("[a-e]", (1..10_000u32, proptest::option::of(1..9u64)), 0..5);
    let served = one_card("");
    let document = |vms: &std::collections::BTreeMap<String, (u32, Option<u64>)>, strikes: u32| {
        let vm = |(name, (weight, limit)): (&String, &(u32, Option<u64>))| {
            let mut time = json!({ "weight": weight });
            if let Some(limit) = limit {
                time["max_run_ms"] = (*limit).into();
            }
            json!({ "name": name, "card": "card0", "vram_mib": 16, "time": time })
        };
        let card = json!({ "name": "card0", "scheduler": { "strikes": strikes } });
        json!({ "card": [card], "vm": vms.iter().map(vm).collect::<Vec<_>>() }).to_string()
    };
    let test = |(first, second, strikes): (_, _, u32)| {
        let ran = with_file(&served, &document(&first, strikes), &["apply", "--prune"]);
        prop_assert_eq!((ran.code, &*ran.err), (Code::Good, ""));
        let kept = ctl(&served, &["export", "--no-revision"]).out;
        let before = exported(&served);
        prop_assert_eq!(before.vm.len(), first.len());

        let second = document(&second, strikes + 1);
        prop_assert_eq!(with_file(&served, &second, &["apply", "--prune"]).code, Code::Good);
        prop_assert_eq!(with_file(&served, &second, &["assert", "--exact"]).code, Code::Good);
        prop_assert_eq!(with_file(&served, &kept, &["assert", "--exact"]).code, Code::Failed);

        // TOML has no null, so the export does not remove limits that only the second state sets.
        let ran = with_file(&served, &kept, &["apply", "--prune"]);
        prop_assert_eq!((ran.code, &*ran.err), (Code::Good, ""));
        prop_assert_eq!(with_file(&served, &kept, &["assert", "--exact"]).code, Code::Good);
        let after = exported(&served);
        prop_assert_eq!(&after.card, &before.card);
        for (after, before) in after.vm.iter().zip(&before.vm) {
            let time = TimeShare { max_run_ms: before.time.max_run_ms.or(after.time.max_run_ms), ..before.time };
            prop_assert_eq!(after, &VmSpec { time, ..before.clone() });
        }
        // Applying the export of the current state changes nothing.
        let kept = ctl(&served, &["export"]).out;
        let ran = with_file(&served, &kept, &["--json", "apply", "--prune"]);
        let applied: Applied = serde_json::from_str(&ran.out).unwrap();
        prop_assert!(applied.steps.iter().all(|step| step.action == Action::Keep), "{}", ran.out);
        prop_assert_eq!(exported(&served), after);
        Ok(())
    };
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    runner.run(&(states(), states(), 0..100u32), test).unwrap();
}
