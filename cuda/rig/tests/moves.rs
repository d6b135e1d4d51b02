//! Tests tenants that move between two cards of a daemon. All programs are real processes on the fake driver. This
//! driver restores a process on another card only if the process does not use memory of other processes. The process
//! can import memory on that card only if it saw the card from its start.

mod support;

use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json as value};
use support::daemon::*;
use support::{Program, Rig, built};

const CARDS: [&str; 2] = ["one", "two"];

/// Creates a rig with two cards. Tenants `a` and `b` are on the first card, and `c` is on the second.
fn two_cards(more: &str) -> Rig {
    let mut rig = rig(|rig| {
        let cards = [0, 1].map(|at| card(rig, CARDS[at], &format!("cuda.device = \"{at}\"\n")));
        cards.concat() + &tenant("a", "one", more) + &tenant("b", "one", "") + &tenant("c", "two", "")
    });
    rig.cards = 2;
    rig
}

fn card_of(rig: &Rig, name: &str) -> String {
    json(rig, &["tenant", "show", name])["card"].as_str().expect("a name").to_owned()
}

/// Returns true if the owner of a card lists a tenant.
fn is_listed(rig: &Rig, card: &str, name: &str) -> bool {
    // After an owner is killed, requests fail until the daemon has started the next one. TIMEOUT: only a failing test
    // waits this long.
    let answer = (0..600).find_map(|_| {
        let output = ctl(rig, &["--json", "memory", "show", card]);
        if !output.status.success() {
            std::thread::sleep(Duration::from_millis(100));
        }
        output.status.success().then_some(output.stdout)
    });
    let memory: Value = serde_json::from_slice(&answer.expect("an owner")).expect("JSON");
    memory["vms"].as_array().expect("a list").iter().any(|vm| vm["vm"] == name)
}

/// Waits until a tenant's only program is served on its card, with at least `least_mib` MiB of memory, and the other
/// card does not list the tenant.
fn until_settled(rig: &Rig, name: &str, least_mib: u64) {
    until(rig, name, "its program is on its card", |tenant| {
        let memory = mib(tenant, "on_card_bytes") + mib(tenant, "in_host_bytes");
        tenant["served"] == true && programs(tenant) == 1 && memory >= least_mib
    });
    let card = card_of(rig, name);
    let other = CARDS.into_iter().find(|other| *other != card).expect("two cards");
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..600 {
        if !is_listed(rig, other, name) {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("card {other} has tenant {name} still, which is on {card}");
}

/// Returns a command that runs a program of a tenant through `mediatorctl run`.
fn command(rig: &Rig, tenant: &str, program: &str) -> Command {
    let mut command = rig.command(built("mediatorctl"), "plain");
    command.env(cuda_protocol::DRIVER_VARIABLE, &rig.fake);
    command.arg("--socket").arg(rig.folder.path().join("admin.sock")).args(["run", "--tenant", tenant, "--library"]);
    command.arg(rig.folder.path().join("shim")).arg("--").arg(program);
    command
}

/// Starts a program of each of the tenants `b` and `c`.
fn neighbours(rig: &Rig) -> [Program; 2] {
    ["b", "c"].map(|name| {
        let mut program = run(rig, name, &[], &["live", "--mib", "8"]);
        program.steps(2);
        program
    })
}

#[test]
fn program_moves_back_and_forth_while_it_computes() {
    let rig = two_cards("memory.guarantee_mib = 16\n");
    let _daemon = Daemon::start(&rig);
    let mut neighbours = neighbours(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "24"]);
    program.steps(3);
    for (round, to) in ["two", "one", "two", "one"].into_iter().enumerate() {
        let moved = json(&rig, &["tenant", "move", "a", "--card", to]);
        assert_eq!((&moved["to"], &moved["programs"]), (&to.into(), &1.into()), "{moved}");
        assert!(moved["memory_mib"].as_u64() >= Some(24), "{moved}");
        // The report includes the driver's phases of the pause.
        assert!(moved["phases"]["restore_us"].as_u64() > Some(0), "{moved}");
        assert_eq!(card_of(&rig, "a"), to);
        program.steps(3);
        if round == 1 {
            program.grow();
        }
        until_settled(&rig, "a", 24);
        // The memory returns to the card, because the tenant has its quota there.
        until(&rig, "a", "its memory is on the card", |a| {
            mib(a, "on_card_bytes") >= 24 && mib(a, "in_host_bytes") == 0
        });
        for neighbour in &mut neighbours {
            neighbour.steps(2);
        }
    }
    // A program that starts afterwards uses the new card.
    let mut late = run(&rig, "a", &[], &["live", "--mib", "4"]);
    late.steps(2);
    until(&rig, "a", "both are served", |a| programs(a) == 2);
    assert_eq!(late.end(), "held 2");
    assert_eq!(program.end(), "held 14");
    for neighbour in neighbours {
        assert_eq!(neighbour.end(), "held 4");
    }
    until(&rig, "a", "its memory is free", |a| mib(a, "on_card_bytes") + mib(a, "in_host_bytes") == 0);
    let events = good(&rig, &["events", "--tenant", "a"]);
    assert_eq!(events.matches("checkpoint").count(), 4, "{events}");
}

const SECOND: &str = "GPU-66616b65-2063-7564-6120-636172642031";

#[test]
fn program_sees_one_card_although_its_driver_sees_two() {
    let rig = two_cards("");
    let _daemon = Daemon::start(&rig);
    for (tenant, card, hidden, of_nvml) in [("a", 0, 1, [0, 6, 0, 6]), ("c", 1, 0, [6, 0, 6, 0])] {
        let address = |card: u64| format!("0000:0{}:00.0", card + 1);
        for list in [None, Some("0"), Some("0,1")] {
            let mut command = command(&rig, tenant, built("cuda-hoard").to_str().expect("UTF-8"));
            list.map(|list| command.env("CUDA_VISIBLE_DEVICES", list));
            let mut program = Program::start(command.arg("cards"));
            let line = program.line();
            let found: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
            program.kill();
            assert_eq!(
                found["devices"],
                value!([[format!("fake cuda card {card}"), address(card)]]),
                "{list:?}: {found}"
            );
            assert_eq!(found["beyond"], -101, "{found}");
            assert_eq!(found["by_address"][hidden], -101, "{found}");
            assert_eq!(found["by_address"][card as usize], 0, "{found}");
            assert_eq!(found["named"], value!([101, 101, 101, 101]), "{found}");
            assert_eq!(found["nvml"].as_array().map(Vec::len), Some(1), "{found}");
            assert_eq!(found["nvml_found"], value!(of_nvml), "{found}");
            assert_eq!((&found["create"], &found["create_on_another"]), (&value!(0), &value!(101)), "{found}");
            assert_eq!(found["variable"].as_str(), list, "{found}");
            until(&rig, tenant, "it has ended", |tenant| programs(tenant) == 0);
        }
    }
    // The tenant has only one card, so these lists do not select any.
    for list in ["1", "", "-1", SECOND] {
        let mut command = command(&rig, "a", built("cuda-hoard").to_str().expect("UTF-8"));
        let mut program = Program::start(command.env("CUDA_VISIBLE_DEVICES", list).arg("cards"));
        assert_eq!(program.line(), r#"{"init":100}"#, "{list:?}");
        program.kill();
    }
}

#[test]
fn program_with_graph_moves_and_reports_its_new_card() {
    let rig = two_cards("");
    let _daemon = Daemon::start(&rig);
    let mut command = command(&rig, "a", env!("CARGO_BIN_EXE_cuda-cards"));
    let mut program = Program::start(command.args(["live", "--mib", "6"]));
    assert_eq!(program.line(), "ready");
    for (to, card) in [("two", 1), ("one", 0), ("two", 1)] {
        good(&rig, &["tenant", "move", "a", "--card", to]);
        // The only device keeps its number, and the other card stays hidden.
        for (line, expected) in [("card 0", format!("fake cuda card {card}")), ("card 1", "101".to_owned())] {
            program.say(line);
            assert_eq!(program.line(), expected);
        }
        program.say("alloc 0");
        assert_eq!(program.line(), "0");
        program.say("0");
        program.line();
        // TIMEOUT: only a failing test waits this long.
        let progresses = (0..600).any(|_| {
            std::thread::sleep(Duration::from_millis(100));
            program.say("0");
            program.line() != "0"
        });
        assert!(progresses, "the program computes on card {to}");
    }
    program.close();
    assert_eq!(program.line(), "ended");
}

/// Returns the error of a rejected move of tenant `a`, which stays on the first card.
fn refused(rig: &Rig, to: &str) -> String {
    let text = bad(rig, 4, &["tenant", "move", "a", "--card", to]);
    assert!(text.contains("the tenant and its programs continue"), "{text}");
    assert_eq!(card_of(rig, "a"), "one");
    text
}

#[test]
fn program_whose_driver_sees_one_card_is_named_and_stays() {
    let rig = two_cards("");
    let _daemon = Daemon::start(&rig);
    // Simulate a container without the device file of the other card.
    let mut program =
        Program::start(command(&rig, "a", support::PROGRAM).env("FAKE_CUDA_CARDS", "1").args(["live", "--mib", "8"]));
    program.steps(2);
    let text = refused(&rig, "two");
    assert!(text.contains("program `cuda-program` (process ") && text.contains("does not show it that card"), "{text}");
    assert!(text.contains("start it again"), "{text}");
    program.steps(2);
    let output = ctl(&rig, &["--json", "card", "drain", "one"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["left"][0]["vm"], "a", "{report}");
    program.steps(2);
    good(&rig, &["card", "undrain", "one"]);
    until(&rig, "a", "its memory is on the card", |a| mib(a, "on_card_bytes") >= 8 && mib(a, "in_host_bytes") == 0);
    assert_eq!(program.end(), "held 4");
}

#[test]
fn card_without_moves_keeps_its_programs() {
    let mut rig = rig(|rig| {
        let cards =
            [0, 1].map(|at| card(rig, CARDS[at], &format!("cuda.device = \"{at}\"\ncuda.moves = {}\n", at == 0)));
        cards.concat() + &tenant("a", "one", "")
    });
    rig.cards = 2;
    let _daemon = Daemon::start(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "8"]);
    program.steps(2);
    let text = refused(&rig, "two");
    assert!(text.contains("shows it only its own card"), "{text}");
    assert_eq!(program.end(), "held 4");
    until(&rig, "a", "it has ended", |a| programs(a) == 0);
    good(&rig, &["tenant", "move", "a", "--card", "two"]);
}

#[test]
fn card_without_room_is_refused_before_programs_stop() {
    let mut rig = rig(|rig| {
        let cards = [0, 1].map(|at| card(rig, CARDS[at], &format!("cuda.device = \"{at}\"\n")));
        let [first, second] = cards;
        let second = second.replace("memory.host_mib = 128", "memory.host_mib = 8");
        first + &second + &tenant("a", "one", "") + &tenant("c", "two", "")
    });
    rig.cards = 2;
    let _daemon = Daemon::start(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "24"]);
    let mut full = run(&rig, "c", &[], &["live", "--mib", "56"]);
    program.steps(2);
    full.steps(2);
    let text = refused(&rig, "two");
    assert!(text.contains("the other card, with its host memory, has space for"), "{text}");
    program.steps(2);
    until(&rig, "a", "its memory stays", |a| mib(a, "on_card_bytes") >= 24 && mib(a, "in_host_bytes") == 0);
    assert_eq!(full.end(), "held 28");
    until(&rig, "c", "its memory is free", |c| mib(c, "on_card_bytes") == 0);
    good(&rig, &["tenant", "move", "a", "--card", "two"]);
    program.steps(2);
    assert_eq!(program.end(), "held 12");
}

#[test]
fn program_that_cannot_import_its_chunks_returns_to_its_card() {
    let rig = two_cards("");
    let _daemon = Daemon::start(&rig);
    let mut neighbours = neighbours(&rig);
    let mut programs = [0, 1].map(|_| run(&rig, "a", &[], &["live", "--mib", "12"]));
    for program in &mut programs {
        program.steps(2);
    }
    rig.set_importable(1, false);
    let text = refused(&rig, "two");
    assert!(text.contains("cannot import its memory on that card: CUDA error 3"), "{text}");
    for program in &mut programs {
        program.steps(3);
    }
    rig.set_importable(1, true);
    let moved = json(&rig, &["tenant", "move", "a", "--card", "two"]);
    assert_eq!(moved["programs"], 2, "{moved}");
    for program in &mut programs {
        program.steps(2);
    }
    assert_eq!(programs.map(Program::end), ["held 6"; 2]);
    for neighbour in &mut neighbours {
        neighbour.steps(2);
    }
}

#[test]
fn several_programs_with_swapped_memory_move_together() {
    let rig = two_cards("memory.quota_mib = 16\n");
    let _daemon = Daemon::start(&rig);
    let mut all = [0, 1, 2].map(|_| run(&rig, "a", &[], &["live", "--mib", "12"]));
    for program in &mut all {
        program.steps(2);
    }
    let moved = json(&rig, &["tenant", "move", "a"]);
    assert_eq!((&moved["to"], &moved["programs"]), (&"two".into(), &3.into()), "the daemon chooses the card: {moved}");
    for program in &mut all {
        program.steps(3);
    }
    until(&rig, "a", "its quota applies", |a| mib(a, "on_card_bytes") == 16 && mib(a, "in_host_bytes") >= 20);
    assert_eq!(all.map(Program::end), ["held 6"; 3]);
}

#[test]
fn idle_tenant_changes_its_card_and_keeps_it() {
    let rig = two_cards("time.weight = 200\n");
    let daemon = Daemon::start(&rig);
    let output = good(&rig, &["tenant", "move", "a", "--card", "two"]);
    assert!(output.starts_with("tenant a has moved from one to two: 0 programs"), "{output}");
    assert!(!is_listed(&rig, "one", "a") && is_listed(&rig, "two", "a"));
    daemon.kill();
    let _daemon = Daemon::start(&rig);
    assert_eq!(card_of(&rig, "a"), "two");
    assert_eq!(json(&rig, &["tenant", "show", "a"])["time"]["weight"], 200);
    assert_eq!(run(&rig, "a", &[], &["live", "--mib", "4"]).end(), "held 2");
}

#[test]
fn tenant_that_cannot_move_is_refused_by_name_and_continues() {
    let mut rig = rig(|rig| {
        let cards = [("one", 0, ""), ("two", 1, ""), ("three", 2, "cuda.chunk_mib = 4\n")];
        let cards = cards.map(|(name, at, more)| {
            card(rig, name, &format!("cuda.device = \"{at}\"\n")).replace(
                "cuda.chunk_mib = 2\n",
                match more {
                    "" => "cuda.chunk_mib = 2\n",
                    more => more,
                },
            )
        });
        let group = tenant("g", "one", "share_group = \"team\"\nsharing = \"turns\"\n");
        let soft = "[[card]]\nname = \"soft\"\nkind = \"simgpu\"\nvram_mib = 64\n";
        let both = "[[tenant]]\nname = \"m\"\ncards = [\"one\", \"two\"]\nvram_mib = 64\n";
        let tenants = tenant("a", "one", "") + &tenant("f", "two", "memory.guarantee_mib = 56\n") + both;
        cards.concat() + soft + &tenants + &group
    });
    rig.cards = 3;
    let _daemon = Daemon::start(&rig);
    let mut own = run(&rig, "a", &[], &["live", "--mib", "8", "--own"]);
    own.steps(2);
    for (name, to, code, why) in [
        ("a", "two", 4, "it maps its memory itself"),
        ("a", "one", 4, "it already has that card"),
        ("a", "three", 4, "its `cuda.chunk_mib` is 4, expected 2"),
        ("a", "soft", 4, "the card is not of kind `cuda`"),
        ("a", "none", 3, "there is no card `none`"),
        ("z", "two", 3, "there is no tenant `z`"),
        ("g", "two", 4, "it is in a share group"),
        ("m", "two", 4, "it has several cards"),
    ] {
        let text = bad(&rig, code, &["tenant", "move", name, "--card", to]);
        assert!(text.contains(why), "{name} {to}: {text}");
        own.steps(2);
    }
    let text = bad(&rig, 4, &["tenant", "move", "a", "--card", "two"]);
    assert!(text.contains("program `") && text.contains("the tenant and its programs continue"), "{text}");
    assert_eq!(card_of(&rig, "a"), "one");
    assert_eq!(own.end(), "held 4");
    // The guarantee of the other card's tenant leaves no memory for another guarantee.
    good(&rig, &["tenant", "set", "a", "--guarantee-mib", "16"]);
    let text = bad(&rig, 4, &["tenant", "move", "a", "--card", "two"]);
    assert!(text.contains("memory.guarantee_mib"), "{text}");
    // The tenant on card `two` cannot move to another card, so the command reports this tenant.
    let _ = ctl(&rig, &["card", "drain", "two"]);
    let text = bad(&rig, 4, &["tenant", "move", "a", "--card", "two"]);
    assert!(text.contains("the card is drained"), "{text}");
}

#[test]
fn driver_that_cannot_restore_leaves_program_on_its_card() {
    let rig = two_cards("");
    let _daemon = Daemon::start(&rig);
    let mut neighbours = neighbours(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "16"]);
    program.steps(2);
    rig.set_broken(1, true);
    let text = bad(&rig, 4, &["tenant", "move", "a", "--card", "two"]);
    assert!(text.contains("the driver cannot move it") && text.contains("cuCheckpointProcessRestore"), "{text}");
    assert_eq!(card_of(&rig, "a"), "one");
    program.steps(3);
    until_settled(&rig, "a", 16);
    rig.set_broken(1, false);
    good(&rig, &["tenant", "move", "a", "--card", "two"]);
    program.grow();
    assert_eq!(program.end(), "held 10");
    for neighbour in &mut neighbours {
        neighbour.steps(2);
    }
}

fn begin_move(rig: &Rig, to: &str) -> Child {
    let mut command = ctl_command(rig, &["tenant", "move", "a", "--card", to]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts")
}

fn ended(child: Child) -> Output {
    child.wait_with_output().expect("ends")
}

/// Times after the beginning of a move, in ms, from before its first step to after its last one.
const MOMENTS: [u64; 14] = [0, 5, 10, 20, 30, 40, 50, 65, 80, 100, 125, 160, 220, 300];

#[test]
fn killed_owner_at_any_moment_of_a_move_leaves_program_running() {
    let rig = two_cards("");
    let mut daemon = Daemon::start(&rig);
    let mut neighbours = neighbours(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "16"]);
    program.steps(2);
    let rounds = if is_full_scale() { 2 } else { 1 };
    for (round, moments) in (0..rounds).flat_map(|round| MOMENTS.chunks(5).map(move |moments| (round, moments))) {
        for (nth, moment) in moments.iter().enumerate() {
            let to = if card_of(&rig, "a") == "one" { "two" } else { "one" };
            let moving = begin_move(&rig, to);
            std::thread::sleep(Duration::from_millis(*moment));
            let owners = owners_of(&daemon);
            signal("-KILL", &owners[(round + nth) % owners.len()].to_string());
            let output = ended(moving);
            program.steps(2);
            until_settled(&rig, "a", 16);
            if output.status.success() {
                assert_eq!(card_of(&rig, "a"), to, "{output:?}");
            }
            until(&rig, "b", "served", |b| b["served"] == true && programs(b) == 1);
            until(&rig, "c", "served", |c| c["served"] == true && programs(c) == 1);
        }
        // A daemon doubles the delay before it restarts an owner, up to 30 s. A new daemon begins with the shortest
        // delay.
        daemon.kill();
        daemon = Daemon::start(&rig);
    }
    for neighbour in &mut neighbours {
        neighbour.steps(3);
    }
    program.grow();
    assert_eq!(program.end(), "held 10");
    drop(daemon);
}

/// Returns true if the suite runs at full scale.
fn is_full_scale() -> bool {
    std::env::var_os("GPU_MEDIATOR_FULL").is_some()
}

/// Returns the process IDs of the owners, including restarted ones.
fn owners_of(daemon: &Daemon) -> Vec<i32> {
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..600 {
        let owners = owner_pids(daemon.0.id());
        if !owners.is_empty() {
            return owners;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("the daemon has no owner");
}

#[test]
fn killed_daemon_at_any_moment_of_a_move_leaves_program_running() {
    let rig = two_cards("");
    let mut daemon = Daemon::start(&rig);
    let mut neighbours = neighbours(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "16"]);
    program.steps(2);
    for moment in MOMENTS {
        let to = if card_of(&rig, "a") == "one" { "two" } else { "one" };
        let moving = begin_move(&rig, to);
        std::thread::sleep(Duration::from_millis(moment));
        daemon.kill();
        ended(moving);
        daemon = Daemon::start(&rig);
        program.steps(2);
        until_settled(&rig, "a", 16);
    }
    for neighbour in &mut neighbours {
        neighbour.steps(3);
    }
    assert_eq!(program.end(), "held 8");
    drop(daemon);
}

#[test]
fn killed_program_at_any_moment_of_a_move_frees_its_memory() {
    let rig = two_cards("");
    let _daemon = Daemon::start(&rig);
    let mut neighbours = neighbours(&rig);
    for moment in MOMENTS {
        let mut program = run(&rig, "a", &[], &["live", "--mib", "16"]);
        let mut other = run(&rig, "a", &[], &["live", "--mib", "4"]);
        program.steps(2);
        other.steps(2);
        let to = if card_of(&rig, "a") == "one" { "two" } else { "one" };
        let moving = begin_move(&rig, to);
        std::thread::sleep(Duration::from_millis(moment));
        program.kill();
        let output = ended(moving);
        other.steps(2);
        until(&rig, "a", "only the other program has memory", |a| {
            programs(a) == 1 && mib(a, "on_card_bytes") + mib(a, "in_host_bytes") <= 8
        });
        if output.status.success() {
            assert_eq!(card_of(&rig, "a"), to, "{output:?}");
        }
        assert_eq!(other.end(), "held 2");
    }
    for neighbour in &mut neighbours {
        neighbour.steps(3);
    }
}

#[test]
fn drained_card_loses_its_tenants_or_names_them() {
    let rig = two_cards("");
    let _daemon = Daemon::start(&rig);
    let mut one = run(&rig, "a", &[], &["live", "--mib", "8"]);
    let mut own = run(&rig, "b", &[], &["live", "--mib", "8", "--own"]);
    one.steps(2);
    own.steps(2);
    let output = ctl(&rig, &["--json", "card", "drain", "one"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(output.status.code(), Some(4), "{report}");
    assert_eq!(report["tenants"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!((&report["tenants"][0]["tenant"], &report["tenants"][0]["to"]), (&"a".into(), &"two".into()));
    assert_eq!(report["left"][0]["vm"], "b", "{report}");
    assert!(report["left"][0]["why"].as_str().is_some_and(|why| why.contains("it maps its memory itself")), "{report}");
    one.steps(2);
    own.steps(2);
    assert_eq!(own.end(), "held 4");
    // Once it has no programs, this tenant can move as well.
    let text = good(&rig, &["card", "drain", "one"]);
    assert!(text.contains("no VMs or tenants are left on it"), "{text}");
    assert_eq!(["a", "b", "c"].map(|name| card_of(&rig, name)), ["two"; 3]);
    assert_eq!(one.end(), "held 4");
}
