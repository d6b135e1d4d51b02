//! Tests programs as tenants of a daemon on the fake driver. `mediatord`, `mediatorctl`, the owner and the programs are
//! separate processes.

mod support;

use std::process::{Child, Stdio};
use std::time::Duration;

use support::daemon::*;
use support::{Program, Rig, built};

#[test]
fn two_programs_share_a_card_of_a_daemon_and_outlive_it() {
    let rig = pair();
    let daemon = Daemon::start(&rig);
    let mut one = run(&rig, "a", &[], &["live", "--mib", "32"]);
    let mut two = run(&rig, "b", &["--weight", "200"], &["live", "--mib", "24"]);
    for program in [&mut one, &mut two] {
        program.steps(3);
    }
    until(&rig, "b", "its program is listed, with its weight", |b| programs(b) == 1 && b["time"]["weight"] == 200);

    // The commands for virtual machines also change tenants' limits at run time.
    let set = ctl(&rig, &["memory", "set-quota", "a", "16"]);
    assert!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
    until(&rig, "a", "memory above the quota was moved to host memory", |a| {
        mib(a, "on_card_bytes") <= 16 && mib(a, "in_host_bytes") >= 16
    });
    assert!(ctl(&rig, &["sched", "set-vm", "a", "--weight", "50"]).status.success());
    assert_eq!(json(&rig, &["tenant", "show", "a"])["time"]["weight"], 50);
    assert_eq!(
        ctl(&rig, &["tenant", "set", "a", "--quota-mib", "15"]).status.code(),
        Some(2),
        "not a whole number of chunks"
    );
    assert_eq!(ctl(&rig, &["tenant", "show", "z"]).status.code(), Some(3));
    for (arguments, shown) in [(["top", "--once"], "b"), (["sched", "show"], "b"), (["memory", "show"], "b")] {
        let output = ctl(&rig, &arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains(shown), "{arguments:?}: {text}");
    }
    let metrics = get(&rig, "/metrics");
    assert!(metrics.contains("gpu_mediator_tenant_programs{tenant=\"a\",card=\"fake\"} 1"), "{metrics}");

    // Kill the daemon. Its owner also exits, and the next daemon and owner take over the programs.
    daemon.kill();
    for program in [&mut one, &mut two] {
        program.steps(10);
    }
    let daemon = Daemon::start(&rig);
    for program in [&mut one, &mut two] {
        program.grow();
    }
    until(&rig, "a", "its memory is accounted again", |a| mib(a, "on_card_bytes") + mib(a, "in_host_bytes") >= 36);

    // The owner frees a killed program's memory.
    one.kill();
    until(&rig, "a", "its memory is free", |a| {
        programs(a) == 0 && mib(a, "on_card_bytes") + mib(a, "in_host_bytes") == 0
    });
    assert_eq!(two.end(), "held 14");
    drop(daemon);
    rig.until_free();
}

#[test]
fn an_owner_that_is_killed_is_started_again() {
    let rig = pair();
    let daemon = Daemon::start(&rig);
    let mut program = run(&rig, "a", &["--memory", "32M"], &["live", "--mib", "8"]);
    program.steps(3);
    signal("-KILL", &daemon.owners()[0]);
    program.grow();
    until(&rig, "a", "the tenant is served with the new settings", |a| {
        a["served"] == true && programs(a) == 1 && a["memory"]["quota_mib"] == 32
    });
    // The tenant may use all of its memory, because the other tenant has no programs.
    let memory = json(&rig, &["memory", "show", "fake"]);
    let shown = memory["vms"].as_array().expect("a list").iter().find(|vm| vm["vm"] == "a").expect("tenant a");
    let [entitled, on_card] = ["entitled_bytes", "on_card_bytes"].map(|key| shown[key].as_u64().expect("a size"));
    assert!(entitled >= on_card && on_card > 0, "{memory}");
    let restarts = "gpu_mediator_card_owner_restarts_total{card=\"fake\"} 1\n";
    assert!(get(&rig, "/metrics").contains(restarts), "{}", get(&rig, "/metrics"));
    assert_eq!(program.end(), "held 6");
}

#[test]
fn tenant_socket_rejects_name_of_other_tenant() {
    let rig = pair();
    let _daemon = Daemon::start(&rig);
    // The socket determines the tenant, so the owner rejects the name of another tenant.
    let mut command = rig.command(support::PROGRAM, "shim");
    command.env(cuda_protocol::TENANT_VARIABLE, "b");
    let output =
        command.env(cuda_protocol::SOCKET_VARIABLE, rig.folder.path().join("tenants/a/cuda.sock")).arg("look").output();
    let output = output.expect("starts");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Denied"), "{output:?}");
}

#[test]
fn stuck_owner_does_not_block_requests_to_other_cards() {
    let rig = rig(|rig| {
        let cards = card(rig, "fake", "")
            + &card(rig, "other", "")
            + "[[card]]\nname = \"soft\"\nkind = \"simgpu\"\nvram_mib = 64\n";
        cards + &tenant("a", "fake", "") + &tenant("c", "other", "")
    });
    let daemon = Daemon::start(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "8"]);
    program.steps(2);
    signal("-STOP", &daemon.owners()[0]);
    // Send more requests to the stuck owner than may wait for one card at a time.
    let waiting =
        || ctl_command(&rig, &["tenant", "set", "a", "--weight", "50"]).stderr(Stdio::piped()).spawn().expect("starts");
    let mut waiting: Vec<_> = (0..24).map(|_| waiting()).collect();
    let first = |waiting: &mut Vec<Child>| waiting.iter_mut().any(|child| matches!(child.try_wait(), Ok(None)));
    for _ in 0..2 {
        for path in ["/metrics", "/v1/tenants", "/v1/cards", "/v1/schedulers", "/v1/memory", "/v1/desired"] {
            let text = get(&rig, path);
            assert!(text.starts_with("HTTP/1.0 200"), "{path}: {text}");
        }
        for command in [
            &["tenant", "set", "c", "--weight", "7"][..],
            &["sched", "set", "other", "--policy", "credit"],
            &["memory", "set", "other", "--return-ms", "30"],
            &["tenant", "add", "d", "--card", "other", "--vram-mib", "16"],
            &["vm", "add", "v", "--card", "soft", "--vram-mib", "16"],
            &["sched", "set-vm", "v", "--weight", "9"],
            &["tenant", "remove", "d"],
            &["vm", "remove", "v"],
        ] {
            good(&rig, command);
        }
        assert!(first(&mut waiting), "all requests to other owners are done before the stuck owner is killed");
    }
    // Before the owner is killed, the status reports that it does not respond.
    while !get(&rig, "/v1/cards/fake").contains("the owner of card `fake` has not responded for") {
        assert!(first(&mut waiting), "no caller was notified: {}", get(&rig, "/v1/cards/fake"));
    }
    assert!(get(&rig, "/metrics").contains("gpu_mediator_tenant_served{tenant=\"a\",card=\"fake\"} 0"));
    assert!(bad(&rig, 1, &["sched", "show", "fake"]).contains("restarted"));
    assert!(good(&rig, &["card", "show", "other"]).contains("tenants"));
    for child in waiting {
        let output = child.wait_with_output().expect("ends");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let told = text.contains("card `fake`")
            && (text.contains("restarted") || text.contains("wait until pending changes have completed"));
        assert!(!output.status.success() && told, "{text}");
    }
    // The next owner serves the tenant as the killed one did.
    until(&rig, "a", "it is served as before", |a| {
        a["served"] == true && programs(a) == 1 && a["time"]["weight"] == 100
    });
    program.grow();
    assert_eq!(program.end(), "held 6");
}

#[test]
fn guarantee_waiting_for_memory_does_not_block_requests() {
    let rig = pair();
    let _daemon = Daemon::start(&rig);
    let mut holder = run(&rig, "a", &[], &["hold", "--mib", "60"]);
    assert_eq!(holder.line(), "holds");
    let pid = holder.child.id().to_string();
    // A stopped program cannot quiesce, so its memory does not move until the program is resumed.
    signal("-STOP", &pid);
    let mut waiting = ctl_command(&rig, &["memory", "set-guarantee", "b", "40"]).spawn().expect("starts");
    std::thread::sleep(Duration::from_millis(500));
    for command in [
        &["sched", "set", "fake", "--policy", "credit"][..],
        &["tenant", "set", "a", "--weight", "7"],
        &["tenant", "show", "b"],
        &["memory", "set", "fake", "--return-ms", "30"],
    ] {
        good(&rig, command);
    }
    assert!(matches!(waiting.try_wait(), Ok(None)), "the guarantee did not wait for memory: {waiting:?}");
    assert_eq!(json(&rig, &["tenant", "show", "b"])["memory"]["guarantee_mib"], serde_json::Value::Null);
    signal("-CONT", &pid);
    assert!(waiting.wait().expect("ends").success(), "the guarantee is given once the memory has moved");
    assert_eq!(json(&rig, &["tenant", "show", "b"])["memory"]["guarantee_mib"], 40);
    assert_eq!(holder.end(), "held");
}

/// Waits for a program that must fail. Returns the rest of its output.
fn fails(mut program: Program) -> String {
    let mut text = String::new();
    std::io::Read::read_to_string(program.output(), &mut text).expect("readable");
    assert!(!program.child.wait().expect("ends").success(), "the program continues after a reset: {text}");
    text
}

#[test]
fn reset_card_loses_its_programs_and_serves_again() {
    let mut rig = rig(|rig| {
        card(rig, "fake", "cuda.device = \"0\"\n")
            + &card(rig, "other", "cuda.device = \"1\"\n")
            + &tenant("a", "fake", "")
            + &tenant("b", "fake", "")
            + &tenant("c", "other", "")
    });
    rig.cards = 2;
    let daemon = Daemon::start(&rig);
    let mut unaffected = run(&rig, "c", &[], &["live", "--mib", "16"]);
    let mut lost = run(&rig, "a", &[], &["live", "--mib", "16"]);
    let mut idle = run(&rig, "b", &[], &["hold", "--mib", "8"]);
    unaffected.steps(2);
    lost.steps(2);
    let served = |tenant: &str| json(&rig, &["tenant", "show", tenant])["served"] == true;
    until(&rig, "b", "both programs are listed", |b| programs(b) == 1);

    // From now on, the card rejects new contexts, so its owner cannot start again.
    rig.set_broken(0, true);
    rig.set_exit_waits(0, "cuda-owner");
    rig.reset(0);
    fails(lost);
    until(&rig, "a", "the card has no owner", |a| a["served"] == false);
    assert!(bad(&rig, 1, &["sched", "show", "fake"]).contains("card `fake` has no owner"));
    let refused = bad(&rig, 1, &["run", "--tenant", "a", "--", "true"]);
    let (reason, remedy) = refused.split_once('\n').expect("two lines");
    let reason = reason.strip_prefix("mediatorctl: tenant `a` is not served: card `fake`: ").expect(&refused);
    assert!(reason.len() > 20 && !reason.ends_with("100"), "{reason}");
    assert_eq!(
        remedy,
        "  check with `nvidia-smi` that the driver works, and see `mediatorctl card show` and the daemon's log\n"
    );
    assert!(served("c"));
    unaffected.steps(2);
    unaffected.grow();

    rig.set_broken(0, false);
    for name in ["a", "b"] {
        until(&rig, name, "the tenant is served again, without any previous memory", |tenant| {
            tenant["served"] == true && mib(tenant, "on_card_bytes") == 0 && mib(tenant, "in_host_bytes") == 0
        });
    }
    // A program that was idle during the reset gets the error from its next call.
    idle.close();
    fails(idle);
    assert!(rig.free().starts_with("free=512"), "{}", rig.free());
    let mut again = run(&rig, "a", &[], &["live", "--mib", "32"]);
    again.steps(3);
    assert_eq!(again.end(), "held 16");
    unaffected.steps(2);
    assert_eq!(unaffected.end(), "held 10");
    daemon.kill();
}

/// Returns the code blocks of a given language in README.md's CUDA section.
fn readme(kind: &str) -> Vec<&'static str> {
    let section = include_str!("../../../README.md").split("## CUDA programs on your GPU").nth(1).expect("a section");
    let section = section.split("\n## ").next().expect("its text");
    section.split(kind).skip(1).map(|rest| rest.split("```").next().expect("its end")).collect()
}

#[test]
fn quick_start_of_the_readme_prints_its_output() {
    let (scripts, outputs) = (readme("```sh\n"), readme("```text\n"));
    let (build, script) = scripts[0].split_once('\n').expect("two lines");
    assert!(build.starts_with("cargo build"), "{build}");
    let programs = built("mediatorctl").parent().expect("a folder").display().to_string();
    for (folder_of_libraries, expected) in [("plain", outputs[0]), ("none", outputs[1])] {
        let rig = Rig::new(9000);
        let folder = rig.folder.path().join("start");
        std::fs::create_dir(&folder).expect("a folder");
        let folder = folder.display().to_string();
        // The programs are already built. Substitute the folder, and stop the daemon at the end.
        let script = script
            .replace("$PWD/target/release", &programs)
            .replace("$(mktemp -d)", &folder)
            .replace("&\n", "2> \"$folder/log\" & trap 'kill %1 2> /dev/null; wait' EXIT\n");
        // Without a driver, the daemon would never reply.
        let until_it_answers = script.find("export MEDIATORCTL_SOCKET").expect("a line");
        let script =
            if folder_of_libraries == "none" { script[..until_it_answers].to_owned() + "wait\n" } else { script };
        let mut command = rig.command("timeout", folder_of_libraries);
        // TIMEOUT: only a failing test takes this long.
        let output = command.args(["60", "bash", "-c", &script]).stdin(Stdio::null()).output().expect("starts");
        let log = std::fs::read_to_string(rig.folder.path().join("start/log")).expect("a log");
        let text = String::from_utf8_lossy(&output.stdout).replace(&folder, "FOLDER");
        if folder_of_libraries == "none" {
            let last = log.lines().rfind(|line| line.starts_with("mediatord: "));
            assert_eq!(last, Some(expected.trim_end()), "{log}");
        } else {
            assert_eq!(text, expected, "{log}{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

#[test]
fn card_show_of_cuda_card_has_device_and_no_apertures() {
    let rig = rig(|rig| card(rig, "fake", "cuda.device = \"0\"\n"));
    let _daemon = Daemon::start(&rig);
    let shown = good(&rig, &["card", "show", "fake"]);
    assert!(shown.lines().any(|line| line.split_whitespace().collect::<Vec<_>>() == ["device", "0"]), "{shown}");
    assert!(!shown.contains("BAR") && !shown.contains("channels"), "{shown}");
    assert!(shown.contains("GPU-66616b65-2063-7564-6120-636172642030"), "{shown}");
    assert!(
        shown.lines().any(|line| line.split_whitespace().collect::<Vec<_>>() == ["owner", "restarts", "0"]),
        "{shown}"
    );
}
