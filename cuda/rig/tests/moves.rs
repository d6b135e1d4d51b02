//! Tests tenants that move between two cards of a daemon. All programs are real processes on the fake driver, which
//! restores a process on another card only if it has no memory of another process.

mod support;

use std::process::{Child, Output, Stdio};
use std::time::Duration;

use support::daemon::*;
use support::{Program, Rig};

const CARDS: [&str; 2] = ["one", "two"];

/// Creates a rig with two cards: tenant `a` and its neighbour `b` on the first one, neighbour `c` on the second one.
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
    let memory = json(rig, &["memory", "show", card]);
    memory["vms"].as_array().expect("a list").iter().any(|vm| vm["vm"] == name)
}

/// Waits until a tenant's only program is served on its card, with this much memory, and the other card does not list
/// the tenant.
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

/// Programs of the tenants `b` and `c`.
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
        assert_eq!(card_of(&rig, "a"), to);
        program.steps(3);
        if round == 1 {
            program.grow();
        }
        until_settled(&rig, "a", 24);
        // The memory returns to the card: the tenant has its quota there.
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
        ("a", "soft", 4, "it is not a card of kind `cuda`"),
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
    // The guarantee of the other card's tenant leaves no room for another guarantee.
    good(&rig, &["tenant", "set", "a", "--guarantee-mib", "16"]);
    let text = bad(&rig, 4, &["tenant", "move", "a", "--card", "two"]);
    assert!(text.contains("memory.guarantee_mib"), "{text}");
    good(&rig, &["card", "drain", "two"]);
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
    let daemon = Daemon::start(&rig);
    let mut neighbours = neighbours(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "16"]);
    program.steps(2);
    for victim in 0..2 {
        for moment in MOMENTS {
            let to = if card_of(&rig, "a") == "one" { "two" } else { "one" };
            let moving = begin_move(&rig, to);
            std::thread::sleep(Duration::from_millis(moment));
            // The owners that were started again are the last children.
            let owners = owners_of(&daemon);
            signal("-KILL", &owners[victim % owners.len()]);
            let output = ended(moving);
            program.steps(2);
            until_settled(&rig, "a", 16);
            if output.status.success() {
                assert_eq!(card_of(&rig, "a"), to, "{output:?}");
            }
            until(&rig, "b", "served", |b| b["served"] == true && programs(b) == 1);
            until(&rig, "c", "served", |c| c["served"] == true && programs(c) == 1);
        }
    }
    for neighbour in &mut neighbours {
        neighbour.steps(3);
    }
    program.grow();
    assert_eq!(program.end(), "held 10");
}

/// Returns the owners' processes, including those that were started again.
fn owners_of(daemon: &Daemon) -> Vec<String> {
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..600 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.0.id())).expect("it runs");
        let children =
            |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("children")).ok();
        let all: Vec<String> = tasks.filter_map(children).collect();
        let mut all: Vec<String> = all.iter().flat_map(|list| list.split_whitespace()).map(str::to_owned).collect();
        all.sort();
        if !all.is_empty() {
            return all;
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
    // Without programs, the tenant moves as well.
    let text = good(&rig, &["card", "drain", "one"]);
    assert!(text.contains("no VM or tenant is left on it"), "{text}");
    assert_eq!(["a", "b", "c"].map(|name| card_of(&rig, name)), ["two"; 3]);
    assert_eq!(one.end(), "held 4");
}
