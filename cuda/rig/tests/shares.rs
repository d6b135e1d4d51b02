//! Tests shares of a card's time, as measured by the programs themselves, and programs that bypass the owner or do not
//! obey it, under a daemon on the fake driver.

mod support;

use support::Program;
use support::daemon::*;

/// Card time after which shares are compared, in microseconds: a few hundred turns.
const WORK_US: u64 = 3_000_000;

/// Returns the card time that each program has used so far, in microseconds.
fn counts(programs: &mut [Program]) -> Vec<u64> {
    for program in programs.iter_mut() {
        program.say("how much");
    }
    programs.iter_mut().map(|program| program.line().parse().expect("a number")).collect()
}

/// Returns each program's share of the work done from now on, in thousandths. Measures a fixed amount of work,
/// regardless of the wall time.
fn parts(programs: &mut [Program]) -> Vec<u64> {
    parts_of(programs, WORK_US)
}

/// Like [`parts`], for `work_us` microseconds of card time.
fn parts_of(programs: &mut [Program], work_us: u64) -> Vec<u64> {
    // The replies show that each program has had a turn.
    let before = counts(programs);
    loop {
        let now = counts(programs);
        let done: Vec<u64> = now.iter().zip(&before).map(|(now, before)| now - before).collect();
        let sum: u64 = done.iter().sum();
        if sum >= work_us {
            return done.into_iter().map(|done| done * 1000 / sum).collect();
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}

/// Returns true if the parts match the weights within a tenth of the total. A busy host delays programs, but not the
/// card's clock.
fn as_weights(parts: &[u64], weights: &[u64]) -> bool {
    let sum: u64 = weights.iter().sum();
    parts.iter().zip(weights).all(|(part, weight)| part.abs_diff(weight * 1000 / sum) <= 100)
}

#[test]
fn weights_hold_by_the_programs_own_counts_and_change_live() {
    let rig = rig(|rig| card(rig, "fake", "") + &["a", "b", "c"].map(|name| tenant(name, "fake", "")).concat());
    let _daemon = Daemon::start(&rig);
    let set = |name: &str, weight: &str| drop(good(&rig, &["tenant", "set", name, "--weight", weight]));
    let count = |name: &str, us: &str| run(&rig, name, &[], &["count", "--kernel-us", us]);
    let mut programs = vec![count("a", "500"), count("b", "2000")];
    set("a", "300");
    let found = parts(&mut programs);
    assert!(as_weights(&found, &[3, 1]), "3:1 gave {found:?}");
    programs.push(count("c", "1000"));
    for (name, weight) in [("a", "100"), ("b", "200"), ("c", "400")] {
        set(name, weight);
    }
    let found = parts(&mut programs);
    assert!(as_weights(&found, &[1, 2, 4]), "1:2:4 gave {found:?}");
    for program in programs {
        program.end();
    }
}

#[test]
fn programs_that_begin_within_moments_share_the_card() {
    let rig = pair();
    let _daemon = Daemon::start(&rig);
    let count = |name: &str| run(&rig, name, &[], &["count", "--kernel-us", "12000"]);
    let mut first = count("a");
    // Until the other program starts, the first one is alone on the card and submits as much as the library allows.
    first.say("how much");
    first.line();
    let mut programs = [first, count("b")];
    // Only one kernel of this length is in flight at a time, so the shares also depend on host delays.
    let found = parts(&mut programs);
    assert!(found.iter().all(|part| *part > 100), "{found:?} of a thousand");
    for name in ["a", "b"] {
        until(&rig, name, "its work is accounted, and the program still runs", |tenant| {
            tenant["launches"].as_u64() > Some(0) && tenant["killed"] == 0
        });
    }
    for program in programs {
        program.end();
    }
}

/// Creates a card of 64 MiB and two programs of 48 MiB each that always have work. The second tenant has three times
/// the first one's weight.
fn more_than_fits() -> (support::Rig, Daemon, [Program; 2]) {
    let quanta = "memory.quanta.min_ms = 50\nmemory.quanta.max_ms = 200\nmemory.quanta.window_ms = 200\n";
    let auto = |text: String| text.replace("memory.quanta.mode = \"off\"", "memory.quanta.mode = \"auto\"");
    let rig = rig(|rig| {
        let heavy = tenant("b", "fake", "time.weight = 300\n");
        auto(card(rig, "fake", quanta)) + &tenant("a", "fake", "") + &heavy
    });
    let daemon = Daemon::start(&rig);
    let count = |name: &str| run(&rig, name, &[], &["count", "--kernel-us", "1000", "--mib", "48"]);
    let programs = [count("a"), count("b")];
    (rig, daemon, programs)
}

/// Returns the card's current memory quantum, or null without quanta.
fn memory_turn(rig: &support::Rig) -> serde_json::Value {
    json(rig, &["memory", "show", "fake"])["turn"].clone()
}

#[test]
fn memory_quanta_divide_time_by_weights() {
    let (rig, _daemon, mut programs) = more_than_fits();
    counts(&mut programs);
    let begins = (0..300).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        !memory_turn(&rig).is_null()
    });
    assert!(begins, "96 MiB do not fit into 64");
    let found = parts_of(&mut programs, 8_000_000);
    assert!(as_weights(&found, &[1, 3]), "1:3 gave {found:?}");
    drop(programs.map(Program::end));
}

#[test]
fn quota_that_makes_memory_fit_ends_quanta() {
    let (rig, _daemon, mut programs) = more_than_fits();
    good(&rig, &["tenant", "set", "a", "--quota-mib", "16"]);
    until(&rig, "a", "its memory is within the quota", |a| mib(a, "on_card_bytes") <= 16);
    until(&rig, "b", "all its memory is on the card", |b| mib(b, "on_card_bytes") >= 48);
    let ends = (0..300).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        memory_turn(&rig).is_null()
    });
    assert!(ends, "16 and 48 MiB fit");
    let found = parts(&mut programs);
    assert!(as_weights(&found, &[1, 3]), "1:3 gave {found:?}");
    assert!(memory_turn(&rig).is_null(), "quanta begin again");
    drop(programs.map(Program::end));
}

#[test]
fn stopped_program_lives_and_its_neighbour_works() {
    let limited = "time.max_run_ms = 1000\n";
    let rig = rig(|rig| card(rig, "fake", "") + &tenant("a", "fake", limited) + &tenant("b", "fake", ""));
    let _daemon = Daemon::start(&rig);
    let count = |name: &str| run(&rig, name, &[], &["count", "--kernel-us", "1000"]);
    let mut programs = [count("a"), count("b")];
    let before = counts(&mut programs);
    let [stops, works] = &mut programs;
    let pid = stops.child.id().to_string();
    signal("-STOP", &pid);
    // Wait for longer than the program's limit, as measured by the neighbour's work.
    let mut worked = before[1];
    while worked < before[1] + 3_000_000 {
        worked = counts(std::slice::from_mut(works))[0];
    }
    until(&rig, "a", "the program is unaffected", |a| a["killed"] == 0 && support::daemon::programs(a) == 1);
    signal("-CONT", &pid);
    let mut continued = 0;
    while continued < before[0] + 100_000 {
        continued = counts(std::slice::from_mut(stops))[0];
    }
    drop(programs.map(Program::end));
}

#[test]
fn endless_kernel_shares_the_card_until_its_limit() {
    let limited = "time.max_run_ms = 6000\n";
    let rig = rig(|rig| card(rig, "fake", "") + &tenant("a", "fake", limited) + &tenant("b", "fake", ""));
    let _daemon = Daemon::start(&rig);
    let mut works = [run(&rig, "b", &[], &["count", "--kernel-us", "1000"])];
    counts(&mut works);
    let endless = run(&rig, "a", &[], &["count", "--kernel-us", "3600000000"]);
    until(&rig, "a", "its kernel runs", |a| a["used_ns"].as_u64() > Some(100_000_000));
    // Wait for a tenth of the limit.
    let before = counts(&mut works)[0];
    while counts(&mut works)[0] < before + 600_000 {}
    until(&rig, "a", "its kernel still runs", |a| a["killed"] == 0 && support::daemon::programs(a) == 1);
    until(&rig, "a", "the program is given up at its limit", |a| a["killed"] == 1 && support::daemon::programs(a) == 0);
    endless.kill();
    drop(works.map(Program::end));
}

#[test]
fn stopped_program_is_handled_as_configured() {
    // The driver cannot suspend a stopped process, so the policy `suspend` also results in a kill.
    for policy in ["kill", "suspend"] {
        let stuck = format!("on_stuck = \"{policy}\"\ntime.max_run_ms = 500\n");
        let rig = rig(|rig| card(rig, "fake", "") + &tenant("a", "fake", &stuck) + &tenant("b", "fake", ""));
        let _daemon = Daemon::start(&rig);
        let mut stops = run(&rig, "a", &[], &["live", "--mib", "16"]);
        let mut goes_on = run(&rig, "b", &[], &["live", "--mib", "16"]);
        stops.steps(3);
        goes_on.steps(3);
        // Make the owner order the stopped program to move memory.
        signal("-STOP", &stops.child.id().to_string());
        good(&rig, &["tenant", "set", "a", "--quota-mib", "4"]);
        goes_on.steps(20);
        goes_on.grow();
        until(&rig, "a", "the program and its memory are gone", |a| {
            a["killed"] == 1 && programs(a) == 0 && mib(a, "on_card_bytes") + mib(a, "in_host_bytes") == 0
        });
        assert!(!stops.child.wait().expect("ends").success());
        let metrics = get(&rig, "/metrics");
        assert!(metrics.contains("gpu_mediator_tenant_killed_total{tenant=\"a\",card=\"fake\"} 1"), "{metrics}");
        assert_eq!(goes_on.end(), "held 10");
        rig.until_free();
    }
}

#[test]
fn user_without_access_to_tenant_socket_is_rejected() {
    let rig = rig(|rig| card(rig, "fake", "") + &tenant("a", "fake", "mode = \"0600\"\n"));
    let _daemon = Daemon::start(&rig);
    let look = |user: Option<u32>| {
        let mut command = rig.command(support::PROGRAM, "shim");
        command.env(cuda_protocol::SOCKET_VARIABLE, rig.folder.path().join("a.cuda")).arg("look");
        if let Some(user) = user {
            std::os::unix::process::CommandExt::uid(&mut command, user);
        }
        command.output()
    };
    let own = look(None).expect("starts");
    assert!(own.status.success(), "{own:?}");
    // Run as another user. Make the folder and the card accessible to all users.
    for folder in [rig.folder.path().to_owned(), rig.folder.path().join("card")] {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o777)).expect("set");
    }
    const NOBODY: u32 = 65_534;
    match look(Some(NOBODY)) {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && text.contains("802"), "{output:?}");
        }
        // Running as another user needs root, and that user must be able to execute the built programs.
        Err(error) => println!("skipped: no program can be run as another user here: {error}"),
    }
}

/// Starts a program without the library, next to the tenants' programs.
fn past_the_owner(rig: &support::Rig) -> Program {
    let mut program = Program::start(rig.command(support::PROGRAM, "plain").args(["hold", "--mib", "4"]));
    assert_eq!(program.line(), "holds");
    program
}

/// Polls the card until it lists `count` processes that bypass its owner. Returns their process IDs.
fn strangers(rig: &support::Rig, count: usize) -> Vec<u64> {
    let mut shown = serde_json::Value::Null;
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..600 {
        shown = json(rig, &["card", "show", "fake"]);
        let list = shown["strangers"].as_array().expect("a list");
        if list.len() == count {
            return list.iter().map(|one| one["pid"].as_u64().expect("a number")).collect();
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!("{count} strangers were expected: {shown}");
}

#[test]
fn unmanaged_process_is_reported() {
    let rig = pair();
    let _daemon = Daemon::start(&rig);
    let mut tenant = run(&rig, "a", &[], &["hold", "--mib", "4"]);
    assert_eq!(tenant.line(), "holds");
    let stranger = past_the_owner(&rig);
    assert_eq!(strangers(&rig, 1), [u64::from(stranger.child.id())], "the tenant's program does not bypass the owner");
    assert!(good(&rig, &["card", "show", "fake"]).contains("cuda-program ("));
    assert!(get(&rig, "/metrics").contains("gpu_mediator_card_strangers{card=\"fake\"} 1"));
    assert_eq!(stranger.end(), "held");
    strangers(&rig, 0);
    assert_eq!(tenant.end(), "held");
}

#[test]
fn unmanaged_process_is_killed_when_configured() {
    let rig = rig(|rig| card(rig, "fake", "cuda.strangers = \"kill\"\n") + &tenant("a", "fake", ""));
    let _daemon = Daemon::start(&rig);
    let mut tenant = run(&rig, "a", &[], &["hold", "--mib", "4"]);
    assert_eq!(tenant.line(), "holds");
    let mut stranger = past_the_owner(&rig);
    assert!(!stranger.child.wait().expect("ends").success(), "the process was killed");
    strangers(&rig, 0);
    assert_eq!(tenant.end(), "held", "a tenant's program was not killed");
}

#[test]
fn memory_past_an_account_is_shown_counted_and_reported() {
    let more = "cuda.margin_mib = 0\n";
    let rig = rig(|rig| card(rig, "fake", more) + &tenant("a", "fake", "").replace("64", "16"));
    let _daemon = Daemon::start(&rig);
    let shown = json(&rig, &["tenant", "show", "a"]);
    let mut command = rig.command(support::built("cuda-hoard"), "shim");
    command.env(cuda_protocol::SOCKET_VARIABLE, shown["socket"].as_str().expect("a path"));
    let mut program = Program::start(command.args(["past", "--mib", "40"]));
    assert_eq!(program.line(), "40");
    let pid = program.child.id();
    until(&rig, "a", "the excess is detected", |tenant| tenant["unaccounted"][0]["bytes"] == 40 << 20);
    let shown = json(&rig, &["tenant", "show", "a"]);
    assert_eq!(shown["unaccounted"][0]["pid"], pid, "{shown}");
    assert_eq!((mib(&shown, "over_quota_bytes"), mib(&shown, "on_card_bytes")), (24, 16), "{shown}");
    let text = good(&rig, &["tenant", "show", "a"]);
    assert!(text.contains(&format!("cuda-hoard ({pid}): 40 MiB, 24 MiB OVER QUOTA")), "{text}");
    let metrics = get(&rig, "/metrics");
    let sample = |part: &str, mib: u64| {
        format!("gpu_mediator_tenant_unaccounted_bytes{{tenant=\"a\",card=\"fake\",part=\"{part}\"}} {}", mib << 20)
    };
    for (part, mib) in [("processes", 40), ("kept", 0), ("over_quota", 24)] {
        assert!(metrics.contains(&sample(part, mib)), "{part}: {metrics}");
    }
    assert!(metrics.contains("gpu_mediator_card_unexplained_bytes{card=\"fake\"} 0"), "{metrics}");
    program.kill();
    until(&rig, "a", "its memory is freed when the program exits", |tenant| {
        tenant.get("unaccounted").is_none() && mib(tenant, "on_card_bytes") == 0
    });
}

#[test]
fn nvml_that_fails_is_asked_again() {
    let rig = pair();
    let card = rig.folder.path().join("card");
    std::fs::create_dir_all(&card).expect("a folder");
    std::fs::write(card.join("nvml-fails"), "").expect("written");
    let _daemon = Daemon::start(&rig);
    let stranger = past_the_owner(&rig);
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..600 {
        if card.join("nvml-failed").exists() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert!(card.join("nvml-failed").exists(), "the owner has sent an order and got no reply");
    strangers(&rig, 0);
    std::fs::remove_file(card.join("nvml-fails")).expect("removed");
    assert_eq!(strangers(&rig, 1), [u64::from(stranger.child.id())]);
    assert_eq!(stranger.end(), "held");
}
